"""What the sender knows of one outgoing handoff once its link is open."""

from __future__ import annotations

from typing import final

from pdhandoff.engines.base import Peer
from pdhandoff.planner import LandingRun
from pdhandoff.protocol.spans import IntervalSet
from pdhandoff.runtime.outgoing import Outgoing
from pdhandoff.runtime.routes import Routes

__all__ = ["Way"]


@final
class Way:
    """Belongs to the producer's loop."""

    __slots__ = (
        "advancing",
        "again",
        "generation",
        "granted",
        "landing",
        "outgoing",
        "peers",
        "pushed",
        "routes",
        "start",
    )

    def __init__(self, outgoing: Outgoing, routes: Routes) -> None:
        self.outgoing = outgoing
        self.routes = routes
        self.generation = 0
        self.granted = False
        self.advancing = False
        self.again = False
        "something has moved on while its chunks were looked at: look again"
        self.start = 0
        "first token that moves"
        self.peers: dict[int, Peer] = {}
        "consumer rank -> whom to write to"
        self.landing: dict[int, list[LandingRun]] = {}
        "consumer rank -> where its steps land"
        self.pushed = IntervalSet()
