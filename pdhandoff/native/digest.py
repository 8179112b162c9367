"""The payload digest: what was sent is what has landed, wherever its pages lie. `docs/spec/digest.md` is its text.

Every row (one token of one head in one layer of one component) contributes a 64-bit number, and the digest is their sum
modulo 2**64. So it does not depend on pages or on the order in which chunks arrive, and it can be accumulated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts.descriptor import Component
from pdhandoff.native.strided import Slots, gather_bytes, locate
from pdhandoff.planner.pages import PageTable

__all__ = ["DIGEST_MASK", "digest_rows", "head_key"]

DIGEST_MASK: Final = (1 << 64) - 1
"digests are added modulo this plus one"

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS: Final = (30, 27, 31)
_WORD: Final = 8
_CHUNK_BYTES: Final = 1 << 20
"rows hashed at a time: what stays in a core's cache"


def head_key(component: str, layer: int, head: int) -> int:
    """The key of all rows of one head in one layer; the same for every token, so that a kernel is handed it.

    Args:
        component: name, as in the manifest.
        layer: global layer id.
        head: counted over the whole model.

    Returns:
        An unsigned 64-bit integer.

    """
    name = hashlib.blake2b(component.encode(), digest_size=_WORD).digest()
    return _step(_step(int.from_bytes(name, "little"), layer), head)


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
    for region in component.regions:
        got = len(bases.get(region, ()))
        if got != len(layers):
            raise LocalError(
                ErrorCode.MISUSE,
                f"region {region!r} of {component.name} needs {len(layers)} bases, one per layer; got {got}",
            )
    at = locate(component, pages, tokens)
    at = at.only(at.real)
    step = max(1, _CHUNK_BYTES // (component.row_bytes or 1))
    total = 0
    for start in range(0, len(at.token), step):
        part = at.part(slice(start, start + step))
        for index, layer in enumerate(layers):
            base = {region: bases[region][index] for region in component.regions}
            total += _digest_layer(component, layer, base, part, wanted)
    return total & DIGEST_MASK


def _digest_layer(component: Component, layer: int, base: Mapping[str, int], at: Slots, heads: range) -> int:
    local = range(heads.start - component.head_start, heads.stop - component.head_start)
    rows = [gather_bytes(component, plane, base[plane.region], at, heads=local) for plane in component.planes]
    padding = -sum(plane.row_bytes for plane in component.planes) % _WORD
    if padding:
        rows.append(torch.zeros((len(at.token), len(heads), padding), dtype=torch.uint8))
    words = torch.cat(rows, dim=-1).view(torch.int64)
    key = torch.tensor([_signed(head_key(component.name, layer, head)) for head in heads], dtype=torch.int64)
    row_key = _mix(key + (at.token.unsqueeze(-1) + 1) * _signed(_GOLDEN))
    counter = torch.arange(1, words.shape[-1] + 1, dtype=torch.int64) * _signed(_GOLDEN)
    return int(_mix(words ^ (row_key.unsqueeze(-1) + counter)).sum().item())


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64 words, in place: a bijection."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        x ^= (x >> shift) & (DIGEST_MASK >> shift)
        if multiplier is not None:
            x *= _signed(multiplier)
    return x


def _step(key: int, number: int) -> int:
    """The state of splitmix64 seeded with `key`, after `number + 1` steps."""
    x = (key + (number + 1) * _GOLDEN) & DIGEST_MASK
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        x = ((x ^ (x >> shift)) * multiplier) & DIGEST_MASK
    return x


def _signed(word: int) -> int:
    """An unsigned 64-bit integer as the signed one with the same bits: torch's arithmetic wraps on those."""
    return word - (1 << 64) if word >> 63 else word
