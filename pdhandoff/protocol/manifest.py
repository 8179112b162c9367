"""What one shard will move, agreed by both sides: (component, layer, heads, token range) -> bytes.

A manifest also fixes the *landing space*: the order and size of the pieces in which a shard's rows land. A piece is the
pages of one layer of one entry, packed, in token order; it never spans two extents. Rows keep the byte layout that they
have in a source page; the first piece page is the one that holds `start_token`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Self, final

import msgspec

from pdhandoff.errors import ErrorCode, PlanError
from pdhandoff.limits import DEFAULT_LIMITS, Limits

__all__ = ["PIECE_ALIGNMENT", "Entry", "Manifest", "Piece", "place_pieces"]

PIECE_ALIGNMENT: Final = 64
"pieces start on multiples of this many bytes, inside their extent"


@final
class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of one component that one shard sends to one destination rank."""

    component: str
    layers: tuple[int, ...]
    "global layer ids, in landing order"
    row_bytes: int
    "bytes of one token in one layer, for these heads"
    page_tokens: int
    "tokens of one landing page"
    page_bytes: int
    "bytes of one landing page of one layer"
    head_start: int = 0
    "first head, counted over the whole model"
    heads: int = 1
    destination: int = 0
    "rank of the consumer that needs them"


class Piece(NamedTuple):
    """One contiguous run of the landing space: the pages of one layer of one entry."""

    entry: int
    "index into `Manifest.entries`"
    layer: int
    "global layer id"
    nbytes: int
    "bytes of its pages, before rounding up to PIECE_ALIGNMENT"


@final
class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that one shard of a handoff moves: tokens `[start_token, prompt_tokens)` of every entry."""

    prompt_tokens: int
    shard: int
    shards: int
    entries: tuple[Entry, ...]
    start_token: int = 0
    "the consumer holds the rows before it already"

    @property
    def tokens(self) -> int:
        """Rows per layer that move."""
        return self.prompt_tokens - self.start_token

    @property
    def nbytes(self) -> int:
        """Bytes of rows that move, of all entries."""
        return self.tokens * sum(entry.row_bytes * len(entry.layers) for entry in self.entries)

    @property
    def destinations(self) -> tuple[int, ...]:
        """The consumer ranks that it names, ascending."""
        return tuple(sorted({entry.destination for entry in self.entries}))

    def pages(self, entry: Entry) -> int:
        """Landing pages of one layer of an entry."""
        if self.tokens == 0:
            return 0
        return -(-self.prompt_tokens // entry.page_tokens) - self.start_token // entry.page_tokens

    def pieces(self, destination: int) -> Iterator[Piece]:
        """The pieces that land on one consumer rank, in order."""
        for index, entry in enumerate(self.entries):
            if entry.destination == destination:
                nbytes = self.pages(entry) * entry.page_bytes
                for layer in entry.layers:
                    yield Piece(index, layer, nbytes)

    def starting_at(self, token: int) -> Self:
        """The same manifest without the rows before `token`. Raises PlanError when it lies outside the prompt."""
        if not self.start_token <= token <= self.prompt_tokens:
            raise PlanError(
                ErrorCode.OUT_OF_RANGE, f"start token {token} lies outside {self.start_token}..{self.prompt_tokens}"
            )
        return msgspec.structs.replace(self, start_token=token)

    def digest(self) -> bytes:
        """Sixteen bytes over everything in it, for comparing what the two sides believe."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()

    def validate(self, limits: Limits = DEFAULT_LIMITS) -> Self:
        """This manifest, if it is consistent and within bounds. Raises PlanError that names the field otherwise."""
        _check(0 < self.prompt_tokens <= limits.max_prompt_tokens, "prompt_tokens", self.prompt_tokens)
        _check(0 <= self.start_token <= self.prompt_tokens, "start_token", self.start_token)
        _check(0 < self.shards <= limits.max_shards, "shards", self.shards)
        _check(0 <= self.shard < self.shards, "shard", self.shard)
        _check(len(self.entries) <= limits.max_entries, "entries", len(self.entries))
        for entry in self.entries:
            _validate_entry(entry, limits)
        return self


def place_pieces(pieces: Sequence[Piece], extents: Sequence[tuple[int, int]]) -> list[int]:
    """The address of each piece in granted extents, `(address, length)` each, filled in order.

    A piece that does not fit into the rest of an extent starts the next one. Raises PlanError when they do not all fit.
    """
    addresses: list[int] = []
    remaining = iter(extents)
    address, left = 0, 0
    for piece in pieces:
        need = -(-piece.nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
        while left < need:
            extent = next(remaining, None)
            if extent is None:
                raise PlanError(ErrorCode.OUT_OF_RANGE, "the granted extents are smaller than the manifest")
            address, left = extent
        addresses.append(address)
        address, left = address + need, left - need
    return addresses


def _check(condition: bool, field: str, value: int) -> None:  # noqa: FBT001
    if not condition:
        raise PlanError(ErrorCode.MANIFEST_MISMATCH, f"manifest.{field} is out of range: {value}")


def _validate_entry(entry: Entry, limits: Limits) -> None:
    _check(0 < len(entry.component) <= limits.max_string, "entry.component", len(entry.component))
    layers = entry.layers
    _check(0 < len(layers) <= limits.max_layers, "entry.layers", len(layers))
    _check(len(set(layers)) == len(layers), "entry.layers (repeated)", len(layers))
    _check(all(0 <= layer < 1 << 31 for layer in layers), "entry.layers (ids)", len(layers))
    _check(0 < entry.row_bytes <= limits.max_row_bytes, "entry.row_bytes", entry.row_bytes)
    _check(0 < entry.page_tokens <= limits.max_page_tokens, "entry.page_tokens", entry.page_tokens)
    _check(0 < entry.page_bytes < 1 << 40, "entry.page_bytes", entry.page_bytes)
    _check(
        entry.row_bytes * entry.page_tokens <= entry.page_bytes, "entry.page_bytes (below its rows)", entry.page_bytes
    )
    _check(entry.heads > 0 and entry.head_start >= 0, "entry.heads", entry.heads)
    _check(0 <= entry.destination < limits.max_ranks, "entry.destination", entry.destination)
