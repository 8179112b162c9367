from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdhandoff.errors import ErrorCode, LocalError, RemoteError
from pdhandoff.ids import Incarnation
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.consumer_table import ConsumerState
from pdhandoff.protocol.effects import Restarted, RowsVoid, Send, SourceFree
from pdhandoff.protocol.messages import (
    Cancel,
    Drained,
    Draining,
    Failed,
    Grant,
    Message,
    Pong,
    Progress,
    Queued,
    Ready,
    Refuse,
    Renew,
)
from pdhandoff.protocol.owed import OWED_PEERS, OwedDrains
from pdhandoff.protocol.producer import MIN_RENEW_S, ProducerCore
from pdhandoff.protocol.producer_table import ProducerState
from pdhandoff.protocol.spans import Span
from support.peers import PAGE, ProducerPeer, Scene, handoff_id, make_manifest

A, B = handoff_id(1), handoff_id(2)
CONSUMER = Incarnation(b"c" * 16)
ROW = Span(0, 0, 1, 0, 1)


def alone(**limits: Any) -> ProducerCore:
    """A core with link 1 open and nobody at the other end but the test."""
    core = ProducerCore(limits=msgspec.structs.replace(DEFAULT_LIMITS, **limits))
    core.link_up(1, CONSUMER)
    return core


def grant(generation: int = 1, **more: Any) -> Grant:
    return Grant(handoff=A, generation=generation, shard=0, **{"lease_ms": 3000, **more})


def moving(**limits: Any) -> ProducerCore:
    core = alone(**limits)
    core.offer(1, A, make_manifest(), 0.0)
    core.receive(1, grant(), 0.0)
    core.take_effects()
    return core


def sent(core: ProducerCore) -> list[Message]:
    return [effect.message for effect in core.take_effects() if isinstance(effect, Send)]


def scene_moving() -> tuple[Scene, ProducerPeer]:
    scene = Scene()
    producer = scene.producers[0]
    producer.offer(A, make_manifest())
    return scene, producer


# ---- offers


def test_an_offer_needs_an_open_link_a_new_id_and_room() -> None:
    core = alone(max_handoffs_per_link=1)
    with pytest.raises(LocalError, match="link 9 is not open"):
        core.offer(9, A, make_manifest(), 0.0)
    core.offer(1, A, make_manifest(), 0.0)
    with pytest.raises(LocalError, match="under way: mint a new id"):
        core.offer(1, A, make_manifest(), 0.0)
    with pytest.raises(LocalError, match="wait for some to end"):
        core.offer(1, B, make_manifest(), 0.0)


def test_a_draining_consumer_gets_no_offers_until_its_link_is_new() -> None:
    core = alone()
    core.receive(1, Draining(), 0.0)
    with pytest.raises(LocalError, match="takes no new handoffs"):
        core.offer(1, A, make_manifest(), 0.0)
    core.link_lost(1, 0, "lost")
    core.link_lost(1, 0, "lost")
    core.link_up(1, CONSUMER)
    core.offer(1, A, make_manifest(), 0.0)


def test_a_grant_that_does_not_fit_the_offer_fails() -> None:
    for bad, code in ((grant(start_token=2), ErrorCode.OUT_OF_RANGE), ({"shard": 1}, ErrorCode.UNEXPECTED)):
        core = alone()
        core.offer(1, A, make_manifest(), 0.0)
        core.take_effects()
        message = bad if isinstance(bad, Grant) else msgspec.structs.replace(grant(), **bad)
        core.receive(1, message, 0.0)
        failed = sent(core)[0]
        assert isinstance(failed, Failed)
        assert (failed.code, failed.drained) == (code, True)


def test_positions_are_noted_only_while_queued() -> None:
    core = alone()
    core.offer(1, A, make_manifest(), 0.0)
    assert core.position(A) is None
    core.receive(1, Queued(handoff=A, position=3), 0.0)
    assert core.position(A) == 3
    core.receive(1, Queued(handoff=A, position=2), 0.0)
    assert core.position(A) == 2
    core.receive(1, grant(), 0.0)
    core.receive(1, Queued(handoff=A, position=1), 0.0)
    assert core.position(A) is None
    assert core.state(A) is ProducerState.MOVING
    assert core.state(B) is None
    assert core.statistics().ignored == 1


