"""Keys of the payload digest: which row a word belongs to. `docs/spec/digest.md` is their text."""

from __future__ import annotations

import hashlib
from array import array
from functools import lru_cache
from typing import Final

__all__ = ["DIGEST_MASK", "GOLDEN", "MULTIPLIERS", "SHIFTS", "head_key", "head_keys"]

DIGEST_MASK: Final = (1 << 64) - 1
"digests are added modulo this plus one"
GOLDEN: Final = 0x9E3779B97F4A7C15
"step of splitmix64"
MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS: Final = (30, 27, 31)


def head_key(component: str, layer: int, head: int) -> int:
    """The key of all rows of one head in one layer; the same for every token, so that a kernel is handed it.

    Args:
        component: name, as in the manifest.
        layer: global layer id.
        head: counted over the whole model.

    Returns:
        An unsigned 64-bit integer.

    """
    name = hashlib.blake2b(component.encode(), digest_size=8).digest()
    return _step(_step(int.from_bytes(name, "little"), layer), head)


@lru_cache(maxsize=256)
def head_keys(component: str, layers: tuple[int, ...], heads: range) -> array[int]:
    """`head_key` of every layer and head: unsigned 64-bit integers [layer, head]."""
    return array("Q", (head_key(component, layer, head) for layer in layers for head in heads))


def _step(key: int, number: int) -> int:
    """The state of splitmix64 seeded with `key`, after `number + 1` steps."""
    x = (key + (number + 1) * GOLDEN) & DIGEST_MASK
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        x = ((x ^ (x >> shift)) * multiplier) & DIGEST_MASK
    return x
