"""The pretended engine itself: vLLM's scheduler drives it, and its rows are where and when a model would put them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.vllm_engine import Order, PretendedEngine, Shape
from support.vllm_recorder import RecordingConnector, Written
from support.vllm_rows import sample
from support.vllm_scripts import SCRIPTS, Abort, Add, Script, Turn, prompt_of

pytestmark = pytest.mark.slow

CONNECTOR = {
    "kv_connector": "RecordingConnector",
    "kv_connector_module_path": "support.vllm_recorder",
    "kv_role": "kv_producer",
}
SHAPES = [Shape(order=order, asynchronous=late) for order, late in product(Order, (False, True))]


def prompt(length: int, *, seed: int = 1) -> list[int]:
    return [(seed + at * 7) % 250 for at in range(length)]


class Watch:
    """Compares every row of every prompt with the model whenever the rows are said to be there."""

    def __init__(self, engine: PretendedEngine) -> None:
        self.engine = engine
        self.prompts: dict[str, list[int]] = {}
        self.seen: list[Written] = []
        assert isinstance(engine.worker, RecordingConnector)
        engine.worker.written = self.check

    def add(self, name: str, tokens: list[int], *, max_tokens: int = 1, hold: bool = False) -> None:
        self.prompts[name] = tokens
        if hold:
            self.engine.worker.hold(name)
        self.engine.add(name, tokens, max_tokens=max_tokens, params={"hold": True} if hold else None)

    def check(self, written: Written) -> None:
        self.seen.append(written)
        rows, tokens = self.engine.rows, self.prompts[written.name]
        known = [*tokens, sample(tokens)]
        for layer in rows.target | rows.draft:
            span = range(written.tokens.stop)
            wrong = rows.differences(layer, written.blocks, span, rows.expected(layer, known, span))
            if layer in rows.draft:
                wrong = [each for each in wrong if each.token not in self.engine.stale_drafts(written.name)]
            assert not wrong, (written, wrong[:3])

    def finish(self) -> None:
        for _ in range(400):
            if not self.engine.busy:
                break
            self.engine.advance()
        assert not self.engine.busy
        assert self.engine.free_blocks == self.engine.shape.blocks - 1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.order.name}-{shape.asynchronous}")
def test_rows_are_there_when_the_step_is_saved(shape: Shape) -> None:
    watch = Watch(PretendedEngine(shape, CONNECTOR))
    watch.add("chunked", prompt(300), max_tokens=1)
    watch.add("long answer", prompt(50, seed=9), max_tokens=20)
    watch.finish()
    assert [w.tokens for w in watch.seen if w.name == "chunked"][-1].stop == 300
    watch.add("prefix", [*prompt(200), *prompt(60, seed=4)], max_tokens=3)
    watch.add("same", prompt(300), max_tokens=3)
    watch.finish()
    first = next(w for w in watch.seen if w.name == "prefix").tokens
    assert first.start >= 160, "the prefix cache was not used"
    for name, tokens in watch.prompts.items():
        made = list(watch.engine.answers[name].tokens)
        assert made == [sample([*tokens, *made[:at]]) for at in range(len(made))]
    watch.engine.close()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.order.name}-{shape.asynchronous}")
def test_preempted_requests_come_back_with_other_blocks(shape: Shape) -> None:
    small = Shape(order=shape.order, asynchronous=shape.asynchronous, blocks=24, batch_tokens=128)
    watch = Watch(PretendedEngine(small, CONNECTOR))
    for seed in range(3):
        watch.add(f"r{seed}", prompt(110, seed=seed), max_tokens=60)
    watch.finish()
    preempted = [call for call in watch.engine.worker.calls if call.startswith("preempted")]
    assert preempted, "nothing was preempted"
    for name, tokens in watch.prompts.items():
        made = list(watch.engine.answers[name].tokens)
        assert len(made) == 60
        assert made == [sample([*tokens, *made[:at]]) for at in range(60)]
    watch.engine.close()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.order.name}-{shape.asynchronous}")
def test_rows_are_there_whatever_the_scheduler_does(shape: Shape) -> None:
    preemptions = 0

    @settings(max_examples=30, deadline=None)
    @given(SCRIPTS, st.sampled_from([20, 28, 48]), st.sampled_from([48, 128]))
    def explore(script: Script, blocks: int, batch_tokens: int) -> None:
        nonlocal preemptions
        engine = PretendedEngine(replace(shape, blocks=blocks, batch_tokens=batch_tokens), CONNECTOR)
        watch = Watch(engine)
        for step in script:
            match step:
                case Add():
                    watch.add(f"r{len(watch.prompts)}", prompt_of(step), max_tokens=step.max_tokens, hold=step.marked)
                case Turn():
                    for _ in range(step.times):
                        engine.advance(late=step.late)
                case Abort() if watch.prompts:
                    engine.abort(list(watch.prompts)[step.which % len(watch.prompts)])
        watch.finish()
        preemptions += engine.preemptions
        engine.close()

    explore()
    assert preemptions > 5, "there are too many blocks for any harm"


def test_a_row_of_another_request_is_noticed() -> None:
    engine = PretendedEngine(SHAPES[0], CONNECTOR)
    watch = Watch(engine)
    watch.add("one", prompt(40))
    watch.prompts["one"] = prompt(40, seed=2)
    with pytest.raises(AssertionError):
        watch.finish()
    engine.close()
