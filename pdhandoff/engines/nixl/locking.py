"""Locks around calls into NIXL, with an end to every wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["held"]


@contextlib.contextmanager
def held(lock: threading.Lock, wait_s: float) -> Iterator[None]:
    """Hold a lock. Raises MoverError (BUSY) when it is not free within `wait_s` seconds."""
    if not lock.acquire(timeout=max(0.0, wait_s)):
        raise MoverError(
            ErrorCode.BUSY, f"another call has not come back from NIXL within {wait_s:g} s: is a network card stuck?"
        )
    try:
        yield
    finally:
        lock.release()
