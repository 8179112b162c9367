"""From the demo's prefill to a consumer beside a TileRT engine, in one process, over the loopback mover."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from pdhandoff import Consumer, HandoffId, Outgoing, Producer
from pdhandoff.demo.model import PrefillEngine, convert_by_hand, prefill_layout, prefill_placements, prompt_tokens
from pdhandoff.demo.model.decode import LayerRows
from pdhandoff.layouts import Layout, Policy
from pdhandoff.layouts.descriptor import RopeOrder
from pdhandoff.layouts.profiles import Profile, mla
from pdhandoff.protocol.attachments import Expected
from pdhandoff.runtime.arrival import Arrival
from pdhandoff_tilert.tilert_engine import EngineOptions, TilertEngine
from support.demo_model import network, run
from support.tilert_generator import Dsv32StandIn, Glm5StandIn

__all__ = ["PROFILE", "Link", "Source", "create", "engine_for", "link", "sending", "source"]

PROFILE: Final[Profile] = mla("pdhandoff-demo", layers=4, draft_layers=1, index_rope_order=RopeOrder.HALF_SPLIT)
"the demo's model"
DEADLINE_S: Final = 30.0
_CHUNK: Final = 96
_POLICY: Final = Policy(cold_drafts=True)
_EXPECTED: Final = {"last_token": Expected(dtype="i64"), "first_token": Expected(dtype="i64", required=True)}


class Source(NamedTuple):
    """A prompt after its prefill. Nobody changes it."""

    prompt: tuple[int, ...]
    first_token: int
    engine: PrefillEngine
    table: tuple[int, ...]
    rows: tuple[LayerRows, ...]
    "converted by hand"

    def raw_latents(self) -> list[Tensor]:
        """Per layer, the 528 bytes of values and scales of every token, cut out of the pages by hand."""
        pages = torch.tensor(self.table)
        return [layer[pages].flatten(0, 1)[: len(self.prompt), :528] for layer in self.engine.tensors.latent]


@cache
def source(number: int, tokens: int) -> Source:
    """Prefill a default prompt."""
    prompt = tuple(prompt_tokens(number, tokens))
    engine = PrefillEngine(network(), pages=32)
    request = engine.add(prompt)
    first_token = run(engine, request, 128)
    return Source(
        prompt, first_token, engine, tuple(engine.block_table(request)), tuple(convert_by_hand(engine, request))
    )


def engine_for(generator: Dsv32StandIn, **options: Any) -> TilertEngine:
    """The engine around a stand-in."""
    return TilertEngine(generator, PROFILE, EngineOptions(**{"spec_depth": 3, **options}))


def create(**options: Any) -> TilertEngine:
    """The factory of a node's engine: `--engine support.tilert_path:create`."""
    return engine_for(Glm5StandIn(network()), **options)


@contextmanager
def sending(
    address: str, handoff: HandoffId, given: Source, *, drafts: bool = True, first_token: int | None = None
) -> Iterator[Outgoing]:
    """A producer that hands a prefilled prompt off in chunks: offered, pushed and committed.

    Args:
        address: of the consumer.
        handoff: its id.
        given: the prompt.
        drafts: the draft layer's rows come along.
        first_token: what prefill says that it sampled; None: what it did.
    """
    layout, placements = prefill_layout(network().config), dict(prefill_placements(given.engine))
    if not drafts:
        layout = _without_drafts(layout)
        placements = {
            name: at._replace(bases={region: list(bases)[:-1] for region, bases in at.bases.items()})
            for name, at in placements.items()
        }
    with Producer(
        mover="loopback", layout=layout, placements=placements, staging_bytes=8 << 20, digest=True, policy=_POLICY
    ) as producer:
        count = len(given.prompt)
        outgoing = producer.offer(address, handoff, prompt_tokens=count, queue_s=DEADLINE_S)
        for start in range(0, count, _CHUNK):
            outgoing.push(given.table, tokens=range(start, min(start + _CHUNK, count)))
        outgoing.commit(
            last_token=given.prompt[-1], first_token=given.first_token if first_token is None else first_token
        )
        yield outgoing


class Link:
    """A consumer; producers come and go with the handoffs."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer

    def hand_off(self, given: Source, *, start_token: int = 0, **more: Any) -> Arrival:
        """Hand a prefilled prompt off; the arrival.

        Args:
            given: the prompt.
            start_token: rows before it are said to be here already.
            more: see `sending`.
        """
        handoff = HandoffId.mint()
        ticket = self.consumer.announce(handoff, deadline_s=DEADLINE_S, start_token=start_token)
        with sending(str(self.consumer.address), handoff, given, **more) as outgoing:
            arrival = ticket.wait(DEADLINE_S)
            outgoing.wait(DEADLINE_S)
        return arrival

    def free_bytes(self) -> Sequence[int]:
        """Landing memory: free, and in all."""
        book = self.consumer.statistics().book
        return book.free_bytes, book.total_bytes


@contextmanager
def link(engine: TilertEngine) -> Iterator[Link]:
    """A consumer for one engine."""
    with Consumer(
        mover="loopback",
        layout=engine.layout,
        arena_bytes=16 << 20,
        max_seq_len=engine.max_seq_len,
        expected=_EXPECTED,
        policy=_POLICY,
    ) as consumer:
        yield Link(consumer)


def _without_drafts(layout: Layout) -> Layout:
    model = msgspec.structs.replace(layout.model, draft_layers=(), spec_depth=0)
    components = tuple(
        msgspec.structs.replace(component, layers=component.layers[:-1]) for component in layout.components
    )
    return msgspec.structs.replace(layout, model=model, components=components)
