"""Everything that lives as long as the router does: servers, nodes, their health, the configuration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final

from pdhandoff.errors import LocalError
from pdhandoff_router.config import Config, read_config
from pdhandoff_router.decode_pool import DecodePool, Node
from pdhandoff_router.metrics import Metrics
from pdhandoff_router.refusals import Refusal, from_answer
from pdhandoff_router.servers import Server, Servers
from pdhandoff_router.transport import Transport, read_json

__all__ = ["Router"]

_LOG: Final = logging.getLogger("pdhandoff.router")
_PROBE_S: Final = 5.0


@final
class Router:
    """The state of one router. Made, and used, on one event loop.

    Args:
        config: the first one.
        file: where it was read from, and is read from again when it has changed; None: nowhere.
        clock: monotonic seconds.
    """

    def __init__(self, config: Config, *, file: Path | None, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.transport = Transport()
        self.pool = DecodePool(config.max_queue)
        self.prefills = Servers("prefill")
        self.natives = Servers("native")
        self.renders = Servers("render")
        self.metrics = Metrics(self.pool, (self.prefills, self.natives, self.renders))
        self.draining = False
        self.present = 0
        "requests under way"
        self._file = file
        self._stamp = _stamp(file)
        self._reload = asyncio.Event()
        self.config = config
        self.decode_headers: dict[str, str] = {}
        self._configure(config)

    def _configure(self, config: Config) -> None:
        self.decode_headers = _decode_headers(config)
        self.config = config
        self.prefills.configure([(url, None) for url in config.prefill])
        self.natives.configure([(each.url, each.prefill) for each in config.native])
        render = [config.render] if config.render else config.prefill[:1]
        self.renders.configure([(url, None) for url in render])
        self.pool.configure(config.decode, config.max_queue)

    def reload(self) -> None:
        """Read the configuration again, soon."""
        self._stamp = None
        self._reload.set()

    async def run(self) -> None:
        """Look at every server again and again, and at the configuration file. Ends by being cancelled."""
        while True:
            self._read_again()
            await self.look()
            self._reload.clear()
            try:
                async with asyncio.timeout(self.config.probe_s):
                    await self._reload.wait()
            except TimeoutError:
                continue

    async def look(self) -> None:
        """Look at every server once."""
        groups = (self.prefills, self.natives, self.renders)
        servers = [server for group in groups for server in group.members]
        await asyncio.gather(
            *(self._look_at_node(node) for node in list(self.pool.nodes.values())),
            *(self._look_at_server(server) for server in servers),
        )
        self.pool.serve()
        digests = self.pool.layouts()
        if len(digests) > 1:
            _LOG.warning("decode nodes have %d different layouts: prefill can suit one of them only", len(digests))

    async def _look_at_node(self, node: Node) -> None:
        who, before = f"the decode node {node.name}", node.problem
        try:
            answer = await self.transport.ask(
                f"{node.config.url}/status", who=who, within_s=_PROBE_S, headers=self.decode_headers
            )
            if answer.status != 200:
                raise from_answer(answer.status, answer.body, who=who)
            status: Mapping[str, Any] = read_json(answer.body, who)
            serving = status.get("state") == "serving"
            problem = "" if serving else f"{status.get('state')}: {status.get('reason')}"
            node.looked_at(status, problem)
        except Refusal as refusal:
            node.looked_at(None, refusal.reason)
        if node.problem != before:
            _LOG.info("%s is %s", who, f"not used: {node.problem}" if node.problem else "used")

    async def _look_at_server(self, server: Server) -> None:
        try:
            answer = await self.transport.ask(f"{server.url}/health", who=server.name, within_s=_PROBE_S)
            server.problem = "" if answer.status == 200 else f"/health answers with status {answer.status}"
        except Refusal as refusal:
            server.problem = refusal.reason

    def _read_again(self) -> None:
        stamp = _stamp(self._file)
        if self._file is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._configure(read_config(self._file))
            _LOG.info("%s has been read again", self._file)
        except LocalError as error:
            _LOG.error("%s is not used, the former configuration stays: %s", self._file, error.reason)

    def problem(self) -> str:
        """Why nothing can be answered; empty: something can."""
        if self.draining:
            return "draining"
        handoffs = self.prefills.usable() and any(node.usable() for node in self.pool.nodes.values())
        if handoffs or self.natives.usable():
            return ""
        return "neither both legs of a handoff nor a native server are usable"

    def show(self) -> dict[str, Any]:
        """The status page."""
        return {
            "state": self.problem() or "serving",
            "present": self.present,
            "queued": self.pool.queued,
            "max_queue": self.pool.max_queue,
            "decode": [
                {
                    "url": node.config.url,
                    "usable": node.usable(),
                    "problem": node.problem,
                    "held": node.held,
                    "credits": node.credits,
                    "max_seq_len": node.max_seq_len,
                    "layout_digest": node.status.get("layout_digest"),
                }
                for node in self.pool.nodes.values()
            ],
            **{
                group.kind: [{"url": each.url, "problem": each.problem, "busy": each.busy} for each in group.members]
                for group in (self.prefills, self.natives, self.renders)
            },
        }


def _decode_headers(config: Config) -> dict[str, str]:
    if config.decode_key_file is None:
        return {}
    # the same reader as for the shared secret: bounded by what an operator writes
    from pdhandoff.cli.options import read_secret

    key = read_secret(Path(config.decode_key_file))
    return {} if key is None else {"authorization": f"Bearer {key.decode('latin-1')}"}


def _stamp(file: Path | None) -> tuple[int, int] | None:
    """What changes when a file does; None: it is not there."""
    try:
        found = None if file is None else file.stat()
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_ino)
