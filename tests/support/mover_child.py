"""Another process with a loopback mover, told what to do by lines of JSON; and the handle that a test holds of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdhandoff.engines.base import Extent, TransferState, Writes
from pdhandoff.engines.loopback import create
from pdhandoff.errors import MoverError
from support.movers import PAGE, Side, settle

ROOT = Path(__file__).parents[2]


class Child:
    """Runs `main` below in a process of its own."""

    def __init__(self, pages: int = 8) -> None:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.mover_child", str(pages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.pid = self._process.pid
        hello = self._answer()
        self.address: int = hello["address"]
        self.identity = bytes.fromhex(hello["identity"])

    def tell(self, **command: object) -> None:
        """Send a command that is not answered, or whose answer is read later."""
        stream = self._process.stdin
        assert stream is not None
        stream.write(json.dumps(command) + "\n")
        stream.flush()

    def _answer(self) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        answer = json.loads(stream.readline())
        assert isinstance(answer, dict)
        return answer

    def ask(self, **command: object) -> dict[str, Any]:
        """Send a command and read its answer."""
        self.tell(**command)
        return self._answer()

    def describe(self, *pages: tuple[int, int]) -> bytes:
        """A grant of (first page, pages) extents of the child's memory."""
        return bytes.fromhex(self.ask(do="describe", extents=pages)["description"])

    def kill(self) -> None:
        """As `kill -9`, and wait until the process is gone."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def stop(self, number: int = signal.SIGSTOP) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class _Worker:
    """The child's state."""

    def __init__(self, pages: int) -> None:
        self.side = Side(create(), pages)
        self.peer: Any = None

    def describe(self, extents: list[list[int]]) -> dict[str, object]:
        granted = [Extent(self.side.address + first * PAGE, pages * PAGE) for first, pages in extents]
        return {"description": self.side.mover.describe(granted).hex()}

    def connect(self, description: str) -> dict[str, object]:
        self.peer = self.side.mover.connect(bytes.fromhex(description))
        return {"key": self.peer.key}

    def write(self, destination: int, nbytes: int, value: int) -> dict[str, object]:
        self.side.fill(value)
        writes = Writes.of((self.side.address, destination, nbytes))
        status = settle(self.side.mover, self.side.mover.submit(self.peer, writes))
        return {"state": status.state.value, "reason": status.reason}

    def late(self, destination: int, nbytes: int, value: int) -> dict[str, object]:
        """What a write that was already running does: store through the mapping, with no check whatever."""
        self.side.fill(value)
        for local, source, length in self.peer.localise(Writes.of((self.side.address, destination, nbytes))):
            Side.store(local, source, length)
        return {}

    def storm(self, destination: int, nbytes: int) -> dict[str, object]:
        """Write without end: until the process is killed, or a write fails."""
        value = 0
        while True:
            value = value % 255 + 1
            answer = self.write(destination, nbytes, value)
            if answer["state"] != TransferState.DONE.value:
                return answer
            if value == 1:
                sys.stdout.write(json.dumps({"storm": "on"}) + "\n")
                sys.stdout.flush()

    def read(self, start: int, nbytes: int) -> dict[str, object]:
        return {"bytes": self.side.bytes(start, nbytes).hex()}

    def fence(self, extents: list[list[int]]) -> dict[str, object]:
        me = self.side.mover.connect(self.side.mover.describe([]))
        granted = [Extent(self.side.address + first * PAGE, pages * PAGE) for first, pages in extents]
        self.side.mover.fence(me, granted, 0.0)
        return {}

    def close(self) -> dict[str, object]:
        self.side.mover.close()
        return {}


def main() -> None:
    """Obey until standard input ends."""
    worker = _Worker(int(sys.argv[1]))
    hello = {"address": worker.side.address, "identity": worker.side.mover.describe([]).hex()}
    sys.stdout.write(json.dumps(hello) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        command = json.loads(line)
        act: Callable[..., dict[str, object]] = getattr(worker, command.pop("do"))
        try:
            answer = act(**command)
        except MoverError as error:
            answer = {"error": int(error.code), "reason": error.reason}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
