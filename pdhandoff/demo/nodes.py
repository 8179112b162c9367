"""Starts, talks to and ends the demo's node processes. Ends only what it started."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final, Self, final

import msgspec

from pdhandoff.demo.wire import Command, Event, decode_event, encode
from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError

__all__ = ["Node", "NodeDied"]

_END_S: Final = 10.0


@final
class NodeDied(PdHandoffError):
    """The node's process has ended, killed or not. The sentence has its last words."""

    def __init__(self, name: str, status: int, log: Path) -> None:
        said = log.read_text(encoding="utf-8", errors="backslashreplace").splitlines()
        last = f": {said[-1]}" if said else ""
        super().__init__(ErrorCode.INTERNAL, f"the {name} process ended with status {status}{last} (see {log})")
        self.status = status


@final
class Node:
    """One node process, with its events in a queue. Use as a context manager."""

    def __init__(self, name: str, module: str, arguments: list[str], log: Path) -> None:
        self.name = name
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C goes to the parent alone, which then ends its nodes
        )
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def tell(self, command: Command) -> None:
        """Send a command. Raises NodeDied."""
        pipe = self._process.stdin
        try:
            if pipe is not None:
                pipe.write(encode(command))
                pipe.flush()
        except (BrokenPipeError, ValueError):
            raise self._died() from None

    def next(self, timeout_s: float) -> Event:
        """The next event. Raises NodeDied, or LocalError when none comes in time."""
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise LocalError(
                ErrorCode.INTERNAL, f"the {self.name} process said nothing for {timeout_s:.0f} s: see {self._log.name}"
            ) from None
        if event is None:
            self._events.put(None)
            raise self._died()
        return event

    def end(self) -> None:
        """End the process, politely first. Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                self._process.stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_END_S)
        self._reader.join(_END_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _died(self) -> NodeDied:
        return NodeDied(self.name, self._process.wait(_END_S), Path(self._log.name))

    def _read(self) -> None:
        for line in self._process.stdout or ():
            try:
                self._events.put(decode_event(line))
            except msgspec.MsgspecError:
                break  # not our node's words: what follows cannot be trusted
        self._events.put(None)
