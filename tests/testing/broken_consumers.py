"""Consumers that break one rule each: a real one, behind a proxy that changes what is said, or with an odd mover.

What they do wrong is narrowed down until no other rule notices.
"""

# ruff: noqa: ARG002 - most changes do not look at everything that they are given

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from pdhandoff.engines.base import Extent, Mover, Peer
from pdhandoff.engines.forwarding import Forwarding
from pdhandoff.engines.loopback import create
from pdhandoff.errors import ErrorCode, MoverError
from pdhandoff.protocol.codec import UnknownMessage, encode_message
from pdhandoff.protocol.messages import (
    Bye,
    Cancel,
    Commit,
    Drained,
    Draining,
    Failed,
    Grant,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Progress,
    Queued,
    Ready,
    Refuse,
    Renew,
    Restart,
)
from pdhandoff.protocol.spans import Span
from support.tampering import Conversation, Tamper

__all__ = ["BROKEN_CONSUMERS", "Broken"]

Said = Message | UnknownMessage | None
E = ErrorCode


class Edit(Tamper):
    """Every message goes through `say` (down) or `hear` (up), which gives what takes its place."""

    def down(self, talk: Conversation, message: Said, frame: bytes) -> bytes:
        return self._with(frame, message, self.say(talk, message))

    def up(self, talk: Conversation, message: Said, frame: bytes) -> bytes:
        return self._with(frame, message, self.hear(talk, message))

    def say(self, talk: Conversation, message: Any) -> Any:
        """What the producer gets in place of a consumer's message; None: nothing."""
        return message

    def hear(self, talk: Conversation, message: Any) -> Any:
        """What the consumer gets in place of a producer's message; None: nothing."""
        return message

    @staticmethod
    def _with(frame: bytes, old: Said, new: Any) -> bytes:
        if old is None or new is old:
            return frame
        return b"" if new is None else encode_message(new)


def replace(message: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(message, **changes)


class Swap(Edit):
    """One thing that it says, said otherwise."""

    def __init__(self, matches: Callable[[Any], bool], change: Callable[[Any], Any]) -> None:
        self._matches = matches
        self._change = change

    def say(self, talk: Conversation, message: Any) -> Any:
        return self._change(message) if self._matches(message) else message


class Hear(Edit):
    """One thing that it hears, heard otherwise."""

    def __init__(self, matches: Callable[[Any], bool], change: Callable[[Any], Any]) -> None:
        self._matches = matches
        self._change = change

    def hear(self, talk: Conversation, message: Any) -> Any:
        return self._change(message) if self._matches(message) else message


def bye(code: ErrorCode, words: str = "") -> Callable[[Any], bool]:
    return lambda message: isinstance(message, Bye) and message.code == code and words in message.reason


def refuse(code: ErrorCode, words: str = "") -> Callable[[Any], bool]:
    return lambda message: isinstance(message, Refuse) and message.code == code and words in message.reason


def coded(code: ErrorCode) -> Callable[[Any], Any]:
    return lambda message: replace(message, code=code)


def nothing(_: Any) -> None:
    return None


# ---- the handshake


class TwoLives(Edit):
    def say(self, talk: Conversation, message: Any) -> Any:
        odd = isinstance(message, Hello) and talk.number % 2
        return replace(message, incarnation=bytes(16)) if odd else message


class RefusesNewerMinors(Edit):
    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Hello) and message.minor > 0:
            talk.to_producer(Bye(code=E.VERSION, reason="too new for me"))
            talk.hang_up()
            return None
        return message


class SpeaksFirst(Tamper):
    def opened(self, talk: Conversation) -> None:
        def speak() -> None:
            if not talk.incarnation and not talk.buffers[talk.producer]:
                talk.to_producer(Draining())

        threading.Timer(0.04, speak).start()


class EndsAtUnknownTypes(Edit):
    def up(self, talk: Conversation, message: Said, frame: bytes) -> bytes:
        if isinstance(message, UnknownMessage):
            talk.to_producer(Bye(code=E.MALFORMED, reason="what is that?"))
            talk.hang_up()
            return b""
        return frame


class TakesAnotherHello(Edit):
    def __init__(self) -> None:
        self._greeted: set[int] = set()

    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Hello):
            if talk.number in self._greeted:
                return None
            self._greeted.add(talk.number)
        return message


class Keeps(Edit):
    """Does not end what it has to."""

    def __init__(self, matches: Callable[[Any], bool]) -> None:
        self._matches = matches
        self._kept: set[int] = set()

    def say(self, talk: Conversation, message: Any) -> Any:
        if self._matches(message):
            self._kept.add(talk.number)
            return None
        return message

    def ended(self, talk: Conversation) -> bool:
        return talk.number not in self._kept


