"""Decoding behind the seam: what ends it, how tokens are chosen, and what drafts may and may not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pdhandoff.demo.engine.decoding import Decoding
from pdhandoff.demo.engine.sampling import Sampler
from pdhandoff.errors import LocalError

VOCABULARY = 16
END = 15


class Ask(NamedTuple):
    prompt: Sequence[int] = (1, 2, 3)
    first_token: int = 4
    max_tokens: int = 8
    min_tokens: int = 0
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


class Counting:
    """A model whose next token is the last one plus one. Its draft layer guesses so too, or always wrong.

    Hidden states are [n, 2]: the token, and whether they are the draft layer's.
    """

    def __init__(self, *, wrong: bool = False, spread: float = 0.0) -> None:
        self.calls: list[tuple[str, int, list[int]]] = []
        self._wrong = wrong
        self._spread = spread

    def target(self, _cache: Any, /, *, start: int, tokens: Sequence[int]) -> Tensor:
        self.calls.append(("target", start, list(tokens)))
        return torch.tensor([[float(token), 0.0] for token in tokens])

    def draft(self, _cache: Any, /, *, start: int, hidden: Tensor, next_tokens: Sequence[int]) -> Tensor:
        assert len(hidden) == len(next_tokens)
        if not self._spread:  # each hidden state with the token after its own
            rows = zip(hidden.tolist(), next_tokens, strict=True)
            assert all(drafts or (int(token) + 1) % VOCABULARY == following for (token, drafts), following in rows)
        self.calls.append(("draft", start, list(next_tokens)))
        return torch.tensor([[float(token), 1.0] for token in next_tokens])

    def logits(self, hidden: Tensor, /) -> Tensor:
        step = 1 + (hidden[:, 1] * self._wrong).long()
        following = (hidden[:, 0].long() + step) % VOCABULARY
        certain = torch.nn.functional.one_hot(following, VOCABULARY).float() * 9
        return certain if not self._spread else certain * self._spread


def decoding(network: Counting, ask: Ask, *, drafts: int = 3, cold: bool = False, max_seq_len: int = 100) -> Decoding:
    return Decoding(network, None, ask, drafts=drafts, cold=cold, end_tokens={END}, max_seq_len=max_seq_len)


def run(one: Decoding) -> tuple[list[int], str, list[tuple[int, int]]]:
    """Tokens, why it ended, and (drafted, accepted) of each step."""
    tokens: list[int] = []
    speculation = []
    while True:
        step = one.step()
        tokens += step.tokens
        speculation.append((step.drafted, step.accepted))
        if step.finish_reason:
            return tokens, step.finish_reason, speculation


def test_warm_speculation_begins_with_the_first_step() -> None:
    network = Counting()
    assert run(decoding(network, Ask())) == ([5, 6, 7, 8, 9, 10, 11], "length", [(3, 3), (2, 2)])
    assert network.calls[:2] == [("target", 2, [3]), ("draft", 2, [4])]  # the replay, then drafts from the first token
    assert network.calls[2:5] == [("draft", 3, [5]), ("draft", 4, [6]), ("target", 3, [4, 5, 6, 7])]
    assert network.calls[5] == ("draft", 3, [5, 6, 7, 8])  # rows of everything that was accepted
    assert network.calls[-1] == ("target", 7, [8, 9, 10])


def test_T037_without_draft_rows_the_first_step_runs_without_drafts() -> None:
    network = Counting()
    tokens, _, speculation = run(decoding(network, Ask(), cold=True))
    assert tokens == [5, 6, 7, 8, 9, 10, 11]
    assert speculation == [(0, 0), (3, 3), (1, 1)]
    assert network.calls[:2] == [("target", 3, [4]), ("draft", 3, [5])]


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("wrong", [False, True])
def test_drafts_change_no_token(drafts: int, wrong: bool) -> None:
    network = Counting(wrong=wrong)
    tokens, reason, speculation = run(decoding(network, Ask(), drafts=drafts))
    assert (tokens, reason) == ([5, 6, 7, 8, 9, 10, 11], "length")
    assert sum(accepted for _, accepted in speculation) == (0 if wrong else 7 - len(speculation))
    assert max(drafted for drafted, _ in speculation) == drafts


@pytest.mark.parametrize(
    ("ask", "expected", "reason"),
    [
        (Ask(max_tokens=100), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], "stop"),
        (Ask(max_tokens=14, ignore_eos=True), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1], "length"),
        (Ask(stop_token_ids={7, 9}), [5, 6, 7], "stop"),
        (Ask(stop_token_ids={7}, ignore_eos=True), [5, 6, 7], "stop"),
        (Ask(max_tokens=2), [5], "length"),
        (Ask(max_tokens=1), [], "length"),
        (Ask(first_token=END), [], "stop"),
        (Ask(stop_token_ids={4}), [], "stop"),
    ],
)
def test_what_ends_the_output(ask: Ask, expected: list[int], reason: str) -> None:
    one = decoding(Counting(), ask)
    assert run(one)[:2] == (expected, reason)
    with pytest.raises(LocalError, match=f"has ended \\({reason}\\)"):
        one.step()


@pytest.mark.parametrize("room", [1, 2, 5])
def test_it_ends_where_the_caches_end(room: int) -> None:
    network = Counting()
    tokens, reason, _ = run(decoding(network, Ask(max_tokens=100, ignore_eos=True), max_seq_len=3 + room))
    assert len(tokens) == room - 1
    assert reason == "length"
    assert all(start + len(run_of) <= 3 + room for _, start, run_of in network.calls)


class Ending(Counting):
    """Would end at once, if it may; otherwise it says 1."""

    def logits(self, hidden: Tensor, /) -> Tensor:
        return (
            torch.zeros(len(hidden), VOCABULARY)
            .index_fill(1, torch.tensor([END]), 9.0)
            .index_fill(1, torch.tensor([1]), 5.0)
        )


@pytest.mark.parametrize(
    ("ask", "expected", "reason"),
    [
        (Ask(), [END], "stop"),
        (Ask(min_tokens=1), [END], "stop"),
        (Ask(min_tokens=3), [1, 1, END], "stop"),
        (Ask(min_tokens=3, max_tokens=3), [1, 1], "length"),
        (Ask(min_tokens=2, ignore_eos=True, max_tokens=4), [1, END, END], "length"),
        (Ask(min_tokens=2, stop_token_ids={1}), [0, END], "stop"),
    ],
)
def test_no_end_token_comes_before_min_tokens(ask: Ask, expected: list[int], reason: str) -> None:
    assert run(decoding(Ending(spread=1.0), ask))[:2] == (expected, reason)


def test_a_seed_gives_the_same_tokens_whatever_the_drafts() -> None:
    ask = Ask(max_tokens=40, ignore_eos=True, temperature=1.0, seed=11)
    outputs = [
        run(decoding(Counting(wrong=wrong, spread=0.3), ask, drafts=drafts, cold=cold))[0]
        for drafts, wrong, cold in ((0, False, False), (3, False, False), (3, True, False), (2, False, True))
    ]
    assert outputs[0] != list(range(5, 44))  # it does sample
    assert all(tokens == outputs[0] for tokens in outputs)
    other = run(decoding(Counting(spread=0.3), ask._replace(seed=12)))[0]
    assert other != outputs[0]


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    sampler = Sampler(temperature=1.0, seed=3)
    seen = Counter(sampler.choose(logits) for _ in range(4000))
    assert [seen[token] / 4000 for token in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.03)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_k": 9}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_p": 0.65}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.75}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_p": 1e-9}, [0, 0, 0, 1]),
        ({"top_k": 3, "top_p": 0.5}, [0, 0, 3 / 7, 4 / 7]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
    ],
)
def test_what_is_drawn_from(options: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    found = Sampler(**{"temperature": 1.0, **options}).probabilities(logits)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_temperature_zero_takes_the_likeliest_and_a_forbidden_token_is_never_taken() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert Sampler().choose(logits) == 3
    assert Sampler().choose(logits, forbidden={3}) == 2
    sampler = Sampler(temperature=5.0)
    assert 3 not in {sampler.choose(logits, forbidden=[3]) for _ in range(200)}
