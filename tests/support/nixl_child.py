"""Another process with a NIXL mover, told what to do by lines of JSON; and the handle that a test holds of it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdhandoff.engines.base import Extent, Peer, Transfer, Writes
from pdhandoff.engines.nixl.mover import NixlMover, create
from pdhandoff.errors import MoverError
from support.movers import DEADLINE_S, PAGE, Side, settle, soon

__all__ = ["TCP", "NixlChild", "nixl"]

ROOT = Path(__file__).parents[2]
TCP = "tcp,self"


def nixl(transports: str = TCP) -> NixlMover:
    """A mover that uses the loopback device only."""
    return create(transports=transports, ucx={"NET_DEVICES": "lo"})


class NixlChild:
    """Runs `main` below in a process of its own."""

    def __init__(self, pages: int = 8, transports: str = TCP) -> None:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.nixl_child", str(pages), transports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.pid = self._process.pid
        hello = self.answer()
        self.address: int = hello["address"]
        self.identity = bytes.fromhex(hello["identity"])

    def tell(self, **command: object) -> None:
        """Send a command whose answer is read later, or never."""
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

    def connect(self, side: Side, *extents: Extent) -> None:
        """Let the child write into these extents of ours."""
        self.ask(do="connect", description=side.mover.describe(extents).hex())

    def describe(self, *pages: tuple[int, int]) -> bytes:
        """A grant of (first page, pages) extents of the child's memory."""
        return bytes.fromhex(self.ask(do="describe", extents=pages)["description"])

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Halt every thread of it, and wait until they have."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def kill(self) -> None:
        """As `kill -9`, and wait until the process is gone."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(DEADLINE_S)

    def leave(self) -> int:
        """Let it come to its end by itself. Returns its exit status."""
        stream = self._process.stdin
        assert stream is not None
        stream.close()
        return self._process.wait(DEADLINE_S)

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

    def __init__(self, pages: int, transports: str) -> None:
        self.side = Side(nixl(transports), pages)
        self.peer: Peer
        self.transfer: Transfer

    def _extents(self, pages: list[list[int]]) -> list[Extent]:
        return [Extent(self.side.address + first * PAGE, count * PAGE) for first, count in pages]

    def describe(self, extents: list[list[int]]) -> dict[str, object]:
        return {"description": self.side.mover.describe(self._extents(extents)).hex()}

    def connect(self, description: str) -> dict[str, object]:
        self.peer = self.side.mover.connect(bytes.fromhex(description))
        return {"key": self.peer.key}

    def start(self, destination: int, nbytes: int, value: int) -> dict[str, object]:
        """Begin to write, and do not wait."""
        self.side.fill(value)
        self.transfer = self.side.mover.submit(self.peer, Writes.of((self.side.address, destination, nbytes)))
        return {}

    def finish(self) -> dict[str, object]:
        status = settle(self.side.mover, self.transfer)
        return {"state": status.state.value, "reason": status.reason, "quiet": status.quiet}

    def write(self, destination: int, nbytes: int, value: int) -> dict[str, object]:
        self.start(destination, nbytes, value)
        return self.finish()

    def read(self, start: int, nbytes: int) -> dict[str, object]:
        return {"bytes": self.side.bytes(start, nbytes).hex()}

    def fence(self, extents: list[list[int]]) -> dict[str, object]:
        me = self.side.mover.connect(self.side.mover.describe([]))
        self.side.mover.fence(me, self._extents(extents), soon())
        return {}

    def close(self) -> dict[str, object]:
        self.side.mover.close()
        return {}


def main() -> None:
    """Obey until standard input ends."""
    worker = _Worker(int(sys.argv[1]), sys.argv[2])
    _say({"address": worker.side.address, "identity": worker.side.mover.describe([]).hex()})
    for line in sys.stdin:
        command = json.loads(line)
        act: Callable[..., dict[str, object]] = getattr(worker, command.pop("do"))
        try:
            answer = act(**command)
        except MoverError as error:
            answer = {"error": int(error.code), "reason": error.reason}
        _say(answer)
    worker.side.mover.close()


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
