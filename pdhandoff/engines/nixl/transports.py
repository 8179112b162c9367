"""Which UCX transports write into a process without its help, and so go on after its agent was destroyed.

With TCP, and with shared-memory queues, the bytes of a write are put in place by the receiving agent; with RDMA by a
network card that the agent has opened. Both end when the agent does. The transports named here are different: the
writing process itself stores into the other one's memory, by a system call or through a mapping, and nothing that the
other one does, short of seeing the writer end, stops a store that is under way. They exist between processes of one
host only.

Names of transports and of their groups are those of UCX 1.23 (`UCX_TLS`).
"""

from __future__ import annotations

from typing import Final

from pdhandoff.engines.base import MemoryKind

__all__ = ["DEFAULT_TRANSPORTS", "direct"]

DEFAULT_TRANSPORTS: Final = "^cma,knem,xpmem"
"all but those that write into another process's CPU memory directly; CUDA IPC stays, for without it GPUs are slow"

_DIRECT: Final = {
    MemoryKind.CPU: frozenset({"cma", "knem", "xpmem"}),
    MemoryKind.CUDA: frozenset({"cuda_ipc"}),
}
_GROUPS: Final = {
    "all": frozenset({"cma", "knem", "xpmem", "cuda_ipc"}),
    "sm": frozenset({"cma", "knem", "xpmem"}),
    "shm": frozenset({"cma", "knem", "xpmem"}),
    "mm": frozenset({"xpmem"}),
    "cuda": frozenset({"cuda_ipc"}),
}


def direct(transports: str, kind: MemoryKind) -> frozenset[str]:
    """The transports that may write into memory of this kind without the owner's help.

    Arguments:
        transports: as `UCX_TLS`: names and groups, separated by commas; a leading `^` allows all but those.
        kind: of the memory that is written.

    Returns:
        Their names; empty when destroying the receiving agent stops every write.
    """
    named: set[str] = set()
    for word in transports.removeprefix("^").split(","):
        name = word.strip().removeprefix("\\")
        named |= _GROUPS.get(name, frozenset({name}))
    return _DIRECT[kind] - named if transports.startswith("^") else _DIRECT[kind] & named