# ---- offers


class LosesRefusals(Edit):
    """Of offers that are in order, and that nobody announced."""

    def __init__(self) -> None:
        self._good: set[bytes] = set()
        self._entries: Any = None

    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Offer):
            self._entries = self._entries or message.manifest.entries
            manifest = message.manifest
            if manifest.entries == self._entries and manifest.start_token == 0 and len(message.attachments) == 2:
                self._good.add(message.handoff)
        return message

    def say(self, talk: Conversation, message: Any) -> Any:
        lost = refuse(E.NOT_ANNOUNCED)(message) and message.handoff in self._good
        return None if lost and "in time" in message.reason else message


class TakesLayersTwice(Edit):
    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Offer):
            entries = tuple(
                replace(each, layers=tuple(dict.fromkeys(each.layers))) for each in message.manifest.entries
            )
            return replace(message, manifest=replace(message.manifest, entries=entries))
        return message


class ForgetsRefusals(Edit):
    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Offer) and message.manifest.start_token:
            talk.to_producer(Refuse(handoff=message.handoff, code=E.MANIFEST_MISMATCH, reason="not at token 1"))
            return None
        return message


class AnswersGrants(Edit):
    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Grant):
            talk.to_producer(Refuse(handoff=message.handoff, code=E.UNEXPECTED, reason="why?"))
        return message


class AnswersTwice(Edit):
    """When it is busy."""

    def __init__(self) -> None:
        self._offers = 0

    def hear(self, talk: Conversation, message: Any) -> Any:
        self._offers += isinstance(message, Offer)
        return message

    def say(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Grant | Refuse):
            self._offers -= 1
            if self._offers >= 16 and isinstance(message, Grant):
                talk.to_producer(message, Refuse(handoff=message.handoff, code=E.BUSY, reason="or not"))
                return None
        return message


# ---- handoffs


class Remembers(Edit):
    """What was said about each handoff, both ways."""

    def __init__(self) -> None:
        self.offers: dict[bytes, Offer] = {}
        self.grants: dict[bytes, tuple[int, Grant]] = {}
        "handoff -> number of its connection, and its grant, while it goes on"
        self.heard: dict[bytes, list[Any]] = {}

    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Offer):
            self.offers.setdefault(message.handoff, message)
        if isinstance(message, Cancel):
            self.grants.pop(message.handoff, None)
        handoff = getattr(message, "handoff", None)
        if handoff is not None:
            self.heard.setdefault(handoff, []).append(message)
        return message

    def say(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Grant):
            self.grants[message.handoff] = (talk.number, message)
        elif isinstance(message, Failed | Ready | Cancel):
            self.grants.pop(message.handoff, None)
        return message

    def said(self, handoff: bytes, kind: type) -> list[Any]:
        return [each for each in self.heard.get(handoff, ()) if isinstance(each, kind)]

    def manifest(self, handoff: bytes) -> Any:
        return self.offers[handoff].manifest


class FailsDigests(Remembers):
    """What came with a payload digest never gets through."""

    def say(self, talk: Conversation, message: Any) -> Any:
        super().say(talk, message)
        if isinstance(message, Ready) and any(each.payload_digest for each in self.said(message.handoff, Commit)):
            return Failed(handoff=message.handoff, generation=message.generation, code=E.INTERNAL, reason="no")
        return message


class SaysReadyTwice(Remembers):
    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Commit) and message in self.said(message.handoff, Commit):
            talk.to_producer(Ready(handoff=message.handoff, generation=message.generation))
        return super().hear(talk, message)


class CountsRows(Edit):
    """By number: rows that are reported three times make up for those that never came."""

    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Progress) and len(set(message.spans)) < len(message.spans):
            entries = {span.entry for span in message.spans} | {0, 1}
            stop = max(span.token_stop for span in message.spans)
            layers = max(span.layer_stop for span in message.spans)
            return replace(message, spans=tuple(Span(entry, 0, layers, 0, stop) for entry in sorted(entries)))
        return message


class BelievesCommits(Remembers):
    def hear(self, talk: Conversation, message: Any) -> Any:
        super().hear(talk, message)
        if isinstance(message, Commit) and message.handoff in self.offers:
            manifest = self.manifest(message.handoff)
            return replace(message, manifest_digest=manifest.digest(), nbytes=manifest.nbytes)
        return message


