"""What every row of a pretended vLLM's caches holds: a function of the tokens before it, so that any mix-up shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch

__all__ = ["POISON", "Rows", "Wrong", "chain", "read_rows", "row_views", "sample"]

POISON: Final = 0x2A2A
"what a page holds between its allocation and the forward pass that fills it"

_MIX: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1
_VOCABULARY: Final = 250
_FINITE: Final = 0x3FFF
"bits that make a small finite bfloat16: no conversion may meet a NaN"


class Wrong(NamedTuple):
    """A row that does not hold what it should."""

    layer: str
    token: int
    found: int
    "its first element, as an integer"
    expected: int


def chain(tokens: Sequence[int]) -> list[int]:
    """For each prefix of `tokens`, the shortest first, a number that no other prefix has."""
    value, values = 0x1234567, []
    for token in tokens:
        value = ((value ^ (token + 1)) * _MIX) & _WORD
        value ^= value >> 29
        values.append(value)
    return values


def sample(tokens: Sequence[int]) -> int:
    """The token that the pretended model generates after `tokens`."""
    return chain(tokens)[-1] % _VOCABULARY


class Rows:
    """Reads and writes rows `[token, head, element]` of caches as vLLM registers them, by block table and token.

    Args:
        caches: layer name -> its cache `[block, head, slot, element]`, in CPU memory, 16 bits an element.
        draft: names of the draft layers.
        keys_first: each head's page holds keys `[element, slot]`, then values `[slot, element]`, as vLLM's attention
            on CPU keeps them; otherwise rows lie as the axes say.
    """

    def __init__(
        self, caches: Mapping[str, torch.Tensor], *, draft: frozenset[str] = frozenset(), keys_first: bool = False
    ) -> None:
        self._views = {name: row_views(cache.view(torch.int16), keys_first) for name, cache in caches.items()}
        self.draft = draft
        self.target = frozenset(caches) - draft
        self._seeds = {name: 977 * (1 + index) for index, name in enumerate(sorted(caches))}

    def poison(self, blocks: Sequence[int]) -> None:
        """Make whatever these blocks held unrecognisable, in every layer."""
        for view in (view for views in self._views.values() for view in views):
            view[list(blocks)] = POISON

    def write(self, layer: str, blocks: Sequence[int], tokens: range, values: Sequence[int]) -> None:
        """Put `values`, one per token, into the rows of `tokens`."""
        if not tokens:
            return
        views, done = self._views[layer], 0
        rows = self._rows(layer, values)
        for view in views:
            pages, slots = places(blocks, tokens, view.shape[2])
            view[pages, :, slots] = rows[:, :, done : done + view.shape[3]]
            done += view.shape[3]

    def differences(self, layer: str, blocks: Sequence[int], tokens: range, values: Sequence[int]) -> list[Wrong]:
        """Which rows of `tokens` do not hold `values`."""
        if not tokens:
            return []
        found, expected = read_rows(self._views[layer], blocks, tokens), self._rows(layer, values)
        bad = self.unlike(layer, found, values)
        return [Wrong(layer, tokens[at], int(found[at, 0, 0]), int(expected[at, 0, 0])) for at in bad]

    def unlike(self, layer: str, found: torch.Tensor, values: Sequence[int]) -> list[int]:
        """Which of the rows `[token, head, element]` found elsewhere are not those of `values`."""
        different: torch.Tensor = found.view(torch.int16) != self._rows(layer, values)
        return [int(at) for at in different.flatten(1).any(1).nonzero().flatten()]

    def expected(self, layer: str, known: Sequence[int], rows: range) -> list[int]:
        """What `rows` must hold of a request with these tokens: a draft layer has seen one token further."""
        shift = 1 if layer in self.draft else 0
        return chain(known[: rows.stop + shift])[rows.start + shift :]

    def _rows(self, layer: str, values: Sequence[int]) -> torch.Tensor:
        views = self._views[layer]
        heads, elements = views[0].shape[1], sum(view.shape[3] for view in views)
        base = torch.tensor([value >> 40 for value in values]).unsqueeze(1) * self._seeds[layer]
        mixed = (base + 31 * torch.arange(heads * elements)) & _FINITE
        return mixed.to(torch.int16).view(len(values), heads, elements)


def row_views(cache: torch.Tensor, keys_first: bool) -> list[torch.Tensor]:
    """The parts of a row, each as a view `[block, head, slot, element]` of one cache."""
    if not keys_first:
        return [cache]
    blocks, heads, slots, both = cache.shape
    size = both // 2
    page = cache.view(blocks, heads, 2 * slots * size)
    keys = page[:, :, : slots * size].view(blocks, heads, size, slots).transpose(2, 3)
    return [keys, page[:, :, slots * size :].view(blocks, heads, slots, size)]


def read_rows(views: Sequence[torch.Tensor], blocks: Sequence[int], tokens: range) -> torch.Tensor:
    """Rows `[token, head, element]` of these tokens, all parts side by side."""
    parts = []
    for view in views:
        pages, slots = places(blocks, tokens, view.shape[2])
        parts.append(view[pages, :, slots])
    return torch.cat(parts, dim=2)


def places(blocks: Sequence[int], tokens: range, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and slot of each token."""
    at = torch.arange(tokens.start, tokens.stop)
    return torch.tensor(list(blocks))[at // page_tokens], at % page_tokens
