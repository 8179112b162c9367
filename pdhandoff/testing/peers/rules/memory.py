"""P-40 to P-45: whose the landing memory is. Each check takes all of it, so the consumer must be idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from pdhandoff.errors import ErrorCode
from pdhandoff.ids import HandoffId
from pdhandoff.protocol.messages import Bye, Drained, Failed, Grant, Offer, Progress, Queued, Refuse
from pdhandoff.protocol.spans import Span
from pdhandoff.testing.peers.handoffs import SkipRule
from pdhandoff.testing.peers.line import Line
from pdhandoff.testing.peers.visit import Held, Visit, name_of
from pdhandoff.testing.rule import Rule, Violation, require

__all__ = ["RULES"]

_MANY: Final = "announced handoffs without end"
_AGAIN_S: Final = 0.5
"between two looks at how much memory is free"


def _drained(held: Held) -> Drained:
    return Drained(handoff=held.offer.handoff, generation=held.grant.generation, shard=held.grant.shard)


def _about(handoff: bytes) -> Callable[[Any], bool]:
    """Whether a message speaks of a handoff."""
    return lambda message: message.handoff == handoff


def _fill(v: Visit, line: Line) -> list[Held]:
    """Take all memory. There is some on an idle consumer."""
    held = v.fill(line)
    require(held, "not even the rows of one token could be offered: no memory is free on an idle consumer")
    return held


def _fail_one(v: Visit, held: Held) -> None:
    """Make the consumer fail a handoff whose writer has not said that it is done."""
    held.line.say(
        Progress(
            handoff=held.offer.handoff,
            generation=held.grant.generation,
            shard=held.grant.shard,
            spans=(Span(0, 0, 1, 0, held.manifest.prompt_tokens + 1),),
        )
    )
    v.expect(held.line, Failed, "FAILED after rows behind the prompt", _about(held.offer.handoff))


def _probe(v: Visit, line: Line, tokens: int, what: str) -> Offer:
    """Offer a prompt that needs the memory of an ended handoff: it must not be granted now."""
    (handoff,) = v.announced.take()
    offer = v.offer_of(handoff, tokens, queue_ms=int(v.patience.answer_s * 1000))
    line.say(offer)
    v.quiet()
    _not_granted(v, line, offer, what)
    return offer


def _not_granted(v: Visit, line: Line, offer: Offer, what: str) -> None:
    for message in line.heard:
        if isinstance(message, Grant) and message.handoff == offer.handoff:
            v.hold(line, offer, message)
            raise Violation(f"memory was granted again {what}")


def _take(v: Visit, line: Line, offer: Offer, what: str, within_s: float | None = None) -> None:
    """The offer that was waiting must be granted now."""
    answer = v.answer(line, HandoffId(offer.handoff), f"a GRANT {what}", within_s)
    if isinstance(answer, Refuse):
        raise Violation(f"{what} an offer was refused with {name_of(answer.code)}, not granted")
    v.hold(line, offer, answer)


def _ended_is_not_free(v: Visit) -> None:
    v.announced.need_endless()
    line = v.open()
    largest = _fill(v, line)[0]
    tokens = largest.manifest.prompt_tokens
    _fail_one(v, largest)
    largest.silent = True
    waiting = _probe(v, line, tokens, "before its writer had said DRAINED")
    largest.over = True
    line.say(_drained(largest))
    _take(v, line, waiting, "after DRAINED")


def _strangers_do_not_drain(v: Visit) -> None:
    v.announced.need_endless()
    line, observer = v.open(), v.open()
    largest = _fill(v, line)[0]
    tokens = largest.manifest.prompt_tokens
    owner = line.incarnation
    line.hang_up()
    waiting = _probe(v, observer, tokens, "because its producer's link was lost")
    v.open().say(_drained(largest))
    v.quiet()
    _not_granted(v, observer, waiting, "after somebody else had said DRAINED")
    again = v.open(incarnation=owner)
    largest.line = again
    largest.over = True
    again.say(_drained(largest))
    _take(v, observer, waiting, "after the producer had said DRAINED over a later link")


def _queues(v: Visit) -> None:
    v.announced.need_endless()
    line = v.open()
    held = _fill(v, line)
    tokens = held[0].manifest.prompt_tokens
    patient = int(v.patience.answer_s * 4000)
    (now_or_never,) = v.announced.take()
    line.say(v.offer_of(now_or_never, tokens))
    answer = v.answer(line, now_or_never, "an answer to an offer that does not wait")
    busy = isinstance(answer, Refuse) and answer.code == ErrorCode.BUSY
    require(busy, "an offer that does not wait was not refused with BUSY where no memory is free")
    waiting = v.announced.take(v.patience.queued)
    for position, handoff in enumerate(waiting):
        line.say(v.offer_of(handoff, tokens, queue_ms=patient))
        queued = v.expect(line, Queued, "QUEUED for an offer that waits", _about(handoff))
        require(queued.position == position, f"the place in the queue is {queued.position}, not {position}")
    for each in held:
        v.give_up(each)
    for handoff in waiting:
        answer = v.expect(line, (Grant, Refuse), "a GRANT for the first in the queue")
        require(isinstance(answer, Grant), f"an offer in the queue was refused: {getattr(answer, 'reason', '')}")
        require(answer.handoff == handoff, "the queue was not granted in the order of its offers")
        if isinstance(answer, Grant):
            v.give_up(v.hold(line, v.offer_of(handoff, tokens), answer))


def _queues_end(v: Visit) -> None:
    v.announced.need_endless()
    line = v.open()
    held = _fill(v, line)
    wait_s = max(0.2, v.patience.quiet_s)
    (handoff,) = v.announced.take()
    line.say(v.offer_of(handoff, held[0].manifest.prompt_tokens, queue_ms=int(wait_s * 1000)))
    answer = v.answer(line, handoff, "the end of a wait in the queue", wait_s + v.patience.slack_s)
    ended = isinstance(answer, Refuse) and answer.code == ErrorCode.QUEUE_TIMEOUT
    require(ended, "an offer that had waited as long as it may was not refused with QUEUE_TIMEOUT")


def _the_dead_do_not_keep_it(v: Visit) -> None:
    v.announced.need_endless()
    can = v.rows.mover.capabilities
    if not (can.quiesce or can.fence):
        raise SkipRule("the mover can neither prove that a writer has ended (`quiesce`) nor shut it out (`fence`)")
    mover = v.new_mover()
    v.close_later(mover)
    observer = v.open()
    line = v.open(identity=mover.describe(()))
    largest = _fill(v, line)[0]
    for held in list(v.held_of(line)):
        held.over = True
    (handoff,) = v.announced.take()
    waiting = v.offer_of(handoff, largest.manifest.prompt_tokens, queue_ms=int(v.patience.free_s * 1000))
    observer.say(waiting)
    v.expect(observer, Queued, "QUEUED for an offer that waits", _about(handoff))
    mover.close()
    line.say(Bye(reason="this producer has ended"))
    line.hang_up()
    _take(v, observer, waiting, "after its producer had ended", v.patience.free_s)


def _everything_is_free(v: Visit) -> None:
    v.announced.need_endless()
    if v.capacity is None:
        raise SkipRule(f"how much was free when the run began is not known: {v.announced.why_not}")
    deadline = time.monotonic() + v.patience.free_s
    while True:
        line = v.open()
        held = v.fill(line)
        nbytes = sum(each.nbytes for each in held)
        for each in held:
            v.give_up(each)
        if nbytes >= v.capacity:
            return
        left = deadline - time.monotonic()
        require(left > 0, f"{nbytes} bytes can be granted, {v.capacity} could be when the run began: the rest is lost")
        v.quiet(min(_AGAIN_S, left))


RULES = (
    Rule(
        number="P-40",
        title="ended is not free",
        must="Memory of a handoff that has ended MUST NOT be granted again before its writer has ended, and MUST be "
        "after DRAINED.",
        check=_ended_is_not_free,
        asks=_MANY,
    ),
    Rule(
        number="P-41",
        title="who may say DRAINED",
        must="Neither the loss of a link nor another incarnation's DRAINED MUST free memory; the producer's own, over "
        "a later link, MUST.",
        check=_strangers_do_not_drain,
        asks=_MANY,
    ),
    Rule(
        number="P-42",
        title="the queue",
        must="Without free memory an offer that waits MUST be QUEUED and granted in turn, and one that does not wait "
        "refused with BUSY.",
        check=_queues,
        asks=_MANY,
    ),
    Rule(
        number="P-43",
        title="queues end",
        must="An offer MUST wait no longer than it allowed, and then be refused with QUEUE_TIMEOUT.",
        check=_queues_end,
        asks=_MANY,
    ),
    Rule(
        number="P-44",
        title="the dead keep nothing",
        must="Memory of a producer that has ended MUST be free again in time, where the mover can prove it or fence.",
        check=_the_dead_do_not_keep_it,
        asks=_MANY,
    ),
    Rule(
        number="P-45",
        title="everything is free",
        must="After all of this, as much memory MUST be free as before.",
        check=_everything_is_free,
        asks=_MANY,
    ),
)
