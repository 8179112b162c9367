"""The other side is a process that is killed, stopped or restarted. What is left ends in a clean state."""

from __future__ import annotations

import signal

import pytest

from pdhandoff import ErrorCode, HandoffFailed, HandoffId, Limits, Outgoing, Unannounced
from pdhandoff.engines.faults import Fault, Rule
from pdhandoff.protocol.consumer_table import ConsumerState
from support.engine_child import EngineChild
from support.engines import DEADLINE_S, Pair, check_rows, push_all, until

pytestmark = pytest.mark.slow

GONE = {ErrorCode.LINK_LOST, ErrorCode.LIVENESS, ErrorCode.STALE_INCARNATION, ErrorCode.MOVER_FAILED}


@pytest.mark.parametrize("phase", ["connected", "queued", "granted", "writing", "landed", "ready"])
def test_the_producer_is_killed(phase: str) -> None:
    with Pair(consumer={"unannounced": Unannounced.ACCEPT}, arena_bytes=4096 * 6) as pair:
        with EngineChild("producer") as child:
            handoff = HandoffId.mint()
            core = pair.consumer._core
            ticket = pair.consumer.announce(handoff)
            if phase == "queued":
                hog = pair.offer(HandoffId.mint(), 100)
                until(lambda: pair.statistics().states.get("landing"))
            if phase == "connected":
                child.ask("offer", consumer=pair.address, handoff=str(HandoffId.mint()), tokens=10**9)
                until(lambda: pair.consumer._links)
            else:
                child.ask("offer", consumer=pair.address, handoff=str(handoff), tokens=100)
                wanted = ConsumerState.QUEUED if phase == "queued" else ConsumerState.LANDING
                until(lambda: core.state(handoff) is wanted)
            if phase in {"writing", "landed", "ready"}:
                child.ask("push", handoff=str(handoff), tag=7, chunk=50)
            if phase in {"landed", "ready"}:
                until(lambda: child.ask("release")["released"])
            if phase == "ready":
                child.ask("commit", handoff=str(handoff))
                child.ask("wait", handoff=str(handoff))
            child.kill()
            if phase == "ready":
                with ticket.wait(DEADLINE_S) as arrival:
                    check_rows(arrival, 7)
            elif phase == "connected":
                ticket.cancel()
            else:
                with pytest.raises(HandoffFailed) as caught:
                    ticket.wait(DEADLINE_S)
                assert caught.value.code in GONE
                assert caught.value.retryable
            if phase == "queued":
                hog.cancel()
        until(lambda: not pair.consumer._connections.open_links or phase == "queued")
        pair.check_clean()
        assert pair.statistics().book.quarantines == 0, "proven, not guessed"
        until(lambda: len(pair.consumer._proofs._peers) == len(pair.consumer._links), "its mover is forgotten")
        pair.hand_off(2, 60)
        pair.check_clean()


@pytest.mark.parametrize("phase", ["connecting", "queued", "granted", "writing", "held", "committed"])
def test_the_consumer_is_killed(phase: str) -> None:
    rules = [Rule(fault=Fault.HOLD)] if phase == "held" else []
    with Pair(rules=rules) as pair, EngineChild("consumer") as child:
        address = child.address
        handoff = HandoffId.mint()
        if phase == "connecting":
            child.kill()
        hog = hog_memory(pair, address) if phase == "queued" else None
        outgoing = pair.producer.offer(address, handoff, prompt_tokens=100, queue_s=DEADLINE_S)
        request = pair.engine.request(1, 100)
        if phase == "queued":
            until(lambda: pair.producer._core.position(handoff) == 0)
        elif phase != "connecting":
            until(lambda: is_granted(pair, handoff))
        if phase in {"writing", "held", "committed"}:
            push_all(outgoing, request, 50)
        if phase == "held":
            until(lambda: pair.fault.statistics().held == 1)
        if phase == "committed":
            outgoing.commit()
            outgoing.wait(DEADLINE_S)
        child.kill()
        if phase != "committed":
            with pytest.raises(HandoffFailed) as caught:
                outgoing.wait(DEADLINE_S)
            assert caught.value.code in GONE
            assert caught.value.retryable
        if phase == "held":
            assert not outgoing.source_free.is_set()
            pair.fault.release_hold()
        assert outgoing.source_free.wait(DEADLINE_S)
        if hog is not None:
            assert hog.source_free.wait(DEADLINE_S)
        pair.hand_off(2, 60)
        pair.check_clean()


def hog_memory(pair: Pair, address: str) -> Outgoing:
    """Take all landing memory of a consumer."""
    handoff = HandoffId.mint()
    outgoing = pair.producer.offer(address, handoff, prompt_tokens=100)
    until(lambda: is_granted(pair, handoff))
    return outgoing


def is_granted(pair: Pair, handoff: HandoffId) -> bool:
    way = pair.producer._sender._ways.get(handoff)
    return way is not None and way.granted


def test_a_consumer_that_restarts_on_its_address_is_another_incarnation() -> None:
    with Pair() as pair:
        with EngineChild("consumer") as first:
            address = first.address
            send(pair, first, address, 1)
            handoff = HandoffId.mint()
            open_one = pair.producer.offer(address, handoff, prompt_tokens=50)
            until(lambda: is_granted(pair, handoff))
        with pytest.raises(HandoffFailed):
            open_one.wait(DEADLINE_S)
        with EngineChild("consumer", address) as second:
            assert second.address == address
            send(pair, second, address, 2)
        pair.check_clean()


def send(pair: Pair, child: EngineChild, address: str, tag: int) -> None:
    """One handoff to a child, which checks every row."""
    handoff = HandoffId.mint()
    child.ask("announce", handoff=str(handoff))
    request = pair.engine.request(tag, 60)
    outgoing = pair.producer.offer(address, handoff, prompt_tokens=60)
    push_all(outgoing, request, 25)
    outgoing.commit()
    outgoing.wait(DEADLINE_S)
    assert child.ask("take", handoff=str(handoff), tag=tag)["rows"] > 0
    pair.engine.free(request)


def test_a_producer_that_is_stopped_is_given_up_and_its_memory_fenced() -> None:
    limits = Limits(liveness_s=0.4, heartbeat_s=0.1, drain_s=0.1)
    with Pair(limits=limits, consumer={"unannounced": Unannounced.ACCEPT}) as pair:
        with EngineChild("producer") as child:
            handoff = HandoffId.mint()
            ticket = pair.consumer.announce(handoff)
            child.ask("offer", consumer=pair.address, handoff=str(handoff), tokens=100)
            until(lambda: pair.consumer._core.state(handoff) is ConsumerState.LANDING)
            child.ask("push", handoff=str(handoff), tag=7, chunk=100)
            child.signal(signal.SIGSTOP)
            with pytest.raises(HandoffFailed) as caught:
                ticket.wait(DEADLINE_S)
            assert caught.value.code in {ErrorCode.LIVENESS, ErrorCode.LEASE_EXPIRED}
            until(lambda: pair.statistics().book.free_bytes == pair.total_bytes)
            assert pair.statistics().book.quarantines == 1
            second = HandoffId.mint()
            again = pair.consumer.announce(second)
            pair.send(second, pair.engine.request(8, 100))
            with again.wait(DEADLINE_S) as arrival:
                child.signal(signal.SIGCONT)
                child.ask("release")
                check_rows(arrival, 8)
        pair.check_clean()
