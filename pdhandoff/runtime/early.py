"""Early conversion: rows go on into the decode engine's caches as they land, before the handoff is complete.

Everything here belongs to the consumer's loop; conversions run on its worker, one at a time for each handoff. The
landing memory is held as by any other reader meanwhile. What was converted of a shard is void when its producer starts
over, and so is all of it when the handoff fails: whoever waits hears of an end only when no conversion runs any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, final

from pdhandoff.errors import PdHandoffError
from pdhandoff.ids import HandoffId
from pdhandoff.layouts import Component
from pdhandoff.native import Native
from pdhandoff.protocol.consumer import ConsumerCore, SoFar
from pdhandoff.protocol.spans import IntervalSet
from pdhandoff.runtime.landed import LandedRows, Target, convert_rows, landed_rows
from pdhandoff.runtime.meeting import ProducerLink
from pdhandoff.runtime.worker import Worker

__all__ = ["Early", "EarlyDone"]


class _Step(NamedTuple):
    """Rows that are converted together."""

    landed: LandedRows
    tokens: range


class _Summed(NamedTuple):
    tokens: range
    digest: int | None


@final
class EarlyDone:
    """What has been converted of one handoff, and into what."""

    def __init__(self, target: Target, native: Native) -> None:
        self.target: Final = target
        self.native: Final = native
        self._rows: dict[tuple[int, int], list[_Summed]] = {}
        "(shard, entry) -> what was converted of it"

    def add(self, shard: int, entry: int, tokens: range, digest: int | None) -> None:
        """These rows are in the caches."""
        self._rows.setdefault((shard, entry), []).append(_Summed(tokens, digest))

    def void(self, shard: int) -> None:
        """This shard's rows land anew."""
        for key in [key for key in self._rows if key[0] == shard]:
            del self._rows[key]

    def missing(self, landed: LandedRows, within: range) -> list[range]:
        """Which of these rows are not in the caches."""
        rows = self._rows.get((landed.shard, landed.position), ())
        return IntervalSet((each.tokens.start, each.tokens.stop) for each in rows).gaps(within.start, within.stop)

    def digests(self, shard: int) -> dict[int, list[tuple[range, int]]]:
        """Entry -> digests of rows as they were when they were converted."""
        return {
            entry: [(each.tokens, each.digest) for each in rows if each.digest is not None]
            for (of, entry), rows in self._rows.items()
            if of == shard
        }


class _Handoff:
    """One handoff whose rows are converted early."""

    __slots__ = ("busy", "done", "failed", "restarts", "rows", "waiting")

    def __init__(self, done: EarlyDone) -> None:
        self.done = done
        self.busy = False
        self.failed = False
        "a conversion has failed: the engine's own call will say why"
        self.restarts: dict[int, int] = {}
        "shard -> how often it has started over"
        self.waiting: deque[Callable[[], None]] = deque()
        self.rows: list[LandedRows] | None = None
        "where rows land, once memory is granted"


@final
class Early:
    """All of one consumer's."""

    def __init__(
        self,
        *,
        core: ConsumerCore,
        worker: Worker,
        links: Mapping[HandoffId, Mapping[int, ProducerLink]],
        clock: Callable[[], float],
        act: Callable[[], None],
    ) -> None:
        self._core = core
        self._worker = worker
        self._links = links
        self._clock = clock
        self._act = act
        self._handoffs: dict[HandoffId, _Handoff] = {}

    def begin(self, handoff: HandoffId, target: Target, native: Native) -> None:
        """Convert what has landed of a handoff, and from now on what lands."""
        if handoff not in self._handoffs:
            self._handoffs[handoff] = _Handoff(EarlyDone(target, native))
            self.landed(handoff)

    def when_idle(self, handoff: HandoffId, function: Callable[[], None]) -> None:
        """Call a function when no conversion of this handoff runs: at once, or after those that wait already."""
        item = self._handoffs.get(handoff)
        if item is None or not item.busy:
            function()
        else:
            item.waiting.append(function)

    def busy(self, handoff: HandoffId) -> bool:
        """Whether a conversion writes to the engine's caches now."""
        item = self._handoffs.get(handoff)
        return item is not None and item.busy

    def done(self, handoff: HandoffId) -> EarlyDone | None:
        """What is in the caches; None when nothing was to be converted early, or that has failed."""
        item = self._handoffs.get(handoff)
        return None if item is None or item.failed else item.done

    def forget(self, handoff: HandoffId) -> None:
        """It is over, and no conversion runs."""
        self._handoffs.pop(handoff, None)

    def void(self, handoff: HandoffId, shard: int) -> None:
        """A shard starts over: what was converted of it is worth nothing, what is being converted neither."""
        item = self._handoffs.get(handoff)
        if item is not None:
            item.restarts[shard] = item.restarts.get(shard, 0) + 1
            item.done.void(shard)

    def landed(self, handoff: HandoffId) -> None:
        """Rows have landed: convert them, unless a conversion runs. Then they are looked at when it has ended."""
        item = self._handoffs.get(handoff)
        landed = self._core.landed(handoff)
        if item is None or item.busy or item.failed or landed is None:
            return
        steps = [
            _Step(rows, tokens)
            for rows in self._where(handoff, item, landed)
            for there in landed.rows[rows.shard][rows.position]
            for tokens in item.done.missing(rows, _common(rows.tokens, there))
        ]
        if not steps or not self._core.begin_read(landed.generation):
            return
        item.busy = True
        restarts = dict(item.restarts)
        links = self._links[handoff]
        target, native = item.done.target, item.done.native

        def convert() -> list[int | None]:
            return [
                convert_rows(
                    native,
                    links[step.landed.shard].bridges[target.destination],
                    step.landed,
                    target,
                    tokens=step.tokens,
                    prompt_tokens=landed.prompt_tokens,
                    sum_up=landed.digest,
                )
                for step in steps
            ]

        def ended(result: list[int | None] | PdHandoffError) -> None:
            item.busy = False
            self._core.end_read(landed.generation, self._clock())
            if isinstance(result, PdHandoffError):
                item.failed = True
            else:
                for step, digest in zip(steps, result, strict=True):
                    shard = step.landed.shard
                    if restarts.get(shard) == item.restarts.get(shard):
                        item.done.add(shard, step.landed.position, step.tokens, digest)
            self.landed(handoff)
            while item.waiting and not item.busy:
                item.waiting.popleft()()
            self._act()

        self._worker.run(convert, ended)

    def _where(self, handoff: HandoffId, item: _Handoff, landed: SoFar) -> list[LandedRows]:
        if item.rows is None:
            sources: dict[int, dict[str, Component]] = {
                shard: {component.name: component for component in link.layout.components}
                for shard, link in self._links[handoff].items()
            }
            extents = self._core.book.records[landed.generation].extents
            item.rows = landed_rows(self._core.manifests(handoff), extents, sources, item.done.target.destination)
        return item.rows


def _common(a: range, b: range) -> range:
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))
