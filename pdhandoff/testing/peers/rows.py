"""Rows to hand off: noise that is a finite number in every encoding, laid out as it will land."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, final

from pdhandoff.engines.base import Extent, Memory, MemoryKind, Mover, TransferState, Writes
from pdhandoff.errors import LocalError, MoverError, PlanError
from pdhandoff.layouts import Layout
from pdhandoff.native import Native, load
from pdhandoff.protocol.book import Landing, Slot
from pdhandoff.protocol.manifest import Manifest, place_pieces
from pdhandoff.protocol.messages import Grant, GrantedRank
from pdhandoff.protocol.spans import Span
from pdhandoff.runtime.verify import shard_digest
from pdhandoff.testing.bytes_at import fill_bytes, put_bytes
from pdhandoff.testing.noise import noise
from pdhandoff.testing.rule import Violation, require
from pdhandoff.testing.side import settle

__all__ = ["Rows", "all_spans", "needed_bytes"]

_TILE: Final = bytes(noise(11).choices(range(0x40), k=1 << 16))
"no byte over 0x3f: finite as bf16, f16, f32 and e4m3, in values and in scales"


def needed_bytes(manifest: Manifest) -> int:
    """Bytes of all pieces."""
    return sum(piece.nbytes for rank in manifest.destinations for piece in manifest.pieces(rank))


def all_spans(manifest: Manifest) -> tuple[Span, ...]:
    """Every row of a manifest."""
    start, stop = manifest.start_token, manifest.prompt_tokens
    return tuple(Span(index, 0, len(entry.layers), start, stop) for index, entry in enumerate(manifest.entries))


@final
class Rows:
    """Source memory of one mover, filled once, and writes from it.

    Args:
        mover: writes.
        layout: of what is handed off.
        kind: where the source memory is.
        device: CUDA device ordinal.
        settle_s: within which a write must be final.
    """

    def __init__(self, mover: Mover, layout: Layout, *, kind: MemoryKind, device: int, settle_s: float) -> None:
        self.mover = mover
        self._layout = layout
        self._kind = kind
        self._device = device
        self._settle_s = settle_s
        self._memory: Memory | None = None
        self._native: Native | None = None
        self.no_digest = ""
        "why no payload digest can be computed here"
        try:
            self._native = load() if kind is MemoryKind.CPU else load(kind.value)
        except LocalError as error:
            self.no_digest = error.reason

    def digest(self, manifest: Manifest) -> bytes:
        """Of everything that a manifest moves: 8 bytes, or none where nothing computes it."""
        if self._native is None:
            return b""
        at = self._source(needed_bytes(manifest))
        extents = {Slot(manifest.shard, rank): (where,) for rank, where in self._parts(manifest, at)}
        return shard_digest(self._native, self._layout, manifest, manifest.shard, extents)

    def check_extents(self, manifest: Manifest, grant: Grant) -> None:
        """Raises Violation unless the extents hold the pieces, are apart, and have addresses that make sense."""
        granted = {rank.destination: rank for rank in grant.ranks}
        require(len(granted) == len(grant.ranks), "a GRANT names one rank twice")
        runs = sorted(extent for rank in grant.ranks for extent in rank.extents)
        for (start, length), (following, _) in pairwise(runs):
            require(start + length <= following, f"extents of one GRANT overlap at {following:#x}")
        require(all(length > 0 and start > 0 for start, length in runs), "a GRANT has an extent at 0, or an empty one")
        for destination in manifest.destinations:
            rank = granted.get(destination)
            require(rank is not None, f"the GRANT has no memory on rank {destination}, which the manifest names")
            if rank is not None:
                self._places(manifest, destination, rank.extents)

    def write(self, manifest: Manifest, grant: Grant) -> None:
        """Write every piece where it was granted, and wait. Raises Violation where the mover cannot."""
        at = self._source(needed_bytes(manifest))
        for destination, source in self._parts(manifest, at):
            rank = next(rank for rank in grant.ranks if rank.destination == destination)
            sizes = [piece.nbytes for piece in manifest.pieces(destination)]
            here = place_pieces(sizes, [source])
            there = self._places(manifest, destination, rank.extents)
            self._move(rank, list(zip(here, there, sizes, strict=True)))

    def refused(self, rank: GrantedRank, address: int) -> bool:
        """Whether the mover holds that this rank's description does not allow a write of one byte there."""
        at = self._source(1)
        peer = self.mover.connect(rank.description)
        try:
            transfer = self.mover.submit(peer, Writes.of((at, address, 1)))
        except MoverError:
            return True
        status = settle(self.mover, transfer, self._settle_s)
        self.mover.release(transfer)
        return status.state is TransferState.FAILED

    # ---- inside

    def _move(self, rank: GrantedRank, writes: Sequence[tuple[int, int, int]]) -> None:
        try:
            peer = self.mover.connect(rank.description)
            most = self.mover.capabilities.max_writes
            for first in range(0, len(writes), most):
                transfer = self.mover.submit(peer, Writes.of(*writes[first : first + most]))
                status = settle(self.mover, transfer, self._settle_s)
                self.mover.release(transfer)
                require(status.state is TransferState.DONE, f"a write into granted extents failed: {status.reason}")
        except MoverError as error:
            raise Violation(f"granted extents cannot be written to: {error.reason}") from error

    @staticmethod
    def _places(manifest: Manifest, destination: int, extents: Sequence[tuple[int, int]]) -> list[int]:
        try:
            return place_pieces((piece.nbytes for piece in manifest.pieces(destination)), extents)
        except PlanError as error:
            raise Violation(f"the GRANT's extents do not hold the pieces of the manifest: {error.reason}") from error

    @staticmethod
    def _parts(manifest: Manifest, at: int) -> list[tuple[int, Landing]]:
        """Where the pieces for each rank are in the source memory."""
        parts: list[tuple[int, Landing]] = []
        for rank in manifest.destinations:
            nbytes = sum(piece.nbytes for piece in manifest.pieces(rank))
            parts.append((rank, Landing(at, nbytes)))
            at += nbytes
        return parts

    def _source(self, nbytes: int) -> int:
        """The address of at least so many bytes of rows."""
        if self._memory is None or self._memory.length < nbytes:
            self._memory = memory = self.mover.allocate(max(nbytes, len(_TILE)), self._kind, self._device)
            self.mover.register(memory)
            fill_bytes(memory, 0, 0, memory.length)
            for start in range(0, memory.length, len(_TILE)):
                put_bytes(memory, start, _TILE[: memory.length - start])
        return self._memory.address

    @property
    def identity(self) -> bytes:
        """The mover's description of this side, without any memory."""
        none: Sequence[Extent] = ()
        return self.mover.describe(none)
