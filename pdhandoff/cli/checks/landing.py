"""A page that is written to, between two guards that must stay as they are; in CPU memory, or in torch's on a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

from pdhandoff.engines.base import Extent, Memory, MemoryKind

__all__ = ["GUARDS", "UNIT", "Difference", "Landing", "cpu_memory", "cuda_memory", "pattern"]

UNIT: Final = 4096
"bytes of the page, and of each guard, unless the mover wants larger ones"
GUARDS: Final = 1
"pages on each side"
_GUARD_SEED: Final = 0


def pattern(length: int, seed: int) -> bytes:
    """Bytes without a period, the same in every process."""
    return hashlib.shake_256(b"pdhandoff probe %d" % seed).digest(length)


class Difference(NamedTuple):
    """How what landed differs from what was written."""

    wrong: int
    "bytes of the page"
    first: int
    "offset of the first of them; -1: none"
    outside: int
    "bytes of the guards that were changed"
    length: int
    "of the page"


@final
class Landing:
    """Registered memory: a guard, the page, a guard.

    Arguments:
        memory: of all three.
        unit: bytes of each.
        load: copies (offset, bytes) into it.
        read: copies (offset, length) out of it.
    """

    def __init__(
        self, memory: Memory, unit: int, load: Callable[[int, bytes], None], read: Callable[[int, int], bytes]
    ) -> None:
        self.memory = memory
        self.page: Final = Extent(memory.address + GUARDS * unit, unit)
        self._unit = unit
        self._load = load
        self._read = read
        load(0, pattern((1 + 2 * GUARDS) * unit, _GUARD_SEED))

    def fill_page(self, data: bytes) -> None:
        """What will be written from here."""
        self._load(GUARDS * self._unit, data)

    def compare(self, seed: int) -> Difference:
        """Compare the page with `pattern(length, seed)`, and the guards with how they began."""
        start, end = GUARDS * self._unit, (GUARDS + 1) * self._unit
        total = end + GUARDS * self._unit
        held, began = self._read(0, total), pattern(total, _GUARD_SEED)
        page = [
            index
            for index, (one, two) in enumerate(zip(held[start:end], pattern(self._unit, seed), strict=True))
            if one != two
        ]
        guards = zip(held[:start] + held[end:], began[:start] + began[end:], strict=True)
        return Difference(
            wrong=len(page),
            first=page[0] if page else -1,
            outside=sum(one != two for one, two in guards),
            length=self._unit,
        )


def cpu_memory(memory: Memory, unit: int) -> Landing:
    """Of this process."""
    return Landing(
        memory,
        unit,
        lambda offset, data: _store(memory.address + offset, data),
        lambda offset, length: ctypes.string_at(memory.address + offset, length),
    )


def _store(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def cuda_memory(unit: int, device: int) -> Landing:
    """From torch's allocator, as an engine's caches are: that is the memory whose registration has to work."""
    torch = importlib.import_module("torch")
    length = (1 + 2 * GUARDS) * unit
    tensor: Any = torch.zeros(length + unit, dtype=torch.uint8, device=f"cuda:{device}")
    skip = -tensor.data_ptr() % unit
    view = tensor[skip : skip + length]

    def load(offset: int, data: bytes) -> None:
        view[offset : offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(view.device)
        torch.cuda.synchronize(device)

    def read(offset: int, length: int) -> bytes:
        torch.cuda.synchronize(device)
        return bytes(view[offset : offset + length].cpu().tolist())

    return Landing(Memory(view.data_ptr(), length, MemoryKind.CUDA, device, tensor), unit, load, read)
