"""A decode engine behind the calls that a decode node makes: park, inject, begin, step, end.

It keeps one memory per parked request and one that is live. What has landed is converted into a parked memory while
another request decodes; injecting swaps it with the live one, so no row is copied twice. When all are taken, `park`
gives the arrival back and `inject` converts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, final

from pdhandoff.demo.engine.decoding import Decoding, Request, Speculator, Step
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts import Layout
from pdhandoff.planner import Placement

if TYPE_CHECKING:
    from pdhandoff.runtime.arrival import Arrival

__all__ = ["Engine", "Memory", "Parked"]


class Memory(Protocol):
    """Rows of one request."""

    @property
    def cache(self) -> Any:
        """What the model reads and writes."""

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Component -> where its rows are, as the engine's layout describes them."""

    def begin(self, tokens: int, *, cold: bool) -> None:
        """The rows of `tokens` tokens were converted into it; cold: but for the draft layer's."""


@final
class Parked:
    """Converted rows that wait for their turn."""

    def __init__(self, memory: Memory, *, prompt_tokens: int, cold: bool) -> None:
        self.memory: Memory | None = memory
        "None: given back, or live"
        self.prompt_tokens = prompt_tokens
        self.cold = cold


@final
class Engine:
    """One request at a time. Every call comes from one thread, except `park`, `drop` and `unsupported`.

    Args:
        network: the model.
        layout: of its memories.
        model: name that requests may use.
        max_seq_len: tokens of one request, prompt and output.
        vocabulary: tokens 0 .. vocabulary - 1 may stand in a prompt.
        new_memory: makes the memory of one request.
        parked: memories beside the live one.
        drafts: draft tokens per verify step; 0: no speculation.
        end_tokens: the model's own.
    """

    def __init__(
        self,
        *,
        network: Speculator,
        layout: Layout,
        model: str,
        max_seq_len: int,
        vocabulary: int,
        new_memory: Callable[[], Memory],
        parked: int,
        drafts: int,
        end_tokens: Collection[int],
    ) -> None:
        self.layout = layout
        self.model = model
        self.max_seq_len = max_seq_len
        self.end_token_ids = frozenset(end_tokens)
        self._network = network
        self._vocabulary = vocabulary
        self._drafts = drafts
        self._lock = threading.Lock()
        self._free = [new_memory() for _ in range(parked)]
        self._live = new_memory()
        self._prompt_tokens: int | None = None
        "of what was injected; None: nothing was"
        self._cold = False
        self._decoding: Decoding | None = None
        self._closed = False

    def unsupported(self, request: Request) -> str:
        """The name of a parameter that cannot be honoured, and why; empty: there is none."""
        outside = next((token for token in request.prompt if not 0 <= token < self._vocabulary), None)
        if outside is not None:
            return f"prompt: token {outside} lies outside the vocabulary of {self._vocabulary}"
        if not request.prompt or len(request.prompt) >= self.max_seq_len:
            return f"prompt: {len(request.prompt)} tokens, where 1 to {self.max_seq_len - 1} leave room for output"
        stops = frozenset(request.stop_token_ids)
        if request.min_tokens > 1 and len(stops | self.end_token_ids) >= self._vocabulary:
            return "min_tokens: every token is a stop token"
        if not request.temperature >= 0:
            return f"temperature: {request.temperature} is negative"
        return "" if 0 < request.top_p <= 1 else f"top_p: {request.top_p} lies outside (0, 1]"

    def park(self, arrival: Arrival) -> Parked | Arrival:
        """Convert landed rows into a memory that no running request uses, and release the arrival.

        Returns the arrival itself where there is no such memory.
        """
        memory = self._take()
        if memory is None:
            return arrival
        with arrival, ExitStack() as undo:
            undo.callback(self._give_back, memory)
            _convert(arrival, memory)
            undo.pop_all()
        return Parked(memory, prompt_tokens=arrival.prompt_tokens, cold=arrival.mtp_cold)

    def inject(self, parked: Parked | Arrival) -> None:
        """Make what `park` returned the live state.

        Raises:
            LocalError: another request is running, or this one was dropped or injected before.
        """
        if not isinstance(parked, Parked):
            with parked:
                self._need_idle()
                self._prompt_tokens = None
                _convert(parked, self._live)
                self._prompt_tokens, self._cold = parked.prompt_tokens, parked.mtp_cold
            return
        self._need_idle()
        with self._lock:
            memory, parked.memory = parked.memory, None
        if memory is None:
            raise LocalError(ErrorCode.MISUSE, "these rows were injected or dropped before: hand the request off again")
        former, self._live = self._live, memory
        self._prompt_tokens, self._cold = parked.prompt_tokens, parked.cold
        self._give_back(former)

    def drop(self, parked: Parked | Arrival) -> None:
        """Release what was parked. Idempotent, from any thread."""
        if not isinstance(parked, Parked):
            parked.release()
            return
        with self._lock:
            memory, parked.memory = parked.memory, None
        if memory is not None:
            self._give_back(memory)

    def begin(self, request: Request) -> None:
        """Start decoding from `first_token`, which `step` does not return again.

        Raises:
            LocalError: nothing was injected, or a prompt of another length.
        """
        self._need_idle()
        if self._prompt_tokens != len(request.prompt):
            held = "no rows were injected" if self._prompt_tokens is None else f"rows of {self._prompt_tokens} were"
            raise LocalError(ErrorCode.MISUSE, f"the prompt has {len(request.prompt)} tokens, and {held}")
        self._live.begin(self._prompt_tokens, cold=self._cold)
        self._prompt_tokens = None
        self._decoding = Decoding(
            self._network,
            self._live.cache,
            request,
            drafts=self._drafts,
            cold=self._cold,
            end_tokens=self.end_token_ids,
            max_seq_len=self.max_seq_len,
        )

    def step(self) -> Step:
        """Decode on.

        Raises:
            LocalError: nothing was begun, or the output has ended.
        """
        if self._decoding is None:
            raise LocalError(ErrorCode.MISUSE, "no request was begun")
        return self._decoding.step()

    def end(self) -> None:
        """The request is over, or was cancelled. Idempotent."""
        self._decoding = None
        self._prompt_tokens = None

    def close(self) -> None:
        """Forget everything. Idempotent."""
        self.end()
        with self._lock:
            self._closed = True
            self._free.clear()

    def _need_idle(self) -> None:
        if self._decoding is not None:
            raise LocalError(ErrorCode.MISUSE, "a request is being decoded: end it first")

    def _take(self) -> Memory | None:
        with self._lock:
            return self._free.pop() if self._free else None

    def _give_back(self, memory: Memory) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(memory)


def _convert(arrival: Arrival, memory: Memory) -> None:
    if arrival.start_token:
        raise LocalError(
            ErrorCode.MISUSE, f"rows before token {arrival.start_token} did not come, and this engine keeps no prefixes"
        )
    arrival.convert_into(memory.placements)
