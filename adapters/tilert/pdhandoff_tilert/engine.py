"""The seam between the decode node and a decode engine: one request at a time, called from one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, final

import msgspec

if TYPE_CHECKING:
    from pdhandoff.layouts import Layout
    from pdhandoff.runtime.arrival import Arrival

__all__ = ["DecodeEngine", "DecodeRequest", "DecodeStep"]


@final
class DecodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode engine needs to know of a request, apart from its landed rows."""

    prompt: tuple[int, ...]
    "token ids"
    first_token: int
    "sampled by the prefill engine; it is the first output token, and counts towards `max_tokens`"
    max_tokens: int
    "output tokens in all, at least 1"
    stop_token_ids: frozenset[int] = frozenset()
    "ends the output, besides the model's own end tokens; the stop token itself is returned"
    ignore_eos: bool = False
    "the model's own end tokens do not end the output"
    min_tokens: int = 0
    "output tokens, the first one included, before which no token that ends the output may be sampled"
    temperature: float = 0.0
    "0: greedy"
    top_p: float = 1.0
    top_k: int = 0
    "0: all"
    seed: int | None = None


@final
class DecodeStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one call of `step` produced."""

    tokens: tuple[int, ...]
    "new output tokens, in order; empty only where a step serves the engine itself (replaying the last prompt token)"
    finish_reason: str = ""
    "stop or length, with the last tokens; empty: it goes on"
    drafted: int = 0
    "draft tokens that this step verified"
    accepted: int = 0
    "of those, the ones that were right"


class DecodeEngine(Protocol):
    """A live engine. Every call comes from the node's engine thread, except `park`.

    Attributes:
        layout: what `Arrival.convert_into` converts into.
        model: name that requests may use.
        max_seq_len: tokens of one request, prompt and output.
        end_token_ids: the model's own end tokens.
    """

    layout: Layout
    model: str
    max_seq_len: int
    end_token_ids: frozenset[int]

    def unsupported(self, request: DecodeRequest) -> str:
        """The name of a parameter of this request that the engine cannot honour, and why; empty: it can."""

    def park(self, arrival: Arrival) -> object:
        """Convert landed rows into memory that no running request uses, in a thread of its own; release the arrival.

        An engine without such memory returns the arrival itself; `inject` then converts.
        """

    def inject(self, parked: object) -> None:
        """Make what `park` returned the state of the live caches; releases it, however that ends."""

    def drop(self, parked: object) -> None:
        """What was parked will not be injected: release it. Idempotent, from any thread."""

    def begin(self, request: DecodeRequest) -> None:
        """Start decoding at position `len(prompt)` from `first_token`, which `step` does not return again.

        Never called for a request that its first token ends: an end or stop token, or `max_tokens` 1.
        """

    def step(self) -> DecodeStep:
        """Decode on. Raises PdHandoffError when the engine broke."""

    def end(self) -> None:
        """The request is over, or was cancelled: the engine is free for the next one. Idempotent."""

    def close(self) -> None:
        """Give everything back. Idempotent."""