# ---- grants, late and repeated


def test_a_grant_for_what_is_over_is_answered_by_drained() -> None:
    core = moving()
    core.receive(1, grant(), 0.0)
    assert sent(core) == []
    core.receive(1, grant(7), 0.0)
    assert sent(core) == [Drained(handoff=A, generation=7, shard=0)]
    core.receive(1, msgspec.structs.replace(grant(5), handoff=B), 0.0)
    assert sent(core) == [Drained(handoff=B, generation=5, shard=0)]
    core.receive(2, grant(5), 0.0)  # over a link that is not open
    assert sent(core) == []


def test_messages_that_fit_nothing_are_counted() -> None:
    core = moving()
    late: list[Message] = [
        Refuse(handoff=A, code=1, reason=""),
        Ready(handoff=A, generation=1),
        Failed(handoff=A, generation=9, code=1, reason=""),
        Renew(handoff=A, generation=1, shard=0),
        Ready(handoff=B, generation=1),
        Pong(number=1),
    ]
    for number, message in enumerate(late, 1):
        core.receive(1, message, 0.0)
        assert core.statistics().ignored == number
    assert core.state(A) is ProducerState.MOVING


def test_failed_for_a_grant_that_was_never_seen_is_answered_by_drained() -> None:
    core = alone()
    core.offer(1, A, make_manifest(), 0.0)
    core.take_effects()
    core.receive(1, Failed(handoff=A, generation=4, code=62, reason="no description"), 0.0)
    assert sent(core) == [Drained(handoff=A, generation=0, shard=0)]


def test_a_refused_handoff_owes_nothing() -> None:
    core = alone()
    core.offer(1, A, make_manifest(), 0.0)
    core.receive(1, Refuse(handoff=A, code=43, reason="busy"), 0.0)
    core.link_lost(1, 0, "lost")
    assert core.statistics().owed_drains == 0


# ---- writes


def test_a_write_of_a_handoff_that_is_over_is_misuse() -> None:
    core = moving()
    assert core.may_write(A, 1)
    assert not core.may_write(A, 2)
    core.cancel(A, "test")
    assert not core.may_write(A, 1)
    assert not core.cancel(A, "again")
    with pytest.raises(LocalError, match="ask may_write"):
        core.write_started(A, 1, PAGE, 0.0)
    core.write_done(A, 1, (ROW,), 0.0)
    core.write_failed(A, 1, "late", quiet=True)
    core.write_quiet(A, 1)
    assert core.statistics().ignored == 3


def test_rows_outside_the_manifest_leave_the_write_in_flight() -> None:
    core = moving()
    core.write_started(A, 1, PAGE, 0.0)
    with pytest.raises(RemoteError):
        core.write_done(A, 1, (Span(0, 0, 1, 0, 5),), 0.0)
    assert core.statistics().writes_in_flight == 1


def test_many_layers_go_in_several_messages() -> None:
    core = moving(max_progress_layers=3)
    core.write_started(A, 1, PAGE, 0.0)
    core.write_done(A, 1, (ROW,) * 7, 0.0)
    assert [len(message.spans) for message in sent(core) if isinstance(message, Progress)] == [3, 3, 1]


def test_many_spans_go_in_several_messages() -> None:
    core = moving(max_entries=2)
    core.write_started(A, 1, PAGE, 0.0)
    core.write_done(A, 1, (ROW,) * 5, 0.0)
    assert [len(message.spans) for message in sent(core) if isinstance(message, Progress)] == [2, 2, 1]


def test_a_loud_failure_ends_the_handoff_now_and_its_writer_later() -> None:
    core = moving()
    core.write_started(A, 1, PAGE, 0.0)
    core.write_failed(A, 1, "refused", quiet=False)
    told = sent(core)
    assert isinstance(told[0], Failed)
    assert not told[0].drained
    assert core.state(A) is ProducerState.ENDING
    core.write_quiet(A, 1)
    effects = core.take_effects()
    assert effects == [Send(1, Drained(handoff=A, generation=1, shard=0)), SourceFree(A)]


