"""Runs a node in this process until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, final

import msgspec
import uvicorn

from pdhandoff.errors import LocalError
from pdhandoff.runtime.address import Address, listen
from pdhandoff_tilert.engine import DecodeEngine
from pdhandoff_tilert.node.app import make_app
from pdhandoff_tilert.node.protocol import BoundedH11
from pdhandoff_tilert.node.service import NodeSettings, Service

__all__ = ["HttpSettings", "Ready", "serve"]

_LOG: Final = logging.getLogger("pdhandoff.node")
_HEAD_BYTES: Final = 32 << 10
_LAST_WORDS_S: Final = 5
"how long answers may take to leave after everything has ended"


@final
class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The node's HTTP side."""

    address: Address = Address("127.0.0.1", 5557)
    certificate: Path | None = None
    key: Path | None = None
    api_key: bytes | None = None
    drain_s: float = 60.0
    "after SIGTERM, how long what is under way may take"
    ready_file: Path | None = None
    "gets `Ready` as JSON when requests are taken"
    connections: int = 1024
    "open at a time"


@final
class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What scripts want to know of a node that has started."""

    url: str
    host: str
    port: int
    control: str
    "control address, as producers reach it"
    model: str
    layout_digest: str
    mover: str
    pid: int


@final
class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are this module's: it drains first."""
        yield


def serve(
    create_engine: Callable[[], DecodeEngine],
    node: NodeSettings,
    http: HttpSettings,
    *,
    say: Callable[[str], None],
) -> int:
    """Serve until SIGTERM, which drains, or SIGINT, which does not.

    Args:
        create_engine: makes the engine, on the engine's thread.
        node: settings of the node.
        http: settings of its HTTP side.
        say: tells the person who started it where it serves.

    Returns:
        The exit status: 0, or 1 when requests had to be broken off.

    Raises:
        LocalError: a setting is wrong, or a port is taken.
        KeyboardInterrupt: SIGINT; everything has been ended.
    """
    with contextlib.closing(listen(http.address)) as sock:
        service = Service(create_engine, node)
        try:
            return asyncio.run(_serve(service, sock, http, say))
        finally:
            service.close()
            if http.ready_file is not None:
                http.ready_file.unlink(missing_ok=True)


async def _serve(service: Service, sock: socket.socket, http: HttpSettings, say: Callable[[str], None]) -> int:
    server = _Server(
        uvicorn.Config(
            make_app(service, api_key=http.api_key),
            http=BoundedH11,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_HEAD_BYTES,
            limit_concurrency=http.connections,
            timeout_graceful_shutdown=_LAST_WORDS_S,
            ssl_certfile=http.certificate,
            ssl_keyfile=http.key,
        )
    )
    end: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.put_nowait, number)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started and not running.done():
        await asyncio.wait([running], timeout=0.02)
    _announce(service, sock, http, say)
    first = asyncio.create_task(end.get())
    await asyncio.wait([running, first], return_when=asyncio.FIRST_COMPLETED)
    drained = False
    if first.done() and first.result() is signal.SIGTERM:
        drained = await _drain(service, end, http.drain_s)
    interrupted = first.done() and first.result() is signal.SIGINT
    if service.line.jobs():
        _LOG.warning("%d requests are broken off", len(service.line.jobs()))
    try:
        await asyncio.to_thread(service.close)
    except LocalError:
        _LOG.exception("the node could not be closed in good order")
    server.should_exit = True
    await running
    if interrupted:
        raise KeyboardInterrupt
    return 0 if drained else 1


async def _drain(service: Service, end: asyncio.Queue[signal.Signals], drain_s: float) -> bool:
    """Let what is under way finish. False: it did not in time, or a second signal came."""
    service.drain()
    empty = asyncio.create_task(asyncio.to_thread(service.line.empty, drain_s))
    again = asyncio.create_task(end.get())
    await asyncio.wait([empty, again], return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if empty.done():
        return empty.result()
    return False


def _announce(service: Service, sock: socket.socket, http: HttpSettings, say: Callable[[str], None]) -> None:
    host, port = sock.getsockname()[:2]
    address = Address(host, port)
    scheme = "http" if http.certificate is None else "https"
    ready = Ready(
        url=f"{scheme}://{address}",
        host=host,
        port=port,
        control=service.control,
        model=service.engine.model,
        layout_digest=service.digest,
        mover=service.settings.mover,
        pid=os.getpid(),
    )
    if http.ready_file is not None:
        fresh = http.ready_file.with_name(f"{http.ready_file.name}.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(ready))
        fresh.replace(http.ready_file)
    say(f"{ready.model} is served on {ready.url}; handoffs come to {ready.control} by {ready.mover}")
