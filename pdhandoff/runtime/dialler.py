"""How a producer reaches consumers: one link per address, every address of a name, and again where DRAINED is owed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, final

from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff.protocol.link import LinkClosed
from pdhandoff.runtime.address import Address, Resolved, resolve, resolve_numeric
from pdhandoff.runtime.allow import Destinations
from pdhandoff.runtime.connections import Connections
from pdhandoff.runtime.outgoing import Outgoing
from pdhandoff.runtime.worker import Worker

__all__ = ["Dialler"]

_REDIAL_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"pauses before the attempts to reach a consumer again that must still hear DRAINED"
_UNREACHED: Final = frozenset({ErrorCode.LINK_LOST, ErrorCode.LIVENESS})
"how an attempt ends that another address of the same name may better"


class _Way:
    """The way to one consumer address: a link, or the attempt to get one, and who waits for it."""

    __slots__ = ("address", "attempts", "link", "opened", "others", "redial_at", "resolving", "waiting")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.link: int | None = None
        self.opened = False
        "the handshake of the present link is complete"
        self.others: list[Resolved] = []
        "to try when the present one cannot be reached"
        self.resolving = False
        self.waiting: list[Outgoing] = []
        self.attempts = 0
        self.redial_at: float | None = None


@final
class Dialler:
    """Belongs to the producer's loop.

    Args:
        connections: opens the links.
        resolver: looks names up, on a thread that may wait.
        allowed: what may be dialled, or looked up; None: everything.
        owed: whether a consumer must still hear DRAINED, now or later.
        lose: called with (outgoing, code, reason) when its consumer cannot be reached.
    """

    def __init__(
        self,
        *,
        connections: Connections,
        resolver: Worker,
        allowed: Destinations | None,
        owed: Callable[[], bool],
        lose: Callable[[Outgoing, int, str], None],
    ) -> None:
        self._connections = connections
        self._resolver = resolver
        self._allowed = allowed
        self._owed = owed
        self._lose = lose
        self._ways: dict[Address, _Way] = {}
        self._way_of: dict[int, _Way] = {}
        self._closed = False

    def reach(self, address: Address, outgoing: Outgoing) -> int | None:
        """The open link to a consumer. None: there is none yet, and `opened` will name this handoff, or it is lost."""
        way = self._ways.get(address)
        if way is None and self._allowed is not None:
            try:
                self._allowed.check(address)
            except LocalError as error:
                self._lose(outgoing, error.code, error.reason)
                return None
        if way is None:
            way = self._ways[address] = _Way(address)
        if way.link is not None and way.opened:
            return way.link
        way.waiting.append(outgoing)
        if way.link is None and not way.resolving:
            self._dial(way)
        return None

    def opened(self, link: int) -> list[Outgoing]:
        """A handshake is complete: the handoffs that waited for it."""
        way = self._way_of[link]
        way.attempts = 0
        way.opened = True
        waiting, way.waiting = way.waiting, []
        return waiting

    def ended(self, link: int, closed: LinkClosed, now: float) -> None:
        """A link is gone, or could not be had."""
        way = self._way_of.pop(link)
        way.link = None
        if way.others and not way.opened and closed.code in _UNREACHED and not self._closed:
            self._dial_next(way)
            return
        way.opened = False
        if not self._closed and way.attempts < len(_REDIAL_S) and self._owed():
            way.redial_at = now + _REDIAL_S[way.attempts]
            way.attempts += 1
        else:
            self._ways.pop(way.address, None)
        self._lose_all(way, closed.code, f"{way.address}: {closed.reason}")

    def cancel(self, outgoing: Outgoing) -> None:
        """It does not wait any more."""
        for way in self._ways.values():
            if outgoing in way.waiting:
                way.waiting.remove(outgoing)

    def close(self) -> None:
        """Dial no more."""
        self._closed = True
        for way in self._ways.values():
            way.redial_at = None

    def deadlines(self) -> Iterator[float | None]:
        """When `tick` wants to be called."""
        return (way.redial_at for way in self._ways.values())

    def tick(self, now: float) -> None:
        """Let time pass."""
        for way in list(self._ways.values()):
            if way.redial_at is not None and way.redial_at <= now:
                self._dial(way)

    # ---- inside

    def _lose_all(self, way: _Way, code: int, reason: str) -> None:
        waiting, way.waiting = way.waiting, []
        for outgoing in waiting:
            self._lose(outgoing, code, reason)

    def _dial(self, way: _Way) -> None:
        """Start to connect. Names are looked up on a thread of their own, so that none delays what needs no look-up."""
        way.redial_at = None
        numeric = resolve_numeric(way.address)
        if numeric:
            self._resolved(way, numeric)
            return
        way.resolving = True
        self._resolver.run(lambda: resolve(way.address), lambda found: self._resolved(way, found))

    def _resolved(self, way: _Way, found: list[Resolved] | PdHandoffError) -> None:
        way.resolving = False
        if isinstance(found, PdHandoffError) or self._closed:
            reason = found.reason if isinstance(found, PdHandoffError) else "the producer is closing"
            self._ways.pop(way.address, None)
            self._lose_all(way, ErrorCode.LINK_LOST, reason)
            return
        way.others = found
        self._dial_next(way)

    def _dial_next(self, way: _Way) -> None:
        """Try the next address of a name."""
        (family, where), *way.others = way.others
        way.opened = False
        link = self._connections.new_link()
        way.link = link
        self._way_of[link] = way
        self._connections.dial(link, family, where, host=way.address.host)
