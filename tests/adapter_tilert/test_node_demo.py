"""The demo's real model behind a real node: what another process prefilled is decoded to the tokens of one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path

import httpx
import pytest

from pdhandoff import HandoffId, Producer
from pdhandoff.demo.model import (
    DEFAULT_CONFIG,
    DecodeResult,
    PrefillEngine,
    decode_locally,
    fingerprint,
    prefill_layout,
    prefill_placements,
    prompt_tokens,
)
from pdhandoff.engines.base import Mover
from support.demo_model import network
from support.engines import DEADLINE_S
from support.node import Node, body_of, events
from support.transfer_engines import need_mover

pytestmark = pytest.mark.slow

TOKENS = 12


class DemoPrefill:
    """Prefills and hands off."""

    def __init__(self, control: str, mover: Mover) -> None:
        self._control = control
        self._engine = PrefillEngine(network(), pages=64)
        self.producer = Producer(
            mover=mover,
            layout=prefill_layout(DEFAULT_CONFIG, revision=fingerprint(network().weights)),
            placements=prefill_placements(self._engine),
            staging_bytes=4 << 20,
            digest=True,
        )

    def send(self, prompt: list[int], handoff: HandoffId) -> None:
        """Chunk by chunk, as prefill gets on."""
        outgoing = self.producer.offer(self._control, handoff, prompt_tokens=len(prompt), queue_s=30.0)
        number = self._engine.add(prompt)
        done = 0
        while done < len(prompt):
            progress = self._engine.step(number, 100)
            outgoing.push(self._engine.block_table(number), tokens=range(done, progress.draft_tokens))
            done = progress.draft_tokens
        assert progress.first_token is not None
        outgoing.commit(last_token=prompt[-1], first_token=progress.first_token)
        outgoing.wait(DEADLINE_S)
        assert outgoing.source_free.wait(DEADLINE_S)
        self._engine.free(number)


@cache
def locally(prompt: tuple[int, ...]) -> DecodeResult:
    """The same in one process, without a handoff."""
    return decode_locally(network(), prompt, max_tokens=TOKENS)


NODE_OPTIONS = {
    "loopback": (),
    "nixl": ("--mover-option", "transports=tcp,self", "--mover-option", 'ucx={"NET_DEVICES": "lo"}'),
}


@pytest.fixture(params=sorted(NODE_OPTIONS))
def prefill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Node, DemoPrefill]]:
    mover = need_mover(request.param)()
    options = ("--arena-bytes", "16M", "--mover", request.param, *NODE_OPTIONS[request.param])
    with Node(tmp_path, *options, engine=("--engine", "demo")) as node:
        side = DemoPrefill(node.control, mover)
        with side.producer:
            yield node, side
        mover.close()
        node.idle()


def test_tokens_are_those_of_a_single_process(prefill: tuple[Node, DemoPrefill]) -> None:
    node, side = prefill
    prompts = [prompt_tokens(number, length) for number, length in enumerate((130, 70))]
    handoffs = [HandoffId.mint() for _ in prompts]
    answers: list[Future[httpx.Response]] = []
    for prompt, handoff in zip(prompts, handoffs, strict=True):
        answers.append(node.later(body_of(handoff, prompt, TOKENS, stream=True)))
        side.send(prompt, handoff)  # while what came before is decoded
    for prompt, answer in zip(prompts, answers, strict=True):
        response = answer.result(DEADLINE_S)
        assert response.status_code == 200, response.text
        chunks = [event["choices"][0] for event in events(response) if event]
        tokens = [token for chunk in chunks for token in chunk["token_ids"]]
        expected = locally(tuple(prompt))
        assert [token for token in tokens if token != DEFAULT_CONFIG.end_token] == list(expected.tokens)
        assert chunks[-1]["finish_reason"] == ("stop" if expected.stopped else "length")
    assert "draft_tokens_accepted_total" in node.client.get("/metrics").text
