"""The payload digest: what was sent is what has landed, wherever its pages lie. `docs/spec/digest.md` is its text.

Every row (one token of one head in one layer of one component) contributes a 64-bit number, and the digest is their sum
modulo 2**64. So it does not depend on pages or on the order in which chunks arrive, and it can be accumulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from pdhandoff.layouts.descriptor import Component
from pdhandoff.native.checks import check_bases
from pdhandoff.native.keys import DIGEST_MASK, GOLDEN, MULTIPLIERS, SHIFTS, head_key
from pdhandoff.native.strided import Slots, gather_bytes, locate
from pdhandoff.planner.pages import PageTable

__all__ = ["DIGEST_MASK", "digest_rows", "digest_slots", "head_key"]

_WORD: Final = 8
_CHUNK_BYTES: Final = 1 << 20
"rows hashed at a time: what stays in a core's cache"


def digest_rows(
    component: Component,
    *,
    layers: Sequence[int],
    bases: Mapping[str, Sequence[int]],
    pages: PageTable,
    tokens: range,
    heads: range | None = None,
) -> int:
    """Digest of rows where they lie. Tokens on null pages are no rows.

    Args:
        component: how the rows lie in memory.
        layers: global layer ids.
        bases: region -> one absolute address per entry of `layers`.
        pages: the page table of one request.
        tokens: absolute token numbers, step 1.
        heads: counted over the whole model; None: all that the component has.

    Returns:
        An unsigned 64-bit integer; 0 without rows.

    Raises:
        LocalError: bases, pages or heads do not fit the component.

    """
    wanted = range(component.head_start, component.head_start + component.heads) if heads is None else heads
    check_bases(component, layers, bases)
    at = locate(component, pages, tokens)
    return digest_slots(component, layers=layers, bases=bases, at=at.only(at.real), heads=wanted)


def digest_slots(
    component: Component,
    *,
    layers: Sequence[int],
    bases: Mapping[str, Sequence[int]],
    at: Slots,
    heads: range,
) -> int:
    """`digest_rows` of tokens that were located already: all of `at`, whatever `at.real` says."""
    step = max(1, _CHUNK_BYTES // (component.row_bytes or 1))
    total = 0
    for start in range(0, len(at.token), step):
        part = at.part(slice(start, start + step))
        for index, layer in enumerate(layers):
            base = {region: bases[region][index] for region in component.regions}
            total += _digest_layer(component, layer, base, part, heads)
    return total & DIGEST_MASK


def _digest_layer(component: Component, layer: int, base: Mapping[str, int], at: Slots, heads: range) -> int:
    local = range(heads.start - component.head_start, heads.stop - component.head_start)
    rows = [gather_bytes(component, plane, base[plane.region], at, heads=local) for plane in component.planes]
    padding = -sum(plane.row_bytes for plane in component.planes) % _WORD
    if padding:
        rows.append(torch.zeros((len(at.token), len(heads), padding), dtype=torch.uint8))
    words = torch.cat(rows, dim=-1).view(torch.int64)
    key = torch.tensor([_signed(head_key(component.name, layer, head)) for head in heads], dtype=torch.int64)
    row_key = _mix(key + (at.token.unsqueeze(-1) + 1) * _signed(GOLDEN))
    counter = torch.arange(1, words.shape[-1] + 1, dtype=torch.int64) * _signed(GOLDEN)
    return int(_mix(words ^ (row_key.unsqueeze(-1) + counter)).sum().item())


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64 words, in place: a bijection."""
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, None), strict=True):
        x ^= (x >> shift) & (DIGEST_MASK >> shift)
        if multiplier is not None:
            x *= _signed(multiplier)
    return x


def _signed(word: int) -> int:
    """An unsigned 64-bit integer as the signed one with the same bits: torch's arithmetic wraps on those."""
    return word - (1 << 64) if word >> 63 else word
