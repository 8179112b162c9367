"""The wheel: finding it, starting UCX with the settings that were asked for, and one agent with typed failures.

Agents are made through the wheel's binding module, not its `nixl_agent` class: that class fixes the progress thread's
delay at 0, with which it spins on one core (NIXL 1.5.1). Descriptor lists are never unpickled.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from pdhandoff.engines.base import MemoryKind
from pdhandoff.engines.nixl.options import INSTALL, NixlOptions
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["Agent", "Descriptor", "load"]

_WHEELS: Final = ("nixl_cu13", "nixl_cu12", "nixl")
_starting: Final = threading.Lock()
"UCX reads its settings from the environment, which belongs to the whole process"


class Descriptor(NamedTuple):
    """A run of memory, as NIXL has it."""

    address: int
    length: int
    device: int
    kind: MemoryKind


def load() -> Any:
    """The binding module of an installed wheel. Raises MoverError (CONFIG) when there is none that works."""
    failures: list[str] = []
    with _environment({}):
        for wheel in _WHEELS:
            try:
                return importlib.import_module(f"{wheel}._bindings")
            except ModuleNotFoundError as error:
                if error.name is None or error.name.split(".")[0] != wheel:
                    failures.append(f"{wheel}: {error}")
            except (ImportError, OSError) as error:
                failures.append(f"{wheel}: {error}")
    if failures:
        raise MoverError(ErrorCode.CONFIG, f"NIXL is installed and cannot be loaded ({'; '.join(failures)})")
    raise MoverError(ErrorCode.CONFIG, f"the nixl mover needs the NIXL wheel, which is not installed: {INSTALL}")


def _defaults() -> dict[str, str]:
    """What UCX should be told while it is loaded, unless the process's environment says otherwise.

    It logs to standard output by itself, where a program's own output goes. Its InfiniBand module is left out where no
    such device is: merely loaded, it crashes when the process exits (NIXL 1.5.1).
    """
    devices = Path("/sys/class/infiniband")
    modules = {} if devices.is_dir() and any(devices.iterdir()) else {"UCX_MODULES": "^ib"}
    return {"UCX_LOG_FILE": "stderr"} | modules


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Show these variables to libraries that start meanwhile. Defaults yield to what is set already."""
    with _starting:
        shown = {name: value for name, value in _defaults().items() if name not in os.environ} | dict(settings)
        former = {name: os.environ.get(name) for name in shown}
        os.environ.update(shown)
        try:
            yield
        finally:
            for name, value in former.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@final
