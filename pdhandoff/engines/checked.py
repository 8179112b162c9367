"""A wrapper that lets no write through which leaves registered or granted memory, whatever the wrapped mover checks.

Some transfer engines write wherever they are told. The producer knows from the grant which extents it may touch, says
so by `allow`, and every batch is compared with that before the engine sees it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

import msgspec

from pdhandoff.engines.base import Extent, Memory, Mover, Peer, Region, Transfer, Writes
from pdhandoff.engines.bounds import Runs, check_columns, outside
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["Checked", "CheckedPeer", "CheckedStatistics"]


@final
class CheckedStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the wrapper was made."""

    passed: int
    "batches that the wrapped mover was given"
    refused_sources: int
    "batches that would have read outside registered memory"
    refused_destinations: int
    "batches that would have written outside granted extents"
    refused_extents: int
    "extents outside registered memory, or not aligned, that were to be granted or fenced"


@final
class CheckedPeer:
    """A peer, and the extents that may be written at it: none until `Checked.allow` names some."""

    def __init__(self, inner: Peer) -> None:
        self.inner = inner
        self.allowed = Runs()

    @property
    def key(self) -> str:
        """As the wrapped peer's."""
        return self.inner.key


@final
class Checked(Forwarding):
    """See the module. As thread-safe as the wrapped mover."""

    def __init__(self, mover: Mover) -> None:
        super().__init__(mover)
        self._lock = threading.Lock()
        self._regions: list[Region] = []
        self._registered = Runs()
        self._passed = 0
        self._refused_sources = 0
        self._refused_destinations = 0
        self._refused_extents = 0

    def statistics(self) -> CheckedStatistics:
        """A snapshot."""
        with self._lock:
            return CheckedStatistics(
                passed=self._passed,
                refused_sources=self._refused_sources,
                refused_destinations=self._refused_destinations,
                refused_extents=self._refused_extents,
            )

    def register(self, memory: Memory) -> Region:
        """See `Mover.register`."""
        region = self._mover.register(memory)
        with self._lock:
            self._set_regions([*self._regions, region])
        return region

    def deregister(self, region: Region) -> None:
        """See `Mover.deregister`."""
        with self._lock:
            self._set_regions([other for other in self._regions if other is not region])
        self._mover.deregister(region)

    def _set_regions(self, regions: list[Region]) -> None:
        self._regions = regions
        self._registered = Runs((region.memory.address, region.memory.length) for region in regions)

    def describe(self, extents: Sequence[Extent]) -> bytes:
        """See `Mover.describe`. Raises MoverError (OUT_OF_RANGE) for extents that are not aligned and registered."""
        self._check_extents(extents)
        return self._mover.describe(extents)

    def connect(self, description: bytes) -> CheckedPeer:
        """See `Mover.connect`. Nothing may be written until `allow`."""
        return CheckedPeer(self._mover.connect(description))

    def allow(self, peer: Peer, extents: Sequence[Extent]) -> None:
        """Say what the peer granted, in its own addresses. Replaces what was said before."""
        _own(peer).allowed = Runs((extent.address, extent.length) for extent in extents)

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        """See `Mover.submit`. Raises MoverError (OUT_OF_RANGE) before the wrapped mover sees anything."""
        target = _own(peer)
        check_columns(writes, max_writes=self.capabilities.max_writes)
        with self._lock:
            registered = self._registered
        bad = registered.first_outside(writes.source, writes.length)
        if bad is not None:
            with self._lock:
                self._refused_sources += 1
            raise outside(bad, writes.source, writes.length, "registered memory")
        bad = target.allowed.first_outside(writes.destination, writes.length)
        if bad is not None:
            with self._lock:
                self._refused_destinations += 1
            raise outside(bad, writes.destination, writes.length, "what the peer granted")
        transfer = self._mover.submit(target.inner, writes)
        with self._lock:
            self._passed += 1
        return transfer

    def quiesce(self, peer: Peer, deadline: float) -> bool:
        """See `Mover.quiesce`."""
        return self._mover.quiesce(_own(peer).inner, deadline)

    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        """See `Mover.fence`. Raises MoverError (OUT_OF_RANGE) for extents that are not aligned and registered."""
        self._check_extents(extents)
        self._mover.fence(_own(peer).inner, extents, deadline)

    def _check_extents(self, extents: Sequence[Extent]) -> None:
        alignment = self.capabilities.alignment
        with self._lock:
            for extent in extents:
                aligned = extent.address % alignment == 0 and extent.length % alignment == 0
                if not aligned or extent.length <= 0 or not self._registered.covers(extent.address, extent.length):
                    self._refused_extents += 1
                    raise MoverError(
                        ErrorCode.OUT_OF_RANGE,
                        f"{extent} is not inside registered memory, or not aligned to {alignment} bytes",
                    )


def _own(peer: Peer) -> CheckedPeer:
    if not isinstance(peer, CheckedPeer):
        raise MoverError(ErrorCode.MISUSE, f"{type(peer).__name__} is no peer of this wrapper: connect through it")
    return peer
