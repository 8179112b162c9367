"""Processes of this machine: started with a log, asked whether they are ready, ended together."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final
from urllib.parse import urlsplit

import msgspec

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff_router.up.groups import end_groups
from pdhandoff_router.up.keeper import WITHIN_S, Keeper

__all__ = ["Part", "Process", "Processes", "free_ports"]

_PROBE_S: Final = 2.0
_TAIL_BYTES: Final = 64 << 10
_TAIL_LINES: Final = 25


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@final
class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a topology."""

    name: str
    "unique; also of its log"
    about: str
    "what it is, for a person"
    command: tuple[str, ...]
    environment: dict[str, str] = {}
    "variables on top of this process's own"
    url: str
    "where it answers /health with 200 once it is ready"


@final
class Process:
    """A part that was started, in a session of its own: Ctrl-C in the terminal does not reach it."""

    def __init__(self, part: Part, folder: Path) -> None:
        self.part = part
        self.log = folder / f"{part.name}.log"
        self.began = time.monotonic()
        self.ready_s: float | None = None
        "seconds that it took to become ready; None: it is not yet"
        with self.log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    part.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **part.environment},
                    cwd=folder,
                    start_new_session=True,
                )
            except OSError as error:
                raise LocalError(
                    ErrorCode.CONFIG, f"{part.name} cannot be started: {part.command[0]}: {error.strerror}"
                ) from error

    @property
    def pid(self) -> int:
        """Its process id, and the id of its session."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def probe(self) -> bool:
        """Ask whether it is ready, and remember when it first was."""
        address = urlsplit(self.part.url).netloc
        try:
            with closing(http.client.HTTPConnection(address, timeout=_PROBE_S)) as link:
                link.request("GET", "/health")
                ready = link.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            ready = False
        if ready and self.ready_s is None:
            self.ready_s = time.monotonic() - self.began
        return ready

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-lines:])


@final
class Processes:
    """All that were started. A context manager that ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keeper = Keeper()
        self.all: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self, parts: Sequence[Part]) -> list[Process]:
        """Start some more. Raises LocalError (CONFIG) when one cannot be started."""
        fresh: list[Process] = []
        for part in parts:
            process = Process(part, self._folder)
            self._keeper.started(process.pid)
            self.all.append(process)
            fresh.append(process)
        return fresh

    def failed(self) -> Process | None:
        """One that has ended, though nobody asked it to."""
        return next((process for process in self.all if process.poll() is not None), None)

    def end(self) -> None:
        """End all of them, by id, within a bounded time. Idempotent."""
        running = [process.pid for process in self.all]
        end_groups(running, within_s=WITHIN_S, reap=lambda: [process.poll() for process in self.all])
        for leader in running:
            self._keeper.ended(leader)
        self._keeper.close()
        self.all.clear()
