"""Starts a topology, says how to use it, and watches it until a signal or a failure ends it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, final

import msgspec
from rich.console import Console
from rich.markup import escape

from pdhandoff_router.up.processes import Process, Processes
from pdhandoff_router.up.show import Show
from pdhandoff_router.up.topology import POOL_HEADER, Choices, Plan, Topology, plan

__all__ = ["Ready", "Run"]

_POLL_S: Final = 0.25
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What scripts want to know of a topology that is up."""

    topology: str
    url: str
    "what clients ask; empty without a router"
    model: str
    prefill: str
    "URL of the vLLM server that prefills; it answers whole requests, too"
    native: str | None
    "URL of the vLLM server that decodes by itself"
    decode: list[str]
    "URLs of decode nodes"
    controls: list[str]
    "where prefill reaches them"
    folder: str
    "of the logs"
    pid: int
    processes: dict[str, int]
    "process ids by name; the name is that of the log, too"


class _Failed(Exception):
    """A process has ended that should run, or one is not ready in time."""


@final
class Run:
    """One topology on this machine.

    Args:
        choices: what to start.
        console: for a person to read.
        ready_file: gets `Ready` as JSON while everything runs.
        within_s: for the start of everything.
    """

    def __init__(self, choices: Choices, console: Console, *, ready_file: Path | None, within_s: float) -> None:
        self._choices = choices
        self._console = console
        self._ready_file = ready_file
        self._within_s = within_s
        self._ended_by: signal.Signals | None = None
        self._end = threading.Event()

    def run(self) -> int:
        """Until a signal, or a failure. Every process has been ended when this returns, or raises.

        Returns:
            0 after SIGTERM or SIGHUP, 1 after a failure.

        Raises:
            KeyboardInterrupt: SIGINT.
            LocalError: a choice cannot be followed.
        """
        made = plan(self._choices)
        self._console.print(f"logs are in {escape(str(self._choices.folder))}", highlight=False, soft_wrap=True)
        with self._signals(), Processes(self._choices.folder) as processes:
            try:
                self._start(made, processes)
            except _Failed as failure:
                self._console.print(str(failure), highlight=False, markup=False, soft_wrap=True)
                return 1
            finally:
                if self._ready_file is not None:
                    self._ready_file.unlink(missing_ok=True)
                self._console.print("ending all processes", highlight=False)
        if self._ended_by is signal.SIGINT:
            raise KeyboardInterrupt
        return 0

    def _start(self, made: Plan, processes: Processes) -> None:
        deadline = time.monotonic() + self._within_s
        with Show(self._console) as show:
            for parts in (made.engines, made.router):
                fresh = processes.start(parts)
                if not self._wait(fresh, processes, show, deadline):
                    return
        self._announce(made, processes)
        while not self._end.wait(_POLL_S):
            _look(processes)

    def _wait(self, fresh: Sequence[Process], processes: Processes, show: Show, deadline: float) -> bool:
        """Until they are ready. False: a signal came. Raises _Failed."""
        left = list(fresh)
        while left:
            show.update(processes.all, time.monotonic())
            if self._end.wait(_POLL_S):
                return False
            _look(processes)
            left = [process for process in left if not process.probe()]
            if left and time.monotonic() > deadline:
                slow = left[0]
                raise _Failed(
                    f"{slow.part.name} is not ready after {self._within_s:.0f} s (--within); the end of {slow.log}:\n"
                    f"{slow.tail()}"
                )
        show.update(processes.all, time.monotonic())
        return True

    def _announce(self, made: Plan, processes: Processes) -> None:
        ready = Ready(
            topology=self._choices.topology.value,
            url=made.url,
            model=self._choices.name,
            prefill=made.prefill,
            native=made.native,
            decode=made.decode,
            controls=made.controls,
            folder=str(self._choices.folder),
            pid=os.getpid(),
            processes={process.part.name: process.pid for process in processes.all},
        )
        for line in _advice(ready, self._choices.topology):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        if self._ready_file is not None:
            fresh = self._ready_file.with_name(f"{self._ready_file.name}.{os.getpid()}")
            fresh.write_bytes(msgspec.json.encode(ready))
            fresh.replace(self._ready_file)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """While this is entered, signals only ask for the end: ending is done once, in order, by this thread."""

        def ask(number: int, _frame: FrameType | None) -> None:
            self._ended_by = self._ended_by or signal.Signals(number)
            self._end.set()

        before = {number: signal.signal(number, ask) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _look(processes: Processes) -> None:
    """Raises _Failed when one has ended."""
    failed = processes.failed()
    if failed is not None:
        raise _Failed(
            f"{failed.part.name} has ended with status {failed.poll()}; the end of {failed.log}:\n{failed.tail()}"
        )


def _advice(ready: Ready, topology: Topology) -> Iterator[str]:
    """What to try now."""
    yield ""
    if not ready.url:
        yield f"ready, without a router: prefill {ready.prefill}, decode {', '.join(ready.decode)}"
    else:
        body = json.dumps({"model": ready.model, "max_tokens": 32, "messages": [{"role": "user", "content": "Hi"}]})
        ask = f"curl -s {ready.url}/v1/chat/completions -H 'content-type: application/json'"
        yield f"ready. The OpenAI and Anthropic APIs are at {ready.url}; try:"
        yield f"  {ask} -d '{body}'"
        if topology is Topology.B:
            yield "and by vLLM's own decode pool:"
            yield f"  {ask} -H '{POOL_HEADER}: native' -d '{body}'"
    yield "Ctrl-C ends everything."
