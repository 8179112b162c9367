"""Fixtures for tests of the NIXL mover. Where its wheel is missing they skip, and say what would mend it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.movers import MakeSide, sides
from support.transfer_engines import need_mover, nixl

__all__ = ["MakeSide", "library", "make"]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Load NIXL before anything is counted: NumPy, which it imports, keeps threads until the process ends."""
    need_mover("nixl")


@pytest.fixture
def make() -> Iterator[MakeSide]:
    """Makes sides on NIXL movers, and closes them."""
    yield from sides(nixl)
