"""Copies a chunk's rows from their pages into the ring, as they will land, and sums them up on the way."""

from __future__ import annotations

import ctypes
from typing import Final, final

from pdhandoff.engines.base import MemoryKind
from pdhandoff.native.base import Finished, Native
from pdhandoff.native.memmove import copy_plan
from pdhandoff.runtime.chunks import Chunk
from pdhandoff.runtime.ring import Ring, Stretch
from pdhandoff.runtime.routes import Routes

__all__ = ["Gatherer"]


@final
class Gatherer:
    """The ring, and what fills it. Every method may be called from any thread.

    Args:
        ring: memory that the mover can read.
        native: what copies and sums up; None: plain copies, no digests.
        digest: whether to sum up.
        kind: where the ring is.
    """

    def __init__(self, ring: Ring, native: Native | None, *, digest: bool, kind: MemoryKind = MemoryKind.CPU) -> None:
        self.ring: Final = ring
        self.native: Final = native
        self._digest = digest
        self._kind = kind

    def gather(self, routes: Routes, chunk: Chunk, stretch: Stretch, *, last: bool, stream: int = 0) -> None:
        """Start the copy; in CPU memory it is done on return.

        Args:
            routes: of the chunk's handoff.
            chunk: `gathered` and `padded` are set.
            stretch: of the ring, at least `routes.ring_bytes` long.
            last: no rows follow the chunk's in its handoff, so that the rest of its last page may be filled.
            stream: on which the copy is launched, in GPU memory.
        """
        pads = routes.pads(chunk.tokens, stretch.address) if last and self._kind is MemoryKind.CPU else []
        for address, nbytes in pads:
            ctypes.memset(address, 0, nbytes)
        chunk.padded = bool(pads)
        if self.native is None:
            copy_plan(routes.gather(chunk, stretch.address))
            chunk.gathered = Finished(0)
        elif self.native.name == "cpu" and not self._digest:  # whole pages at once, where nobody looks at rows
            self.native.copy(routes.gather(chunk, stretch.address))
            chunk.gathered = Finished(0)
        else:
            parts = routes.gather_parts(chunk, stretch.address)
            chunk.gathered = self.native.gather(parts, chunk.tokens, digest=self._digest, stream=stream)

    def gathered(self, chunk: Chunk) -> bool:
        """Whether the copy is done. Then its digest is known."""
        if chunk.gathered is None or not chunk.gathered.query():
            return False
        if self._digest:
            chunk.digest = chunk.gathered.digest
        return True
