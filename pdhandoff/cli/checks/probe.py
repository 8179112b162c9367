"""The child's side: makes one mover, registers a little memory, writes into another child's. Told by lines of JSON."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, final, runtime_checkable

from pdhandoff.cli.checks.landing import GUARDS, UNIT, Landing, cpu_memory, cuda_memory, pattern
from pdhandoff.engines import registry
from pdhandoff.engines.base import Memory, MemoryKind, Mover, Peer, TransferState, Writes
from pdhandoff.errors import ErrorCode, MoverError, PdHandoffError

__all__ = ["Probe", "main"]

_POLL_S: Final = (0.0, 0.0001, 0.001)
"pauses between polls: short ones first"
_POLLS_EACH: Final = 200
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


@runtime_checkable
class TellsTransports(Protocol):
    """A mover that knows by what its bytes travel."""

    def transports(self, peer: Peer) -> tuple[str, ...]:
        """Names, empty when unknown."""


@final
class Probe:
    """What the parent can ask for. Answers go out as JSON; a PdHandoffError does too."""

    def __init__(self) -> None:
        self._mover: Mover | None = None
        self._landings: dict[str, Landing] = {}
        self._peer: Peer | None = None

    @property
    def mover(self) -> Mover:
        """The one that `open` made."""
        if self._mover is None:
            raise MoverError(ErrorCode.MISUSE, "no mover was made: say open first")
        return self._mover

    def torch(self) -> dict[str, object]:
        """Which torch this is, and what it sees."""
        try:
            torch = importlib.import_module("torch")
        except (ImportError, OSError) as error:
            return {"broken": f"{type(error).__name__}: {error}"}
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        return {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "devices": [torch.cuda.get_device_name(device) for device in devices],
        }

    def open(self, mover: str, options: dict[str, Any]) -> dict[str, object]:
        """Make a mover."""
        made = self._mover = registry.create(mover, **options)
        capabilities = made.capabilities
        return {
            "name": made.name,
            "memory_kinds": sorted(kind.value for kind in capabilities.memory_kinds),
            "registers_any_memory": capabilities.registers_any_memory,
            "quiesce": capabilities.quiesce,
            "fence": capabilities.fence,
            "reports_peer_death": capabilities.reports_peer_death,
            "thread_safe": capabilities.thread_safe,
            "alignment": capabilities.alignment,
        }

    def register(self, kind: str, device: int) -> dict[str, object]:
        """Register a page with guards around it: the mover's own memory, or torch's on a GPU."""
        unit = max(UNIT, self.mover.capabilities.alignment)
        landing = self._memory(MemoryKind(kind), device, unit)
        self.mover.register(landing.memory)
        self._landings[kind] = landing
        return {"nbytes": landing.memory.length}

    def _memory(self, kind: MemoryKind, device: int, unit: int) -> Landing:
        if kind is MemoryKind.CUDA and self.mover.capabilities.registers_any_memory:
            return cuda_memory(unit, device)
        memory: Memory = self.mover.allocate((1 + 2 * GUARDS) * unit, kind, device)
        if kind is not MemoryKind.CPU:
            raise MoverError(
                ErrorCode.CONFIG,
                f"{self.mover.name} takes only its own {kind.value} memory, which cannot be looked at from here",
            )
        return cpu_memory(memory, unit)

    def identity(self) -> dict[str, object]:
        """Who the mover is, without any memory."""
        return {"description": self.mover.describe(()).hex()}

    def describe(self, kind: str) -> dict[str, object]:
        """Grant the page between the guards."""
        landing = self._landings[kind]
        return {"description": self.mover.describe([landing.page]).hex(), "address": landing.page.address}

    def connect(self, description: str) -> dict[str, object]:
        """Connect to the other child."""
        self._peer = self.mover.connect(bytes.fromhex(description))
        return {"key": self._peer.key}

    def write(self, kind: str, destination: int, seed: int, settle_s: float) -> dict[str, object]:
        """Write the page, and wait until it is settled."""
        if self._peer is None:
            raise MoverError(ErrorCode.MISUSE, "there is no peer: say connect first")
        landing = self._landings[kind]
        landing.fill_page(pattern(landing.page.length, seed))
        started = time.monotonic()
        transfer = self.mover.submit(self._peer, Writes.of((landing.page.address, destination, landing.page.length)))
        status = self.mover.poll(transfer)
        polls = 0
        never = threading.Event()
        while status.state is TransferState.PENDING and time.monotonic() - started < settle_s:
            never.wait(_POLL_S[min(polls // _POLLS_EACH, len(_POLL_S) - 1)])
            polls += 1
            status = self.mover.poll(transfer)
        elapsed_s = time.monotonic() - started
        self.mover.release(transfer)
        told = self.mover.transports(self._peer) if isinstance(self.mover, TellsTransports) else ()
        return {"state": status.state.value, "reason": status.reason, "elapsed_s": elapsed_s, "transports": list(told)}

    def compare(self, kind: str, seed: int) -> dict[str, object]:
        """Compare the page with what was written, and the guards with what they were."""
        return self._landings[kind].compare(seed)._asdict()

    def close(self) -> dict[str, object]:
        """Close the mover."""
        self.mover.close()
        return {}


def _answer(probe: Probe, command: dict[str, Any]) -> dict[str, object]:
    act: Callable[..., dict[str, object]] = getattr(probe, command.pop("do"))
    try:
        return act(**command)
    except PdHandoffError as error:
        return {"refused": error.reason, "code": int(error.code)}


def main() -> None:
    """Obey until standard input ends. An interrupt is for the parent, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not even a call that hangs outlives the parent
    # Transfer engines print to standard output: the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    probe = Probe()
    answers.write('{"ready": true}\n')
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(probe, json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
