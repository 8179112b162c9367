"""Another process with a Mooncake mover, told what to do by lines of JSON; and the handle that a test holds of it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdhandoff.engines.base import Extent, Mover, Writes
from pdhandoff.engines.mooncake import create
from pdhandoff.errors import MoverError
from support.movers import DEADLINE_S, PAGE, Side, settle, soon

__all__ = ["MooncakeChild", "mooncake"]

ROOT = Path(__file__).parents[2]


def mooncake(*, stall_s: int = 5) -> Mover:
    """A mover as all tests of one process must have it: Mooncake's settings hold for the process."""
    return create(log_level="silent", stall_s=stall_s, allowed_hosts=["127.0.0.1"])


class MooncakeChild:
    """Runs `main` below in a process of its own. `variables` are set in its environment."""

    def __init__(self, pages: int = 8, variables: Mapping[str, str] | None = None) -> None:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.mooncake_child", str(pages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, **(variables or {})},
        )
        self.pid = self._process.pid
        hello = self.answer()
        self.address: int = hello["address"]
        self.identity = bytes.fromhex(hello["identity"])

    def tell(self, **command: object) -> None:
        """Send a command whose answer is read later."""
        stream = self._process.stdin
        assert stream is not None
        stream.write(json.dumps(command) + "\n")
        stream.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer."""
        stream = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], DEADLINE_S)[0]:
            raise TimeoutError(f"process {self.pid} has not answered for {DEADLINE_S} s")
        answer = json.loads(stream.readline())
        assert isinstance(answer, dict)
        return answer

    def ask(self, **command: object) -> dict[str, Any]:
        """Send a command and read its answer."""
        self.tell(**command)
        return self.answer()

    def describe(self, *pages: tuple[int, int]) -> bytes:
        """A grant of (first page, pages) extents of the child's memory."""
        return bytes.fromhex(self.ask(do="describe", extents=pages)["description"])

    def read(self, start: int, nbytes: int) -> bytes:
        """The child's memory."""
        return bytes.fromhex(self.ask(do="read", start=start, nbytes=nbytes)["bytes"])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """As `kill -9`, and wait until the process is gone."""
        self._process.kill()
        self._process.wait(DEADLINE_S)

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
        self.side = Side(mooncake(), pages)
        self.peer: Any = None
        self.transfer: Any = None

    def _extents(self, pages: list[list[int]]) -> list[Extent]:
        return [self.side.extent(first, count) for first, count in pages]

    def describe(self, extents: list[list[int]]) -> dict[str, object]:
        return {"description": self.side.mover.describe(self._extents(extents)).hex()}

    def connect(self, description: str) -> dict[str, object]:
        self.peer = self.side.mover.connect(bytes.fromhex(description))
        return {"key": self.peer.key}

    def begin(self, destination: int, nbytes: int, value: int) -> dict[str, object]:
        """Start a write, and say so at once."""
        self.side.fill(value)
        self.transfer = self.side.mover.submit(self.peer, Writes.of((self.side.address, destination, nbytes)))
        return {}

    def finish(self) -> dict[str, object]:
        """Wait for the write that `begin` started."""
        status = settle(self.side.mover, self.transfer)
        return {"state": status.state.value, "reason": status.reason, "quiet": status.quiet}

    def write(self, destination: int, nbytes: int, value: int) -> dict[str, object]:
        self.begin(destination, nbytes, value)
        return self.finish()

    def read(self, start: int, nbytes: int) -> dict[str, object]:
        return {"bytes": self.side.bytes(start, nbytes).hex()}

    def fence(self, extents: list[list[int]]) -> dict[str, object]:
        me = self.side.mover.connect(self.side.mover.describe([]))
        self.side.mover.fence(me, self._extents(extents), soon())
        return {}

    def deregister(self) -> dict[str, object]:
        self.side.mover.deregister(self.side.region)
        return {}

    def close(self) -> dict[str, object]:
        self.side.mover.close()
        return {}


def main() -> None:
    """Obey until standard input ends."""
    worker = _Worker(int(sys.argv[1]))
    hello = {"address": worker.side.address, "identity": worker.side.mover.describe([]).hex(), "page": PAGE}
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
