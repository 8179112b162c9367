"""The words of an answer, as vLLM 0.32 says them.

Sources: vllm/entrypoints/scale_out/token_in_token_out/protocol.py, `GenerateTokensResponse` and
`GenerateTokensStreamResponse`; vllm/entrypoints/generate/base/protocol.py, `SpeculativeDecodingMetrics`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, final

import msgspec

from pdhandoff_tilert.engine import DecodeRequest
from pdhandoff_tilert.node.job import Ending, Tokens
from pdhandoff_tilert.node.schema import Wanted

__all__ = ["Output", "event"]


@final
class Output:
    """Collects what one request gave, and says it."""

    def __init__(self, wanted: Wanted, model: str) -> None:
        self._wanted = wanted
        self._model = model
        self.tokens: list[int] = []
        self._accepted: Counter[int] = Counter()
        "accepted drafts -> verify steps"
        self._drafted = 0
        self._most_drafted = 0
        self._first_chunk = True

    def add(self, tokens: Tokens) -> None:
        """Take a step's tokens in."""
        self.tokens += tokens.tokens
        if tokens.drafted:
            self._accepted[tokens.accepted] += 1
            self._drafted += tokens.drafted
            self._most_drafted = max(self._most_drafted, tokens.drafted)

    def whole(self, ending: Ending) -> bytes:
        """The answer in one piece."""
        return msgspec.json.encode({
            "request_id": self._wanted.request_id,
            "model": self._model,
            "usage": self._usage(),
            "prompt_token_ids": self._wanted.decode.prompt if self._wanted.return_prompt else None,
            "metrics": self._metrics(),
            "kv_transfer_params": None,
            "output_mode": "tokens",
            "choices": [self._choice(self.tokens, ending)],
        })  # fmt: skip

    def chunk(self, tokens: list[int], ending: Ending | None) -> bytes:
        """One event of a stream: new tokens, the end, or both."""
        body: dict[str, Any] = {
            "request_id": self._wanted.request_id,
            "usage": self._usage() if self._wanted.usage_always else None,
            "output_mode": "tokens",
            "choices": [self._choice(tokens, ending)],
        }
        if self._first_chunk and self._wanted.return_prompt:
            body["prompt_token_ids"] = self._wanted.decode.prompt
        self._first_chunk = False
        return event(body)

    def last(self) -> bytes:
        """What comes after the last chunk: usage where it was asked for."""
        if not self._wanted.usage_at_end:
            return b""
        body = {
            "request_id": self._wanted.request_id,
            "usage": self._usage(),
            "output_mode": "tokens",
            "choices": [],
        }
        metrics = self._metrics()
        return event(body if metrics is None else body | {"metrics": metrics})

    def _choice(self, tokens: list[int], ending: Ending | None) -> dict[str, Any]:
        reason = ending.finish_reason if ending is not None else None
        return {
            "index": 0,
            "finish_reason": reason,
            "stop_reason": self._stop_reason(self._wanted.decode, reason),
            "token_ids": tokens,
            "logprobs": None,
        }

    def _stop_reason(self, request: DecodeRequest, reason: str | None) -> int | None:
        """The stop token that the request named; None for the model's own end."""
        last = self.tokens[-1] if self.tokens else None
        return last if reason == "stop" and last in request.stop_token_ids else None

    def _usage(self) -> dict[str, int]:
        prompt, completion = len(self._wanted.decode.prompt), len(self.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _metrics(self) -> dict[str, Any] | None:
        """How speculation went; None: nothing was drafted."""
        steps = self._accepted.total()
        if not steps:
            return None
        accepted = sum(count * times for count, times in self._accepted.items())
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / steps,
                "draft_acceptance_rate": accepted / self._drafted,
                "acceptance_histogram": [self._accepted[count] for count in range(self._most_drafted + 1)],
                "num_spec_steps": steps,
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": self._drafted,
                "num_spec_tokens": self._most_drafted,
            }
        }


def event(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
