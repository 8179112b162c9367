"""One Mooncake engine behind typed calls: return codes become errors or outcomes here and nowhere else."""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import stat
import struct
from collections.abc import Iterator
from typing import Any, Final, final

from pdhandoff.engines.base import Memory, MemoryKind
from pdhandoff.engines.mooncake.cuda import bind_thread
from pdhandoff.engines.mooncake.library import Settings, load
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["Engine", "Outcome"]

_OVERLAPPED: Final = -7
"ERR_ADDRESS_OVERLAPPED of Mooncake's error.h"
_REFUSED: Final = frozenset({0, -1, (1 << 64) - 1})
"what a submission returns in place of a handle: which of them depends on where it failed"
_ACCEPT_S: Final = 0.02
"how often the listener looks whether it should end"


_INTERNET: Final = frozenset({socket.AF_INET, socket.AF_INET6})


@final
class Outcome(enum.Enum):
    """How one write stands."""

    PENDING = 0
    DONE = 1
    "the peer has acknowledged that every byte is in its memory"
    FAILED = -1
    "final for this engine; bytes that the network holds may still land"


@final
class Engine:
    """A listener, connections and two threads of its own. Calls must come from one thread at a time."""

    def __init__(self, settings: Settings, *, host: str, devices: tuple[str, ...]) -> None:
        """Start it.

        Arguments:
            settings: see `load`.
            host: address that peers reach this engine at; nothing is probed.
            devices: RDMA devices that may be used; none: all.

        Raises:
            MoverError: CONFIG as `load` does, MOVER_FAILED when it cannot be started.
        """
        module = load(settings, devices)
        self._engine: Any = module.TransferEngine()
        bracketed = f"[{host}]" if ":" in host else host
        code = self._engine.initialize(f"{bracketed}:0", "P2PHANDSHAKE", settings.protocol.value, ",".join(devices))
        if code:
            self._engine = None
            raise MoverError(
                ErrorCode.MOVER_FAILED,
                f"Mooncake could not start on {host} (code {code}): is it an address of this host, and is a port free?",
            )
        port = self._engine.get_rpc_port()
        self.segment: Final = f"{bracketed}:{port}"
        "what peers call this engine"
        _shorten_accept(port)

    def register(self, memory: Memory) -> None:
        """Let peers write into memory, and this engine read it. Raises MoverError (MOVER_FAILED)."""
        address, length = memory.address, memory.length
        if memory.kind is MemoryKind.CUDA:
            bind_thread(memory.device)
        location = f"cuda:{memory.device}" if memory.kind is MemoryKind.CUDA else "*"  # as Mooncake's topology names it
        code = self._engine.register_memory(address, length, location)
        if code == _OVERLAPPED:
            raise MoverError(
                ErrorCode.MOVER_FAILED,
                f"{length} bytes at {address:#x} overlap memory that is registered already: Mooncake takes disjoint "
                "ranges only",
            )
        if code:
            raise MoverError(
                ErrorCode.MOVER_FAILED,
                f"Mooncake could not register {length} bytes at {address:#x} (code {code}): is the limit of locked "
                "memory (ulimit -l) too low for RDMA, or does GPU memory not come from cudaMalloc?",
            )

    def unregister(self, address: int) -> None:
        """Refuse new writes into it. Writes that have begun go on: this is no fence. Unknown memory is ignored."""
        self._engine.unregister_memory(address)

    def write(self, segment: str, source: int, destination: int, length: int) -> int | None:
        """Start one write. Its handle; None when it was refused and nothing was started."""
        handle = int(self._engine.transfer_submit_write(segment, source, destination, length))
        return None if handle in _REFUSED else handle

    def check(self, handle: int) -> Outcome:
        """How a write stands. A handle is used up by its final answer.

        Mooncake's own time-out (-2) stops nothing, so it is not final.
        """
        code = self._engine.transfer_check_status(handle)
        if code == Outcome.DONE.value:
            return Outcome.DONE
        return Outcome.FAILED if code == Outcome.FAILED.value else Outcome.PENDING

    def close(self) -> None:
        """Join its threads and close its connections: it touches no memory after this returns. Idempotent.

        The interpreter is held meanwhile, for about _ACCEPT_S.
        """
        self._engine = None


def _listening() -> Iterator[socket.socket]:
    """Duplicates of all internet sockets of this process that listen, each open until the next is asked for."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are wanted, and entries vanish meanwhile
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with duplicate:
            if duplicate.family in _INTERNET and duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield duplicate


def _shorten_accept(port: int) -> None:
    """Make the handshake's listener look more often whether it should end.

    It waits for a second at a time, and destroying an engine joins it with the interpreter held: the whole process
    would stand still for that second.
    """
    for listener in _listening():
        if listener.getsockname()[1] == port:
            timeout = struct.pack("ll", 0, int(_ACCEPT_S * 1e6))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            _end_wait(listener)


def _end_wait(listener: socket.socket) -> None:
    """End the wait that is under way, which the shorter time does not apply to, by a connection that says nothing."""
    loopback = "::1" if listener.family is socket.AF_INET6 else "127.0.0.1"
    with contextlib.suppress(OSError):  # it listens on all addresses; where not, that one wait lasts longer
        socket.create_connection((loopback, listener.getsockname()[1]), timeout=1.0).close()
