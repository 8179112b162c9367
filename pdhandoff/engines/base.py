"""The interface between pdhandoff and a transfer engine (a *mover*): five verbs, two proofs and a capability record.

A mover knows memory, peers and bytes. It knows nothing of requests, layouts or engines. Every call returns at once,
except `quiesce` and `fence`, which take a deadline and run on the library's own thread. All addresses are absolute: a
source address is one of this process, a destination address is what the peer's mover put into its grant.

Behaviour is added by wrapping a mover in another (see `faults`), never by subclassing one.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import msgspec

__all__ = [
    "Extent",
    "Memory",
    "MemoryKind",
    "Mover",
    "MoverCapabilities",
    "Peer",
    "Region",
    "Transfer",
    "TransferState",
    "TransferStatus",
    "Writes",
]


@final
class MemoryKind(enum.Enum):
    """Where memory lives."""

    CPU = "cpu"
    CUDA = "cuda"


@final
class MoverCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a mover can do. The runtime compensates for what it cannot; the conformance kit checks what it claims."""

    memory_kinds: frozenset[MemoryKind] = frozenset({MemoryKind.CPU})
    registers_any_memory: bool = True
    "False: only memory from the mover's own `allocate` can be registered as a destination"
    quiesce: bool = False
    "can prove that no write of a peer is in flight and none will come"
    fence: bool = False
    "can make late writes of a peer impossible"
    reports_peer_death: bool = False
    "a write to a dead peer fails instead of hanging"
    thread_safe: bool = False
    "False: the runtime calls it from one thread only"
    max_writes: int = 1 << 20
    "entries of one `Writes`"
    alignment: int = 1
    "extents handed to `describe` and `fence` start and end on multiples of this many bytes"


class Memory(NamedTuple):
    """A run of this process's memory."""

    address: int
    length: int
    kind: MemoryKind = MemoryKind.CPU
    device: int = 0
    "CUDA device ordinal; 0 for CPU memory"
    owner: Any = None
    "kept alive as long as the memory is in use: a buffer, a tensor, a mapping"


class Region(Protocol):
    """Memory that is registered with a mover."""

    @property
    def memory(self) -> Memory:
        """What was registered."""


class Extent(NamedTuple):
    """A run of landing memory inside a registered region: absolute address and length, in bytes."""

    address: int
    length: int


class Writes(NamedTuple):
    """Many one-sided writes, as columns of 64-bit integers of one length."""

    source: array[int]
    "absolute addresses in this process, inside registered memory"
    destination: array[int]
    "absolute addresses at the peer, inside what it granted"
    length: array[int]
    "bytes; 0 is allowed and moves nothing"

    @classmethod
    def of(cls, *writes: tuple[int, int, int]) -> Writes:
        """From (source, destination, length) triples."""
        columns = zip(*writes, strict=True) if writes else ((), (), ())
        return cls(*(array("q", column) for column in columns))

    @property
    def nbytes(self) -> int:
        """Bytes moved by all of them."""
        return sum(self.length)


class Peer(Protocol):
    """The other end, as this mover knows it: one incarnation of one process and what it has granted to us."""

    @property
    def key(self) -> str:
        """Same for every grant of one incarnation of one peer; another after it restarts."""


class Transfer(Protocol):
    """Opaque handle of submitted writes."""


@final
class TransferState(enum.Enum):
    """How submitted writes stand. DONE and FAILED are final."""

    PENDING = "pending"
    DONE = "done"
    "every byte is visible in the peer's memory"
    FAILED = "failed"
    "not every byte has landed. More of them may still land, unless `quiet` is set"


@final
class TransferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `poll` answers."""

    state: TransferState
    reason: str = ""
    "why it failed, naming the region or peer"
    quiet: bool = True
    "False: failed, yet this mover may still touch source and destination (rule 2: movers cannot cancel)"


@runtime_checkable
class Mover(Protocol):
    """A transfer engine behind pdhandoff's interface. Failures raise `pdhandoff.errors.MoverError`."""

    @property
    def name(self) -> str:
        """As registered: both sides of a handoff must name the same."""

    @property
    def capabilities(self) -> MoverCapabilities:
        """What it can do."""

    def allocate(self, nbytes: int, kind: MemoryKind = MemoryKind.CPU, device: int = 0) -> Memory:
        """Page-aligned, zeroed memory that `register` accepts. The mover frees it on `close`, or when `owner` dies."""

    def register(self, memory: Memory) -> Region:
        """Make memory usable as source and destination. Raises MoverError when it cannot be, naming the limit."""

    def deregister(self, region: Region) -> None:
        """Undo `register`. Idempotent. Not a fence."""

    def describe(self, extents: Sequence[Extent]) -> bytes:
        """What a peer needs in order to write into these extents of ours, and into nothing else.

        With no extents: only who we are. Raises MoverError for an extent outside registered memory.
        """

    def connect(self, description: bytes) -> Peer:
        """The peer that wrote `description` by `describe`. Idempotent.

        Bounded and unpickled; raises MoverError on garbage.
        """

    def submit(self, peer: Peer, writes: Writes) -> Transfer:
        """Start one-sided writes.

        Raises MoverError, with nothing started, if any lies outside registered or granted memory.
        """

    def poll(self, transfer: Transfer) -> TransferStatus:
        """How it stands. Never blocks. The first final answer stays, but for `quiet`, which may still become True."""

    def release(self, transfer: Transfer) -> None:
        """Forget a handle. Idempotent. Does not stop bytes that are in flight."""

    def quiesce(self, peer: Peer, deadline: float) -> bool:
        """Prove that no write of `peer` into our memory is in flight and that none will come (it has ended or closed).

        False when that is not proven by `deadline` (monotonic seconds); always False without the capability.
        """

    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        """After this returns, no write by `peer` can change `extents`, whatever the peer does.

        Other peers keep their grants, or learn by a failed write that they must connect again.
        Raises MoverError without the capability, or when it cannot be done by `deadline`.
        """

    def close(self) -> None:
        """Release everything. Idempotent. Peers' later writes fail or land nowhere."""
