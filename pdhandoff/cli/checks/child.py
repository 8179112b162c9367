"""A process in which something may crash or hang without harm to the one that asks. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import IO, Any, Final, Self, final

__all__ = ["Child", "ProbeEnded"]

_GRACE_S: Final = 5.0
"for a child whose pipe has ended to become a status"
_LAST_WORDS: Final = 300
"characters of its standard error that are worth showing"


class ProbeEnded(Exception):
    """The child did not answer: it died, or hangs. Says how, and what it printed last."""


@final
class Child:
    """Runs `pdhandoff.cli.checks.probe`. Killed when the `with` block ends, however it ends."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `__exit__`
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pdhandoff.cli.checks.probe"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError:
            self._errors.close()
            raise
        self.pid: Final = self._process.pid
        self._buffer = bytearray()
        self._greeted = False

    def ask(self, verb: str, within_s: float, **arguments: object) -> dict[str, Any]:
        """Let it do something, and give its answer. Raises ProbeEnded."""
        deadline = time.monotonic() + within_s
        if not self._greeted:  # so that its start is not taken for the verb's time
            self._hear("start", deadline, within_s)
            self._greeted = True
        stdin = _stream(self._process.stdin)
        try:
            stdin.write(json.dumps({"do": verb, **arguments}).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise ProbeEnded(self._obituary(verb)) from None
        return self._hear(verb, deadline, within_s)

    def _hear(self, verb: str, deadline: float, within_s: float) -> dict[str, Any]:
        stream = _stream(self._process.stdout)
        poller = select.poll()
        poller.register(stream, select.POLLIN)
        while b"\n" not in self._buffer:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise ProbeEnded(f"did not come back from {verb!r} within {within_s:g} s{self._last_words()}")
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                raise ProbeEnded(self._obituary(verb))
            self._buffer += chunk
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return _answer(line)

    def _obituary(self, verb: str) -> str:
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return f"closed its pipe during {verb!r}{self._last_words()}"
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        return f"ended {how} during {verb!r}{self._last_words()}"

    def _last_words(self) -> str:
        """What it printed last."""
        errors = self._errors.fileno()
        printed = os.pread(errors, os.fstat(errors).st_size, 0)  # a seek would move the child's place in it too
        said = list(filter(None, map(str.strip, printed.decode("utf-8", "replace").splitlines())))
        return f"; its last words: {said[-1][:_LAST_WORDS]}" if said else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what was still to be flushed has no reader
                    stream.close()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise ProbeEnded("has no pipes")
    return stream


def _answer(line: bytes) -> dict[str, Any]:
    answer = json.loads(line)
    if not isinstance(answer, dict):
        raise ProbeEnded(f"answered {answer!r}, which is no answer")
    return answer
