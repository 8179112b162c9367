"""Registration that is whole, or fails."""

from __future__ import annotations

from pdhandoff.engines.base import Memory, Mover, Region
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["register_whole"]


def register_whole(mover: Mover, memory: Memory) -> Region:
    """Register memory, all of it.

    Raises:
        MoverError: it cannot be registered, or only a part of it was: writes to the rest would fail much later, in the
            middle of a handoff.
    """
    region = mover.register(memory)
    have = region.memory
    if have.address <= memory.address and memory.address + memory.length <= have.address + have.length:
        return region
    mover.deregister(region)
    raise MoverError(
        ErrorCode.MOVER_FAILED,
        f"mover {mover.name} registered {have.length} bytes from {have.address:#x}, of {memory.length} from "
        f"{memory.address:#x}: raise the limit on locked or registered memory, or ask for less",
    )
