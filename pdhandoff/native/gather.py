"""Pages of an engine into landing form, on CPU memory: `Native.gather` as the reference does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdhandoff.native.base import GatherPart
from pdhandoff.native.checks import check_gather, local_heads
from pdhandoff.native.digest import DIGEST_MASK, digest_slots
from pdhandoff.native.strided import Slots, gather_bytes, locate, scatter_bytes

__all__ = ["gather_parts"]

_CHUNK_TOKENS: Final = 4096
"rows copied at a time"


def gather_parts(parts: Sequence[GatherPart], tokens: range, *, digest: bool) -> int:
    """`Native.gather`. Returns the digest, 0 where none is asked for."""
    located = [_located(part, tokens) for part in parts]
    total = 0
    for part, (here, there) in zip(parts, located, strict=True):
        for start in range(0, len(here.token), _CHUNK_TOKENS):
            rows = slice(start, start + _CHUNK_TOKENS)
            _copy(part, here.part(rows), there.part(rows))
        if digest:
            bases = {part.destination.regions[0]: part.destination_bases}
            total += digest_slots(part.destination, layers=part.layers, bases=bases, at=there, heads=part.heads)
    return total & DIGEST_MASK


def _located(part: GatherPart, tokens: range) -> tuple[Slots, Slots]:
    """Where the tokens lie on both sides, those on a null page left out."""
    check_gather(part, tokens)
    here = locate(part.source, part.source_pages, tokens)
    there = locate(part.destination, part.destination_pages, tokens)
    real = here.real & there.real
    return here.only(real), there.only(real)


def _copy(part: GatherPart, here: Slots, there: Slots) -> None:
    from_heads, to_heads = local_heads(part.source, part.heads), local_heads(part.destination, part.heads)
    for index in range(len(part.layers)):
        for plane in part.source.planes:
            source_base = part.source_bases[plane.region][index]
            rows = gather_bytes(part.source, plane, source_base, here, heads=from_heads)
            to = part.destination.plane(plane.name)
            scatter_bytes(part.destination, to, part.destination_bases[index], there, rows, heads=to_heads)
