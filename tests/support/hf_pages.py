"""Pages of vLLM on CPU, written row by row after the comments of its backends, and a handoff of them over loopback."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch
from torch import Tensor

from pdhandoff import Consumer, HandoffId, Placement, Producer
from pdhandoff.demo.hf.caches import KeyValueCache, LatentCache
from pdhandoff.layouts import Element, Layout, Model, Policy, catalogue
from pdhandoff.layouts.catalogue.options import Options
from pdhandoff.layouts.profiles import Profile
from pdhandoff.runtime.arrival import Arrival

__all__ = ["PAGES", "Paged", "arriving", "vllm_cpu"]

PAGES: Final = 24
_WAIT_S: Final = 30.0


class Paged(NamedTuple):
    """What a prefill engine holds."""

    layout: Layout
    pages: tuple[Tensor, ...]
    "of each layer; keeps the memory alive"
    table: list[int]
    "of the request"

    @property
    def placements(self) -> dict[str, Placement]:
        """Component -> where its pages are."""
        (component,) = self.layout.components
        return {component.name: Placement(PAGES, {"": [layer.data_ptr() for layer in self.pages]})}


def vllm_cpu(
    cache: KeyValueCache | LatentCache, tokens: int, *, profile: Profile, model: Model, page_tokens: int = 16
) -> Paged:
    """The rows of `tokens` tokens in shuffled pages; whatever else is in the pages is no number.

    Args:
        cache: where the rows are.
        tokens: how many of them.
        profile: of the model.
        model: what the layout says; its draft layers are those that are kept.
        page_tokens: tokens in a page.
    """
    rows = cache.rows if isinstance(cache, LatentCache) else cache.keys
    element = {torch.float32: Element.F32, torch.bfloat16: Element.BF16}[rows[0].dtype]
    name = "vllm.cpu_mla" if isinstance(cache, LatentCache) else "vllm.cpu_attn"
    layout = catalogue.build(name, profile, Options(model=model, element=element, page_tokens=page_tokens))
    table = random.Random(tokens).sample(range(1, PAGES), -(-tokens // page_tokens))
    layers = len(layout.components[0].layers)
    pages = tuple(
        _latent_page(cache, layer, tokens, table, page_tokens)
        if isinstance(cache, LatentCache)
        else _key_value_page(cache, layer, tokens, table, page_tokens)
        for layer in range(layers)
    )
    return Paged(layout, pages, table)


def _latent_page(cache: LatentCache, layer: int, tokens: int, table: Sequence[int], page_tokens: int) -> Tensor:
    """[page, token, latent | rope]."""
    rows = cache.rows[layer]
    pages = torch.full((PAGES, page_tokens, rows.shape[1]), torch.nan, dtype=rows.dtype)
    for token in range(tokens):
        pages[table[token // page_tokens], token % page_tokens] = rows[token]
    return pages


def _key_value_page(cache: KeyValueCache, layer: int, tokens: int, table: Sequence[int], page_tokens: int) -> Tensor:
    """[page, head], in it element x token of the keys, then token x element of the values."""
    keys, values = cache.keys[layer], cache.values[layer]
    heads, _, elements = keys.shape
    half = page_tokens * elements
    pages = torch.full((PAGES, heads, 2 * half), torch.nan, dtype=keys.dtype)
    for token in range(tokens):
        page, slot = table[token // page_tokens], token % page_tokens
        pages[page, :, slot:half:page_tokens] = keys[:, token]
        pages[page, :, half + slot * elements : half + (slot + 1) * elements] = values[:, token]
    return pages


@contextmanager
def arriving(
    held: Layout,
    *requests: tuple[Layout, dict[str, Placement], Sequence[int], int],
    chunk: int = 20,
    policy: Policy | None = None,
) -> Iterator[list[Arrival]]:
    """Hand requests off to a consumer that holds `held`; what has arrived, in order.

    Args:
        held: the decode engine's layout.
        requests: of each the prefill engine's layout, placements, block table and prompt tokens.
        chunk: tokens per push.
        policy: of both sides.
    """
    with Consumer(mover="loopback", layout=held, arena_bytes=16 << 20, policy=policy) as consumer:
        arrivals = []
        for layout, placements, table, tokens in requests:
            with Producer(
                mover="loopback", layout=layout, placements=placements, policy=policy, digest=True
            ) as producer:
                handoff = HandoffId.mint()
                ticket = consumer.announce(handoff)
                outgoing = producer.offer(str(consumer.address), handoff, prompt_tokens=tokens)
                for start in range(0, tokens, chunk):
                    outgoing.push(table, tokens=range(start, min(start + chunk, tokens)))
                outgoing.commit()
                outgoing.wait(_WAIT_S)
                arrivals.append(ticket.wait(_WAIT_S))
        yield arrivals
