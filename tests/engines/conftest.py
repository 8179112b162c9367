from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from pdhandoff.engines.base import Mover
from support.movers import MAKERS, Side, descriptors, mappings

MakeSide = Callable[..., Side]


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Every test in this folder gives back what it took."""
    before = descriptors()
    yield
    if descriptors() > before or mappings():
        gc.collect()
    assert descriptors() <= before
    assert mappings() == 0


@pytest.fixture(params=sorted(MAKERS))
def make(request: pytest.FixtureRequest) -> Iterator[MakeSide]:
    """Makes sides on one kind of mover, and closes them."""
    made: list[Mover] = []

    def side(pages: int = 8) -> Side:
        mover = MAKERS[request.param]()
        made.append(mover)
        return Side(mover, pages)

    yield side
    for mover in made:
        mover.close()


@pytest.fixture
def loopback() -> Iterator[MakeSide]:
    """As `make`, for what only the bare loopback mover shows."""
    made: list[Mover] = []

    def side(pages: int = 8) -> Side:
        mover = MAKERS["loopback"]()
        made.append(mover)
        return Side(mover, pages)

    yield side
    for mover in made:
        mover.close()
