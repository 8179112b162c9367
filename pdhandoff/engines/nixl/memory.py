"""Memory that can be registered: page-aligned, zeroed, kept alive by its owner."""

from __future__ import annotations

import ctypes
import importlib
import mmap
from typing import Final

from pdhandoff.engines.base import Memory, MemoryKind
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["ALIGNMENT", "allocate"]

ALIGNMENT: Final = mmap.PAGESIZE
"grants start and end on multiples of this many bytes"


def allocate(nbytes: int, kind: MemoryKind, device: int) -> Memory:
    """Zeroed memory.

    Raises:
        MoverError: OUT_OF_RANGE for a size below one byte, MOVER_FAILED when there is no memory, CONFIG when GPU memory
            is asked for and torch is not installed.
    """
    if nbytes <= 0:
        raise MoverError(ErrorCode.OUT_OF_RANGE, f"{nbytes} bytes cannot be allocated: ask for at least one")
    return _cuda(nbytes, device) if kind is MemoryKind.CUDA else _cpu(nbytes)


def _cpu(nbytes: int) -> Memory:
    try:
        view = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)).cast("B")
    except (OSError, ValueError, OverflowError) as error:
        raise MoverError(ErrorCode.MOVER_FAILED, f"{nbytes} bytes of memory could not be had: {error}") from error
    return Memory(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), nbytes, owner=view)


def _cuda(nbytes: int, device: int) -> Memory:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise MoverError(
            ErrorCode.CONFIG, "memory of a GPU is allocated through torch, which cannot be imported: pip install torch"
        ) from error
    try:
        owner = torch.zeros(-(-nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT, dtype=torch.uint8, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise MoverError(
            ErrorCode.MOVER_FAILED, f"{nbytes} bytes of memory of GPU {device} could not be had: {error}"
        ) from error
    address = -(-owner.data_ptr() // ALIGNMENT) * ALIGNMENT
    return Memory(address, nbytes, MemoryKind.CUDA, device, owner)
