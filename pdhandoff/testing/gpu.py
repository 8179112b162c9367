"""Bytes of GPU memory, through NVIDIA's driver alone: checks must not depend on what a mover uses.

Driver API: cuInit, cuDeviceGetCount, cuDevicePrimaryCtxRetain, cuCtxSetCurrent, cuMemAlloc_v2,
cuMemFree_v2, cuMemsetD8_v2, cuMemcpyHtoD_v2, cuMemcpyDtoH_v2, cuCtxSynchronize (CUDA Driver API reference, 13.0).
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any, Final, final

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["Block", "Driver", "driver", "no_gpu"]

_LIBRARY: Final = "libcuda.so.1"


def no_gpu(device: int) -> str:
    """Why memory of this device cannot be checked here; empty when it can."""
    try:
        driver(device)
    except LocalError as error:
        return error.reason
    return ""


@cache
def driver(device: int) -> Driver:
    """The driver, with the primary context of a device. Raises LocalError (CONFIG) where there is none."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise LocalError(ErrorCode.CONFIG, f"there is no NVIDIA driver on this machine: {error}") from error
    return Driver(library, device)


@final
class Driver:
    """Copies between GPU memory and this process. Any thread may call.

    Args:
        library: the driver's functions.
        device: CUDA device ordinal.
    """

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        self._device = device
        self._context = ctypes.c_void_p()
        count = ctypes.c_int()
        self._do("cuInit", 0)
        self._do("cuDeviceGetCount", ctypes.byref(count))
        if not 0 <= device < count.value:
            raise LocalError(ErrorCode.CONFIG, f"there is no CUDA device {device}: the driver sees {count.value}")
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def allocate(self, nbytes: int) -> Block:
        """Memory that is freed with the object."""
        self._enter()
        address = ctypes.c_uint64()
        self._do("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.fill(address.value, 0, nbytes)
        return Block(self, address.value)

    def free(self, address: int) -> None:
        """Undo `allocate`."""
        self._enter()
        self._do("cuMemFree_v2", ctypes.c_uint64(address))

    def fill(self, address: int, value: int, nbytes: int) -> None:
        """Set bytes to one value."""
        self._enter()
        self._do("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(nbytes))
        self._do("cuCtxSynchronize")

    def put(self, address: int, data: bytes) -> None:
        """Set bytes."""
        self._enter()
        self._do("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
        self._do("cuCtxSynchronize")

    def read(self, address: int, nbytes: int) -> bytes:
        """What is there now."""
        self._enter()
        buffer = ctypes.create_string_buffer(nbytes)
        self._do("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return buffer.raw

    def _enter(self) -> None:
        """Contexts belong to threads."""
        self._do("cuCtxSetCurrent", self._context)

    def _do(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise LocalError(ErrorCode.CONFIG, f"CUDA device {self._device} cannot be used: {name} gave error {code}")


@final
class Block:
    """GPU memory from `Driver.allocate`."""

    def __init__(self, owner: Driver, address: int) -> None:
        self.address: Final = address
        self._finalizer = weakref.finalize(self, owner.free, address)
        self._finalizer.atexit = False  # the driver frees everything then, and may be gone already
