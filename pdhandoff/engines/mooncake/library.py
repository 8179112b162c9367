"""Mooncake's Python binding: found when a mover is made, configured once for the process, and quiet.

Mooncake reads its settings from environment variables, some of them once and some at any time, and they hold for every
engine of the process. So they are set before the first engine is made and never changed afterwards.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any, Final, final

import msgspec

from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["LogLevel", "Protocol", "Settings", "load"]

_LOG: Final = logging.getLogger("pdhandoff.mooncake")
_DEBIAN: Final = "apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"
_WHEEL: Final = "pip install 'pdhandoff[mooncake]'"
_HCAS: Final = Path("/sys/class/infiniband")


@final
class Protocol(enum.Enum):
    """What carries the bytes."""

    TCP = "tcp"
    RDMA = "rdma"
    NVLINK_INTRA = "nvlink_intra"
    "between GPUs of one host, through CUDA IPC: memory must come from cudaMalloc"


@final
class LogLevel(enum.Enum):
    """What Mooncake writes to standard error."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    SILENT = "silent"


@final
class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all engines of a process."""

    protocol: Protocol
    ipv6: bool
    lanes: int
    "TCP connections to one peer"
    stall_s: int
    "a write without progress for so many seconds has failed"
    connect_s: int
    "bound on one handshake, in seconds"
    log_level: LogLevel

    def environment(self) -> dict[str, str]:
        """As the variables that Mooncake 0.3.13 reads (config.cpp, transfer_engine_impl.cpp, tcp_transport.cpp)."""
        variables = {
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",
            "MC_TCP_LANES_PER_PEER": str(self.lanes),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(self.stall_s),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(self.stall_s),
            "MC_HANDSHAKE_CONNECT_TIMEOUT": str(self.connect_s),
        }
        if self.protocol is Protocol.TCP:
            variables["MC_FORCE_TCP"] = "1"
        if self.protocol is Protocol.NVLINK_INTRA:
            variables["MC_INTRANODE_NVLINK"] = "1"
        if self.ipv6:
            variables["MC_USE_IPV6"] = "1"
        variables["MC_LOG_LEVEL"] = (LogLevel.ERROR if self.log_level is LogLevel.SILENT else self.log_level).name
        return variables


_lock: Final = threading.Lock()
_applied: list[Settings] = []


def load(settings: Settings, devices: tuple[str, ...] = ()) -> Any:
    """The module `mooncake.engine`, with these settings in force.

    Arguments:
        settings: must be the same for all movers of a process.
        devices: RDMA devices that may be used; none: all.

    Raises:
        MoverError: CONFIG, when the wheel or a system library is missing, the protocol cannot work here, or other
            settings are in force already.
    """
    with _lock:
        if _applied and _applied[0] != settings:
            raise MoverError(
                ErrorCode.CONFIG,
                f"Mooncake's settings hold for a whole process: {_applied[0]} are in force, so {settings} cannot be. "
                "Give all movers of a process the same options",
            )
        if _applied:
            return _usable(settings, devices)
        if "mooncake.engine" in sys.modules:
            _LOG.warning("Mooncake was imported before: %s may be ignored in part. Make the mover first", settings)
        variables = settings.environment()
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            module = _usable(settings, devices)
        except MoverError:
            _restore(before)
            raise
        _applied.append(settings)
        if settings.log_level is LogLevel.SILENT:
            _silence()
        return module


def _usable(settings: Settings, devices: tuple[str, ...]) -> Any:
    module = _import()
    _check_protocol(settings.protocol, module, devices)
    return module


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _import() -> Any:
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise MoverError(ErrorCode.CONFIG, f"the mover 'mooncake' needs Mooncake's wheel: {_WHEEL}") from error
    except ImportError as error:
        raise MoverError(
            ErrorCode.CONFIG, f"Mooncake's wheel is installed but cannot be loaded ({error}): {_DEBIAN}"
        ) from error


def _check_protocol(protocol: Protocol, module: Any, devices: tuple[str, ...]) -> None:
    if protocol is Protocol.NVLINK_INTRA and not module.SUPPORT_INTRA_NVLINK:
        raise MoverError(
            ErrorCode.CONFIG,
            "this Mooncake wheel has no nvlink_intra: install mooncake-transfer-engine-cuda13 instead, or choose tcp",
        )
    if protocol is Protocol.RDMA:
        present = {entry.name for entry in _HCAS.iterdir()} if _HCAS.is_dir() else set()
        usable = present & set(devices) if devices else present
        if not usable:
            raise MoverError(
                ErrorCode.CONFIG,
                f"protocol rdma needs one of the devices {list(devices) or 'of an RDMA card'}, and this host has "
                f"{sorted(present) or 'none'}: Mooncake would move everything over TCP without saying so. Choose tcp",
            )


def _silence() -> None:
    """Stop all of Mooncake's messages: its variable goes no further than errors, glog's own flag does."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith("libglog"):
            ctypes.c_int.in_dll(ctypes.CDLL(path), "_ZN3fLI17FLAGS_minloglevelE").value = 3
            return
