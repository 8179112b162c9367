"""The payload digest written straight from docs/spec/digest.md, one byte after the other. Slow on purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pdhandoff.planner.pages import PageTable
from support.caches import Cache

__all__ = ["digest_oracle", "row_digest"]

_MODULUS = 2**64
_STEP = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    x = (x ^ (x // 2**30)) * 0xBF58476D1CE4E5B9 % _MODULUS
    x = (x ^ (x // 2**27)) * 0x94D049BB133111EB % _MODULUS
    return x ^ (x // 2**31)


def row_digest(component: str, layer: int, head: int, token: int, row: bytes) -> int:
    """Contribution of one row."""
    key = int.from_bytes(hashlib.blake2b(component.encode("utf-8"), digest_size=8).digest(), "little")
    for number in (layer, head, token):
        key = _mix((key + (number + 1) * _STEP) % _MODULUS)
    total = 0
    for index in range(0, len(row), 8):
        word = int.from_bytes(row[index : index + 8].ljust(8, b"\0"), "little")
        total += _mix(word ^ (key + (index // 8 + 1) * _STEP) % _MODULUS)
    return total % _MODULUS


def digest_oracle(cache: Cache, table: PageTable, tokens: Sequence[int], layers: Sequence[int] | None = None) -> int:
    """Digest of rows as they lie in a cache, all local heads. Tokens on null pages are left out."""
    component = cache.component
    total = 0
    for layer in component.layers if layers is None else layers:
        for token in tokens:
            if table.ids[(token - table.first_token) // table.page_tokens] == table.null:
                continue
            for head in range(component.heads):
                row = b"".join(cache.row(plane, layer, table, token, head) for plane in component.planes)
                total += row_digest(component.name, layer, component.head_start + head, token, row)
    return total % _MODULUS
