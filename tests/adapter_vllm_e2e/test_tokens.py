"""A real vLLM prefills, another engine decodes: the same tokens as vLLM alone, and the bytes of vLLM's own pages."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from pdhandoff import Consumer, HandoffId
from pdhandoff.demo import hf
from pdhandoff_tilert.engine import DecodeRequest
from support.vllm_landing import Landing, vllm_layout
from support.vllm_servers import DRAFTS, GQA, PLAIN, Running, Servers, Setting, connector_of
from support.vllm_spy import spied_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 64
LENGTHS = (1, 2, 5, 17, 64, 127, 128, 129, 130, 200, 255, 256, 257, 300, 384, 400, 511, 600, 700, 900)


@dataclass(frozen=True)
class Way:
    """A model, and how its state travels."""

    setting: Setting
    mover: str
    attention: str
    draft_layers: int = 0

    @property
    def name(self) -> str:
        return f"{self.setting.model}-{self.mover}"


WAYS = [
    Way(GQA, "loopback", "gqa"),
    Way(Setting("mla", "mla", PLAIN, connector_of(mover="mooncake")), "mooncake", "mla"),
    Way(Setting("mtp", "mla_mtp", (*PLAIN, *DRAFTS), connector_of(mover="nixl")), "nixl", "mla", draft_layers=1),
]


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Way:
    assert isinstance(request.param, Way)
    return request.param


@pytest.fixture
def running(servers: Servers, way: Way) -> Running:
    return servers.get(way.setting)


@pytest.fixture
def landing(way: Way) -> Iterator[Landing]:
    layout = vllm_layout(way.attention, draft_layers=way.draft_layers, dtype=torch.float32, spec_depth=way.draft_layers)
    with Landing(layout, mover=way.mover) as landing:
        yield landing


def prompt(length: int) -> list[int]:
    """A prompt of this many bytes that no other length begins with."""
    random = torch.Generator().manual_seed(length)
    return torch.randint(0, 256, (length,), generator=random).tolist()


def test_landed_bytes_are_those_of_vllms_pages(running: Running, landing: Landing, way: Way) -> None:
    for length in (1, 16, 127, 128, 129, 300, 900):
        ticket = landing.expect()
        answer = running.server.complete(prompt(length), max_tokens=1, params=landing.mark(ticket))
        assert answer.params is not None
        assert answer.params["pdhandoff"]["status"] == "sent", answer.params
        landed = landing.take(ticket)
        assert [landed.first_token] == answer.tokens == [answer.params["pdhandoff"]["first_token"]]
        assert landed.prompt_tokens == length == answer.params["pdhandoff"]["prompt_tokens"]
        (own,) = spied_rows(running.spy, str(ticket.handoff))
        assert len(own) == len(landed.rows) == 3 + way.draft_layers
        for layer, (theirs, ours) in enumerate(zip(own, landed.rows, strict=True)):
            assert torch.equal(theirs, ours), (length, layer)
            assert theirs.any(), "the rows are not all zero"


def test_greedy_tokens_are_vllms_own(running: Running, way: Way) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    engine = hf.create(
        model=running.model,
        name="tiny",
        max_seq_len=1024,
        dtype="float32",
        drafts=3 if way.draft_layers else 0,
        parked=len(prompts),
    )
    parked = []
    with Consumer(mover=way.mover, layout=engine.layout, arena_bytes=64 << 20) as consumer:
        for tokens in prompts:
            ticket = consumer.announce(HandoffId.mint(), deadline_s=60)
            mark = {"pdhandoff": {"consumer": str(consumer.address), "handoff": str(ticket.handoff)}}
            answer = running.server.complete(tokens, max_tokens=1, params=mark)
            arrival = ticket.wait(30)
            first = arrival.value("first_token")
            assert answer.tokens == [first]
            parked.append((engine.park(arrival), first))
    with ThreadPoolExecutor(4) as pool:
        own = list(pool.map(lambda tokens: running.server.complete(tokens, max_tokens=TOKENS).tokens, prompts))
    accepted = 0
    for tokens, (rows, first), theirs in zip(prompts, parked, own, strict=True):
        engine.inject(rows)
        engine.begin(DecodeRequest(prompt=tuple(tokens), first_token=first, max_tokens=TOKENS, ignore_eos=True))
        made = [first]
        while len(made) < TOKENS:
            step = engine.step()
            made += step.tokens
            accepted += step.accepted
        engine.end()
        assert made == theirs, len(tokens)
    engine.close()
    assert bool(accepted) == bool(way.draft_layers), "drafts from the handed-off rows are never right"
