"""Text to tokens and tokens to text, by asking vLLM: the router has no template, tokenizer or parser of its own.

Source: vLLM 0.32, vllm/entrypoints/scale_out/, its render and derender endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from pdhandoff_router.refusals import Refusal, bad_request, from_answer
from pdhandoff_router.transport import Transport, read_json

__all__ = ["TextStream", "Texts"]

_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_START: Final = (
    "start it with --enable-scale-out, or start a `vllm launch render` for the same model and name it with --render-url"
)


@final
class Texts:
    """One server that renders.

    Args:
        transport: the way to it.
        url: where it is.
        headers: go with every request.
        within_s: for each answer.
    """

    def __init__(self, transport: Transport, url: str, *, headers: Mapping[str, str], within_s: float) -> None:
        self._transport = transport
        self._url = url
        self._headers = headers
        self._within_s = within_s
        self._who = f"the render server {url.partition('://')[2]}"

    async def render(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What a client's request is in tokens: the body of a generate request.

        Args:
            path: that the client asked, such as /v1/completions.
            body: the client's.

        Raises:
            Refusal: as the server refuses it, or when it cannot be asked.
        """
        found = await self._ask(f"{path}/render", body)
        if isinstance(found, list):
            if len(found) != 1:
                reason = f"prompt: {len(found)} prompts in one request cannot be handed off: send one at a time"
                raise bad_request("prompt", reason, unsupported=True)
            found = found[0]
        tokens = found.get("token_ids") if isinstance(found, dict) else None
        sampling = found.get("sampling_params") if isinstance(found, dict) else None
        if not isinstance(tokens, list) or not tokens or not isinstance(sampling, dict):
            raise Refusal(502, f"{self._who} gave no token_ids and sampling_params", code="BAD_UPSTREAM")
        rendered: dict[str, Any] = found
        return rendered

    async def derender(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What tokens are in a client's terms. Raises Refusal."""
        found = await self._ask(f"{path}/derender", body)
        if not isinstance(found, dict):
            raise Refusal(502, f"{self._who} gave no object", code="BAD_UPSTREAM")
        return found

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        answer = await self._transport.ask(
            self._url + path, who=self._who, within_s=self._within_s, body=body, headers=self._headers
        )
        if answer.status == 200:
            return read_json(answer.body, self._who)
        refusal = from_answer(answer.status, answer.body, who=self._who, retry_after=answer.headers.get("retry-after"))
        missing = answer.status == _NOT_FOUND and refusal.reason in {
            "Not Found",
            f"{self._who} answered with status 404",
        }
        if answer.status == _FORBIDDEN or missing:
            raise Refusal(503, f"{self._who} does not serve {path}: {_START}", code="NO_RENDER")
        raise refusal


@final
class TextStream:
    """Text of one growing answer: carries vLLM's state from piece to piece.

    Args:
        texts: the server.
        path: /v1/chat/completions or /v1/completions.
        common: fields of every request to it.
    """

    def __init__(self, texts: Texts, path: str, common: Mapping[str, Any]) -> None:
        self._texts = texts
        self._path = path
        self._common = common
        self._state: Any = None

    async def feed(self, chunk: Mapping[str, Any]) -> dict[str, Any]:
        """The client's chunk for a chunk of tokens. Raises Refusal."""
        body = {**self._common, "stream": True, "generate_chunk": chunk, "stream_state": self._state}
        found = await self._texts.derender(self._path, body)
        self._state = found.get("stream_state")
        made = found.get("chunk")
        if not isinstance(made, dict):
            raise Refusal(502, "the render server gave no chunk", code="BAD_UPSTREAM")
        return made