class Agent:
    """One NIXL agent with a UCX backend. Not thread-safe: its owner holds a lock around every call."""

    def __init__(self, name: str, options: NixlOptions) -> None:
        """Start it. Raises MoverError (CONFIG, MOVER_FAILED)."""
        self.name = name
        self.api = load()
        self._segments = {MemoryKind.CPU: self.api.DRAM_SEG, MemoryKind.CUDA: self.api.VRAM_SEG}
        config = self.api.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = options.progress_delay_us
        config.syncMode = self.api.NIXL_THREAD_SYNC_NONE
        with self.failures(f"UCX could not be started with transports {options.transports!r}"):
            self._agent: Any = self.api.nixlAgent(name, config)
            with _environment(options.environment()):
                self._backend = self._agent.createBackend("UCX", options.backend())

    @contextlib.contextmanager
    def failures(self, what: str) -> Iterator[None]:
        """Turn NIXL's exceptions into MoverError (MOVER_FAILED)."""
        try:
            yield
        except self.faults as error:
            raise MoverError(ErrorCode.MOVER_FAILED, f"{what}: {error}") from error

    @property
    def faults(self) -> tuple[type[Exception], ...]:
        """Classes of the exceptions that calls into NIXL raise."""
        names = [name for name in vars(self.api) if name.startswith("nixl") and name.endswith("Error")]
        return (RuntimeError, ValueError, *(getattr(self.api, name) for name in names))

    def _registration(self, descriptors: Sequence[Descriptor], kind: MemoryKind) -> Any:
        rows = [(d.address, d.length, d.device, "") for d in descriptors if d.kind is kind]
        return self.api.nixlRegDList(self._segments[kind], rows)

    def register(self, descriptors: Sequence[Descriptor]) -> None:
        """Register memory. Raises MoverError when UCX refuses."""
        for kind in sorted({d.kind for d in descriptors}, key=lambda kind: kind.value):
            nbytes = sum(d.length for d in descriptors if d.kind is kind)
            with self.failures(
                f"{nbytes} bytes of {kind.value} memory could not be registered (is the limit on locked memory, "
                "`ulimit -l`, or the card's on registered memory used up?)"
            ):
                self._agent.registerMem(self._registration(descriptors, kind), [self._backend])

    def deregister(self, descriptors: Sequence[Descriptor]) -> None:
        """Undo `register`, of exactly these."""
        for kind in {d.kind for d in descriptors}:
            with self.failures(f"{kind.value} memory could not be deregistered"):
                self._agent.deregisterMem(self._registration(descriptors, kind), [self._backend])

    def metadata(self, descriptors: Sequence[Descriptor]) -> list[bytes]:
        """What a peer has to load, in this order, to reach these registered runs and no others.

        How to connect comes first and by itself. When what follows cannot be loaded, NIXL keeps the connection, and
        later refuses to be told of it again: `load_peer` can then tell the one from the other.
        """
        kinds = sorted({d.kind for d in descriptors}, key=lambda kind: kind.value)
        with self.failures("a grant could not be described"):
            nothing = self.api.nixlRegDList(self._segments[MemoryKind.CPU], [])
            address = self._agent.getLocalPartialMD(nothing, inc_conn_info=True, backends=[self._backend])
            return [address] + [
                self._agent.getLocalPartialMD(
                    self._registration(descriptors, kind), inc_conn_info=False, backends=[self._backend]
                )
                for kind in kinds
            ]

    def load_peer(self, name: str, metadata: Sequence[bytes], *, known: Collection[str]) -> None:
        """Learn of a peer's agent, or of more memory of one that is known.

        Arguments:
            name: of the peer's agent.
            metadata: what its `metadata` gave.
            known: agents that stay as they are when this fails.

        Raises:
            MoverError: MALFORMED, when the bytes are not that agent's.
        """
        for index, part in enumerate(metadata):
            try:
                loaded = self._agent.loadRemoteMD(part)
            except self.faults as error:
                if isinstance(error, self.api.nixlInvalidParamError) and not index and metadata[1:]:
                    continue  # the connection is there: left over when an earlier grant could not be loaded
                if name not in known:
                    self.forget_peer(name)
                raise MoverError(ErrorCode.MALFORMED, f"NIXL cannot load the peer's metadata: {error}") from error
            found = loaded.decode("utf-8", "replace") if isinstance(loaded, bytes) else str(loaded)
            if found != name:
                if found not in known:
                    self.forget_peer(found)
                raise MoverError(ErrorCode.MALFORMED, f"a grant of agent {name} carries metadata of another, {found!r}")

    def forget_peer(self, name: str) -> None:
        """Drop a peer's agent and the connection to it. Harmless when it is unknown."""
        with contextlib.suppress(*self.faults):
            self._agent.invalidateRemoteMD(name)

    def post(self, name: str, source: Any, destination: Any, kinds: tuple[MemoryKind, MemoryKind]) -> int:
        """Start a write. Returns its handle; raises what `faults` names.

        Arguments:
            name: the peer's agent.
            source: [write, (address, length, device)], unsigned 64-bit, in memory of the first of `kinds`.
            destination: the same at the peer, in memory of the second.
            kinds: of source and destination.
        """
        here = self.api.nixlXferDList(self._segments[kinds[0]], source)
        there = self.api.nixlXferDList(self._segments[kinds[1]], destination)
        handle = int(self._agent.createXferReq(self.api.NIXL_WRITE, here, there, name, "", [self._backend]))
        try:
            self._agent.postXferReq(handle, "")
        except self.faults:
            self.drop(handle)
            raise
        return handle

    def done(self, handle: int) -> bool:
        """Whether a write has landed. Raises what `faults` names when it has failed."""
        return bool(self._agent.getXferStatus(handle) == self.api.NIXL_SUCCESS)

    def drop(self, handle: int) -> None:
        """Free a handle whose write is over."""
        with contextlib.suppress(*self.faults):
            self._agent.releaseXferReq(handle)

    def destroy(self) -> None:
        """End it: its connections, its registrations, its thread. Idempotent."""
        self._agent = None