class SkipsDigests(Remembers):
    def __init__(self, *, promised: bool) -> None:
        super().__init__()
        self._promised = promised

    def say(self, talk: Conversation, message: Any) -> Any:
        super().say(talk, message)
        if isinstance(message, Failed) and message.code == E.DIGEST_MISMATCH:
            came = any(each.payload_digest for each in self.said(message.handoff, Commit))
            if came is not self._promised:
                return Ready(handoff=message.handoff, generation=message.generation)
        return message


class FailsTheOther(Remembers):
    """Of two handoffs on a link both fail when one does."""

    def say(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Failed) and message.code == E.MANIFEST_MISMATCH:
            mine = [grant for number, grant in self.grants.values() if number == talk.number]
            if len(mine) == 2:
                for grant in mine:
                    talk.to_producer(replace(message, handoff=grant.handoff, generation=grant.generation))
                return None
        return super().say(talk, message)


class IgnoresGenerations(Remembers):
    def hear(self, talk: Conversation, message: Any) -> Any:
        super().hear(talk, message)
        if isinstance(message, Commit) and message.handoff in self.grants:
            return replace(message, generation=self.grants[message.handoff][1].generation)
        return message


class FailsRestarts(Remembers):
    def say(self, talk: Conversation, message: Any) -> Any:
        super().say(talk, message)
        if isinstance(message, Ready) and self.said(message.handoff, Restart):
            return Failed(handoff=message.handoff, generation=message.generation, code=E.INTERNAL, reason="no")
        return message


class TakesCommitsAfterCancel(Remembers):
    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Commit) and self.said(message.handoff, Cancel) and message.handoff in self.offers:
            talk.to_producer(Ready(handoff=message.handoff, generation=message.generation))
        return super().hear(talk, message)


class GrantsAgain(Remembers):
    """A handoff whose link was lost starts again under another name."""

    def __init__(self) -> None:
        super().__init__()
        self._lost: set[int] = set()
        self._names: dict[bytes, bytes] = {}

    def hung_up(self, talk: Conversation) -> bytes:
        self._lost.add(talk.number)
        return b""

    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Offer) and message.handoff in self.grants:
            number, _ = self.grants[message.handoff]
            if number in self._lost:
                self._names[message.handoff] = message.handoff[::-1]
        super().hear(talk, message)
        return self._renamed(message, self._names)

    def say(self, talk: Conversation, message: Any) -> Any:
        super().say(talk, message)
        return self._renamed(message, {new: old for old, new in self._names.items()})

    @staticmethod
    def _renamed(message: Any, names: dict[bytes, bytes]) -> Any:
        handoff = getattr(message, "handoff", b"")
        return replace(message, handoff=names[handoff]) if handoff in names else message


# ---- memory


class FreesWhatFailed(Edit):
    def say(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Failed) and message.code == E.MANIFEST_MISMATCH:
            talk.to_consumer(Drained(handoff=message.handoff, generation=message.generation, shard=0))
        return message


class FreesWithTheLink(Remembers):
    def hung_up(self, talk: Conversation) -> bytes:
        mine = [grant for number, grant in self.grants.values() if number == talk.number]
        drained = [Drained(handoff=each.handoff, generation=each.generation, shard=0) for each in mine]
        return b"".join(map(encode_message, drained))


class Leaks(Edit):
    """The second cancelled handoff's memory: the first of those that filled it."""

    def __init__(self, mover: Stubborn) -> None:
        self._mover = mover
        self._cancels = 0
        self._grants: dict[bytes, Grant] = {}

    def say(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Grant):
            self._grants[message.handoff] = message
        return message

    def hear(self, talk: Conversation, message: Any) -> Any:
        if isinstance(message, Cancel) and message.handoff in self._grants:
            self._cancels += 1
            if self._cancels == 2:
                self._mover.kept = self._grants[message.handoff].ranks[0].extents[0][0]
                return replace(message, drained=False)
        return message


class Stubborn(Forwarding):
    """Does not fence one extent."""

    kept = -1

    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        if any(extent.address == self.kept for extent in extents):
            raise MoverError(E.MOVER_FAILED, "not this one")
        super().fence(peer, extents, deadline)


class Oversharing(Forwarding):
    """Each description opens all memory."""

    def __init__(self, mover: Mover) -> None:
        super().__init__(mover)
        self._whole: list[Extent] = []

    def register(self, memory: Any) -> Any:
        self._whole = [Extent(memory.address, memory.length)]
        return super().register(memory)

    def describe(self, extents: Sequence[Extent]) -> bytes:
        return super().describe(self._whole if extents else extents)


