"""Fixtures for tests of the NIXL mover. Where its wheel is missing they skip, and say what would mend it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pdhandoff.engines.base import Mover
from pdhandoff.errors import MoverError
from support.movers import Side
from support.nixl_child import TCP, nixl

__all__ = ["MakeSide", "library", "make"]

MakeSide = Callable[..., Side]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Load NIXL before anything is counted: numpy, which it imports, keeps threads until the process ends."""
    try:
        mover = nixl()
    except MoverError as error:
        pytest.skip(error.reason)
    side = Side(mover)
    side.connect(side, side.extent(0))
    mover.close()


@pytest.fixture
def make() -> Iterator[MakeSide]:
    """Makes sides on NIXL movers, and closes them."""
    made: list[Mover] = []

    def side(pages: int = 8, transports: str = TCP) -> Side:
        mover = nixl(transports)
        made.append(mover)
        return Side(mover, pages)

    yield side
    for mover in made:
        mover.close()
