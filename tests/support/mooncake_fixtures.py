"""Fixtures for tests of the Mooncake mover. Where Mooncake is missing they skip, and say what would mend it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pdhandoff.engines.base import Mover
from pdhandoff.errors import MoverError
from support.mooncake_child import mooncake
from support.movers import Side

__all__ = ["MakeSide", "library", "make"]

MakeSide = Callable[..., Side]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Load Mooncake before anything is counted: its first engine leaves threads and descriptors to the process."""
    try:
        mover = mooncake()
    except MoverError as error:
        pytest.skip(error.reason)
    side = Side(mover)
    side.connect(side, side.extent(0))
    side.mover.close()


@pytest.fixture
def make() -> Iterator[MakeSide]:
    """Makes sides on Mooncake movers, and closes them."""
    made: list[Mover] = []

    def side(pages: int = 8) -> Side:
        mover = mooncake()
        made.append(mover)
        return Side(mover, pages)

    yield side
    for mover in made:
        mover.close()
