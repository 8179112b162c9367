"""Which implementation of copies, conversions and digests an endpoint uses: the one that reaches its memory."""

from __future__ import annotations

from pdhandoff.engines.base import MemoryKind
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.native import PREFERENCE_VARIABLE, Native, load

__all__ = ["native_for", "plain_native_for"]


def native_for(kind: MemoryKind) -> Native:
    """What computes in memory of this kind. In CPU memory the variable PDHANDOFF_NATIVE may choose.

    Raises LocalError when nothing that does is installed, or the variable names what cannot reach this memory.
    """
    if kind is MemoryKind.CUDA:
        return load("cuda")
    native = load()
    if native.name == "cuda":
        raise LocalError(
            ErrorCode.CONFIG,
            f"{PREFERENCE_VARIABLE}=cuda, and this side's memory is a CPU's: unset it, GPU memory does not need it",
        )
    return native


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
