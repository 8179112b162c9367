"""Prompts whose continuation can be told: each ends in the middle of a sentence that it held before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from pdhandoff.demo.model.config import DEFAULT_CONFIG, ModelConfig

__all__ = ["prompt_text", "prompt_tokens", "text_of"]

_OWNERS: Final = (
    "harbour",
    "museum",
    "old library",
    "weaver",
    "baker",
    "tower",
    "ferry",
    "north gate",
    "orchard",
    "mill",
)
_THINGS: Final = ("lantern", "ledger", "bell", "compass", "kettle", "map", "clock", "key", "ladder", "violin", "anchor")
_COLOURS: Final = ("amber", "blue", "crimson", "green", "ivory", "violet", "silver", "black", "copper", "white")
_PLACES: Final = (
    "under the stairs",
    "behind the stove",
    "in the attic",
    "by the well",
    "on the third shelf",
    "near the quay",
)


def prompt_text(number: int, characters: int) -> str:
    """English sentences of exactly that many ASCII characters, other ones for every number.

    The last few words repeat the start of a sentence that stands in the first half, where there is room for that.
    """
    draw = random.Random(number)  # noqa: S311  # text, not a secret
    sentences: list[str] = []
    while sum(map(len, sentences)) < characters:
        sentences.append(
            f"The {draw.choice(_COLOURS)} {draw.choice(_THINGS)} of the {draw.choice(_OWNERS)} "
            f"is {draw.choice(_PLACES)}, number {draw.randrange(100, 1000)}. "
        )
    if len(sentences) < 2:
        return "".join(sentences)[:characters]
    again = sentences[draw.randrange((len(sentences) + 1) // 2)]
    cue = again[: draw.randrange(len("The amber l"), len(again) // 2)]
    cue = ". " + cue
    return ("".join(sentences)[: max(0, characters - len(cue))] + cue)[-characters:]


def prompt_tokens(number: int, tokens: int, config: ModelConfig = DEFAULT_CONFIG) -> list[int]:
    """The begin token, then the bytes of `prompt_text`: exactly that many tokens."""
    return [config.begin_token, *prompt_text(number, tokens - 1).encode("ascii")][:tokens]


def text_of(tokens: Sequence[int]) -> str:
    """What tokens say; what is no byte is left out, and bytes that are no UTF-8 are shown as such."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", errors="backslashreplace")
