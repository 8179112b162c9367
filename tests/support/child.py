"""Another process that is told what to do by lines of JSON: the handle that a test holds of it, and its main loop."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdhandoff.errors import PdHandoffError

__all__ = ["ROOT", "ChildProcess", "obey", "say"]

ROOT = Path(__file__).parents[2]
ANSWER_S = 60.0
"bound on waiting for one answer, and for an end"


class ChildProcess:
    """Runs a module of these tests in a process of its own. It answers once when it has started: `hello`."""

    def __init__(self, module: str, *arguments: str, silent: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if silent else None,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        )
        self.pid = self._process.pid
        self._unread = b""
        self.hello = self.answer()

    def tell(self, do: str, **arguments: object) -> None:
        """Send a command whose answer is read later, or never."""
        stream = self._process.stdin
        assert stream is not None
        stream.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        stream.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer."""
        stream = self._process.stdout
        assert stream is not None
        while b"\n" not in self._unread:
            if not select.select([stream], [], [], ANSWER_S)[0]:
                raise TimeoutError(f"process {self.pid} has not answered for {ANSWER_S} s")
            received = os.read(stream.fileno(), 1 << 16)
            if not received:
                raise EOFError(f"process {self.pid} has ended without an answer")
            self._unread += received
        line, self._unread = self._unread.split(b"\n", 1)
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """Send a command and read its answer."""
        self.tell(do, **arguments)
        return self.answer()

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
        self.wait()

    def leave(self) -> int:
        """Let it come to its end by itself. Returns its exit status."""
        stream = self._process.stdin
        assert stream is not None
        stream.close()
        return self.wait()

    def wait(self) -> int:
        """Wait for its end. Returns its exit status."""
        return self._process.wait(ANSWER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # a command that it did not live to read
                    stream.close()


def say(answer: Mapping[str, object]) -> None:
    """Send an answer, from the child."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def obey(worker: object, hello: Mapping[str, object]) -> None:
    """Say hello, then call the methods of `worker` that the lines of standard input name, until it ends."""
    say(hello)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except PdHandoffError as error:
            answer = {"error": int(error.code), "reason": error.reason}
        say(answer)