class SlowToBury(Forwarding):
    """Takes long to see that a peer has ended."""

    def __init__(self, mover: Mover) -> None:
        super().__init__(mover)
        self._since: dict[str, float] = {}

    def quiesce(self, peer: Peer, deadline: float) -> bool:
        return super().quiesce(peer, deadline) and not self._young(peer)

    def fence(self, peer: Peer, extents: Sequence[Extent], deadline: float) -> None:
        if super().quiesce(peer, time.monotonic()) and self._young(peer):
            raise MoverError(E.MOVER_FAILED, "not yet")
        super().fence(peer, extents, deadline)

    def _young(self, peer: Peer) -> bool:
        now = time.monotonic()
        return now - self._since.setdefault(peer.key, now) < 11.0


class Broken(NamedTuple):
    """How to make it."""

    tamper: Callable[[Any], Tamper] = lambda _: Tamper()
    "gets the mover"
    mover: Callable[[], Mover] = create
    announced: bool = False
    "it takes announced handoffs only"


def swap(matches: Callable[[Any], bool], change: Callable[[Any], Any]) -> Broken:
    return Broken(lambda _: Swap(matches, change))


def hear(matches: Callable[[Any], bool], change: Callable[[Any], Any]) -> Broken:
    return Broken(lambda _: Hear(matches, change))


def made(kind: Callable[[], Tamper]) -> Broken:
    return Broken(lambda _: kind())


BROKEN_CONSUMERS = {
    "P-01": made(TwoLives),
    "P-02": swap(bye(E.VERSION), lambda message: replace(message, reason="another version")),
    "P-03": made(RefusesNewerMinors),
    "P-04": made(SpeaksFirst),
    "P-05": swap(bye(E.AUTHENTICATION), coded(E.UNEXPECTED)),
    "P-06": swap(bye(E.MALFORMED, "not a message"), nothing),
    "P-07": swap(bye(E.OVERSIZED), nothing),
    "P-08": made(EndsAtUnknownTypes),
    "P-09": made(TakesAnotherHello),
    "P-10": swap(
        lambda message: isinstance(message, Pong) and message.number == 150,
        lambda message: replace(message, number=151),
    ),
    "P-11": swap(bye(E.MOVER_MISMATCH), coded(E.LAYOUT_MISMATCH)),
    "P-12": swap(bye(E.LAYOUT_MISMATCH), coded(E.UNEXPECTED)),
    "P-13": swap(lambda message: isinstance(message, Ping), nothing),
    "P-14": Broken(lambda _: Keeps(bye(E.LIVENESS, "no message"))),
    "P-15": Broken(lambda _: Keeps(bye(E.LIVENESS, "handshake"))),
    "P-16": Broken(lambda _: LosesRefusals(), announced=True),
    "P-17": made(TakesLayersTwice),
    "P-18": hear(
        lambda message: isinstance(message, Offer) and len(message.declares) == 1,
        lambda message: replace(message, declares=()),
    ),
    "P-19": made(ForgetsRefusals),
    "P-20": hear(lambda message: isinstance(message, Renew) and message.generation == 3, nothing),
    "P-21": made(AnswersGrants),
    "P-22": made(FailsDigests),
    "P-23": swap(refuse(E.TOO_LARGE), coded(E.BUSY)),
    "P-24": hear(lambda message: isinstance(message, Drained) and message.generation == 0, nothing),
    "P-25": made(AnswersTwice),
    "P-26": Broken(mover=lambda: Oversharing(create())),
    "P-27": made(SaysReadyTwice),
    "P-28": made(CountsRows),
    "P-29": made(BelievesCommits),
    "P-30": Broken(lambda _: SkipsDigests(promised=False)),
    "P-31": Broken(lambda _: SkipsDigests(promised=True)),
    "P-32": made(FailsTheOther),
    "P-33": made(IgnoresGenerations),
    "P-34": hear(lambda message: isinstance(message, Restart), nothing),
    "P-35": made(FailsRestarts),
    "P-36": made(TakesCommitsAfterCancel),
    "P-37": swap(refuse(E.DUPLICATE, "somebody else"), coded(E.BUSY)),
    "P-38": swap(lambda message: isinstance(message, Failed) and message.code == E.LEASE_EXPIRED, nothing),
    "P-39": made(GrantsAgain),
    "P-40": made(FreesWhatFailed),
    "P-41": made(FreesWithTheLink),
    "P-42": swap(lambda message: isinstance(message, Queued), lambda m: replace(m, position=m.position + 1)),
    "P-43": swap(refuse(E.QUEUE_TIMEOUT), coded(E.BUSY)),
    "P-44": Broken(mover=lambda: SlowToBury(create())),
    "P-45": Broken(Leaks, mover=lambda: Stubborn(create())),
}
"rule -> the consumer that breaks it"
