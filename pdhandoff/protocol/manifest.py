"""What one shard will move, agreed by both sides: (component, layer, heads, token range) -> bytes.

A manifest also fixes the *landing space*: the order and size of the pieces in which a shard's rows land. Entries for
one consumer rank whose landing pages hold equally many tokens form a *group*, in the order of their first entries. A
piece is a group's pages for a run of tokens: one step for each page, in token order, and in a step the page of every
entry and layer, so that a chunk of prefill lands in one run. A piece never spans two extents. Rows keep the byte layout
that they have in a source page; the first step is the one that holds `start_token`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple, Self, final

import msgspec

from pdhandoff.errors import ErrorCode, PlanError
from pdhandoff.limits import DEFAULT_LIMITS, Limits

__all__ = ["PAGE_ALIGNMENT", "PIECE_ALIGNMENT", "Entry", "Group", "Manifest", "Piece", "landing_groups", "place_pieces"]

PAGE_ALIGNMENT: Final = 16
"pages start on multiples of this many bytes, inside their step: what processors load at once"
PIECE_ALIGNMENT: Final = 64
"steps, and with them pieces, are multiples of this many bytes"
_KEPT_GROUPS: Final = 64
_PIECE_TOKENS: Final = 64
"a piece has so many at least, however small the pages"


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


class Group(NamedTuple):
    """Entries for one consumer rank that land together."""

    entries: tuple[int, ...]
    "indices into `Manifest.entries`"
    page_tokens: int
    "tokens of one step"
    offsets: tuple[tuple[int, ...], ...]
    "of each entry: where the page of each of its layers starts in a step, in bytes"
    step: int
    "bytes of one step"

    @property
    def piece_pages(self) -> int:
        """Steps of one piece; the last one may have fewer."""
        return max(1, _PIECE_TOKENS // self.page_tokens)


class Piece(NamedTuple):
    """One contiguous run of the landing space: some steps of one group."""

    group: int
    "position in `landing_groups`"
    pages: int
    "steps"
    nbytes: int
    "a multiple of PIECE_ALIGNMENT"


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
        return self.steps(entry.page_tokens)

    def steps(self, page_tokens: int) -> int:
        """Landing pages, of so many tokens each, from the one that holds `start_token` on."""
        if self.tokens == 0:
            return 0
        return -(-self.prompt_tokens // page_tokens) - self.start_token // page_tokens

    def pieces(self, destination: int) -> Iterator[Piece]:
        """The pieces that land on one consumer rank, in order."""
        for index, group in enumerate(landing_groups(self.entries, destination)):
            left = self.steps(group.page_tokens)
            while left > 0:
                pages = min(left, group.piece_pages)
                yield Piece(index, pages, pages * group.step)
                left -= pages

    def landing_bytes(self, destination: int) -> int:
        """Bytes of all pieces for one consumer rank."""
        return sum(self.steps(group.page_tokens) * group.step for group in landing_groups(self.entries, destination))

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


@lru_cache(maxsize=_KEPT_GROUPS)
def landing_groups(entries: tuple[Entry, ...], destination: int) -> tuple[Group, ...]:
    """The groups of the entries that one consumer rank gets, in landing order. All handoffs of a link have the same."""
    members: dict[int, list[int]] = {}
    for index, entry in enumerate(entries):
        if entry.destination == destination:
            members.setdefault(entry.page_tokens, []).append(index)
    groups: list[Group] = []
    for page_tokens, chosen in members.items():
        at = 0
        offsets: list[tuple[int, ...]] = []
        for index in chosen:
            stride = _round_up(entries[index].page_bytes, PAGE_ALIGNMENT)
            layers = len(entries[index].layers)
            offsets.append(tuple(range(at, at + layers * stride, stride)))
            at += layers * stride
        groups.append(Group(tuple(chosen), page_tokens, tuple(offsets), _round_up(at, PIECE_ALIGNMENT)))
    return tuple(groups)


def place_pieces(sizes: Iterable[int], extents: Iterable[tuple[int, int]]) -> list[int]:
    """The address of each piece in granted extents, `(address, length)` each, filled in order.

    A piece that does not fit into the rest of an extent starts the next one. Raises PlanError when they do not all fit.

    Args:
        sizes: of the pieces, in bytes.
        extents: in the order of the grant.
    """
    addresses: list[int] = []
    remaining = iter(extents)
    address, left = 0, 0
    for nbytes in sizes:
        need = _round_up(nbytes, PIECE_ALIGNMENT)
        while left < need:
            extent = next(remaining, None)
            if extent is None:
                raise PlanError(ErrorCode.OUT_OF_RANGE, "the granted extents are smaller than the manifest")
            address, left = extent
        addresses.append(address)
        address, left = address + need, left - need
    return addresses


def _round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


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
