"""The movers that come with pdhandoff, made as every test of one process must make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

import pytest

from pdhandoff.engines.base import Mover
from pdhandoff.engines.loopback import create
from pdhandoff.errors import MoverError
from support.mooncake_child import mooncake
from support.movers import Side
from support.nixl_child import nixl

__all__ = ["MOVERS", "need_mover"]

MOVERS: Final[dict[str, Callable[[], Mover]]] = {"loopback": create, "nixl": nixl, "mooncake": mooncake}


@cache
def _missing(name: str) -> str:
    """Why a mover cannot be made here, empty when it can.

    What its library leaves to the process (threads of NumPy for NIXL, of Mooncake's own) is there afterwards, and
    counts as nobody's leak.
    """
    try:
        mover = MOVERS[name]()
    except MoverError as error:
        return error.reason
    side = Side(mover)
    side.connect(side, side.extent(0))
    mover.close()
    return ""


def need_mover(name: str) -> Callable[[], Mover]:
    """What makes this mover. Skips the test where its library is missing, in the mover's own words."""
    reason = _missing(name)
    if reason:
        pytest.skip(reason)
    return MOVERS[name]
