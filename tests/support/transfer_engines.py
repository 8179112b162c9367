"""The movers that come with pdhandoff, made as every test of one process must make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

import pytest

from pdhandoff.engines.base import Mover
from pdhandoff.engines.loopback import create
from pdhandoff.engines.mooncake import create as create_mooncake
from pdhandoff.engines.nixl.mover import NixlMover
from pdhandoff.engines.nixl.mover import create as create_nixl
from pdhandoff.errors import MoverError
from support.movers import Side

__all__ = ["MOVERS", "TCP", "mooncake", "need_mover", "nixl"]

TCP: Final = "tcp,self"


def nixl(transports: str = TCP) -> NixlMover:
    """A mover that uses the loopback device only."""
    return create_nixl(transports=transports, ucx={"NET_DEVICES": "lo"})


def mooncake(*, stall_s: int = 5) -> Mover:
    """A mover as all tests of one process must have it: Mooncake's settings hold for the process."""
    return create_mooncake(log_level="silent", stall_s=stall_s, allowed_hosts=["127.0.0.1"])


MOVERS: Final[dict[str, Callable[..., Mover]]] = {"loopback": create, "nixl": nixl, "mooncake": mooncake}


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


def need_mover(name: str) -> Callable[..., Mover]:
    """What makes this mover. Skips the test where its library is missing, in the mover's own words."""
    reason = _missing(name)
    if reason:
        pytest.skip(reason)
    return MOVERS[name]
