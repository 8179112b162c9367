"""P-16 to P-21, P-23 to P-25: offers and what must become of them, before any row moves."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdhandoff.errors import ErrorCode
from pdhandoff.ids import HandoffId
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.attachments import attach_int
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.messages import (
    AttachmentSpec,
    Cancel,
    Commit,
    Drained,
    Failed,
    Grant,
    GrantedRank,
    Offer,
    Progress,
    Queued,
    Ready,
    Refuse,
    Renew,
    Restart,
)
from pdhandoff.protocol.spans import Span
from pdhandoff.testing.peers.line import Line
from pdhandoff.testing.peers.visit import Visit, name_of
from pdhandoff.testing.rule import Rule, Violation, require

__all__ = ["ANNOUNCED_RULES", "RULES"]

_ONE: Final = "an announced handoff"
_ANSWERS: Final = (Grant, Queued, Refuse, Ready, Failed, Cancel)


def _answers(line: Line, handoff: HandoffId) -> list[str]:
    """Names of all that was said about a handoff."""
    return [
        type(message).__name__.upper()
        for message in line.heard
        if isinstance(message, _ANSWERS) and message.handoff == handoff
    ]


def _refusal(v: Visit, line: Line, offer: Offer, what: str, *codes: ErrorCode) -> Refuse:
    """The offer must be refused, with one of these codes if there are any."""
    handoff = HandoffId(offer.handoff)
    line.say(offer)
    answer = v.answer(line, handoff, f"an answer to {what}")
    if isinstance(answer, Grant):
        v.hold(line, offer, answer)
        raise Violation(f"{what} was granted")
    require(answer.code and answer.reason, f"{what} was refused without a code, or without a reason")
    wanted = " or ".join(code.name for code in codes)
    require(
        not codes or answer.code in set(codes), f"{what} was refused with {name_of(answer.code)}, not with {wanted}"
    )
    return answer


def _never_silence(v: Visit) -> None:
    line = v.open()
    handoff = HandoffId.mint()
    offer = v.offer_of(handoff)
    line.say(offer)
    answer = v.answer(line, handoff, "an answer to an offer that nobody announced")
    if isinstance(answer, Grant):
        v.hold(line, offer, answer)
    else:
        wanted = answer.code == ErrorCode.NOT_ANNOUNCED and answer.reason
        require(wanted, f"an offer that nobody announced was refused with {name_of(answer.code)}, not NOT_ANNOUNCED")
    v.quiet()
    said = [each for each in _answers(line, handoff) if each != "QUEUED"]
    require(len(said) == 1, f"one offer got {len(said)} answers: {', '.join(said)}")


def _bad_manifests(good: Manifest) -> dict[str, Manifest]:
    replace = msgspec.structs.replace
    entry = good.entries[0]
    rest = good.entries[1:]

    def with_entry(**changes: Any) -> Manifest:
        return replace(good, entries=(replace(entry, **changes), *rest))

    return {
        "that starts at token 1": replace(good, start_token=1),
        "of a prompt without tokens": replace(good, prompt_tokens=0),
        "of a prompt over every limit": replace(good, prompt_tokens=DEFAULT_LIMITS.max_prompt_tokens + 1),
        "of another shard than the link's": replace(good, shard=1, shards=2),
        "of a shard that is none": replace(good, shard=good.shards, shards=good.shards),
        "without one of its components": replace(good, entries=rest),
        "with a component twice": replace(good, entries=(entry, *good.entries)),
        "of a component that the layout lacks": with_entry(component="no such component"),
        "with other rows than the layout's": with_entry(row_bytes=entry.row_bytes + 1, page_bytes=entry.page_bytes * 2),
        "of a layer that the layout lacks": with_entry(layers=(*entry.layers, max(entry.layers) + 1000)),
        "with a layer twice": with_entry(layers=(*entry.layers, entry.layers[0])),
        "for a rank that there is not": with_entry(destination=DEFAULT_LIMITS.max_ranks - 1),
    }


def _refuses_wrong_manifests(v: Visit) -> None:
    line = v.open()
    good = v.offer_of(HandoffId.mint()).manifest
    for what, manifest in _bad_manifests(good).items():
        offer = v.offer_of(HandoffId.mint(), manifest=manifest)
        _refusal(v, line, offer, f"an offer {what}")
    v.alive(line, "offers that do not fit")


def _refuses_what_never_fits(v: Visit) -> None:
    (handoff,) = v.announced.take()
    line = v.open()
    offer = v.offer_of(handoff, DEFAULT_LIMITS.max_prompt_tokens, queue_ms=int(v.patience.answer_s * 8000))
    _refusal(v, line, offer, "an offer of 16 million tokens", ErrorCode.TOO_LARGE)


def _checks_attachments(v: Visit) -> None:
    line = v.open()
    codes = (ErrorCode.ATTACHMENT, ErrorCode.NOT_ANNOUNCED)
    unknown = AttachmentSpec(name="pdhandoff.conformance.unknown", dtype="i64", required=True)
    twice = attach_int("pdhandoff.conformance.twice", 1)
    lies = msgspec.structs.replace(twice, data=b"\0" * 7)
    odd = AttachmentSpec(name="pdhandoff.conformance.odd", dtype="i63")
    offers: dict[str, dict[str, Any]] = {
        "an offer that requires an unknown attachment": {"declares": (unknown,)},
        "an offer with one attachment twice": {"attachments": (*v.attachments, twice, twice)},
        "an offer with an attachment that is not as long as it says": {"attachments": (*v.attachments, lies)},
        "an offer with an attachment of an unknown type": {"declares": (odd,)},
    }
    for what, changes in offers.items():
        _refusal(v, line, v.offer_of(HandoffId.mint(), **changes), what, *codes)


def _a_refusal_stays(v: Visit) -> None:
    line = v.open()
    handoff = HandoffId.mint()
    good = v.offer_of(handoff)
    bad = msgspec.structs.replace(good, manifest=msgspec.structs.replace(good.manifest, start_token=1))
    _refusal(v, line, bad, "an offer that starts at token 1")
    _refusal(v, line, good, "an offer with the id of one that was refused")


def _drained_before_a_grant(v: Visit) -> None:
    (handoff,) = v.announced.take()
    line = v.open()
    line.say(Drained(handoff=bytes(handoff), generation=0, shard=0))
    _refusal(v, line, v.offer_of(handoff), "an offer after the DRAINED that forbids a grant")


def _knows_what_it_does_not_know(v: Visit) -> None:
    line = v.open()
    handoff = bytes(HandoffId.mint())
    rest: dict[str, Any] = {"handoff": handoff, "generation": 3, "shard": 0}
    line.say(
        Progress(**rest, spans=(Span(0, 0, 1, 0, 1),)),
        Restart(**rest),
        Commit(**rest, manifest_digest=b"\0" * 16, nbytes=0),
        Cancel(**rest, reason="nothing"),
        Failed(**rest, code=ErrorCode.CANCELLED, reason="nothing"),
        Drained(**rest),
    )
    v.alive(line, "messages about a handoff that does not exist")
    line.say(Renew(**rest))
    failed = v.expect(
        line, Failed, "an answer to the RENEW of an unknown handoff", lambda each: each.handoff == handoff
    )
    require(
        failed.code == ErrorCode.UNKNOWN_HANDOFF,
        f"the RENEW of an unknown handoff is answered by {name_of(failed.code)}, not UNKNOWN_HANDOFF",
    )
    said = _answers(line, HandoffId(handoff))
    require(said == ["FAILED"], f"about an unknown handoff it says {', '.join(said)}")


def _drops_what_consumers_say(v: Visit) -> None:
    line = v.open()
    handoff = bytes(HandoffId.mint())
    line.say(
        Grant(handoff=handoff, generation=1, shard=0, lease_ms=1000, ranks=(GrantedRank(0, ((4096, 64),), b""),)),
        Queued(handoff=handoff, position=0),
        Refuse(handoff=handoff, code=ErrorCode.BUSY, reason="no"),
        Ready(handoff=handoff, generation=1),
    )
    v.alive(line, "messages that only consumers send")
    said = _answers(line, HandoffId(handoff))
    require(not said, f"messages that only consumers send are answered by {', '.join(said)}")


def _answers_every_offer(v: Visit) -> None:
    """Without memory for all of them, some wait, and every one that is given up makes room."""
    ids = v.announced.take(v.patience.many)
    line = v.open()
    patient = int(v.patience.answer_s * 1000)
    offers = {handoff: v.offer_of(handoff, queue_ms=patient) for handoff in ids}
    line.say(*offers.values())
    for _ in offers:
        answer: Grant | Refuse = v.expect(
            line,
            (Grant, Refuse),
            f"an answer to each of {len(offers)} offers at once",
            within_s=2 * v.patience.answer_s,
        )
        handoff = HandoffId(answer.handoff)
        require(handoff in offers, "an answer names a handoff that was not offered")
        if isinstance(answer, Grant):
            v.give_up(v.hold(line, offers[handoff], answer))
        else:
            typed = answer.code in {ErrorCode.BUSY, ErrorCode.QUEUE_TIMEOUT} and answer.reason
            require(typed, f"one of many offers was refused with {name_of(answer.code)}: {answer.reason}")
    v.alive(line, "many offers")
    for handoff in ids:
        said = [each for each in _answers(line, handoff) if each != "QUEUED"]
        require(len(said) == 1, f"one offer got {len(said)} answers: {', '.join(said)}")


RULES = (
    Rule(
        number="P-16",
        title="unannounced offers",
        must="An offer that nobody announced MUST get one answer in bounded time: by the consumer's policy a GRANT, or "
        "REFUSE with NOT_ANNOUNCED.",
        check=_never_silence,
    ),
    Rule(
        number="P-17",
        title="manifests that do not fit",
        must="An offer whose manifest contradicts the link, the layouts or itself MUST be refused with a code and a "
        "reason, and nothing else ends.",
        check=_refuses_wrong_manifests,
    ),
    Rule(
        number="P-18",
        title="attachments",
        must="Attachments that are required and unknown, repeated, or not what they say MUST be refused with "
        "ATTACHMENT.",
        check=_checks_attachments,
    ),
    Rule(
        number="P-19",
        title="refused stays refused",
        must="An offer with the id of a handoff that was refused MUST be refused.",
        check=_a_refusal_stays,
    ),
    Rule(
        number="P-20",
        title="unknown handoffs",
        must="Messages about unknown handoffs MUST be dropped, and RENEW be answered by FAILED with UNKNOWN_HANDOFF.",
        check=_knows_what_it_does_not_know,
    ),
    Rule(
        number="P-21",
        title="messages of the other side",
        must="Messages that only consumers send MUST be dropped.",
        check=_drops_what_consumers_say,
    ),
)
ANNOUNCED_RULES = (
    Rule(
        number="P-23",
        title="what never fits",
        must="An offer that can never fit MUST be refused with TOO_LARGE at once, however long it would wait.",
        check=_refuses_what_never_fits,
        asks=_ONE,
    ),
    Rule(
        number="P-24",
        title="drained before a grant",
        must="A handoff MUST NOT be granted after DRAINED without a generation.",
        check=_drained_before_a_grant,
        asks=_ONE,
    ),
    Rule(
        number="P-25",
        title="many offers",
        must="Each of many offers at the same time MUST get exactly one GRANT or REFUSE, and may be QUEUED before.",
        check=_answers_every_offer,
        asks="announced handoffs",
    ),
)
