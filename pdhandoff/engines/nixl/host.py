"""Where a process runs: on which machine, and in which space of process numbers."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pdhandoff.ids import ID_BYTES

__all__ = ["host_cookie", "machine_cookie"]


def _boot() -> bytes:
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def machine_cookie() -> bytes:
    """ID_BYTES that are the same in two processes if one kernel runs both."""
    return hashlib.sha256(_boot()).digest()[:ID_BYTES]


def host_cookie() -> bytes:
    """ID_BYTES that are the same in two processes only if `/proc/PID` means the same to both."""
    numbers = Path("/proc/self/ns/pid").readlink()
    return hashlib.sha256(_boot() + os.fsencode(numbers)).digest()[:ID_BYTES]
