"""Case T094: one fault script, three movers. What an engine sees, and how it ends, must not depend on the mover.

Each script below is written down once, with the events and the end that it must have, and is played on every mover by
a real producer and a real consumer. What differs between movers shows in one number only:

- loopback can prove that a peer has ended (`quiesce`), NIXL and Mooncake cannot. Memory of a writer that ended without
  a word is freed by that proof on loopback, and goes through quarantine and a fence on the other two
  (`Script.unproven`). Either way it is free in the end, and no byte of the ended writer is in it.

On NIXL and Mooncake a fence also ends every other grant of the agent, or the engine, behind it. No other grant is open
in these scripts; the tests of those movers say what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from pdhandoff import Consumer, Limits, Producer, Staging
from pdhandoff.engines.base import Mover
from pdhandoff.engines.faults import Fault, Rule
from support.engines import DEADLINE_S, Pair, until
from support.stage import TOKENS, Stage, Watch
from support.transfer_engines import MOVERS, need_mover

pytestmark = pytest.mark.slow

PATIENT = Limits(drain_s=2 * DEADLINE_S)
"writers have time to drain: nothing is fenced"
HASTY = Limits(drain_s=0.05)
"writers that do not drain at once are fenced"


# ---- what is done about the fault that the second batch meets


def take(stage: Stage) -> None:
    stage.push()
    stage.take()


def fail(stage: Stage) -> None:
    stage.push()
    stage.fails()


def land_after_the_error(stage: Stage) -> None:
    stage.push()
    stage.fails()
    stage.both_ends_hold()
    stage.pair.fault.land_late()


def land_after_the_fence(stage: Stage) -> None:
    """By the time the batch comes, its memory is another handoff's."""
    stage.push()
    stage.fails()
    stage.wait_for_fence()
    stage.others_rows(then=stage.pair.fault.land_late)


def consumer_cancels(stage: Stage) -> None:
    stage.push_until_kept()
    stage.ticket.cancel("the client left")
    stage.fails()
    stage.both_ends_hold()
    stage.pair.fault.release_hold()


def producer_cancels(stage: Stage) -> None:
    stage.push_until_kept()
    stage.outgoing.cancel("the client left")
    stage.fails()
    stage.both_ends_hold()
    stage.pair.fault.release_hold()


def cancel_and_fence(stage: Stage) -> None:
    stage.push_until_kept()
    stage.ticket.cancel("the client left")
    stage.fails()
    stage.wait_for_fence()
    stage.others_rows(then=stage.pair.fault.release_hold)


def cut(end: Producer | Consumer) -> None:
    """Without a word: as when a cable is pulled."""

    def tear() -> None:
        for connection in list(end._connections._all.values()):
            end._connections._broken(connection, "cut by the test")

    end._loop.call(tear)


def cut_link(stage: Stage) -> None:
    """The link is gone, the mover's way is not: the batch still lands, and the producer calls again to say so."""
    stage.push_until_kept()
    cut(stage.pair.consumer)
    stage.fails()
    stage.both_ends_hold()
    stage.pair.fault.release_hold()


def cut_link_and_fence(stage: Stage) -> None:
    stage.push_until_kept()
    cut(stage.pair.producer)
    stage.fails()
    stage.wait_for_fence()
    stage.others_rows(then=stage.pair.fault.release_hold)


def close_producer(stage: Stage) -> None:
    """It goes while a batch is on its way, and its mover with it: it never says that it has drained."""
    pair = stage.pair
    stage.push_until_kept()
    pair.producer.close(drain_s=0)
    pair.fault.close()
    stage.fails()
    until(lambda: pair.statistics().book.free_bytes == pair.total_bytes, "its memory is free")
    pair.replace_producer()


def close_consumer(stage: Stage) -> None:
    """It goes with its memory and its mover. The batch fails, or lands nowhere."""
    stage.push_until_kept()
    stage.pair.consumer.close(drain_s=0)
    stage.pair.landing_mover.close()
    stage.fails()
    assert not stage.outgoing.source_free.is_set()
    stage.pair.fault.release_hold()


# ---- the scripts


class Script(NamedTuple):
    """A fault, what is done about it, and what must come of it, on every mover."""

    rules: tuple[Rule, ...]
    play: Callable[[Stage], None]
    sent: tuple[str, ...]
    "events of the producer"
    taken: tuple[str, ...]
    "events of the consumer"
    limits: Limits = PATIENT
    digest: bool = False
    fenced: bool = False
    "the landing memory goes through quarantine and a fence, on every mover"
    unproven: bool = False
    "it does so on a mover that cannot prove the end of a peer"
    producer_stays: bool = True
    consumer_stays: bool = True


def second(fault: Fault, **options: Any) -> tuple[Rule, ...]:
    """The batch of the second chunk meets a fault."""
    return (Rule(fault=fault, call=1, **options),)


