"""Peers as a writer sees them: a mover that may end, the lives of its receiving agent, and what each grant allows."""

from __future__ import annotations

import threading
from typing import Final, final

from pdhandoff.engines.base import MemoryKind
from pdhandoff.engines.loopback.control import Pulse
from pdhandoff.engines.nixl.binding import Descriptor
from pdhandoff.engines.nixl.tiles import Tiles
from pdhandoff.engines.nixl.wire import Description
from pdhandoff.ids import Incarnation

__all__ = ["Life", "NixlPeer", "Remote"]


@final
class Remote:
    """One incarnation of one mover. Thread-safe."""

    def __init__(self, description: Description, *, host: bytes, machine: bytes) -> None:
        """Watch it, if it runs where we can. Raises MoverError (STALE_INCARNATION) when it is seen to have ended."""
        self.incarnation: Final = Incarnation(description.incarnation)
        self.pid: Final = description.pid
        self.near: Final = description.machine == machine
        "whether it runs on this machine, and so may write into our memory directly"
        self.local: Final = description.host == host
        "whether its process runs where this one can watch it"
        self.newest = 0
        "latest life that it has granted memory of"
        self._lock = threading.Lock()
        self._pulse = Pulse(description.pid, description.control_fd, description.incarnation) if self.local else None

    @property
    def ended(self) -> bool:
        """Whether it is proven that this mover has ended. Never of one that cannot be watched."""
        with self._lock:
            return self._pulse is not None and self._pulse.ended

    def close(self) -> None:
        """Stop watching. Idempotent."""
        with self._lock:
            if self._pulse is not None:
                self._pulse.close()


@final
class Life:
    """One receiving agent of a remote mover, as loaded into our sending agent."""

    def __init__(self, remote: Remote, number: int, agent: str) -> None:
        self.remote: Final = remote
        self.number: Final = number
        self.agent: Final = agent
        self.broken = ""
        "why no write through it can succeed any more"
        self.in_flight = 0
        "handles that are not over"
        self.transports: tuple[str, ...] = ()
        "what UCX uses to reach it, as `transport/device`; empty where it does not say"

    @property
    def over(self) -> bool:
        """Whether it is proven that this agent has ended, so that no write through it lands any more."""
        return self.remote.newest > self.number or self.remote.ended


@final
class NixlPeer:
    """A peer and one grant of it."""

    def __init__(self, remote: Remote, life: Life | None, description: Description) -> None:
        self.remote: Final = remote
        self.life: Final = life
        self.granted: Final = Tiles(
            Descriptor(part.address, part.length, part.device, MemoryKind.CUDA if part.cuda else MemoryKind.CPU)
            for part in description.parts
        )

    @property
    def key(self) -> str:
        """Same for every grant of one incarnation of one peer, before and after its fences."""
        return str(self.remote.incarnation)
