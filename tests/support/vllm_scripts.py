"""Random scripts of what clients do and how an engine's loop turns, for the pretended engine."""

from __future__ import annotations

from typing import Final, NamedTuple

from hypothesis import strategies as st

__all__ = ["SCRIPTS", "Abort", "Add", "Script", "Turn", "prompt_of"]


class Add(NamedTuple):
    """A request arrives."""

    family: int
    "requests of one family share the beginnings of their prompts"
    length: int
    "tokens of the prompt"
    max_tokens: int
    marked: bool
    "it is to be handed off"


class Turn(NamedTuple):
    """The engine's loop turns."""

    times: int
    late: bool
    "the worker runs a step only when its result is waited for"


class Abort(NamedTuple):
    """A client goes away."""

    which: int
    "number of a request, modulo how many there were"


Script = list[Add | Turn | Abort]

_ADDS: Final = st.builds(
    Add,
    family=st.integers(0, 1),
    length=st.sampled_from([1, 15, 16, 17, 48, 70, 113, 160, 250]) | st.integers(1, 250),
    max_tokens=st.sampled_from([1, 2, 9, 40, 40]),
    marked=st.sampled_from([True, True, False]),
)
_BURSTS: Final = st.lists(_ADDS, min_size=3, max_size=7)
_OTHERS: Final = st.lists(
    st.one_of(
        st.builds(Turn, st.integers(1, 12), st.booleans()),
        st.builds(Turn, st.integers(1, 3), st.booleans()),
        st.builds(Abort, st.integers(0, 30)),
        _ADDS,
    ),
    min_size=2,
    max_size=8,
)
SCRIPTS: Final[st.SearchStrategy[Script]] = st.tuples(_BURSTS, _OTHERS, _BURSTS, _OTHERS).map(
    lambda parts: [step for part in parts for step in part]
)
"requests come in bursts, so that blocks run out"


def prompt_of(add: Add) -> list[int]:
    """Token ids."""
    return [(add.family + at * 7 + at // 100 * add.family) % 250 for at in range(add.length)]