BEGUN = ("offer", "grant", "gather 0..50", "write 0..50", "gather 50..100")
"up to the batch that the script is about"
OVER = "write 50..100"
"the mover is quiet, whether the batch failed or not"
SENT, TAKEN = (*BEGUN, OVER, "commit", "READY"), ("landed", "landed", "ready", "taken")
FAILED = "MOVER_FAILED retryable"
WRONG = "DIGEST_MISMATCH retryable"
LOST = "LINK_LOST retryable"
ENDED = "CANCELLED"
HOLD, LATE = second(Fault.HOLD), second(Fault.LATE)

SCRIPTS: Mapping[str, Script] = {
    "no fault": Script((), take, SENT, TAKEN),
    "delay": Script(second(Fault.DELAY, polls=20), take, SENT, TAKEN),
    "duplicate": Script(second(Fault.DUPLICATE), take, SENT, TAKEN),
    "fail": Script(second(Fault.FAIL), fail, (*BEGUN, OVER, FAILED), ("landed", FAILED)),
    "drop": Script(second(Fault.DROP, polls=5), fail, (*BEGUN, OVER, FAILED), ("landed", FAILED)),
    "partial": Script(second(Fault.PARTIAL), fail, (*BEGUN, OVER, FAILED), ("landed", FAILED)),
    "refuse": Script(second(Fault.REFUSE), fail, (*BEGUN, FAILED), ("landed", FAILED)),
    "flip": Script(
        second(Fault.FLIP, byte=777),
        fail,
        (*BEGUN, OVER, "commit", WRONG),
        ("landed", "landed", WRONG),
        digest=True,
    ),
    "late": Script(LATE, land_after_the_error, (*BEGUN, FAILED, OVER), ("landed", FAILED)),
    "late, fenced": Script(
        LATE, land_after_the_fence, (*BEGUN, FAILED, OVER), ("landed", FAILED), limits=HASTY, fenced=True
    ),
    "hold, consumer cancels": Script(HOLD, consumer_cancels, (*BEGUN, ENDED, OVER), ("landed", ENDED)),
    "hold, producer cancels": Script(HOLD, producer_cancels, (*BEGUN, ENDED, OVER), ("landed", ENDED)),
    "hold, cancelled, fenced": Script(
        HOLD, cancel_and_fence, (*BEGUN, ENDED, OVER), ("landed", ENDED), limits=HASTY, fenced=True
    ),
    "link cut": Script(HOLD, cut_link, (*BEGUN, LOST, OVER), ("landed", LOST)),
    "link cut, fenced": Script(
        HOLD, cut_link_and_fence, (*BEGUN, LOST, OVER), ("landed", LOST), limits=HASTY, fenced=True
    ),
    "producer closes": Script(
        HOLD, close_producer, (*BEGUN, ENDED), ("landed", ENDED), limits=HASTY, unproven=True, producer_stays=False
    ),
    "consumer closes": Script(HOLD, close_consumer, (*BEGUN, ENDED, OVER), ("landed", ENDED), consumer_stays=False),
}


@pytest.fixture(params=MOVERS)
def mover(request: pytest.FixtureRequest) -> Callable[[], Mover]:
    return need_mover(request.param)


@pytest.mark.parametrize("staging", [Staging.STAGED, Staging.DIRECT])
@pytest.mark.parametrize("name", SCRIPTS)
def test_T094_the_same_faults_have_the_same_events_and_the_same_end(
    mover: Callable[[], Mover], name: str, staging: Staging
) -> None:
    script = SCRIPTS[name]
    sent = tuple(event for event in script.sent if staging is Staging.STAGED or not event.startswith("gather"))
    sending, taking = Watch(), Watch()
    with Pair(
        mover=mover,
        rules=script.rules,
        limits=script.limits,
        arena_bytes=4096 * 6,
        consumer={"recorder": taking},
        producer={"recorder": sending, "digest": script.digest, "staging": staging},
    ) as pair:
        stage = Stage(pair, sending, taking, staging=staging)
        script.play(stage)
        until(lambda: len(stage.sent) >= len(sent), f"{stage.sent} is not all yet")
        assert stage.sent == sent
        assert stage.taken == script.taken
        if script.producer_stays:
            assert stage.outgoing.source_free.wait(DEADLINE_S)
        else:
            assert not stage.outgoing.source_free.is_set(), "nobody is left who would know"
        if script.consumer_stays:
            check_consumer(pair, script)
        else:
            until(lambda: not pair.producer.statistics().active)
            assert not pair.producer._sender._ring.used


def check_consumer(pair: Pair, script: Script) -> None:
    """Everything is free, by the way that the mover allows, and good for the next handoff."""
    pair.check_clean()
    proves = pair.landing_mover.capabilities.quiesce
    fenced = script.fenced or (script.unproven and not proves)
    assert pair.statistics().book.quarantines == fenced
    pair.hand_off(3, TOKENS)
    pair.check_clean()
