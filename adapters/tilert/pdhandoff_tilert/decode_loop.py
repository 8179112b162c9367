"""From injected rows and the token that prefill sampled to output tokens, with drafts from the first step.

With drafts, the first call replays the last prompt token, because the hidden state that drafts start from is no part of
the rows. If the replay predicts the token that prefill sampled, its own drafts continue that token, and so speculation
is warm. If it predicts another one (another kernel, another sample), decoding still goes on from prefill's token: the
position is set after the prompt, the draft layer's last row (which the replay has made from the wrong token) is put
back, and the first step runs with copies of the token in place of drafts. Without drafts nothing is replayed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import final

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff_tilert.engine import DecodeRequest, DecodeStep
from pdhandoff_tilert.generator import Calls
from pdhandoff_tilert.parking import Facts

__all__ = ["DecodeLoop"]


@final
class _Phase(enum.Enum):
    REPLAY = enum.auto()
    COLD = enum.auto()  # the next row holds copies, no drafts
    WARM = enum.auto()
    OVER = enum.auto()


@final
class DecodeLoop:
    """One request.

    Args:
        calls: the engine's; sampling is set.
        request: what to decode.
        facts: of the injected rows.
        limit: output tokens at most, the first one included.
        end_tokens: that end this request.
        steps_per_call: steps that one call may run; cancelling waits for a call.
        keep_draft_row: see `Injector.keep_draft_row`.
    """

    def __init__(
        self,
        calls: Calls,
        request: DecodeRequest,
        facts: Facts,
        *,
        limit: int,
        end_tokens: frozenset[int],
        steps_per_call: int,
        keep_draft_row: Callable[[int], Callable[[], None]],
    ) -> None:
        self._calls = calls
        self._stepper = calls.stepper
        self._request = request
        self._facts = facts
        self._end_tokens = end_tokens
        self._steps_per_call = steps_per_call if calls.stepper.several else 1
        self._keep_draft_row = keep_draft_row
        self._left = limit
        self._reason = ""
        self._row = [request.first_token] * calls.stepper.width
        "of the next step"
        self._phase = _Phase.REPLAY if calls.with_mtp else _Phase.WARM
        self._take([request.first_token])
        if self._phase is not _Phase.OVER:
            calls.stepper.prepare()
            calls.generator.set_cur_pos(facts.prompt_tokens - (1 if calls.with_mtp else 0))

    @property
    def cold(self) -> bool:
        """The next step has no drafts to verify."""
        return self._phase is _Phase.COLD

    def step(self) -> DecodeStep:
        """Replay, or decode on. Raises LocalError when the engine returns what no engine can."""
        if self._phase is _Phase.OVER:
            return DecodeStep(tokens=(), finish_reason=self._reason)
        return self._replay() if self._phase is _Phase.REPLAY else self._decode()

    def _replay(self) -> DecodeStep:
        put_back = self._keep_draft_row(self._facts.prompt_tokens - 1)
        width = self._stepper.width
        first, *more = self._stepper.run([self._request.prompt[-1]] * width, 1).tokens
        if first != self._request.first_token:
            put_back()
            self._calls.generator.set_cur_pos(self._facts.prompt_tokens)
            self._phase = _Phase.COLD
            return DecodeStep(tokens=())
        # copies of the last prompt token may have been right by chance, and then they count
        tokens = self._take(more)
        last = more[-1] if more else first
        self._row = [last] * width if self._facts.mtp_cold else self._continuing(last)
        if self._phase is not _Phase.OVER:
            self._phase = _Phase.COLD if self._facts.mtp_cold else _Phase.WARM
        return DecodeStep(tokens=tokens, finish_reason=self._reason)

    def _decode(self) -> DecodeStep:
        width = self._stepper.width
        steps = min(self._steps_per_call, -(-self._left // width))
        verified = self._stepper.run(self._row, steps)
        undrafted = 1 if self._phase is _Phase.COLD else 0
        counts = verified.counts[undrafted:]
        self._phase = _Phase.WARM
        self._row = self._continuing(verified.tokens[-1])
        tokens = self._take(verified.tokens)
        return DecodeStep(
            tokens=tokens,
            finish_reason=self._reason,
            drafted=len(counts) * (width - 1),
            accepted=sum(counts) - len(counts),
        )

    def _take(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Output tokens, as far as they are wanted; says when that was the end."""
        taken = tokens[: self._left]
        at = next((number for number, token in enumerate(taken) if token in self._end_tokens), None)
        if at is not None:
            taken, self._reason = taken[: at + 1], "stop"
        self._left -= len(taken)
        if not self._reason and self._left == 0:
            self._reason = "length"
        if self._reason:
            self._phase = _Phase.OVER
        return tuple(taken)

    def _continuing(self, last: int) -> list[int]:
        """The next step's row, which begins with the last output token."""
        row = self._stepper.next_row()
        if row[0] != last:
            raise LocalError(
                ErrorCode.INTERNAL,
                f"the engine goes on from token {row[0]}, and its last output token is {last}: it is broken",
            )
        return row
