"""What the checks read of this machine, in one place, so that a test can give them another one."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self, final

import msgspec

from pdhandoff.cli.checks.interfaces import LocalAddress, local_addresses

__all__ = ["System"]


def _space(folder: Path) -> tuple[int, int]:
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


@final
class System(msgspec.Struct, frozen=True, kw_only=True):
    """A machine."""

    environment: Mapping[str, str]
    root: Path = Path("/")
    "of `proc`, `sys` and `dev`"
    addresses: Callable[[], tuple[LocalAddress, ...]] = local_addresses
    "raises OSError when they cannot be listed"
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    "soft and hard limit of a RLIMIT_ number"
    space: Callable[[Path], tuple[int, int]] = _space
    "bytes of a file system, in all and free; raises OSError"

    @classmethod
    def here(cls) -> Self:
        """This one."""
        return cls(environment=os.environ)

    def rdma_devices(self) -> tuple[str, ...]:
        """Names of its RDMA devices, sorted."""
        folder = self.root / "sys/class/infiniband"
        return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()

    def lines(self, path: str) -> tuple[str, ...]:
        """Lines of a text file below `root`; none when it cannot be read."""
        try:
            return tuple((self.root / path).read_text(encoding="utf-8").splitlines())
        except OSError:
            return ()
