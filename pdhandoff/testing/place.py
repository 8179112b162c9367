"""In which memory a run checks a mover, as its processes tell each other."""

from __future__ import annotations

from typing import Final, NamedTuple, Self, final

from pdhandoff.engines.base import MemoryKind

__all__ = ["IN_CPU_MEMORY", "Place"]


@final
class Place(NamedTuple):
    """Kind and device of all memory that is written and read."""

    kind: MemoryKind = MemoryKind.CPU
    device: int = 0

    def spell(self) -> str:
        """For a command line: cpu:0, cuda:1."""
        return f"{self.kind.value}:{self.device}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `spell` wrote. Raises ValueError."""
        kind, _, device = text.partition(":")
        return cls(MemoryKind(kind), int(device))


IN_CPU_MEMORY: Final = Place()
