"""Proof of life: a file that a mover keeps locked, and that its peers hold open.

The kernel drops the lock when the process ends, however it ends, after the process's memory is gone. So a peer that
gets the lock has proof that no write of that mover is in flight and that none will come. The peer opens the file once,
at connect; from then on a reused process number cannot mislead it.
"""

from __future__ import annotations

import fcntl
import os
from typing import final

from pdhandoff.engines.loopback.files import SharedFile, open_shared
from pdhandoff.errors import ErrorCode, MoverError
from pdhandoff.ids import Incarnation

__all__ = ["Life", "Pulse"]


@final
class Life:
    """This mover's own lock, held from construction to `end`. A forked child shares it: fork before making a mover."""

    def __init__(self) -> None:
        """Raises MoverError when the host has no more descriptors."""
        self.incarnation = Incarnation.mint()
        self.pid = os.getpid()
        self._file = SharedFile(0, self.incarnation)
        fcntl.flock(self._file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def fd(self) -> int:
        """Descriptor number that a peer opens below `/proc/PID/fd`."""
        return self._file.fd

    def end(self) -> None:
        """Let peers know that no write will come. Call it after the last one. Idempotent."""
        if self._file.fd >= 0:
            fcntl.flock(self._file.fd, fcntl.LOCK_UN)
            self._file.close()


@final
class Pulse:
    """A peer's lock as seen from here."""

    def __init__(self, pid: int, fd: int, incarnation: bytes) -> None:
        """Raises MoverError (STALE_INCARNATION) when that mover has ended already."""
        self._ended = False
        self._fd = -1
        self._fd = open_shared(pid, fd, incarnation, 0)
        if self.ended:
            raise MoverError(
                ErrorCode.STALE_INCARNATION,
                f"the mover of process {pid} has ended: connect to its successor",
            )

    @property
    def ended(self) -> bool:
        """Whether that mover is known to have ended. Once True it stays True."""
        if self._fd >= 0:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self._ended = True
            self.close()
        return self._ended

    def close(self) -> None:
        """Stop watching. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
