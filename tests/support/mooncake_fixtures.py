"""Fixtures for tests of the Mooncake mover. Where its wheel is missing they skip, and say what would mend it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.movers import MakeSide, sides
from support.transfer_engines import mooncake, need_mover

__all__ = ["MakeSide", "library", "make"]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Load Mooncake before anything is counted: it leaves threads and descriptors to the process."""
    need_mover("mooncake")


@pytest.fixture
def make() -> Iterator[MakeSide]:
    """Makes sides on Mooncake movers, and closes them."""
    yield from sides(mooncake)
