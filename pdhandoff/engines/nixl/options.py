"""What a caller may choose about the NIXL mover."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, final

import msgspec

from pdhandoff.engines.nixl.transports import DEFAULT_TRANSPORTS
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["INSTALL", "NixlOptions"]

INSTALL: Final = "pip install 'pdhandoff[nixl]'"

_SETTING: Final = re.compile(r"[A-Z][A-Z0-9_]*")


@final
class NixlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `create`."""

    transports: str = DEFAULT_TRANSPORTS
    "what UCX may use, as `UCX_TLS`; see `transports` for what it means for a fence"
    devices: str = ""
    "network devices that UCX may use, comma-separated, as UCX names them; all when empty"
    workers: int = 1
    "UCX workers of each agent"
    progress_delay_us: int = 1000
    "how long the agent's own thread sleeps at most when nothing arrives; 0 makes it burn one core"
    ucx: Mapping[str, str] = {}
    "further UCX settings, by their names without `UCX_`, such as NET_DEVICES"
    call_s: float = 10.0
    "how long a call waits for another one to leave NIXL before it gives up"
    close_s: float = 2.0
    "how long `close` lets writes under way finish"

    def check(self) -> None:
        """Raises MoverError (CONFIG), naming the option that is wrong."""
        if not self.transports.strip("^, "):
            raise MoverError(ErrorCode.CONFIG, "transports is empty: name some, as in 'tcp,self', or leave it out")
        for name, value in (("workers", self.workers - 1), ("progress_delay_us", self.progress_delay_us)):
            if value < 0:
                raise MoverError(ErrorCode.CONFIG, f"{name} is below its least value: see NixlOptions")
        for name in ("call_s", "close_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise MoverError(ErrorCode.CONFIG, f"{name} must be a number of seconds above 0")
        for setting in self.ucx:
            if not _SETTING.fullmatch(setting) or setting.startswith("UCX_"):
                raise MoverError(
                    ErrorCode.CONFIG, f"ucx names {setting!r}: write settings in capitals and without UCX_"
                )
            if setting == "TLS":
                raise MoverError(ErrorCode.CONFIG, "ucx sets TLS: use transports, which the fence depends on")

    def environment(self) -> dict[str, str]:
        """Variables that UCX has to see while it starts."""
        return {"UCX_TLS": self.transports} | {f"UCX_{name}": value for name, value in self.ucx.items()}

    def backend(self) -> dict[str, str]:
        """Parameters of NIXL's UCX backend. Without peer error handling a write to a dead peer would hang."""
        return {
            "ucx_devices": self.devices,
            "num_workers": str(self.workers),
            "ucx_error_handling_mode": "peer",
        }
