from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from support.movers import MAKERS, MakeSide, descriptors, mappings, sides


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
    yield from sides(MAKERS[request.param])


@pytest.fixture
def loopback() -> Iterator[MakeSide]:
    """As `make`, for what only the bare loopback mover shows."""
    yield from sides(MAKERS["loopback"])
