"""The decode loop over an engine that answers as it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pdhandoff.errors import LocalError
from pdhandoff_tilert.decode_loop import DecodeLoop
from pdhandoff_tilert.engine import DecodeRequest, DecodeStep
from pdhandoff_tilert.generator import Calls, Verified
from pdhandoff_tilert.parking import Facts

PROMPT = (5, 6, 7)
FIRST = 10
MORE = DecodeStep(tokens=())


class Script:
    """A stepper and a generator in one: answers in turn, remembers what it was asked."""

    def __init__(self, *answers: Sequence[Sequence[int]], width: int = 4, several: bool = True) -> None:
        self.width = width
        self.several = several
        self.asked: list[tuple[list[int], int]] = []
        self.positions: list[int] = []
        self.prepared = 0
        self.put_back: list[int] = []
        self.next_first: int | None = None
        self._answers = list(answers)
        self._last = -1

    def prepare(self) -> None:
        self.prepared += 1

    def run(self, row: Sequence[int], steps: int) -> Verified:
        self.asked.append((list(row), steps))
        answer = self._answers.pop(0)
        tokens = [token for step in answer for token in step]
        self._last = tokens[-1]
        return Verified(tuple(tokens), tuple(map(len, answer)))

    def next_row(self) -> list[int]:
        first = self._last if self.next_first is None else self.next_first
        return [first, *(100 + number for number in range(1, self.width))]

    def set_cur_pos(self, position: int) -> None:
        self.positions.append(position)

    def keep(self, position: int) -> Callable[[], None]:
        return lambda: self.put_back.append(position)


def loop(
    script: Script,
    *,
    limit: int = 100,
    mtp_cold: bool = False,
    steps_per_call: int = 8,
    end_tokens: Sequence[int] = (2,),
) -> DecodeLoop:
    calls = Calls(script, script, script, script.width > 1, can_seed=True)
    return DecodeLoop(
        calls,
        DecodeRequest(prompt=PROMPT, first_token=FIRST, max_tokens=limit),
        Facts(len(PROMPT), mtp_cold, None),
        limit=limit,
        end_tokens=frozenset(end_tokens),
        steps_per_call=steps_per_call,
        keep_draft_row=script.keep,
    )


def test_a_replay_that_agrees_makes_the_first_step_warm() -> None:
    script = Script([[FIRST]], [[11, 12, 13]])
    decoding = loop(script, steps_per_call=1)
    assert (script.positions, script.prepared) == ([2], 1)
    assert decoding.step() == MORE
    assert not decoding.cold
    assert decoding.step() == DecodeStep(tokens=(11, 12, 13), drafted=3, accepted=2)
    assert script.asked == [([7, 7, 7, 7], 1), ([FIRST, 101, 102, 103], 1)]
    assert (script.positions, script.put_back) == ([2], [])


def test_a_replay_that_disagrees_sets_the_position_and_puts_the_draft_row_back() -> None:
    script = Script([[99, 98]], [[11]], [[12, 13]])
    decoding = loop(script, steps_per_call=1)
    assert decoding.step() == MORE
    assert decoding.cold
    assert (script.positions, script.put_back) == ([2, 3], [2])
    assert decoding.step() == DecodeStep(tokens=(11,))
    assert decoding.step() == DecodeStep(tokens=(12, 13), drafted=3, accepted=1)
    assert [row for row, _ in script.asked[1:]] == [[FIRST] * 4, [11, 101, 102, 103]]


def test_copies_that_a_replay_accepts_by_chance_are_output() -> None:
    script = Script([[FIRST, 11, 12]], [[13]])
    decoding = loop(script)
    assert decoding.step() == DecodeStep(tokens=(11, 12))
    assert script.positions == [2]
    decoding.step()
    assert script.asked[1][0] == [12, 101, 102, 103]


def test_without_draft_rows_the_first_step_has_copies_although_the_replay_agrees() -> None:
    script = Script([[FIRST, 11]], [[12], [13, 14]])
    decoding = loop(script, mtp_cold=True)
    assert decoding.step() == DecodeStep(tokens=(11,))
    assert decoding.cold
    assert decoding.step() == DecodeStep(tokens=(12, 13, 14), drafted=3, accepted=1)
    assert script.asked[1][0] == [11] * 4
    assert (script.positions, script.put_back) == ([2], [])


@pytest.mark.parametrize(
    ("limit", "answers", "tokens"),
    [
        (1, [], ()),
        (2, [[[FIRST]], [[11, 12, 13, 14]]], (11,)),
        (2, [[[FIRST, 11, 12]]], (11,)),
        (5, [[[FIRST]], [[11, 12, 13, 14]]], (11, 12, 13, 14)),
        (4, [[[FIRST, 11]], [[12]], [[13]]], (11, 12, 13)),
    ],
)
def test_the_limit_counts_the_first_token(limit: int, answers: list[list[list[int]]], tokens: tuple[int, ...]) -> None:
    script = Script(*answers)
    decoding = loop(script, limit=limit)
    steps = [decoding.step()]
    while not steps[-1].finish_reason:
        steps.append(decoding.step())
    assert tuple(token for step in steps for token in step.tokens) == tokens
    assert steps[-1].finish_reason == "length"
    assert len(script.asked) == len(answers)
    assert decoding.step() == DecodeStep(tokens=(), finish_reason="length")


@pytest.mark.parametrize(
    ("answers", "tokens"),
    [
        ([[[FIRST]], [[11, 2, 12]]], (11, 2)),
        ([[[FIRST, 2]]], (2,)),
        ([[[FIRST]], [[11], [12, 13], [2, 14]]], (11, 12, 13, 2)),
    ],
)
def test_an_end_token_ends_it_and_is_returned(answers: list[list[list[int]]], tokens: tuple[int, ...]) -> None:
    decoding = loop(Script(*answers))
    steps = [decoding.step()]
    while not steps[-1].finish_reason:
        steps.append(decoding.step())
    assert tuple(token for step in steps for token in step.tokens) == tokens
    assert steps[-1].finish_reason == "stop"


def test_T098_a_first_token_that_ends_the_output_runs_no_step() -> None:
    script = Script()
    decoding = loop(script, end_tokens=[FIRST])
    assert decoding.step() == DecodeStep(tokens=(), finish_reason="stop")
    assert (script.asked, script.positions, script.prepared) == ([], [], 0)


@pytest.mark.parametrize(
    ("limit", "steps_per_call", "several", "steps"),
    [(100, 8, True, 8), (100, 1, True, 1), (10, 8, True, 3), (3, 8, True, 1), (100, 8, False, 1)],
)
def test_a_call_runs_no_more_steps_than_can_be_needed(
    limit: int, steps_per_call: int, several: bool, steps: int
) -> None:
    script = Script([[FIRST]], [[11]], several=several)
    decoding = loop(script, limit=limit, steps_per_call=steps_per_call)
    decoding.step()
    decoding.step()
    assert script.asked[1][1] == steps


def test_plain_decoding_starts_after_the_prompt() -> None:
    script = Script([[11], [12]], [[13]], width=1)
    decoding = loop(script, limit=4, steps_per_call=2)
    assert script.positions == [3]
    assert decoding.step() == DecodeStep(tokens=(11, 12))
    assert decoding.step() == DecodeStep(tokens=(13,), finish_reason="length")
    assert script.asked == [([FIRST], 2), ([12], 1)]


def test_an_engine_that_goes_on_from_another_token_is_broken() -> None:
    script = Script([[FIRST]], [[11]])
    script.next_first = 55
    with pytest.raises(LocalError, match="goes on from token 55, and its last output token is 10"):
        loop(script).step()
