"""The one thing that Mooncake wants of CUDA before it registers GPU memory: a context on the calling thread."""

from __future__ import annotations

import ctypes

from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["bind_thread"]


def bind_thread(device: int) -> None:
    """Make the primary context of a device, which PyTorch uses too, current on this thread.

    Raises:
        MoverError: CONFIG, when there is no driver or no such device.
    """
    context = ctypes.c_void_p()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MoverError(
            ErrorCode.CONFIG, f"GPU memory cannot be registered without NVIDIA's driver: {error}"
        ) from error
    code = (
        driver.cuInit(0)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or driver.cuCtxSetCurrent(context)
    )
    if code:
        raise MoverError(ErrorCode.CONFIG, f"CUDA device {device} cannot be used (driver error {code}): is it visible?")
