"""Movers that do worse than breaking a rule, and one that promises little."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from threading import Event

import msgspec

from pdhandoff.engines.base import Extent, Mover, MoverCapabilities, Peer
from pdhandoff.engines.faults import Faulty
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.engines.loopback import create
from pdhandoff.engines.metered import Metered
from pdhandoff.errors import ErrorCode, MoverError


class _Modest(Forwarding):
    """Promises nothing that it need not promise."""

    @property
    def capabilities(self) -> MoverCapabilities:
        return msgspec.structs.replace(
            self._mover.capabilities, quiesce=False, fence=False, reports_peer_death=False, thread_safe=False
        )

    def quiesce(self, peer: Peer, deadline: float) -> bool:
        self._mover.quiesce(peer, 0.0)
        del deadline
        return False

    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        raise MoverError(ErrorCode.MOVER_FAILED, f"{peer.key} cannot be kept from {extents} by {deadline}, nor ever")


class _Crashing(Forwarding):
    def describe(self, extents: Sequence[Extent]) -> bytes:
        ctypes.string_at(0)
        return self._mover.describe(extents)


class _Hanging(Forwarding):
    def deregister(self, region: object) -> None:
        del region
        Event().wait()


class _Renamed(Forwarding):
    @property
    def name(self) -> str:
        return "renamed"


def renamed() -> Mover:
    return _Renamed(create())


def modest() -> Mover:
    return _Modest(create())


def crashing() -> Mover:
    return _Crashing(create())


def hanging() -> Mover:
    return _Hanging(create())


def wrapped() -> Mover:
    """What the runtime's wrappers must not change."""
    return Metered(Faulty(create()))


def failing() -> Mover:
    raise MoverError(ErrorCode.CONFIG, "there is no such card")


no_mover = object
