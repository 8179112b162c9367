"""A set of addresses that grows and shrinks: what an engine has granted and nobody has granted anew since."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from pdhandoff.engines.base import Extent

__all__ = ["Ranges"]


@final
class Ranges:
    """Disjoint, sorted runs of addresses."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, extents: Iterable[Extent]) -> None:
        """Put addresses in."""
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self._runs, *((address, address + length) for address, length in extents)]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        self._runs = merged

    def remove(self, extents: Iterable[Extent]) -> None:
        """Take addresses out."""
        for address, length in extents:
            end = address + length
            self._runs = [
                piece
                for low, high in self._runs
                for piece in ((low, min(high, address)), (max(low, end), high))
                if piece[0] < piece[1]
            ]

    def touch(self, extents: Iterable[Extent]) -> bool:
        """Whether any of these addresses is in the set."""
        return any(low < address + length and address < high for address, length in extents for low, high in self._runs)
