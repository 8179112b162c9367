"""Kill -9 of a producer or a consumer at every step of a handoff, on every mover. The one that is left ends clean.

The process kills itself inside the step, so no race decides what has been said and written before. Two handoffs are
under way. Whatever the survivor takes or sends next uses the same memory, and every row of it is checked: nothing of
the dead process is in it. Threads and descriptors are counted when everything is closed (`Pair`): what the libraries of
NIXL and Mooncake keep for the life of a process is there before, since `need_mover` has loaded them.
"""

from __future__ import annotations

import ctypes

import pytest

from pdhandoff import ErrorCode, HandoffFailed, HandoffId, Outgoing
from pdhandoff.protocol.consumer_table import ConsumerState
from support.engine_child import EngineChild
from support.engines import DEADLINE_S, WIDE, Pair, check_rows, push_all, until
from support.transfer_engines import MOVERS, need_mover

pytestmark = pytest.mark.slow

TOKENS, CHUNK = 60, 25
ARENA_BYTES = 4096 * 12
"as much as the two handoffs need"
COMES_S = {"offer": 1.0, "grant": 5.0}
"how long an announced handoff is waited for, at steps before which one or both may not have been offered"
GONE = {ErrorCode.LINK_LOST, ErrorCode.LIVENESS, ErrorCode.STALE_INCARNATION, ErrorCode.MOVER_FAILED}


@pytest.fixture(params=MOVERS)
def mover(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    need_mover(name)
    return name


def is_gone(failure: HandoffFailed, *, offered: bool = True) -> bool:
    """Check that a failure tells to try again, or that nobody came."""
    assert failure.code in GONE or (failure.code == ErrorCode.EXPIRED and not offered)
    assert failure.retryable
    return True


def sent_or_gone(outgoing: Outgoing) -> bool:
    """Whether it was READY. Its pages are free either way."""
    try:
        outgoing.wait(DEADLINE_S)
    except HandoffFailed as failure:
        return not is_gone(failure)
    finally:
        assert outgoing.source_free.wait(DEADLINE_S)
    return True


@pytest.mark.parametrize("step", ["offer", "grant", "gather", "submitted", "write", "commit"])
def test_the_producer_is_killed_at_a_step(mover: str, step: str) -> None:
    begins = step in COMES_S
    with Pair(mover=MOVERS[mover], arena_bytes=ARENA_BYTES) as pair:
        handoffs = [HandoffId.mint() for _ in range(2)]
        with EngineChild("producer", mover=mover, kill_at=step) as child:
            tickets = [pair.consumer.announce(handoff, deadline_s=COMES_S.get(step)) for handoff in handoffs]
            names = [str(handoff) for handoff in handoffs]
            for name in names:
                child.tell("offer", consumer=pair.address, handoff=name, tokens=TOKENS)
            if not begins:
                core = pair.consumer._core
                until(lambda: all(core.state(handoff) is ConsumerState.LANDING for handoff in handoffs))
                child.tell("finish", handoffs=names, tags=[0x10, 0x11], chunk=CHUNK)
            assert child.has_killed_itself()
        for ticket in tickets:
            with pytest.raises(HandoffFailed) as caught:
                ticket.wait(DEADLINE_S)
            assert is_gone(caught.value, offered=not begins)
        pair.check_clean()
        until(lambda: len(pair.consumer._proofs._peers) == len(pair.consumer._links), "its mover is forgotten")
        quarantines = pair.statistics().book.quarantines
        assert quarantines == 0 or not pair.landing_mover.capabilities.quiesce, "proven where it can be"
        hand_off_two(pair)


def test_the_producer_is_killed_while_bytes_are_on_their_way(mover: str) -> None:
    """What sockets and queues still hold of it must not come down on the next handoff, in the same memory."""
    tokens = 200
    nbytes = tokens * 3 << 16
    arena_bytes = nbytes + (4 << 20)
    with Pair(mover=MOVERS[mover], layout=WIDE, arena_bytes=arena_bytes, staging_bytes=1 << 27) as pair:
        arena = pair.consumer._region.memory
        request = pair.engine.request(0x20, tokens)
        with EngineChild("producer", mover=mover, wide=True) as child:
            handoff = HandoffId.mint()
            ticket = pair.consumer.announce(handoff)
            child.tell("offer", consumer=pair.address, handoff=str(handoff), tokens=tokens)
            child.tell("finish", handoffs=[str(handoff)], tags=[0x10], chunk=tokens)
            starts = range(arena.address, arena.address + nbytes, 1 << 16)
            until(lambda: any(ctypes.string_at(start, 1) != b"\0" for start in starts), "its first bytes are here")
            child.kill()
        with pytest.raises(HandoffFailed) as caught:
            ticket.wait(DEADLINE_S)
        assert is_gone(caught.value)
        again = HandoffId.mint()
        ticket = pair.consumer.announce(again)
        outgoing = pair.send(again, request, queue_s=DEADLINE_S)
        with ticket.wait(DEADLINE_S) as arrival:
            assert check_rows(arrival, 0x20) == tokens * 3 * 2
        assert sent_or_gone(outgoing)
        pair.check_clean()


def hand_off_two(pair: Pair) -> None:
    """Two handoffs at once, in the memory that the dead one's had."""
    handoffs = [HandoffId.mint() for _ in range(2)]
    tickets = [pair.consumer.announce(handoff) for handoff in handoffs]
    requests = [pair.engine.request(0x20 + number, TOKENS) for number in range(2)]
    outgoings = [pair.send(handoff, request) for handoff, request in zip(handoffs, requests, strict=True)]
    arrivals = [ticket.wait(DEADLINE_S) for ticket in tickets]
    for number, arrival in enumerate(arrivals):
        with arrival:
            assert check_rows(arrival, 0x20 + number) > 0
    assert all(sent_or_gone(outgoing) for outgoing in outgoings)
    pair.check_clean()


@pytest.mark.parametrize("step", ["granting", "landed", "ready", "reading"])
def test_the_consumer_is_killed_at_a_step(mover: str, step: str) -> None:
    with Pair(mover=MOVERS[mover]) as pair:
        with EngineChild("consumer", mover=mover, kill_at=step) as child:
            address = child.address
            outgoings = send_two(pair, child)
            assert child.has_killed_itself()
            done = [sent_or_gone(outgoing) for outgoing in outgoings]
        assert not any(done) or step in {"ready", "reading"}
        pair.check_clean()
        with EngineChild("consumer", address, mover=mover) as child:
            done = [sent_or_gone(outgoing) for outgoing in send_two(pair, child)]
            assert all(done)
            assert [child.answer()["rows"] > 0 for _ in done] == [True, True]
        pair.check_clean()
        pair.hand_off(0x20, TOKENS)


def send_two(pair: Pair, child: EngineChild) -> list[Outgoing]:
    """Two handoffs to a child, which takes both, checks every row and answers twice."""
    handoffs = [HandoffId.mint() for _ in range(2)]
    for handoff in handoffs:
        child.ask("announce", handoff=str(handoff))
    for number, handoff in enumerate(handoffs):
        child.tell("take", handoff=str(handoff), tag=0x10 + number)
    outgoings = []
    for number, handoff in enumerate(handoffs):
        outgoing = pair.producer.offer(child.address, handoff, prompt_tokens=TOKENS, queue_s=DEADLINE_S)
        push_all(outgoing, pair.engine.request(0x10 + number, TOKENS), CHUNK)
        outgoing.commit()
        outgoings.append(outgoing)
    return outgoings
