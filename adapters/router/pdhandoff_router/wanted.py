"""One request in tokens, and the bodies of its legs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import msgspec

from pdhandoff_router.refusals import bad_request

__all__ = ["Wanted", "refuse_alone", "strip_transfer", "wanted_from"]

_TRANSFER: Final = ("kv_transfer_params", "ec_transfer_params")
_ALONE: Final = ("prompt_logprobs", "use_beam_search", "echo", "suffix", "background")
"what only an engine that prefills and decodes by itself can do, as clients write it"

_LEFT_OUT: Final = 16
"output tokens where a rendered request says nothing: vLLM leaves out what is its own default (SamplingParams, 0.32)"


@final
class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A request that both legs can do, as far as the router knows."""

    rendered: dict[str, Any]
    "the body of a generate request"
    max_tokens: int
    "output tokens"

    @property
    def tokens(self) -> list[int]:
        """The prompt."""
        found: list[int] = self.rendered["token_ids"]
        return found

    def prefill_body(self, request_id: str, params: Mapping[str, Any] | None) -> dict[str, Any]:
        """Exactly one token.

        Args:
            request_id: of this leg.
            params: `kv_transfer_params`; None: nothing is handed off.
        """
        sampling = dict(self.rendered["sampling_params"])
        # stop strings would need text; the first token is judged by who answers the client
        sampling |= {"max_tokens": 1, "min_tokens": min(1, sampling.get("min_tokens") or 0), "n": 1, "stop": []}
        sampling.pop("max_completion_tokens", None)
        body = {**self.rendered, "request_id": request_id, "sampling_params": sampling, "stream": False}
        body.pop("stream_options", None)
        return body if params is None else {**body, "kv_transfer_params": dict(params)}

    def decode_body(self, request_id: str, mark: Mapping[str, Any]) -> dict[str, Any]:
        """All tokens, the first one included, as a stream."""
        sampling = {**self.rendered["sampling_params"], "max_tokens": self.max_tokens}
        kept = {key: self.rendered[key] for key in ("token_ids", "features", "priority") if self.rendered.get(key)}
        return {
            **kept,
            "request_id": request_id,
            "sampling_params": sampling,
            "stream": True,
            "kv_transfer_params": {"pdhandoff": dict(mark)},
        }


def strip_transfer(body: dict[str, Any]) -> dict[str, Any]:
    """A client's body without what only a router may say: where state is sent to, or taken from."""
    clean = {key: value for key, value in body.items() if key not in _TRANSFER}
    for key in ("vllm_xargs", "extra_args"):
        extra = clean.get(key)
        if isinstance(extra, dict):
            clean[key] = {name: value for name, value in extra.items() if name not in _TRANSFER}
    return clean


def refuse_alone(body: Mapping[str, Any]) -> None:
    """Refuse what needs one engine for the whole request, before anything is reserved. Raises Refusal."""
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise _cannot(name)
    for name in _ALONE:
        if body.get(name) not in (None, False):
            raise _cannot(name)


def wanted_from(rendered: Mapping[str, Any], *, asked: object, room: int) -> Wanted:
    """Read what vLLM rendered.

    Args:
        rendered: the body of a generate request.
        asked: output tokens that the client asked for; None: it did not say, and gets as many as fit.
        room: tokens of the longest request that a decode node takes; 0: not known.

    Raises:
        Refusal: 400, it needs one engine for the whole request.
    """
    body = strip_transfer({key: value for key, value in rendered.items() if value is not None})
    sampling = body["sampling_params"] = strip_transfer(body["sampling_params"])
    if sampling.get("n") not in (None, 1):
        raise _cannot("n")
    for name in ("features", "content_parts"):
        if body.get(name):
            raise _cannot(name)
    most = sampling.get("max_tokens")
    prompt = len(body["token_ids"])
    wanted = most if isinstance(most, int) and most > 0 else _LEFT_OUT
    if asked is None and room > prompt:
        wanted = min(wanted, room - prompt)
    return Wanted(rendered=body, max_tokens=wanted)


def _cannot(name: str) -> Exception:
    return bad_request(
        name,
        f"{name} is not supported where prefill and decode run on two engines: leave it out, or use the native pool",
        unsupported=True,
    )
