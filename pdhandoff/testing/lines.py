"""Processes that are told what to do by lines of JSON, and answer by lines of JSON; every wait has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, Final, final

from pdhandoff.testing.rule import Violation

__all__ = ["EndedError", "LineProcess", "SilentError", "serve"]

_GRACE_S: Final = 5.0
"for a child to end by itself when its standard input has ended"


class EndedError(Violation):
    """The process is gone, and nobody asked it to go."""


class SilentError(Violation):
    """The process did not answer in time."""


@final
class LineProcess:
    """A child that runs `python -m MODULE ARGUMENTS`."""

    def __init__(self, module: str, *arguments: str, errors: IO[bytes] | None = None, group: bool = False) -> None:
        """Start it.

        Arguments:
            module: what to run; its `main` calls `serve`.
            arguments: of the command line.
            errors: where its standard error goes; None: where ours does.
            group: put it in a group of its own, so that `kill` ends the processes that it has started too.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=group,
        )
        self._group = group
        self._buffer = bytearray()
        self._last = "start"
        self.pid: Final = self._process.pid

    def tell(self, command: Mapping[str, object]) -> None:
        """Send a command. Raises EndedError."""
        self._last = str(command.get("do", "?"))
        if self._process.stdin is None or self._process.stdin.closed:
            raise EndedError(f"process {self.pid} was ended before {self._last!r}")
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EndedError(self._obituary()) from error

    def hear(self, within_s: float) -> dict[str, Any]:
        """The next answer. Raises SilentError or EndedError."""
        deadline = time.monotonic() + within_s
        while b"\n" not in self._buffer:
            self._fill(deadline, within_s)
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise EndedError(f"process {self.pid} answered {answer!r}, which is no answer")
        return answer

    def _fill(self, deadline: float, within_s: float) -> None:
        stream = self._process.stdout
        if stream is None or stream.closed:
            raise EndedError(f"process {self.pid} was ended before {self._last!r} was answered")
        poller = select.poll()
        poller.register(stream, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise SilentError(f"process {self.pid} did not answer {self._last!r} within {within_s:g} s: a call hangs")
        chunk = os.read(stream.fileno(), 1 << 16)
        if not chunk:
            raise EndedError(self._obituary())
        self._buffer += chunk

    def _obituary(self) -> str:
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return f"process {self.pid} closed its pipe during {self._last!r}"
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        return f"process {self.pid} ended {how} during {self._last!r}"

    def ask(self, command: Mapping[str, object], within_s: float) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises SilentError or EndedError."""
        self.tell(command)
        return self.hear(within_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        self._process.send_signal(number)

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """As `kill -9`, the whole group if it has one, and wait until it is gone. Idempotent."""
        if self._group:
            with contextlib.suppress(ProcessLookupError):  # nobody is left
                os.killpg(self.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                _close(stream)

    def end(self) -> None:
        """End its standard input, let it go by itself, and kill it if it does not. Idempotent."""
        if self._process.stdin is not None:
            _close(self._process.stdin)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed next
            self._process.wait(_GRACE_S)
        self.kill()


def _close(stream: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):  # what was still to be flushed has no reader
        stream.close()


def serve(act: Callable[[dict[str, Any]], dict[str, Any]], work: Callable[[], bool] = lambda: False) -> None:
    """The child's side: answer commands until standard input ends.

    Arguments:
        act: what to answer to a command.
        work: called between commands as long as it returns True.
    """
    # Transfer engines print to standard output: the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    ended = threading.Event()
    threading.Thread(target=_read, args=(inbox, ended), name="pdhandoff-testing-input", daemon=True).start()
    while True:
        busy = work()
        try:
            line = inbox.get(block=not busy)
        except queue.Empty:
            continue
        if line is None:
            break
        answers.write(json.dumps(act(json.loads(line))) + "\n")
        answers.flush()
    ended.set()


def _read(inbox: queue.SimpleQueue[str | None], ended: threading.Event) -> None:
    """Pass lines on. A process whose parent is gone must not stay, even if a call of its mover never returns."""
    for line in sys.stdin:
        inbox.put(line)
    inbox.put(None)
    ended.wait(_GRACE_S)
    if not ended.is_set():
        os._exit(1)
