"""DRAINED messages that a consumer may not have heard: kept until it must have, and said again over later links.

A last word that was said on a link may be lost with that link. It counts as heard once the consumer has answered an
OFFER that followed it on the same link, because messages of one link are taken in order.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

from pdhandoff.ids import Incarnation
from pdhandoff.protocol.messages import Drained

__all__ = ["OWED_DRAINS", "OWED_PEERS", "OwedDrains"]

OWED_DRAINS: Final = 1024
"messages kept for one consumer incarnation; the oldest goes first"
OWED_PEERS: Final = 256
"consumer incarnations for which any are kept; the oldest goes first"


class _Word:
    """One DRAINED, and the link that it, or another last word of its shard, was said on last."""

    __slots__ = ("drained", "link", "serial")

    def __init__(self, drained: Drained, link: int | None, serial: int) -> None:
        self.drained = drained
        self.link = link
        self.serial = serial


@final
class OwedDrains:
    """What this producer still owes, per consumer incarnation."""

    __slots__ = ("_peers", "_serial")

    def __init__(self) -> None:
        self._peers: dict[Incarnation, deque[_Word]] = {}
        self._serial = 0

    def __len__(self) -> int:
        """Messages that no open link has carried yet."""
        return sum(word.link is None for words in self._peers.values() for word in words)

    def mark(self) -> int:
        """A number that orders an OFFER after everything said so far."""
        self._serial += 1
        return self._serial

    def add(self, peer: Incarnation, drained: Drained, link: int | None) -> None:
        """A shard is over. `link`: the open link that carried its last word, None when there was none."""
        words = self._peers.get(peer)
        if words is None:
            if len(self._peers) >= OWED_PEERS:
                del self._peers[next(iter(self._peers))]
            words = self._peers[peer] = deque(maxlen=OWED_DRAINS)
        words.append(_Word(drained, link, self.mark()))

    def lost(self, link: int) -> None:
        """What was said on this link may not have been heard."""
        for words in self._peers.values():
            for word in words:
                if word.link == link:
                    word.link = None

    def say(self, peer: Incarnation, link: int) -> list[Drained]:
        """The messages to send over an open link to this consumer."""
        unsaid = [word for word in self._peers.get(peer, ()) if word.link is None]
        for word in unsaid:
            word.link, word.serial = link, self.mark()
        return [word.drained for word in unsaid]

    def heard(self, peer: Incarnation, link: int, mark: int) -> None:
        """The consumer has answered the OFFER with this mark, sent over this link: it has heard what went before."""
        words = self._peers.get(peer)
        if words is None:
            return
        rest = [word for word in words if word.link != link or word.serial > mark]
        if rest:
            self._peers[peer] = deque(rest, maxlen=OWED_DRAINS)
        else:
            del self._peers[peer]
