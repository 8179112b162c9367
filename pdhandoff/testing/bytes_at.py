"""Looking at registered memory, and setting it, wherever it lives."""

from __future__ import annotations

import ctypes

from pdhandoff.engines.base import Memory, MemoryKind
from pdhandoff.testing.place import Place

__all__ = ["callers_memory", "fill_bytes", "put_bytes", "read_bytes"]


def callers_memory(place: Place, nbytes: int, alignment: int = 1) -> Memory:
    """Memory that no mover has allocated. Raises LocalError where there is none of that kind."""
    room = nbytes + alignment - 1
    if place.kind is MemoryKind.CPU:
        buffer = ctypes.create_string_buffer(room)
        owner: object = buffer
        start = ctypes.addressof(buffer)
    else:
        from pdhandoff.testing.gpu import driver  # only where there is GPU memory

        owner = block = driver(place.device).allocate(room)
        start = block.address
    return Memory(-(-start // alignment) * alignment, nbytes, place.kind, place.device, owner)


def fill_bytes(memory: Memory, value: int, start: int, length: int) -> None:
    """Set bytes to one value."""
    if memory.kind is MemoryKind.CPU:
        ctypes.memset(memory.address + start, value, length)
        return
    from pdhandoff.testing.gpu import driver

    driver(memory.device).fill(memory.address + start, value, length)


def put_bytes(memory: Memory, start: int, data: bytes) -> None:
    """Set bytes."""
    if memory.kind is MemoryKind.CPU:
        ctypes.memmove(memory.address + start, data, len(data))
        return
    from pdhandoff.testing.gpu import driver

    driver(memory.device).put(memory.address + start, data)


def read_bytes(memory: Memory, start: int, length: int) -> bytes:
    """What is there now."""
    if memory.kind is MemoryKind.CPU:
        return ctypes.string_at(memory.address + start, length)
    from pdhandoff.testing.gpu import driver

    return driver(memory.device).read(memory.address + start, length)
