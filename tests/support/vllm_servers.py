"""The servers that the tests with a real vLLM share: each is started when it is first asked for."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from support.vllm_models import cached_model
from support.vllm_server import VllmServer

__all__ = ["CHUNKED", "DRAFTS", "GQA", "PLAIN", "Running", "Servers", "Setting", "connector_of"]

DRAFTS: Final = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1}))
_ALIVE: Final = 2
"servers at a time: each takes 1.5 GiB"


def connector_of(name: str = "SpyConnector", module: str = "support.vllm_spy", **extra: Any) -> dict[str, Any]:
    """`--kv-transfer-config` for the connector under test."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"model": "tiny", "allow": ["127.0.0.1"], **extra},
    }


@dataclass(frozen=True)
class Setting:
    """One way to start a server."""

    name: str
    model: str
    arguments: tuple[str, ...] = ()
    connector: Mapping[str, Any] | None = field(default=None, hash=False)
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Running:
    """A server and where its spy writes."""

    server: VllmServer
    spy: Path
    model: Path


PLAIN: Final = ("--dtype", "float32")
CHUNKED: Final = (*PLAIN, "--max-num-batched-tokens", "128", "--enable-chunked-prefill")
"prompts over 128 tokens take several steps; vLLM has no chunks with latent attention on CPU"
GQA: Final = Setting("gqa", "gqa", CHUNKED, connector_of(mover="loopback"))
"what most tests ask for"


class Servers:
    """Keeps servers by setting, the latest few alive. A context manager that ends them all.

    Args:
        folder: logs and spies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: OrderedDict[Setting, Running] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._running:
            self._running.popitem()[1].server.end()

    def get(self, setting: Setting) -> Running:
        """The server of a setting, ready."""
        running = self._running.pop(setting, None)
        if running is None or not running.server.alive:
            while len(self._running) >= _ALIVE:
                self._running.popitem(last=False)[1].server.end()
            running = self._start(setting)
        self._running[setting] = running
        return running

    def _start(self, setting: Setting) -> Running:
        spy, model = self._folder / setting.name, cached_model(setting.model)
        spy.mkdir(exist_ok=True)
        server = VllmServer(
            model,
            self._folder / f"{setting.name}.log",
            *setting.arguments,
            connector=setting.connector,
            environment={**setting.environment, "PDHANDOFF_SPY": os.fspath(spy)},
        )
        server.__enter__()
        return Running(server, spy, model)
