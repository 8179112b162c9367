"""Raw copies in CPU memory with nothing but the standard library. `ctypes.memmove` releases the interpreter lock."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdhandoff.planner.copies import CopyPlan

__all__ = ["copy_plan", "copy_writes"]

_BATCH: Final = 1 << 14
"copies whose addresses are expanded at a time"


def copy_writes(source: Iterable[int], destination: Iterable[int], length: Iterable[int]) -> int:
    """Copy `length` bytes from each source to each destination address, in order.

    Args:
        source: absolute addresses in this process, readable for `length` bytes.
        destination: absolute addresses in this process, writable for `length` bytes.
        length: bytes; 0 moves nothing.

    Returns:
        Bytes copied.

    Raises:
        ValueError: the columns differ in length; what came before the first gap has been copied.

    """
    memmove = ctypes.memmove
    total = 0
    for from_address, to_address, nbytes in zip(source, destination, length, strict=True):
        if nbytes:
            memmove(to_address, from_address, nbytes)
            total += nbytes
    return total


def copy_plan(plan: CopyPlan) -> int:
    """Execute a plan whose addresses are all in this process. Returns the bytes copied.

    The planner has checked every range against the placements it was given; whether those describe live memory is the
    caller's promise.
    """
    return sum(copy_writes(*columns) for columns in plan.writes(_BATCH))
