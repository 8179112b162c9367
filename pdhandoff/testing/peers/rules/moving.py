"""P-22 and P-26 to P-39: from GRANT to READY, and every way in which a handoff must fail instead."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any, Final

import msgspec

from pdhandoff.errors import ErrorCode
from pdhandoff.protocol.messages import Cancel, Commit, Failed, Grant, Progress, Ready, Refuse, Restart
from pdhandoff.protocol.spans import Span
from pdhandoff.testing.peers.handoffs import SkipRule
from pdhandoff.testing.peers.line import Line
from pdhandoff.testing.peers.rows import all_spans
from pdhandoff.testing.peers.visit import Held, Visit, name_of
from pdhandoff.testing.rule import Rule, Violation, require

__all__ = ["FIRST_RULE", "RULES"]

_ONE: Final = "an announced handoff"
_TWO: Final = "two announced handoffs"


def _progress(held: Held, **changes: Any) -> Progress:
    said = Progress(
        handoff=held.offer.handoff,
        generation=held.grant.generation,
        shard=held.grant.shard,
        spans=all_spans(held.manifest),
    )
    return msgspec.structs.replace(said, **changes)


def _commit(v: Visit, held: Held, **changes: Any) -> Commit:
    said = Commit(
        handoff=held.offer.handoff,
        generation=held.grant.generation,
        shard=held.grant.shard,
        manifest_digest=held.manifest.digest(),
        nbytes=held.manifest.nbytes,
        payload_digest=v.rows.digest(held.manifest) if held.offer.digest else b"",
    )
    return msgspec.structs.replace(said, **changes)


def _say_commit(v: Visit, held: Held, **changes: Any) -> None:
    """Once all is said about it, a producer is silent."""
    held.silent = True
    held.line.say(_commit(v, held, **changes))


def _outcome(v: Visit, held: Held, after: str, within_s: float | None = None) -> Ready | Failed | Cancel:
    outcome: Ready | Failed | Cancel = v.expect(
        held.line,
        (Ready, Failed, Cancel),
        f"READY or FAILED after {after}",
        lambda message: message.handoff == held.offer.handoff,
        within_s,
    )
    held.ready = isinstance(outcome, Ready)
    return outcome


def _ready(v: Visit, held: Held, after: str) -> None:
    outcome = _outcome(v, held, after)
    if not isinstance(outcome, Ready):
        code = name_of(outcome.code) if isinstance(outcome, Failed) else "CANCEL"
        raise Violation(f"after {after} the handoff ended with {code}: {outcome.reason}")
    require(outcome.generation == held.grant.generation, "READY speaks of another generation than GRANT did")


def _failed(v: Visit, held: Held, after: str, *codes: ErrorCode, within_s: float | None = None) -> None:
    outcome = _outcome(v, held, after, within_s)
    wanted = " or ".join(code.name for code in codes)
    if not isinstance(outcome, Failed):
        raise Violation(f"{after} led to {type(outcome).__name__.upper()}, not to FAILED with {wanted}")
    require(outcome.code in codes, f"{after} led to {name_of(outcome.code)}, not to {wanted}")
    require(outcome.reason, f"{after} led to FAILED without a reason")


def _land(v: Visit, held: Held) -> None:
    """Write every row and say so."""
    v.rows.write(held.manifest, held.grant)
    held.line.say(_progress(held))


def _wants_digest(v: Visit) -> bool:
    return not v.rows.no_digest


def _goes_through(v: Visit) -> None:
    (handoff,) = v.announced.take()
    line = v.open()
    held = v.granted(line, handoff, digest=_wants_digest(v))
    grant = held.grant
    require(grant.lease_ms > 0, "the GRANT has no lease")
    require(grant.shard == held.manifest.shard, f"the GRANT is for shard {grant.shard}")
    v.rows.check_extents(held.manifest, grant)
    _land(v, held)
    _say_commit(v, held)
    _ready(v, held, "rows that all landed, and COMMIT")


def _grants_are_apart(v: Visit) -> None:
    first_id, second_id = v.announced.take(2)
    line = v.open()
    first, second = v.granted(line, first_id), v.granted(line, second_id)
    for held in (first, second):
        v.rows.check_extents(held.manifest, held.grant)
    ours = sorted(extent for held in (first, second) for rank in held.grant.ranks for extent in rank.extents)
    for (start, length), (following, _) in pairwise(ours):
        require(start + length <= following, f"two grants share memory at {following:#x}")
    require(first.grant.generation != second.grant.generation, "two grants have one generation")
    for one, other in ((first, second), (second, first)):
        for rank in one.grant.ranks:
            theirs = next(each for each in other.grant.ranks if each.destination == rank.destination)
            allowed = not v.rows.refused(rank, theirs.extents[0][0])
            require(not allowed, "the description in a GRANT lets its producer write into another one's extents")


def _repeats_change_nothing(v: Visit) -> None:
    (handoff,) = v.announced.take()
    line = v.open()
    held = v.granted(line, handoff)
    line.say(held.offer)
    _land(v, held)
    line.say(_progress(held), _progress(held))
    commit = _commit(v, held)
    held.silent = True
    line.say(commit, commit)
    _ready(v, held, "repeated messages")
    line.say(_progress(held), commit, v.renewal(held))
    v.alive(line, "repeated messages")
    about = [message for message in line.heard if getattr(message, "handoff", None) == held.offer.handoff]
    for kind in (Grant, Ready):
        count = sum(isinstance(message, kind) for message in about)
        require(count == 1, f"{kind.__name__.upper()} came {count} times for one handoff")
    refused = [message for message in about if isinstance(message, Refuse)]
    require(not refused, "an offer that was repeated over its own link was refused after its GRANT")


def _every_row_counts(v: Visit) -> None:
    (handoff,) = v.announced.take()
    line = v.open()
    held = v.granted(line, handoff)
    entries = held.manifest.entries
    index = len(entries) - 1
    last = len(entries[index].layers)
    start, stop = held.manifest.start_token, held.manifest.prompt_tokens
    spans = [span for span in all_spans(held.manifest) if span.entry != index]
    if last > 1:
        spans.append(Span(index, 0, last - 1, start, stop))
    if stop - start > 1:
        spans.append(Span(index, last - 1, last, start, stop - 1))  # all but one row
    repeated = tuple(spans) * 3  # which must not make up for it
    v.rows.write(held.manifest, held.grant)
    line.say(_progress(held, spans=repeated))
    _say_commit(v, held)
    _failed(v, held, "COMMIT before the last row", ErrorCode.INCOMPLETE)


def _manifest_is_repeated(v: Visit) -> None:
    first, second = v.announced.take(2)
    line = v.open()
    held = v.granted(line, first)
    _land(v, held)
    _say_commit(v, held, manifest_digest=os.urandom(16))
    _failed(v, held, "COMMIT of another manifest", ErrorCode.MANIFEST_MISMATCH)
    held = v.granted(line, second)
    _land(v, held)
    _say_commit(v, held, nbytes=held.manifest.nbytes + 1)
    _failed(v, held, "COMMIT of other bytes than were granted", ErrorCode.MANIFEST_MISMATCH)


def _payload_is_checked(v: Visit) -> None:
    if v.rows.no_digest:
        raise SkipRule(f"no payload digest can be computed here: {v.rows.no_digest}")
    (handoff,) = v.announced.take()
    line = v.open()
    held = v.granted(line, handoff, digest=True)
    _land(v, held)
    right = int.from_bytes(v.rows.digest(held.manifest), "little")
    _say_commit(v, held, payload_digest=(right ^ 1).to_bytes(8, "little"))
    _failed(v, held, "COMMIT with another payload digest", ErrorCode.DIGEST_MISMATCH)


def _promised_digest_is_due(v: Visit) -> None:
    (handoff,) = v.announced.take()
    line = v.open()
    held = v.granted(line, handoff, digest=True)
    _land(v, held)
    _say_commit(v, held, payload_digest=b"")
    _failed(v, held, "COMMIT without the digest that the offer promised", ErrorCode.DIGEST_MISMATCH)


def _rows_outside_fail_their_handoff(v: Visit) -> None:
    first, second = v.announced.take(2)
    line = v.open()
    bad, good = v.granted(line, first), v.granted(line, second)
    stop = bad.manifest.prompt_tokens
    line.say(_progress(bad, spans=(Span(0, 0, 1, 0, stop + 1),)))
    _failed(v, bad, "rows behind the prompt", ErrorCode.MANIFEST_MISMATCH)
    _land(v, good)
    _say_commit(v, good)
    _ready(v, good, "the failure of another handoff on its link")


def _generations_fence(v: Visit) -> None:
    (handoff,) = v.announced.take()
    line = v.open()
    held = v.granted(line, handoff)
    other = held.grant.generation + 1
    _land(v, held)
    line.say(_commit(v, held, generation=other))
    if held.grant.generation > 1:
        line.say(_commit(v, held, generation=held.grant.generation - 1))
    v.alive(line, "COMMITs of other generations")
    early = [m for m in line.heard if isinstance(m, Ready | Failed) and m.handoff == held.offer.handoff]
    require(not early, "a COMMIT of another generation was taken")
    _say_commit(v, held)
    _ready(v, held, "COMMITs of other generations, and the right one")


def _restart_voids(v: Visit) -> None:
    (handoff,) = v.announced.take()
    line = v.open()
    held = v.granted(line, handoff)
    _land(v, held)
    line.say(_restart(held))
    _say_commit(v, held)
    _failed(v, held, "RESTART and COMMIT, with no row between them", ErrorCode.INCOMPLETE)


def _restart(held: Held) -> Restart:
    return Restart(handoff=held.offer.handoff, generation=held.grant.generation, shard=held.grant.shard)


def _restart_goes_on(v: Visit) -> None:
    (handoff,) = v.announced.take()
    line = v.open()
    held = v.granted(line, handoff)
    _land(v, held)
    line.say(_restart(held))
    _land(v, held)
    _say_commit(v, held)
    _ready(v, held, "RESTART and every row again")


def _cancelled_stays_cancelled(v: Visit) -> None:
    (handoff,) = v.announced.take()
    line = v.open()
    held = v.granted(line, handoff)
    _land(v, held)
    v.give_up(held)
    _say_commit(v, held)
    v.alive(line, "CANCEL and COMMIT")
    said = [m for m in line.heard if isinstance(m, Ready) and m.handoff == held.offer.handoff]
    require(not said, "a handoff became READY after its producer's CANCEL")
    _offered_again(v, line, held, "a handoff that was cancelled")


def _offered_again(v: Visit, line: Line, held: Held, what: str) -> None:
    line.say(held.offer)
    answer = v.answer(line, held.handoff, f"an answer to the offer of {what}")
    if isinstance(answer, Grant):
        v.hold(line, held.offer, answer)
        raise Violation(f"{what} was granted again")


def _shards_belong_to_one(v: Visit) -> None:
    (handoff,) = v.announced.take()
    owner, other = v.open(), v.open()
    held = v.granted(owner, handoff)
    other.say(held.offer)
    answer = v.answer(other, handoff, "an answer to the offer of somebody else's shard")
    if isinstance(answer, Grant):
        v.hold(other, held.offer, answer)
        raise Violation("one shard was granted to two producers")
    require(answer.code == ErrorCode.DUPLICATE, f"somebody else's shard was refused with {name_of(answer.code)}")
    other.say(_progress(held), _commit(v, held))  # over the wrong link
    v.alive(other, "messages about somebody else's handoff")
    _land(v, held)
    _say_commit(v, held)
    _ready(v, held, "what another producer said about it")


def _leases_end(v: Visit) -> None:
    first, second = v.announced.take(2)
    line = v.open()
    renewed, silent = v.granted(line, first), v.granted(line, second)
    silent.silent = True
    lease_s = silent.grant.lease_ms / 1000
    _failed(v, silent, "a lease without a sign of life", ErrorCode.LEASE_EXPIRED, within_s=lease_s + v.patience.slack_s)
    v.quiet(lease_s)
    early = [m for m in line.heard if isinstance(m, Failed) and m.handoff == renewed.offer.handoff]
    require(not early, "a handoff that was renewed in time was failed")


def _a_lost_link_ends_it(v: Visit) -> None:
    (handoff,) = v.announced.take()
    line = v.open()
    held = v.granted(line, handoff)
    line.hang_up()
    again = v.open(incarnation=line.incarnation)
    # the consumer may notice the new link first
    v.quiet()
    _offered_again(v, again, held, "a handoff whose link was lost")


FIRST_RULE = Rule(
    number="P-22",
    title="a whole handoff",
    must="An offer that is in order MUST be granted extents that hold its rows and can be written to, and MUST be "
    "READY once every row has landed and was committed.",
    check=_goes_through,
    asks=_ONE,
)

RULES = (
    Rule(
        number="P-26",
        title="grants are apart",
        must="Grants MUST have generations and extents of their own, and each description MUST open these extents "
        "only.",
        check=_grants_are_apart,
        asks=_TWO,
    ),
    Rule(
        number="P-27",
        title="repeated messages",
        must="Repeated messages MUST be dropped: one GRANT and one READY for each handoff.",
        check=_repeats_change_nothing,
        asks=_ONE,
    ),
    Rule(
        number="P-28",
        title="every row counts",
        must="COMMIT before every row was reported MUST fail with INCOMPLETE, however often others were.",
        check=_every_row_counts,
        asks=_ONE,
    ),
    Rule(
        number="P-29",
        title="the granted manifest",
        must="COMMIT MUST fail with MANIFEST_MISMATCH when it repeats another digest or other bytes than were granted.",
        check=_manifest_is_repeated,
        asks=_TWO,
    ),
    Rule(
        number="P-30",
        title="the payload digest",
        must="A payload digest that is not that of the landed rows MUST fail the handoff with DIGEST_MISMATCH.",
        check=_payload_is_checked,
        asks=_ONE,
    ),
    Rule(
        number="P-31",
        title="promised digests",
        must="COMMIT without the digest that its offer promised MUST fail with DIGEST_MISMATCH.",
        check=_promised_digest_is_due,
        asks=_ONE,
    ),
    Rule(
        number="P-32",
        title="rows outside",
        must="Rows outside the manifest MUST fail their handoff with MANIFEST_MISMATCH, and no other on the link.",
        check=_rows_outside_fail_their_handoff,
        asks=_TWO,
    ),
    Rule(
        number="P-33",
        title="other generations",
        must="Messages of another generation than the grant's MUST be dropped.",
        check=_generations_fence,
        asks=_ONE,
    ),
    Rule(
        number="P-34",
        title="restart voids rows",
        must="RESTART MUST void all rows of its shard.",
        check=_restart_voids,
        asks=_ONE,
    ),
    Rule(
        number="P-35",
        title="restart goes on",
        must="Rows that come anew after RESTART MUST lead to READY under the same grant.",
        check=_restart_goes_on,
        asks=_ONE,
    ),
    Rule(
        number="P-36",
        title="cancelled stays cancelled",
        must="After its producer's CANCEL a handoff MUST NOT become READY, nor be granted again.",
        check=_cancelled_stays_cancelled,
        asks=_ONE,
    ),
    Rule(
        number="P-37",
        title="whose shard it is",
        must="A shard that somebody else has offered MUST be refused with DUPLICATE, and messages about it over "
        "another link be dropped.",
        check=_shards_belong_to_one,
        asks=_ONE,
    ),
    Rule(
        number="P-38",
        title="leases end",
        must="A grant without a sign of life within its lease MUST fail with LEASE_EXPIRED; one that is renewed MUST "
        "NOT.",
        check=_leases_end,
        asks=_TWO,
    ),
    Rule(
        number="P-39",
        title="a lost link ends it",
        must="A handoff whose link was lost before COMMIT MUST be over: its id MUST NOT be granted again.",
        check=_a_lost_link_ends_it,
        asks=_ONE,
    ),
)
