"""Outlives `pdhandoff up` for a moment when that is killed, and ends what it had started.

Reads lines from standard input: `+N` is a leader of a session that runs, `-N` one that has ended. When the input ends,
so did `pdhandoff up`, whatever ended it; those still running are ended too.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from typing import Final, final

from pdhandoff_router.up.groups import end_groups

__all__ = ["Keeper"]

WITHIN_S: Final = 20.0


@final
class Keeper:
    """The keeper's process, seen from `pdhandoff up`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdhandoff_router.up.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def started(self, leader: int) -> None:
        """A process runs."""
        self._say(f"+{leader}\n")

    def ended(self, leader: int) -> None:
        """It has ended, and so has its group."""
        self._say(f"-{leader}\n")

    def close(self) -> None:
        """Let it end. Whatever still runs is ended by it."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * WITHIN_S)

    def _say(self, line: str) -> None:
        with suppress(OSError):  # it was killed: then nobody looks after us, and nothing else changes
            if self._process.stdin is not None:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()


def _keep() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    running: set[int] = set()
    for line in sys.stdin:
        (running.add if line[0] == "+" else running.discard)(int(line[1:]))
    end_groups(running, within_s=WITHIN_S)


if __name__ == "__main__":
    _keep()
