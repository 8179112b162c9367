"""The few system calls that Python's standard library does not offer: mappings at a chosen address, holes in files."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["PAGE", "copy", "map_anonymous", "map_file", "punch_hole", "unmap"]

PAGE: Final = os.sysconf("SC_PAGESIZE")
"bytes of one page of this host"

_READ_WRITE: Final = 0x1 | 0x2  # PROT_READ | PROT_WRITE
_SHARED: Final = 0x01
_PRIVATE: Final = 0x02
_FIXED: Final = 0x10
_ANONYMOUS: Final = 0x20
_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value
_KEEP_SIZE: Final = 0x01  # FALLOC_FL_KEEP_SIZE
_PUNCH_HOLE: Final = 0x02  # FALLOC_FL_PUNCH_HOLE

_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap: Final = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_munmap: Final = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_fallocate: Final = _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

# A copy of a few KiB takes less time than handing the interpreter lock to another thread and getting it back.
_HOLD_LOCK_BELOW: Final = 16 << 10
_memmove_holding: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", _libc)
)
_memmove_releasing: Final = ctypes.memmove


def _map(address: int, length: int, flags: int, fd: int, offset: int) -> int:
    mapped = _mmap(address or None, length, _READ_WRITE, flags, fd, offset)
    if mapped is None or mapped == _FAILED:
        code = ctypes.get_errno()
        raise MoverError(
            ErrorCode.MOVER_FAILED,
            f"mapping {length} bytes failed ({os.strerror(code)}): is vm.max_map_count used up?",
        )
    return int(mapped)


def map_file(fd: int, length: int, *, offset: int = 0, at: int = 0) -> int:
    """Map `length` bytes of a file, shared and writable.

    Arguments:
        fd: the file; it may be closed afterwards.
        length: bytes, a multiple of PAGE.
        offset: bytes into the file, a multiple of PAGE.
        at: replace what is mapped at this address, in one step as seen by other threads; 0: anywhere.

    Returns:
        The address.
    """
    return _map(at, length, _SHARED | (_FIXED if at else 0), fd, offset)


def map_anonymous(length: int, *, at: int) -> None:
    """Replace what is mapped at `[at, at + length)` by private zeros that take no memory until written."""
    _map(at, length, _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED, -1, 0)


def unmap(address: int, length: int) -> None:
    """Undo a mapping."""
    _munmap(address, length)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the pages of a part of a file back. That part reads as zeros. Best effort: it only saves memory."""
    _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length)


def copy(destination: int, source: int, length: int) -> None:
    """Copy bytes between two addresses of this process; other threads run meanwhile if it is long."""
    if length < _HOLD_LOCK_BELOW:
        _memmove_holding(destination, source, length)
    else:
        _memmove_releasing(destination, source, length)
