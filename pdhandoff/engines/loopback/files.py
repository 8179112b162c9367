"""Shared files without a name, as one process makes them and another opens them through `/proc/PID/fd/FD`.

A process number and a descriptor number may both be reused, so a file ends in a trailer with a random cookie; an opener
that was told another cookie has the wrong file. Layout, in order: data, a whole number of pages; marks, one byte a data
page (1: fenced, nobody reads it any more), rounded up to pages; one page with the trailer. Files are sealed against
changes of size, so that a mapping of them can never fault.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from typing import Final, final

from pdhandoff.engines.loopback.syscalls import PAGE
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["COOKIE_BYTES", "SharedFile", "marks_bytes", "open_shared", "round_up"]

COOKIE_BYTES: Final = 16
_MAGIC: Final = b"pdhandoff loop 1"
_TRAILER: Final = struct.Struct("<16s16sQ")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def round_up(nbytes: int) -> int:
    """The next multiple of PAGE."""
    return -(-nbytes // PAGE) * PAGE


def marks_bytes(data_bytes: int) -> int:
    """Bytes of the marks of a file with so much data."""
    return round_up(data_bytes // PAGE)


def _total_bytes(data_bytes: int) -> int:
    return data_bytes + marks_bytes(data_bytes) + PAGE


@final
class SharedFile:
    """A file of this process. It lives until it is closed here and unmapped everywhere."""

    def __init__(self, data_bytes: int, cookie: bytes) -> None:
        """Make a file of zeros.

        Arguments:
            data_bytes: a multiple of PAGE; 0 for a file that is only a trailer.
            cookie: COOKIE_BYTES random bytes.

        Raises:
            MoverError: MOVER_FAILED, when the host has no more descriptors or memory.
        """
        self.cookie = cookie
        self.data_bytes = data_bytes
        self.live_bytes = data_bytes
        "bytes of data that are still mapped by an allocation"
        try:
            self.fd = os.memfd_create("pdhandoff", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise MoverError(ErrorCode.MOVER_FAILED, f"no shared file could be made: {error}") from error
        try:
            os.ftruncate(self.fd, _total_bytes(data_bytes))
            os.pwrite(self.fd, _TRAILER.pack(_MAGIC, cookie, data_bytes), _total_bytes(data_bytes) - PAGE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            self.close()
            raise MoverError(
                ErrorCode.MOVER_FAILED, f"a shared file of {data_bytes} bytes could not be made: {error}"
            ) from error

    def mark(self, offset: int, length: int, *, fenced: bool) -> None:
        """Tell writers whether a part of the data is read by nobody any more. Both in bytes, multiples of PAGE."""
        os.pwrite(self.fd, bytes((fenced,)) * (length // PAGE), self.data_bytes + offset // PAGE)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def open_shared(pid: int, fd: int, cookie: bytes, data_bytes: int) -> int:
    """Open a shared file of another process (or of this one), and make sure that it is the one meant.

    What the other side says is not trusted: nothing but a sealed, nameless file with that cookie is ever opened for
    writing, so a lie cannot make this process touch a device, a pipe or somebody else's memory.

    Returns:
        A descriptor for reading and writing, which the caller closes.

    Raises:
        MoverError: STALE_INCARNATION, when that file is not there any more or is another one.
    """
    try:
        handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise _stale(pid, f"file {fd} cannot be opened ({error.strerror})") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _stale(pid, f"descriptor {fd} is not a shared file")
        probe = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _verify(probe, pid, cookie, data_bytes)
        finally:
            os.close(probe)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _stale(pid, f"file {fd} cannot be read ({error.strerror})") from error
    finally:
        os.close(handle)


def _verify(fd: int, pid: int, cookie: bytes, data_bytes: int) -> None:
    """Raise unless `fd` is a sealed file with this cookie behind this much data."""
    total = _total_bytes(data_bytes)
    if os.pread(fd, _TRAILER.size, total - PAGE) != _TRAILER.pack(_MAGIC, cookie, data_bytes):
        raise _stale(pid, "its file carries another cookie, or has another size")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise _stale(pid, "its file is not sealed, so a write into it could fault")


def _stale(pid: int, detail: str) -> MoverError:
    return MoverError(
        ErrorCode.STALE_INCARNATION,
        f"the memory described by process {pid} is gone: {detail}. Ask the peer for a new grant; both sides must run "
        "as one user in one process namespace",
    )
