"""Runs a router in this process until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, final

import msgspec
import uvicorn

from pdhandoff.runtime.address import Address, listen
from pdhandoff_router.app import make_app
from pdhandoff_router.config import Config
from pdhandoff_router.router import Router

__all__ = ["Ready", "serve"]

_HEAD_BYTES: Final = 64 << 10
_LAST_WORDS_S: Final = 5
_POLL_S: Final = 0.05
_CONNECTIONS: Final = 4096


@final
class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What scripts want to know of a router that has started."""

    url: str
    host: str
    port: int
    pid: int


@final
class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are this module's: it drains first."""
        yield


def serve(
    config: Config,
    *,
    file: Path | None,
    address: Address,
    ready_file: Path | None,
    drain_s: float,
    say: Callable[[str], None],
) -> int:
    """Serve until SIGTERM, which drains, or SIGINT, which does not. SIGHUP reads the configuration again.

    Args:
        config: the first configuration.
        file: where it was read from; None: nowhere.
        address: of the HTTP side.
        ready_file: gets `Ready` as JSON when requests are taken; None: nothing does.
        drain_s: how long requests under way may take after SIGTERM.
        say: tells the person who started it where it serves.

    Returns:
        The exit status: 0, or 1 when requests had to be broken off.

    Raises:
        LocalError: the port is taken, or a file cannot be read.
        KeyboardInterrupt: SIGINT; everything has been ended.
    """
    with contextlib.closing(listen(address)) as sock:
        try:
            return asyncio.run(_serve(config, file, sock, ready_file=ready_file, drain_s=drain_s, say=say))
        finally:
            if ready_file is not None:
                ready_file.unlink(missing_ok=True)


async def _serve(
    config: Config,
    file: Path | None,
    sock: socket.socket,
    *,
    ready_file: Path | None,
    drain_s: float,
    say: Callable[[str], None],
) -> int:
    router = Router(config, file=file, clock=time.monotonic)
    server = _Server(
        uvicorn.Config(
            make_app(router),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_HEAD_BYTES,
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
    )
    end: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.put_nowait, number)
    loop.add_signal_handler(signal.SIGHUP, router.reload)
    await router.look()
    watching = asyncio.create_task(router.run())
    running = asyncio.create_task(server.serve(sockets=[sock]))
    first = asyncio.create_task(end.get())
    try:
        while not server.started and not running.done():
            await asyncio.wait([running], timeout=_POLL_S)
        _announce(sock, ready_file, say)
        await asyncio.wait([running, watching, first], return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()  # it only ends by a fault, which is raised here
        interrupted = first.done() and first.result() is signal.SIGINT
        broken = 0 if interrupted else await _drain(router, end, drain_s)
        server.should_exit = True
        server.force_exit = interrupted
        await running
    finally:
        for task in (watching, running, first):
            task.cancel()
        await asyncio.gather(watching, running, first, return_exceptions=True)
        await router.transport.close()
    if interrupted:
        raise KeyboardInterrupt
    return 1 if broken else 0


async def _drain(router: Router, end: asyncio.Queue[signal.Signals], drain_s: float) -> int:
    """Let what is under way finish. Returns the requests that did not in time."""
    router.draining = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            while router.present and end.empty():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await asyncio.Event().wait()
    return router.present


def _announce(sock: socket.socket, ready_file: Path | None, say: Callable[[str], None]) -> None:
    host, port = sock.getsockname()[:2]
    ready = Ready(url=f"http://{Address(host, port)}", host=host, port=port, pid=os.getpid())
    if ready_file is not None:
        fresh = ready_file.with_name(f"{ready_file.name}.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(ready))
        fresh.replace(ready_file)
    say(f"the router serves on {ready.url}")
