"""Whatever vLLM's scheduler does with its requests, a handoff lands with the rows of exactly its prompt, or not at all.

Property tests: random scripts of requests, turns and aborts, for every order of hooks, plain and asynchronous
scheduling, few and many blocks. A request's rows are known from its tokens alone, and pages are poisoned when they
change hands.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import product

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pdhandoff import HandoffFailed
from pdhandoff.runtime.arrival import Ticket
from support.vllm_engine import Order, PretendedEngine, Shape
from support.vllm_landing import Landed, Landing, vllm_layout
from support.vllm_rows import sample
from support.vllm_scripts import SCRIPTS, Abort, Add, Script, Turn, prompt_of
from support.vllm_servers import connector_of

pytestmark = [pytest.mark.slow]

VARIANTS = [*product(Order, (False, True), ("mla",)), (Order.V1, False, "gqa"), (Order.V2, True, "gqa")]
STAGINGS = ["staged", "direct", "auto"]
SETTLED_S = 10.0


@pytest.fixture(scope="module")
def landings() -> Iterator[dict[str, Landing]]:
    latent, grouped = vllm_layout("mla", draft_layers=1, spec_depth=1), vllm_layout("gqa", page_tokens=16)
    with Landing(latent, arena_bytes=64 << 20) as mla, Landing(grouped, arena_bytes=64 << 20) as gqa:
        yield {"mla": mla, "gqa": gqa}


def connector(**more: object) -> dict[str, object]:
    """Blocks may be held without end: here they are the test's matter."""
    return connector_of("PDHandoffConnector", "pdhandoff_vllm", mover="loopback", hold_bytes=1 << 30, **more)


class Play:
    """Runs a script, and knows what each request must come to."""

    def __init__(self, engine: PretendedEngine, landing: Landing) -> None:
        self.engine = engine
        self.landing = landing
        self.prompts: dict[str, list[int]] = {}
        self.tickets: dict[str, Ticket] = {}
        self.aborted: set[str] = set()
        self.sent = 0

    def run(self, script: Script) -> None:
        for step in script:
            match step:
                case Add():
                    self.add(step)
                case Turn():
                    for _ in range(step.times):
                        self.engine.advance(late=step.late)
                case Abort() if self.prompts:
                    name = list(self.prompts)[step.which % len(self.prompts)]
                    if name not in self.engine.answers:
                        self.aborted.add(name)
                    self.engine.abort(name)
        self.finish()

    def add(self, add: Add) -> None:
        name = f"request-{len(self.prompts)}"
        self.prompts[name] = prompt_of(add)
        params = None
        if add.marked:
            self.tickets[name] = self.landing.expect()
            params = self.landing.mark(self.tickets[name])
        self.engine.add(name, self.prompts[name], max_tokens=add.max_tokens, params=params)

    def finish(self) -> None:
        """Everything comes to an end, and every block back."""
        deadline, pause = time.monotonic() + SETTLED_S, threading.Event()
        while self.engine.busy:
            assert time.monotonic() < deadline, f"still held: {list(self.engine.scheduler.requests)}"
            self.engine.advance()
            if not self.engine.scheduler.running:
                pause.wait(0.0005)
        assert self.engine.free_blocks == self.engine.shape.blocks - 1

    def check(self) -> None:
        self.landing.check_over()
        for name, prompt in self.prompts.items():
            answer = self.engine.answers.get(name)
            if name not in self.aborted:
                assert answer is not None
                made = list(answer.tokens)
                assert made == [sample([*prompt, *made[:at]]) for at in range(len(made))]
            if name not in self.tickets:
                assert answer is None or answer.params is None
                continue
            self.check_handoff(name, sent=name not in self.aborted)
        self.landing.check_empty()

    def check_handoff(self, name: str, *, sent: bool) -> None:
        prompt, first = self.prompts[name], sample(self.prompts[name])
        if sent:
            params = self.engine.answers[name].params
            assert params is not None
            told = params["pdhandoff"]
            assert (told["status"], told["reason"]) == ("sent", ""), told
            assert told["handoff"] == str(self.tickets[name].handoff)
            assert (told["prompt_tokens"], told["first_token"]) == (len(prompt), first)
        else:
            self.tickets[name].cancel()  # it may be that the consumer never heard of it
        try:
            landed = self.landing.take(self.tickets[name], SETTLED_S)
        except HandoffFailed:
            if sent:
                raise
            return
        self.sent += 1
        assert (landed.prompt_tokens, landed.first_token, landed.last_token) == (len(prompt), first, prompt[-1])
        self.check_rows(name, landed, [*prompt, first])

    def check_rows(self, name: str, landed: Landed, known: list[int]) -> None:
        rows, span = self.engine.rows, range(landed.prompt_tokens)
        for layer, found in zip(sorted(rows.target) + sorted(rows.draft), landed.rows, strict=True):
            stale = self.engine.stale_drafts(name) if layer in rows.draft else set()
            wrong = [at for at in rows.unlike(layer, found, rows.expected(layer, known, span)) if at not in stale]
            assert not wrong, (name, layer, wrong)

    def close(self) -> None:
        """Leave nothing to the next script, whatever became of this one."""
        self.engine.close()
        for ticket in self.tickets.values():
            ticket.cancel()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("order", "asynchronous", "attention"), VARIANTS)
def test_whatever_the_scheduler_does_a_handoff_is_whole_or_fails(
    order: Order, asynchronous: bool, attention: str, landings: dict[str, Landing]
) -> None:
    plays: list[Play] = []

    @settings(max_examples=30, deadline=None, phases=[Phase.generate])
    @given(SCRIPTS, st.sampled_from([20, 28, 48]), st.sampled_from([48, 128]), st.sampled_from(STAGINGS))
    def explore(script: Script, blocks: int, batch_tokens: int, staging: str) -> None:
        shape = Shape(
            order=order,
            asynchronous=asynchronous,
            attention=attention,
            draft=attention == "mla",
            blocks=blocks,
            batch_tokens=batch_tokens,
        )
        play = Play(PretendedEngine(shape, connector(staging=staging)), landings[attention])
        plays.append(play)
        with closing(play):
            play.run(script)
            play.check()

    explore()
    assert sum(play.sent for play in plays) > 80
    assert sum(play.engine.preemptions for play in plays) > 5, "there are too many blocks for any harm"


@pytest.mark.parametrize("order", Order)
def test_blocks_that_a_full_consumer_keeps_come_back(order: Order) -> None:
    layout = vllm_layout("mla", draft_layers=1, spec_depth=1)
    shape = Shape(order=order, asynchronous=order.v2)
    # memory for one prompt of 100 tokens
    with Landing(layout, arena_bytes=8 * 4 * layout.components[0].planes[0].page_stride) as landing:
        play = Play(PretendedEngine(shape, connector(staging="direct", hold_s=0.3)), landing)
        with closing(play):
            for _ in range(3):
                play.add(Add(family=0, length=100, max_tokens=1, marked=True))
            play.finish()
            first, *others = play.tickets
            play.check_handoff(first, sent=True)
            for name in others:
                assert play.engine.answers[name].tokens == play.engine.answers[first].tokens
                with pytest.raises(HandoffFailed):
                    landing.take(play.tickets[name])
            landing.check_empty()
