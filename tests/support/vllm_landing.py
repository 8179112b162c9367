"""The other end for a vLLM under test: a consumer with pages like vLLM's, and what has landed in them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from pdhandoff import Consumer, HandoffId, PageTable, Placement
from pdhandoff.layouts import Layout, catalogue, profiles
from pdhandoff.layouts.catalogue import Options
from pdhandoff.layouts.descriptor import Element
from pdhandoff.protocol.consumer_table import ConsumerState
from pdhandoff.runtime.arrival import Ticket
from support.vllm_rows import read_rows, row_views

__all__ = ["Landed", "Landing", "vllm_layout"]

_ELEMENTS = {torch.bfloat16: Element.BF16, torch.float32: Element.F32}
_PAGES = 96
_ARENA = 32 << 20
_STILL_OPEN = frozenset(
    state.value
    for state in (
        ConsumerState.UNANNOUNCED,
        ConsumerState.ASSEMBLING,
        ConsumerState.QUEUED,
        ConsumerState.LANDING,
        ConsumerState.VERIFYING,
    )
)


def vllm_layout(
    attention: str,
    *,
    layers: int = 3,
    draft_layers: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "tiny",
    revision: str = "",
    spec_depth: int = 0,
    page_tokens: int | None = None,
) -> Layout:
    """What vLLM on CPU holds of one of the tiny models: `gqa` or `mla`."""
    if attention == "gqa":
        profile, entry = profiles.gqa(name, layers=layers, heads=2, head_elements=32), "vllm.cpu_attn"
    else:
        profile, entry = profiles.mla(name, layers=layers, draft_layers=draft_layers), "vllm.cpu_mla"
    options = Options(
        model=profile.model(revision=revision, spec_depth=spec_depth), element=_ELEMENTS[dtype], page_tokens=page_tokens
    )
    return catalogue.build(entry, profile, options)


@dataclass(frozen=True)
class Landed:
    """What came of one request."""

    prompt_tokens: int
    first_token: int
    last_token: int
    rows: tuple[torch.Tensor, ...]
    "for each layer, its rows `[token, head, element]`"


class Landing:
    """A consumer whose caches have vLLM's own layout, so that rows come out as the bytes that went in.

    Args:
        layout: of `vllm_layout`.
        mover: name of a mover.
    """

    def __init__(self, layout: Layout, *, mover: str = "loopback", arena_bytes: int = _ARENA) -> None:
        self.layout = layout
        (self.component,) = layout.components
        dtype = {Element.BF16: torch.bfloat16, Element.F32: torch.float32}[self.component.planes[0].element]
        self._keys_first = len(self.component.planes) > 1 and self.component.planes[0].name == "key"
        heads, slots = self.component.heads, self.component.page_tokens
        page = self.component.planes[0].page_stride // dtype.itemsize
        shape = (_PAGES, heads, slots, page // (heads * slots))
        self.caches = [torch.zeros(shape, dtype=dtype) for _ in self.component.layers]
        self._placement = Placement(_PAGES, {"": [cache.data_ptr() for cache in self.caches]})
        self.consumer = Consumer(mover=mover, layout=layout, arena_bytes=arena_bytes, listen="127.0.0.1:0")
        self.address = str(self.consumer.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the consumer."""
        self.consumer.close()

    def expect(self, *, deadline_s: float = 60) -> Ticket:
        """Announce a new handoff."""
        return self.consumer.announce(HandoffId.mint(), deadline_s=deadline_s)

    def mark(self, ticket: Ticket) -> dict[str, object]:
        """What a client writes into its request for this handoff."""
        return {"pdhandoff": {"consumer": self.address, "handoff": str(ticket.handoff)}}

    def check_empty(self, within_s: float = 10) -> None:
        """Every byte of landing memory is free again, within this time."""
        deadline, pause = time.monotonic() + within_s, threading.Event()
        while (book := self.consumer.statistics().book).free_bytes < book.total_bytes:
            assert time.monotonic() < deadline, book
            pause.wait(0.002)

    def check_over(self, within_s: float = 10) -> None:
        """No producer is still at a handoff, within this time: each is complete, has failed, or was never offered."""
        deadline, pause = time.monotonic() + within_s, threading.Event()
        while open_ := _STILL_OPEN & self.consumer.statistics().states.keys():
            assert time.monotonic() < deadline, open_
            pause.wait(0.002)

    def take(self, ticket: Ticket, timeout_s: float = 30) -> Landed:
        """Wait for a handoff and take its rows. Raises HandoffFailed."""
        with ticket.wait(timeout_s) as arrival:
            count = -(-arrival.prompt_tokens // self.component.page_tokens)
            blocks = list(range(_PAGES - 1, _PAGES - 1 - count, -1))
            for cache in self.caches:
                cache[blocks] = 0
            name = self.component.name
            arrival.convert_into({name: self._placement}, pages={name: PageTable(blocks, self.component.page_tokens)})
            tokens = range(arrival.prompt_tokens)
            rows = tuple(read_rows(row_views(cache, self._keys_first), blocks, tokens) for cache in self.caches)
            return Landed(arrival.prompt_tokens, arrival.value("first_token"), arrival.value("last_token"), rows)