def test_a_write_that_outlasts_its_budget_fails_the_handoff_and_stays_in_flight() -> None:
    core = moving()
    core.write_started(A, 1, 500_000_000, 0.0)
    core.tick(19.9)
    assert core.state(A) is ProducerState.MOVING
    core.tick(20.0)
    assert core.state(A) is ProducerState.ENDING
    core.tick(1000.0)
    assert core.statistics().writes_in_flight == 1
    core.write_done(A, 1, (ROW,), 1000.0)
    assert core.take_effects()[-1] == SourceFree(A)


# ---- restart, commit, renewal


def test_a_restart_waits_for_writes_in_flight_and_voids_rows() -> None:
    scene, producer = scene_moving()
    producer.start(A)
    assert producer.core.restart(A)
    assert not producer.core.restart(A)
    assert not producer.core.may_write(A, 1)
    assert producer.of(Restarted) == []
    producer.finish(A)
    assert producer.of(Restarted) == [Restarted(A)]
    assert scene.consumer.of(RowsVoid) == [RowsVoid(A, 1, 0)]
    with pytest.raises(LocalError, match="tokens 0\\.\\.1 are missing"):
        producer.commit(A)
    producer.move(A)
    assert producer.outcome(A) == 0
    assert not producer.core.restart(A)


def test_a_commit_may_come_while_writes_are_in_flight() -> None:
    scene, producer = scene_moving()
    producer.start(A)
    assert producer.commit(A)
    assert not producer.commit(A)
    assert producer.core.state(A) is ProducerState.COMMITTING
    producer.finish(A)
    assert producer.outcome(A) == 0
    assert scene.consumer.core.state(A) is ConsumerState.READY


def test_rows_that_were_promised_and_never_written_fail_the_commit() -> None:
    scene, producer = scene_moving()
    producer.start(A)
    assert producer.commit(A)
    producer.finish(A, spans=())
    assert producer.outcome(A) == ErrorCode.INCOMPLETE
    assert scene.consumer.free == 2


def test_a_commit_that_is_never_confirmed_ends_however_it_came_to_be() -> None:
    for late in (False, True):
        core = moving(handoff_s=50.0)
        core.write_started(A, 1, PAGE, 0.0)
        if late:
            core.commit(A, 0.0)
        core.write_done(A, 1, (ROW,), 0.0)
        if not late:
            core.commit(A, 0.0)
        assert core.state(A) is ProducerState.COMMITTED
        core.take_effects()
        core.tick(50.0)
        told = sent(core)
        assert isinstance(told[-1], Failed)
        assert told[-1].code == ErrorCode.EXPIRED


def test_an_offer_that_is_never_answered_ends() -> None:
    core = alone()
    core.offer(1, A, make_manifest(), 0.0, queue_ms=1000)
    deadline = core.next_deadline()
    assert deadline == DEFAULT_LIMITS.assemble_s + DEFAULT_LIMITS.unannounced_s + 1
    core.take_effects()
    core.tick(deadline)
    told = sent(core)
    assert isinstance(told[0], Failed)
    assert (told[0].code, told[0].drained) == (ErrorCode.QUEUE_TIMEOUT, True)


@pytest.mark.parametrize(("lease_ms", "wait_s"), [(3000, 1.0), (0, MIN_RENEW_S)])
def test_a_shard_is_renewed_three_times_within_its_lease(lease_ms: int, wait_s: float) -> None:
    core = alone()
    core.offer(1, A, make_manifest(), 0.0)
    core.receive(1, grant(lease_ms=lease_ms), 0.0)
    core.take_effects()
    assert core.next_deadline() == wait_s
    core.tick(wait_s)
    assert sent(core) == [Renew(handoff=A, generation=1, shard=0)]
    assert core.next_deadline() == 2 * wait_s


def test_deadlines_of_shards_that_ended_in_the_same_tick_do_nothing() -> None:
    core = moving(transfer_base_s=0.0)
    core.write_started(A, 1, 0, 0.0)
    core.write_started(A, 2, 0, 0.0)
    core.offer(1, B, make_manifest(), 0.0)
    core.receive(1, Failed(handoff=A, generation=1, code=1, reason=""), 0.0)
    core.tick(1e6)
    core.write_done(A, 1, (), 1e6)
    core.write_done(A, 2, (), 1e6)
    assert core.statistics().active == 0
    assert core.next_deadline() is None


