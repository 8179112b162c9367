"""Handles that callers give back to a mover: they must be its own."""

from __future__ import annotations

from typing import TypeVar

from pdhandoff.engines.base import Peer, Transfer
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["own_peer", "own_transfer"]

_Handle = TypeVar("_Handle")


def own_peer(peer: Peer, kind: type[_Handle]) -> _Handle:
    """The peer, as the class that this mover makes. Raises MoverError (MISUSE) for another mover's."""
    if not isinstance(peer, kind):
        raise MoverError(ErrorCode.MISUSE, f"{type(peer).__name__} is no peer of this mover: connect to it first")
    return peer


def own_transfer(transfer: Transfer, kind: type[_Handle]) -> _Handle:
    """The transfer, as the class that this mover makes. Raises MoverError (MISUSE) for another mover's."""
    if not isinstance(transfer, kind):
        raise MoverError(ErrorCode.MISUSE, f"{type(transfer).__name__} is no transfer of this mover")
    return transfer
