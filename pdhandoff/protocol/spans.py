"""Which rows have landed: counted by identity, never by number (rule 3)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple, final

from msgspec import Meta

from pdhandoff.errors import ErrorCode, RemoteError
from pdhandoff.limits import Limits
from pdhandoff.protocol.manifest import Manifest

__all__ = ["Hole", "IntervalSet", "Ledger", "Span"]

_Index = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Span(NamedTuple):
    """A rectangle of rows: some layers of one manifest entry, over a range of tokens."""

    entry: _Index
    "index into the manifest's entries"
    layer_start: _Index
    "first layer, as a position in the entry's layers"
    layer_stop: _Index
    token_start: _Index
    token_stop: _Index


class Hole(NamedTuple):
    """The first rows that are missing."""

    component: str
    layer: int
    token_start: int
    token_stop: int


@final
class IntervalSet:
    """A set of integers kept as disjoint, ascending, half-open intervals."""

    __slots__ = ("_starts", "_stops")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in intervals:
            self.add(start, stop)

    def __len__(self) -> int:
        """How many intervals."""
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def add(self, start: int, stop: int) -> None:
        """Add `[start, stop)`; what is in the set already stays."""
        if start >= stop:
            return
        low = bisect_left(self._stops, start)
        high = bisect_right(self._starts, stop)
        if low < high:
            start = min(start, self._starts[low])
            stop = max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]

    def first_gap(self, start: int, stop: int) -> tuple[int, int] | None:
        """The first sub-interval of `[start, stop)` that is not in the set."""
        for have_start, have_stop in zip(self._starts, self._stops, strict=True):
            if have_stop <= start:
                continue
            if have_start > start:
                return start, min(have_start, stop)
            start = have_stop
            if start >= stop:
                return None
        return (start, stop) if start < stop else None

    def gaps(self, start: int, stop: int) -> list[range]:
        """All of `[start, stop)` that is not in the set, in ascending order."""
        found: list[range] = []
        while (gap := self.first_gap(start, stop)) is not None:
            found.append(range(*gap))
            start = gap[1]
        return found


@final
class Ledger:
    """The rows of one shard that have landed, against its manifest. Adding a row twice changes nothing."""

    __slots__ = ("_all_layers", "_some_layers", "manifest")

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._all_layers = [IntervalSet() for _ in manifest.entries]
        self._some_layers: dict[tuple[int, int], IntervalSet] = {}

    def clear(self) -> None:
        """Forget everything: the rows will land anew."""
        self._all_layers = [IntervalSet() for _ in self.manifest.entries]
        self._some_layers.clear()

    def layers(self, span: Span) -> int:
        """Layers that are counted one by one for a span: 1 for all layers of its entry.

        Raises RemoteError when it names rows that the manifest does not have.
        """
        every = self._check(span)
        some = span.layer_stop - span.layer_start
        return 1 if some == every else some

    def add_all(self, spans: Sequence[Span], limits: Limits) -> None:
        """Count the spans of a peer's message.

        Raises RemoteError when one names rows that the manifest does not have, and when counting this message, or what
        it leaves behind, would take too long.
        """
        if sum(map(self.layers, spans)) > limits.max_progress_layers:
            raise RemoteError(
                ErrorCode.OVERSIZED,
                f"progress names more than {limits.max_progress_layers} layers in one message: report spans of all "
                "layers, or fewer at once",
            )
        for span in spans:
            if self.add(span) > limits.max_fragments:
                raise RemoteError(
                    ErrorCode.OVERSIZED,
                    f"the rows of entry {span.entry} have landed in more than {limits.max_fragments} fragments: hand "
                    "tokens off in order",
                )

    def add(self, span: Span) -> int:
        """Count a span. Returns how many runs of rows there are now in a layer of it, at most.

        Raises RemoteError when it names rows that the manifest does not have.
        """
        layers = self._check(span)
        if span.layer_start == 0 and span.layer_stop == layers:
            grown = [self._all_layers[span.entry]]
        else:
            some = range(span.layer_start, span.layer_stop)
            grown = [self._some_layers.setdefault((span.entry, layer), IntervalSet()) for layer in some]
        for rows in grown:
            rows.add(span.token_start, span.token_stop)
        return max(map(len, grown))

    def whole_rows(self) -> list[list[range]]:
        """For each entry, the tokens of which all layers have landed together."""
        return [[range(*interval) for interval in intervals] for intervals in self._all_layers]

    def first_hole(self) -> Hole | None:
        """The first rows that have not landed; None when all have."""
        start, stop = self.manifest.start_token, self.manifest.prompt_tokens
        for index, entry in enumerate(self.manifest.entries):
            if self._all_layers[index].first_gap(start, stop) is None:
                continue
            for position, layer in enumerate(entry.layers):
                gap = self._landed(index, position).first_gap(start, stop)
                if gap is not None:
                    return Hole(entry.component, layer, *gap)
        return None

    def _landed(self, entry: int, position: int) -> IntervalSet:
        some = self._some_layers.get((entry, position))
        if some is None:
            return self._all_layers[entry]
        both = IntervalSet(self._all_layers[entry])
        for start, stop in some:
            both.add(start, stop)
        return both

    def _check(self, span: Span) -> int:
        manifest = self.manifest
        if span.entry >= len(manifest.entries):
            raise _outside(span, f"the manifest has {len(manifest.entries)} entries")
        layers = len(manifest.entries[span.entry].layers)
        if not 0 <= span.layer_start < span.layer_stop <= layers:
            raise _outside(span, f"the entry has {layers} layers")
        if not manifest.start_token <= span.token_start < span.token_stop <= manifest.prompt_tokens:
            raise _outside(span, f"tokens {manifest.start_token}..{manifest.prompt_tokens} move")
        return layers


def _outside(span: Span, what: str) -> RemoteError:
    return RemoteError(ErrorCode.MANIFEST_MISMATCH, f"progress names rows outside the manifest: {span}, but {what}")
