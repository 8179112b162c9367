"""Which implementation of copies, conversions and digests an endpoint uses: the one that reaches its memory."""

from __future__ import annotations

from pdhandoff.engines.base import MemoryKind
from pdhandoff.errors import LocalError
from pdhandoff.native import Native, load

__all__ = ["native_for", "plain_native_for"]


def native_for(kind: MemoryKind) -> Native:
    """What computes in memory of this kind. Raises LocalError when nothing that does is installed."""
    if kind is MemoryKind.CUDA:
        return load("cuda")
    try:
        return load("cpu")
    except LocalError:
        return load("reference")


def plain_native_for(kind: MemoryKind) -> Native | None:
    """What copies in memory of this kind; None: nothing better than the standard library. Imports no torch for that.

    Raises LocalError where the standard library cannot reach the memory.
    """
    if kind is MemoryKind.CUDA:
        return load("cuda")
    try:
        return load("cpu")
    except LocalError:
        return None
