"""The agent that peers write through. It registers what is granted and nothing else; a fence puts another in its place.

Deregistering stops nobody: over TCP a write to memory that was deregistered still lands (seen with NIXL 1.5.1). What
stops writes is the end of the agent that would put them in place. So there is an agent for receiving alone: our own
writes go through another and outlive a fence. Each receiving agent is one *life* of the mover; grants name theirs, and
those of a former life fail at the writer.

A registration, not an extent, is what NIXL discloses. An extent that nobody was granted before is registered as it is.
One that overlaps earlier ones is pieced together from them and from what is missing, because NIXL cannot tell
overlapping registrations apart.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

from pdhandoff.engines.nixl.binding import Agent, Descriptor
from pdhandoff.engines.nixl.locking import held
from pdhandoff.engines.nixl.options import NixlOptions
from pdhandoff.engines.nixl.tiles import Tiles
from pdhandoff.ids import Incarnation

__all__ = ["Grant", "Receiver"]

Grant = tuple[int, tuple[bytes, ...], list[Descriptor]]
"the life, NIXL's metadata, and the granted runs cut at the edges of registrations"


@final
class Receiver:
    """The receiving agents of one mover, one after another. Started by the first grant. Thread-safe."""

    def __init__(self, incarnation: Incarnation, options: NixlOptions) -> None:
        self._name = incarnation.hex()
        self._options = options
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._life = 0
        self._tiles = Tiles()

    def grant(self, extents: Sequence[Descriptor]) -> Grant:
        """Register what is missing and describe these extents (disjoint, inside registered memory).

        Raises:
            MoverError: MOVER_FAILED when UCX refuses, BUSY when another call does not come to an end.
        """
        with held(self._lock, self._options.call_s):
            agent = self._agent or self._start()
            missing = [gap for extent in extents for gap in self._gaps(extent)]
            if missing:
                agent.register(missing)
                self._tiles = Tiles((*self._tiles.runs, *missing))
            touched = [tile for extent in extents for tile in self._tiles.overlapping(extent.address, extent.length)]
            metadata = agent.metadata(list(dict.fromkeys(touched)))
            return self._life, tuple(metadata), [part for extent in extents for part in self._parts(extent)]

    def _start(self) -> Agent:
        self._life += 1
        self._agent = Agent(f"r{self._life}.{self._name}", self._options)
        return self._agent

    def _gaps(self, extent: Descriptor) -> list[Descriptor]:
        gaps: list[Descriptor] = []
        at, end = extent.address, extent.address + extent.length
        for tile in self._tiles.overlapping(extent.address, extent.length):
            if at < tile.address:
                gaps.append(extent._replace(address=at, length=tile.address - at))
            at = tile.address + tile.length
        if at < end:
            gaps.append(extent._replace(address=at, length=end - at))
        return gaps

    def _parts(self, extent: Descriptor) -> list[Descriptor]:
        end = extent.address + extent.length
        parts: list[Descriptor] = []
        for tile in self._tiles.overlapping(extent.address, extent.length):
            low, high = max(tile.address, extent.address), min(tile.address + tile.length, end)
            parts.append(extent._replace(address=low, length=high - low))
        return parts

    def forget(self, memory: Descriptor) -> None:
        """Deregister what was granted of this memory. Not a fence. Raises MoverError as `grant` does."""
        with held(self._lock, self._options.call_s):
            gone = self._tiles.overlapping(memory.address, memory.length)
            if self._agent is not None and gone:
                self._tiles = Tiles(tile for tile in self._tiles.runs if tile not in set(gone))
                self._agent.deregister(gone)

    def renew(self, wait_s: float) -> None:
        """End this life, and with it every write that anybody has under way into our memory through this agent.

        The next grant starts another life. Raises MoverError (BUSY) when another call does not end within `wait_s`.
        """
        with held(self._lock, wait_s):
            agent, self._agent = self._agent, None
            self._tiles = Tiles()
            if agent is not None:
                agent.destroy()