def test_a_shard_that_is_gone_when_its_deadline_is_due() -> None:
    core = moving()
    core._shards.clear()
    core.tick(100.0)
    assert core.next_deadline() is None


# ---- what is owed


def test_a_drained_is_owed_until_a_link_to_the_same_life_has_carried_it() -> None:
    core = moving()
    core.write_started(A, 1, PAGE, 0.0)
    core.link_lost(1, 0, "lost")
    core.link_up(2, Incarnation(b"o" * 16))
    core.write_done(A, 1, (ROW,), 0.0)
    assert core.statistics().owed_drains == 1
    assert sent(core) == []
    core.link_up(3, CONSUMER)
    assert sent(core) == [Drained(handoff=A, generation=1, shard=0)]
    assert core.statistics().owed_drains == 0


def test_a_word_is_owed_from_the_moment_that_the_link_is_lost_under_a_write() -> None:
    """Whoever dials again does so then: nobody asks when the write is over."""
    core = moving()
    core.write_started(A, 1, PAGE, 0.0)
    assert not core.owes()
    core.link_lost(1, 0, "lost")
    assert core.owes()
    core.write_done(A, 1, (ROW,), 0.0)
    assert core.owes()
    core.link_up(2, CONSUMER)
    assert not core.owes()


def test_a_link_that_is_there_already_carries_what_another_one_lost() -> None:
    core = moving()
    core.write_started(A, 1, PAGE, 0.0)
    core.link_up(2, CONSUMER)
    core.link_lost(1, 0, "lost")
    assert sent(core) == []
    core.write_done(A, 1, (ROW,), 0.0)
    assert core.take_effects() == [Send(2, Drained(handoff=A, generation=1, shard=0)), SourceFree(A)]
    core.link_up(3, CONSUMER)
    assert sent(core) == []
    core.link_lost(2, 0, "lost")  # the word may have been lost with it
    assert sent(core) == [Drained(handoff=A, generation=1, shard=0)]


def test_a_word_counts_as_heard_when_a_later_offer_is_answered() -> None:
    core = moving()
    core.offer(1, B, make_manifest(), 0.0)
    core.cancel(A, "test")
    core.receive(1, Queued(handoff=B, position=0), 0.0)  # B's offer went before the cancel
    core.link_lost(1, 0, "lost")
    assert core.statistics().owed_drains == 2
    core.link_up(2, CONSUMER)
    core.offer(2, A, make_manifest(), 0.0)
    core.receive(2, grant(2), 0.0)
    core.link_lost(2, 0, "lost")
    assert core.statistics().owed_drains == 1


def test_drained_that_was_due_on_a_lost_link_is_owed() -> None:
    core = moving()
    core.write_started(A, 1, PAGE, 0.0)
    core.receive(1, Failed(handoff=A, generation=1, code=1, reason=""), 0.0)
    core.link_lost(1, 0, "lost")
    core.take_effects()
    core.write_done(A, 1, (ROW,), 0.0)
    assert core.take_effects() == [SourceFree(A)]
    assert core.statistics().owed_drains == 1


def test_the_loss_of_one_link_leaves_the_words_of_others() -> None:
    core = moving()
    core.cancel(A, "test")
    core.link_up(2, Incarnation(b"o" * 16))
    core.link_lost(2, 0, "lost")
    assert core.statistics().owed_drains == 0


def test_owed_words_are_bounded() -> None:
    owed = OwedDrains()
    word = Drained(handoff=A, generation=1, shard=0)
    for number in range(OWED_PEERS + 1):
        owed.add(Incarnation(number.to_bytes(16, "big")), word, None)
    assert len(owed) == OWED_PEERS
    assert owed.say(Incarnation(bytes(16)), 1) == []


def test_a_cancel_by_the_consumer_before_any_grant_settles_the_shard() -> None:
    core = alone()
    core.offer(1, A, make_manifest(), 0.0)
    core.receive(1, Cancel(handoff=A, reason="no"), 0.0)
    assert core.statistics().failed == 1
    assert core.state(A) is None
