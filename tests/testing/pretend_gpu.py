"""A GPU that is none: the functions of NVIDIA's driver over memory of this process, and a mover that takes it for one.

Importing it gives the process such a GPU: the kit's processes do when they make the mover.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import msgspec

from pdhandoff.engines.base import Memory, MemoryKind, Mover, MoverCapabilities, Region
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.engines.loopback import create
from pdhandoff.testing import gpu

__all__ = ["Library", "make"]

DEVICES = 2


class Library:
    """As `libcuda.so.1`. `calls` are the names of what was called."""

    def __init__(self, *, broken: str = "") -> None:
        self.calls: list[str] = []
        self.blocks: dict[int, Any] = {}
        self._broken = broken

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self._broken:
                return 201
            handler = getattr(type(self), f"_{name}", None)
            if handler is not None:
                handler(self, *arguments)
            return 0

        return call

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = DEVICES

    def _cuMemAlloc_v2(self, address: Any, nbytes: Any) -> None:
        block = ctypes.create_string_buffer(b"\x55" * nbytes.value, nbytes.value)
        address._obj.value = ctypes.addressof(block)
        self.blocks[ctypes.addressof(block)] = block

    def _cuMemFree_v2(self, address: Any) -> None:
        del self.blocks[address.value]

    def _cuMemsetD8_v2(self, address: Any, value: Any, nbytes: Any) -> None:
        ctypes.memset(address.value, value.value, nbytes.value)

    def _cuMemcpyHtoD_v2(self, address: Any, data: bytes, nbytes: Any) -> None:
        ctypes.memmove(address.value, data, nbytes.value)

    def _cuMemcpyDtoH_v2(self, buffer: Any, address: Any, nbytes: Any) -> None:
        ctypes.memmove(buffer, address.value, nbytes.value)


class _Pretends(Forwarding):
    """Loopback, whose memory may be called a GPU's."""

    @property
    def capabilities(self) -> MoverCapabilities:
        return msgspec.structs.replace(self._mover.capabilities, memory_kinds=frozenset(MemoryKind))

    def allocate(self, nbytes: int, kind: MemoryKind = MemoryKind.CPU, device: int = 0) -> Memory:
        return super().allocate(nbytes)._replace(kind=kind, device=device)

    def register(self, memory: Memory) -> Region:
        if memory.kind is not MemoryKind.CUDA or memory.device != 1:
            raise TypeError(f"a run in memory of GPU 1 registers {memory}")
        return super().register(memory._replace(kind=MemoryKind.CPU, device=0))


def make() -> Mover:
    return _Pretends(create())


@cache
def _driver(device: int) -> gpu.Driver:
    return gpu.Driver(Library(), device)


def install() -> None:
    """Give this process such a GPU."""
    gpu.driver = _driver


install()
