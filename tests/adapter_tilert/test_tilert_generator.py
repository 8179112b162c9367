"""Which calls a generator must have, and what is made of their answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff_tilert.generator import TOKEN_OUT, end_tokens, examine

STEPS = (
    "forward",
    "show_hands",
    "ar_accepted_tokens",
    "ar_num_accepted",
    "get_next_draft_tokens",
    "get_num_accepted",
    "get_predicted_tokens",
    "show_hands_no_mtp",
    "ar_accepted_tokens_no_mtp",
)


def nothing(*_: object, **__: object) -> None:
    """A call."""


def generator(*, with_mtp: bool = True, without: tuple[str, ...] = (), **answers: Any) -> Any:
    """Every call of GLM-5's generator, but some."""
    names = [
        *STEPS,
        "num_devices",
        "_get_device_result",
        "set_prefill_valid_tokens",
        "reset_sequence",
        "set_sampling_seed",
    ]
    layer = SimpleNamespace(**{name: nothing for name in names if name not in without})
    for name, answer in answers.items():
        setattr(layer, name, lambda *_, answer=answer: answer)
    parts: dict[str, Any] = {"with_mtp": with_mtp, "mtp_seq_len": 4, "decode_layer": layer}
    parts |= {"set_cur_pos": nothing, "update_sampling_params": nothing}
    return SimpleNamespace(**{name: part for name, part in parts.items() if name not in without})


@pytest.mark.parametrize(
    ("with_mtp", "without", "named"),
    [
        (True, ("set_cur_pos",), "set_cur_pos"),
        (True, ("update_sampling_params", "set_cur_pos"), "set_cur_pos, update_sampling_params"),
        (True, ("decode_layer",), "decode_layer"),
        (True, ("_get_device_result",), "decode_layer._get_device_result"),
        (True, ("reset_sequence",), "decode_layer.reset_sequence"),
        (True, ("mtp_seq_len",), "mtp_seq_len"),
        (True, ("get_next_draft_tokens",), "decode_layer.get_next_draft_tokens"),
        (True, ("set_prefill_valid_tokens",), "decode_layer.set_prefill_valid_tokens"),
        (True, ("ar_num_accepted", "get_num_accepted"), "decode_layer.ar_num_accepted"),
        (True, ("show_hands", "forward"), "decode_layer.show_hands"),
        (False, ("show_hands_no_mtp", "forward"), "decode_layer.show_hands_no_mtp"),
        (False, ("ar_accepted_tokens_no_mtp", "forward"), "decode_layer.ar_accepted_tokens_no_mtp"),
    ],
)
def test_a_missing_call_is_named(with_mtp: bool, without: tuple[str, ...], named: str) -> None:
    with pytest.raises(LocalError, match=rf"has no {named}: this adapter drives") as caught:
        examine(generator(with_mtp=with_mtp, without=without))
    assert caught.value.code is ErrorCode.CONFIG


def test_drafts_need_more_than_one_token_a_step() -> None:
    broken = generator()
    broken.mtp_seq_len = 1
    with pytest.raises(LocalError, match="mtp_seq_len 1"):
        examine(broken)


@pytest.mark.parametrize(
    ("with_mtp", "without", "width", "several"),
    [
        (True, (), 4, True),
        (True, ("show_hands",), 4, False),
        (False, (), 1, True),
        (False, ("show_hands_no_mtp",), 1, False),
    ],
)
def test_the_best_way_of_running_steps_is_taken(
    with_mtp: bool, without: tuple[str, ...], width: int, several: bool
) -> None:
    calls = examine(generator(with_mtp=with_mtp, without=without))
    assert (calls.with_mtp, calls.stepper.width, calls.stepper.several) == (with_mtp, width, several)
    assert calls.can_seed
    assert not examine(generator(without=("set_sampling_seed",))).can_seed


@pytest.mark.parametrize("leading", [False, True], ids=["flat", "one request"])
def test_flat_buffers_are_read(leading: bool) -> None:
    tokens, counts = torch.tensor([3, 11, 12, 13, 99]), torch.tensor([2, 1, 2, 0])
    if leading:
        tokens, counts = tokens[None], counts[None]
    stepper = examine(generator(ar_accepted_tokens=tokens, ar_num_accepted=counts)).stepper
    assert stepper.run([1, 2, 3, 4], 2) == ((11, 12, 13), (1, 2))


@pytest.mark.parametrize(
    ("tokens", "counts", "steps"),
    [
        ([2, 11, 12], [1, 1], 1),  # another number of tokens than the counts say
        ([0], [0], 1),  # no step
        ([2, 11, 12], [2, 1, 1], 1),  # more steps than were asked for
        ([5, 1, 2, 3, 4, 5], [1, 5], 1),  # more tokens than a step has
        ([1, -1], [1, 1], 1),  # no token
        ([7, 11], [1, 1], 1),  # more than the buffer holds
        ([-1, 11], [1, 1], 1),
        ([], [], 1),
    ],
)
def test_an_answer_that_no_run_can_give_is_refused(tokens: list[int], counts: list[int], steps: int) -> None:
    broken = generator(ar_accepted_tokens=torch.tensor(tokens), ar_num_accepted=torch.tensor(counts))
    with pytest.raises(LocalError, match="broken") as caught:
        examine(broken).stepper.run([1, 2, 3, 4], steps)
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize("count", [0, -1, 5])
def test_a_count_that_no_step_can_give_is_refused(count: int) -> None:
    predicted = torch.arange(4).reshape(1, 4, 1)
    broken = generator(without=("show_hands",), get_num_accepted=count, get_predicted_tokens=predicted)
    with pytest.raises(LocalError, match="broken"):
        examine(broken).stepper.run([1, 2, 3, 4], 1)


def test_too_few_drafts_are_refused() -> None:
    with pytest.raises(LocalError, match="drafts 2 tokens, and a step takes 4"):
        examine(generator(get_next_draft_tokens=torch.tensor([[1, 2]]))).stepper.next_row()


def test_a_plain_forward_leaves_its_token_in_the_intermediates() -> None:
    intermediates = [torch.zeros(0)] * TOKEN_OUT + [torch.tensor([[[17], [0]]])]
    stepper = examine(
        generator(with_mtp=False, without=("show_hands_no_mtp",), forward=[(intermediates, [], [], None)])
    ).stepper
    stepper.prepare()
    assert stepper.run([3], 1) == ((17,), (1,))
    assert stepper.next_row() == [17]


def test_end_tokens_come_from_whichever_name_there_is() -> None:
    assert end_tokens(SimpleNamespace(stop_token_ids={3, 4}, eos_id=9)) == {3, 4}
    assert end_tokens(SimpleNamespace(stop_token_ids=set(), eos_id=0)) == {0}
    assert end_tokens(SimpleNamespace(eos_id=9)) == {9}
    assert end_tokens(SimpleNamespace(eos_id=None)) == frozenset()
