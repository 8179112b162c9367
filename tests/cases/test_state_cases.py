"""State machine, late events, reuse of memory: on the real cores, joined by real links, under one fake clock."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pdhandoff.protocol
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.attachments import Expected, attach, attach_int
from pdhandoff.protocol.consumer import Unannounced
from pdhandoff.protocol.consumer_table import ConsumerState
from pdhandoff.protocol.effects import FenceWriter, Freed, GrantShard, Landed, ProveEnded, SourceFree
from pdhandoff.protocol.messages import Cancel, Commit, Drained, Failed, Progress, Renew
from pdhandoff.protocol.spans import Span
from support.peers import PAGE, ConsumerPeer, ProducerPeer, Scene, handoff_id, make_manifest

A, B, C = handoff_id(1), handoff_id(2), handoff_id(3)


def one(pages: int = 1, **more: Any) -> tuple[Scene, ProducerPeer, ConsumerPeer]:
    """One rank; landing memory for one handoff unless told otherwise."""
    scene = Scene(pages=pages, **more)
    return scene, scene.producers[0], scene.consumer


def granted(pages: int = 1, **more: Any) -> tuple[Scene, ProducerPeer, ConsumerPeer]:
    """A is granted and its write is in flight."""
    scene, producer, consumer = one(pages, **more)
    producer.offer(A, make_manifest())
    producer.start(A)
    return scene, producer, consumer


def eight_ranks() -> Scene:
    """A has eight shards, all granted."""
    scene = Scene(pages=8, ranks=8)
    for rank, producer in enumerate(scene.producers):
        producer.offer(A, make_manifest(rank, 8))
    return scene


# ---- ownership


@pytest.mark.parametrize("late_s", [0.0, 2.0])
def test_T043_memory_of_an_aborted_handoff_stays_reserved_until_its_writer_drained(late_s: float) -> None:
    scene, producer, consumer = granted()
    consumer.core.cancel(A, "the client left", scene.now)
    scene.run()
    producer.offer(B, make_manifest(), queue_ms=30_000)
    scene.advance(late_s)
    assert consumer.core.state(B) is ConsumerState.QUEUED
    assert producer.grant(B) is None
    producer.finish(A)
    first, second = producer.grant(A), producer.grant(B)
    assert first is not None
    assert second is not None
    assert second.generation > first.generation
    assert second.ranks[0].extents == first.ranks[0].extents
    assert consumer.core.book.statistics().quarantines == 0


def test_T043_with_memory_to_spare_the_next_handoff_gets_other_extents() -> None:
    scene, producer, consumer = granted(pages=2)
    consumer.core.cancel(A, "the client left", scene.now)
    scene.run()
    producer.offer(B, make_manifest())
    first, second = producer.grant(A), producer.grant(B)
    assert first is not None
    assert second is not None
    assert first.ranks[0].extents != second.ranks[0].extents


def test_T044_a_writer_that_never_answers_is_quarantined_until_it_is_proven_to_have_ended() -> None:
    scene, producer, consumer = granted()
    consumer.core.cancel(A, "test", scene.now)
    scene.run()
    scene.advance(DEFAULT_LIMITS.drain_s - 1)
    assert consumer.core.book.statistics().quarantined_bytes == 0
    scene.advance(100)
    statistics = consumer.core.book.statistics()
    assert (statistics.quarantines, statistics.quarantined_bytes, statistics.free_bytes) == (1, PAGE, 0)
    assert ProveEnded(producer.incarnation) in consumer.effects
    assert not consumer.of(FenceWriter)
    scene.lose(scene.pipes[0])
    scene.advance(100)
    assert consumer.free == 0
    consumer.core.proven_ended(producer.incarnation, scene.now)
    scene.run()
    assert consumer.free == 1
    assert len(consumer.of(Freed)) == 1


def test_T044_a_mover_with_a_fence_is_asked_for_it() -> None:
    scene, producer, consumer = granted(can_fence=True)
    consumer.core.cancel(A, "test", scene.now)
    scene.advance(DEFAULT_LIMITS.drain_s + 1)
    fence = consumer.of(FenceWriter)[0]
    assert (fence.shard, fence.incarnation) == (0, producer.incarnation)
    assert [tuple(extent) for extent in fence.extents] == [(PAGE, PAGE)]
    consumer.core.fenced(fence.generation, fence.shard, scene.now)
    assert consumer.free == 1


def test_T045_the_loss_of_the_link_alone_frees_nothing() -> None:
    scene, producer, consumer = granted()
    scene.lose(scene.pipes[0])
    ended = consumer.ended(A)
    assert ended is not None
    assert ended.code == ErrorCode.LINK_LOST
    assert producer.outcome(A) == ErrorCode.LINK_LOST
    assert consumer.free == 0
    assert producer.of(SourceFree) == []
    scene.connect(producer)
    assert consumer.free == 0
    producer.finish(A)
    assert producer.of(SourceFree) == [SourceFree(A)]
    assert consumer.free == 1


def test_T045_a_drained_that_was_lost_with_its_link_is_said_again() -> None:
    scene, producer, consumer = granted()
    consumer.core.cancel(A, "test", scene.now)
    scene.run()
    scene.pipes[0].cut = True  # what is sent from now on is lost
    producer.finish(A)
    scene.lose(scene.pipes[0])
    assert producer.core.statistics().owed_drains == 1
    assert consumer.free == 0
    scene.connect(producer)
    assert consumer.free == 1
    assert producer.core.statistics().owed_drains == 0


def test_T047_one_failed_shard_fails_the_handoff_now_and_frees_memory_when_the_other_stops() -> None:
    scene = Scene(pages=2, ranks=2)
    first, second = scene.producers
    first.offer(A, make_manifest(0, 2))
    second.offer(A, make_manifest(1, 2))
    first.start(A)
    second.start(A)
    first.core.write_failed(A, 1, "refused", quiet=True)
    scene.run()
    ended = scene.consumer.ended(A)
    assert ended is not None
    assert (ended.code, ended.shard) == (ErrorCode.MOVER_FAILED, 0)
    assert second.outcome(A) == ErrorCode.SHARD_FAILED
    assert scene.consumer.free == 0
    second.finish(A)
    assert scene.consumer.free == 2


def test_T048_a_complete_handoff_keeps_its_memory_until_its_reader_releases_it() -> None:
    scene, producer, consumer = granted()
    producer.finish(A)
    producer.commit(A)
    assert consumer.arrived(A)
    producer.offer(B, make_manifest())
    assert producer.outcome(B) == ErrorCode.BUSY
    claim = consumer.core.claim(A)
    assert claim.generation == 1
    producer.offer(C, make_manifest(), queue_ms=1000)
    assert producer.grant(C) is None
    assert consumer.core.release(A, scene.now)
    scene.run()
    assert producer.grant(C) is not None


# ---- late, repeated, crossing


def test_T050_a_commit_of_an_older_generation_is_counted_and_ignored() -> None:
    scene, producer, consumer = granted(pages=2)
    manifest = make_manifest()
    generation = consumer.of(GrantShard)[0].generation
    old = Commit(handoff=A, generation=generation + 1, shard=0, manifest_digest=manifest.digest(), nbytes=PAGE)
    scene.say(producer, old)
    assert consumer.ignored("stale Commit") == 1
    assert consumer.core.state(A) is ConsumerState.LANDING
    producer.finish(A)
    producer.commit(A)
    assert consumer.arrived(A)


def commit_of(generation: int, *, handoff: bytes = A, **more: Any) -> Commit:
    manifest = make_manifest()
    fields = {"manifest_digest": manifest.digest(), "nbytes": manifest.nbytes, **more}
    return Commit(handoff=handoff, generation=generation, shard=0, **fields)


def test_T051_commit_twice() -> None:
    scene, producer, consumer = granted()
    consumer.verify = False
    producer.finish(A)
    producer.commit(A)
    scene.say(producer, commit_of(1))
    assert consumer.ignored("stale Commit") == 1
    consumer.core.verified(A, 1, scene.now)
    scene.run()
    assert producer.outcome(A) == 0
    assert consumer.ended(A) is None


def test_T051_one_shard_commits_twice_while_the_other_moves() -> None:
    scene = Scene(pages=2, ranks=2)
    for rank, producer in enumerate(scene.producers):
        producer.offer(A, make_manifest(rank, 2))
    scene.producers[0].move(A)
    digest = make_manifest(0, 2).digest()
    again = Commit(handoff=A, generation=1, shard=0, manifest_digest=digest, nbytes=PAGE)
    scene.say(scene.producers[0], again)
    scene.say(scene.producers[0], Renew(handoff=A, generation=1, shard=0))
    assert scene.consumer.ignored("repeated Commit") == 1
    assert scene.consumer.ignored("Renew after commit") == 1
    scene.producers[1].move(A)
    assert scene.consumer.arrived(A)


def test_T051_commit_after_cancel_ends_the_writer_and_nothing_else() -> None:
    scene, producer, consumer = granted()
    consumer.core.cancel(A, "test", scene.now)  # the producer has not heard of it yet
    producer.core.write_done(A, 1, (Span(0, 0, 1, 0, 1),), scene.now)
    producer.core.commit(A, scene.now)
    scene.run()
    ended = consumer.ended(A)
    assert ended is not None
    assert ended.code == ErrorCode.CANCELLED
    assert producer.outcome(A) == ErrorCode.CANCELLED
    assert consumer.ignored("stale Commit") == 1
    assert consumer.free == 1


def test_T051_cancel_after_commit() -> None:
    scene, producer, consumer = granted()
    producer.finish(A)
    producer.commit(A)
    scene.say(producer, Cancel(handoff=A, generation=1, reason="late", drained=True))
    assert producer.outcome(A) == 0
    ended = consumer.ended(A)
    assert ended is not None  # nobody has claimed it yet, and its producer has taken it back
    scene.say(producer, Cancel(handoff=A, generation=1, reason="later", drained=True))
    assert consumer.ignored("stale Cancel") == 1
    assert consumer.free == 1


def test_T051_cancel_while_it_is_read_changes_nothing() -> None:
    scene, producer, consumer = granted()
    producer.finish(A)
    producer.commit(A)
    consumer.core.claim(A)
    scene.say(producer, Cancel(handoff=A, generation=1, reason="late", drained=True))
    assert consumer.ignored("late Cancel") == 1
    assert not consumer.core.cancel(A, "test", scene.now)
    assert consumer.core.release(A, scene.now)
    assert not consumer.core.release(A, scene.now)
    assert consumer.ended(A) is None
    assert consumer.free == 1


def test_T051_commit_and_cancel_in_one_tick() -> None:
    scene, producer, consumer = granted()
    producer.core.write_done(A, 1, (Span(0, 0, 1, 0, 1),), scene.now)
    producer.core.commit(A, scene.now)
    producer.core.cancel(A, "changed my mind")
    scene.run()
    assert producer.outcome(A) == ErrorCode.CANCELLED
    assert consumer.ended(A) is not None
    assert consumer.free == 1


def test_T051_commit_for_an_unknown_id() -> None:
    scene, producer, consumer = one()
    scene.say(producer, commit_of(1, handoff=C))
    scene.say(producer, Progress(handoff=C, generation=1, shard=0, spans=()))
    scene.say(producer, Drained(handoff=C, generation=7, shard=0))
    scene.say(producer, Failed(handoff=C, generation=7, code=1, reason="", drained=True))
    ignored = consumer.core.statistics().ignored
    assert set(ignored) == {"stale Commit", "stale Progress", "stale Drained", "stale Failed"}
    assert consumer.free == 1


def test_T051_two_failures_that_cross_still_drain_the_writer() -> None:
    scene, producer, consumer = granted()
    consumer.core.cancel(A, "test", scene.now)
    producer.core.cancel(A, "test")
    scene.run()
    assert consumer.free == 0
    producer.finish(A)
    assert consumer.free == 1
    assert producer.of(SourceFree) == [SourceFree(A)]


def test_T051_the_last_of_several_failed_writes_drains_the_writer() -> None:
    scene, producer, consumer = granted(pages=2)
    producer.start(A, 2)
    producer.core.write_failed(A, 1, "refused", quiet=True)
    scene.run()
    assert consumer.free == 1
    producer.core.write_failed(A, 2, "refused too", quiet=True)
    scene.run()
    assert consumer.free == 2
    assert producer.of(SourceFree) == [SourceFree(A)]
    assert producer.outcome(A) == ErrorCode.MOVER_FAILED


# ---- completeness


def test_T052_silence_of_one_rank_of_eight_fails_the_handoff_naming_it() -> None:
    scene = eight_ranks()
    for producer in scene.producers[:7]:
        producer.move(A)
    scene.pipes[7].near.send = lambda *_: None  # type: ignore[method-assign]
    scene.advance(DEFAULT_LIMITS.lease_s + 1)
    ended = scene.consumer.ended(A)
    assert ended is not None
    assert (ended.code, ended.shard) == (ErrorCode.LEASE_EXPIRED, 7)
    assert "shard 7" in ended.reason
    assert not scene.consumer.arrived(A)
    assert {producer.outcome(A) for producer in scene.producers[:7]} == {ErrorCode.SHARD_FAILED}


def test_T053_one_component_of_three_is_not_complete() -> None:
    scene, producer, consumer = one(pages=3)
    producer.offer(A, make_manifest(components=3))
    producer.start(A)
    producer.finish(A, spans=(Span(0, 0, 1, 0, 1),))
    with pytest.raises(LocalError, match=r"component-1, layer 0, tokens 0\.\.1 are missing"):
        producer.core.commit(A, scene.now)
    manifest = make_manifest(components=3)
    lie = Commit(handoff=A, generation=1, shard=0, manifest_digest=manifest.digest(), nbytes=manifest.nbytes)
    scene.say(producer, lie)
    ended = consumer.ended(A)
    assert ended is not None
    assert ended.code == ErrorCode.INCOMPLETE
    assert "component-1, layer 0, tokens 0..1 never landed" in ended.reason
    assert not consumer.arrived(A)


@pytest.mark.parametrize("lie", [{"nbytes": PAGE + 1}, {"manifest_digest": b"x" * 16}])
def test_T054_a_commit_of_another_manifest_fails(lie: dict[str, Any]) -> None:
    scene, producer, consumer = granted()
    producer.finish(A)
    scene.say(producer, commit_of(1, **lie))
    ended = consumer.ended(A)
    assert ended is not None
    assert ended.code == ErrorCode.MANIFEST_MISMATCH
    assert producer.outcome(A) == ErrorCode.MANIFEST_MISMATCH
    assert consumer.free == 1


def test_T056_a_failure_of_one_shard_is_told_at_once() -> None:
    scene = eight_ranks()
    for producer in scene.producers[:6]:
        producer.move(A)
    before = scene.now
    scene.producers[6].core.cancel(A, "pages were lost", ErrorCode.SOURCE_LOST)
    scene.run()
    ended = scene.consumer.ended(A)
    assert ended is not None
    assert (ended.code, ended.shard, scene.now) == (ErrorCode.SOURCE_LOST, 6, before)
    assert all(producer.outcome(A) is not None for producer in scene.producers)
    assert scene.consumer.free == 8


# ---- references


def test_T057_a_reference_can_be_used_once() -> None:
    scene, producer, consumer = granted()
    producer.finish(A)
    producer.commit(A)
    consumer.core.claim(A)
    with pytest.raises(LocalError, match="used once") as while_read:
        consumer.core.claim(A)
    consumer.core.release(A, scene.now)
    with pytest.raises(LocalError, match="used once") as after:
        consumer.core.claim(A)
    assert {while_read.value.code, after.value.code} == {ErrorCode.DUPLICATE}
    producer.offer(A, make_manifest())
    assert producer.of(SourceFree) == [SourceFree(A)] * 2
    assert consumer.ended(A) is None


def test_T058_a_reference_that_outlived_its_memory_is_refused() -> None:
    scene, producer, consumer = granted()
    producer.finish(A)
    producer.commit(A)
    scene.advance(DEFAULT_LIMITS.ready_s + 1, step=10)
    producer = scene.add_producer()
    ended = consumer.ended(A)
    assert ended is not None
    assert ended.code == ErrorCode.EXPIRED
    producer.offer(B, make_manifest())
    producer.move(B)
    with pytest.raises(LocalError, match="is over"):
        consumer.core.claim(A)
    assert not consumer.core.begin_read(1)
    assert consumer.core.claim(B).generation == 2


# ---- abort in each phase


def nothing_is_held(scene: Scene) -> None:
    scene.run()
    statistics = scene.consumer.core.statistics()
    assert statistics.states == {}
    assert statistics.queue == 0
    assert statistics.book.free_bytes == statistics.book.total_bytes
    for producer in scene.producers:
        assert producer.core.statistics().active == 0
        assert producer.core.statistics().writes_in_flight == 0


@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize("phase", ["announced", "assembling", "queued", "granted", "transfer", "committed"])
def test_T060_abort_leaves_nothing_behind(  # noqa: C901 - the phases build on one another
    phase: str, side: str
) -> None:
    scene = Scene(pages=2, ranks=2)
    first, second = scene.producers
    consumer = scene.consumer
    if phase == "announced":
        consumer.core.announce(A, scene.now)
        side = "consumer"
    else:
        if phase == "queued":
            for rank, producer in enumerate(scene.producers):
                producer.offer(B, make_manifest(rank, 2))
        first.offer(A, make_manifest(0, 2), queue_ms=10_000)
        if phase != "assembling":
            second.offer(A, make_manifest(1, 2), queue_ms=10_000)
        if phase in {"transfer", "committed"}:
            first.start(A)
        if phase == "committed":
            first.finish(A)
            first.commit(A)
    if side == "consumer":
        assert consumer.core.cancel(A, "test", scene.now)
        scene.run()
    else:
        assert first.cancel(A)
    if phase == "transfer":
        assert consumer.free == 0
        first.finish(A)
    if phase == "queued":
        for producer in scene.producers:
            producer.cancel(B)
    nothing_is_held(scene)
    assert consumer.ended(A) is not None


@pytest.mark.parametrize("phase", ["verifying", "ready"])
def test_T060_abort_on_the_decode_side_after_the_transfer(phase: str) -> None:
    scene, producer, consumer = granted()
    consumer.verify = phase == "ready"
    producer.finish(A)
    producer.commit(A)
    assert consumer.core.cancel(A, "test", scene.now)
    scene.run()
    if phase == "verifying":
        assert consumer.free == 0  # whoever verifies still reads
        consumer.core.verified(A, 1, scene.now)
        assert consumer.ignored("late verification") == 1
    nothing_is_held(scene)
    assert not consumer.arrived(A) or phase == "ready"


def test_T060_abort_while_decoding_is_a_release() -> None:
    scene, producer, consumer = granted()
    producer.finish(A)
    producer.commit(A)
    consumer.core.claim(A)
    assert not consumer.core.cancel(A, "test", scene.now)
    consumer.core.release(A, scene.now)
    nothing_is_held(scene)


def test_T061_a_cancelled_handoff_stays_cancelled() -> None:
    scene, producer, consumer = granted()
    producer.cancel(A)
    assert not producer.core.restart(A)
    assert not producer.core.commit(A, scene.now)
    assert not producer.core.may_write(A, 1)
    producer.finish(A)
    producer.offer(A, make_manifest())
    ended = consumer.ended(A)
    assert ended is not None
    assert ended.code == ErrorCode.CANCELLED
    with pytest.raises(LocalError, match="mint a new id"):
        consumer.core.announce(A, scene.now)
    nothing_is_held(scene)


# ---- time


def test_T067_source_memory_is_released_by_deadlines_alone() -> None:
    scene, producer, _ = one()
    producer.offer(A, make_manifest())
    assert producer.grant(A) is not None
    scene.advance(DEFAULT_LIMITS.handoff_s + 1, step=1.0)  # the engine makes no step and never pushes a row
    assert producer.of(SourceFree) == [SourceFree(A)]
    nothing_is_held(scene)


def test_T067_a_consumer_that_never_grants_does_not_hold_source_memory_for_ever() -> None:
    scene, producer, consumer = one()
    consumer.lost_grants = True
    producer.offer(A, make_manifest(), queue_ms=1000)
    scene.advance(20)
    assert producer.outcome(A) in {ErrorCode.QUEUE_TIMEOUT, ErrorCode.LEASE_EXPIRED}
    nothing_is_held(scene)


def test_T068_no_module_of_the_protocol_knows_a_clock() -> None:
    forbidden = {"time", "datetime", "asyncio", "threading", "socket", "random", "sched", "select"}
    for path in Path(*pdhandoff.protocol.__path__).glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name.partition(".")[0] for name in imported} & forbidden, path.name


@pytest.mark.parametrize("epoch", [0.0, 1e6, 4e9])
def test_T068_only_differences_of_the_times_passed_in_matter(epoch: float) -> None:
    scene, producer, consumer = one()
    scene.now = epoch
    producer = scene.add_producer()
    producer.offer(A, make_manifest())
    deadline = consumer.core.next_deadline()
    assert deadline is not None
    assert deadline - scene.now == pytest.approx(DEFAULT_LIMITS.lease_s)


def test_T070_a_renewal_of_something_unknown_is_answered() -> None:
    scene, producer, consumer = granted()
    generation = consumer.of(GrantShard)[0].generation
    heard = len(consumer.effects)
    scene.say(producer, Renew(handoff=C, generation=generation, shard=0))
    answer = consumer.effects[heard].message
    assert isinstance(answer, Failed)
    assert answer.code == ErrorCode.UNKNOWN_HANDOFF
    assert consumer.ignored("stale Renew") == 1
    scene.say(producer, Renew(handoff=A, generation=generation + 1, shard=0))
    assert consumer.ignored("stale Renew") == 2
    assert consumer.core.state(A) is ConsumerState.LANDING


def test_T071_waiting_in_the_queue_costs_no_transfer_time() -> None:
    limits = msgspec.structs.replace(DEFAULT_LIMITS, handoff_s=6.0, transfer_base_s=5.0)
    scene, producer, consumer = one(pages=4, limits=limits)
    ids = [handoff_id(100 + number) for number in range(32)]
    for handoff in ids:
        producer.offer(handoff, make_manifest(), queue_ms=60_000)
    assert producer.core.position(ids[4]) == 0
    assert producer.core.position(ids[31]) == 27
    moved: list[bytes] = []
    while len(moved) < len(ids):
        moving = [handoff for handoff in ids if handoff not in moved and producer.grant(handoff)]
        assert len(moving) == 4
        for handoff in moving:
            producer.start(handoff)
        scene.advance(4.0)  # together far more than one handoff's time
        for handoff in moving:
            producer.finish(handoff)
            producer.commit(handoff)
            consumer.core.claim(handoff)
            consumer.core.release(handoff, scene.now)
            scene.run()
        moved += moving
    assert {producer.outcome(handoff) for handoff in ids} == {0}
    assert moved == ids


def test_T072_a_silent_consumer_fails_a_queued_handoff_within_the_liveness_window() -> None:
    scene, producer, _ = one()
    producer.offer(B, make_manifest())
    producer.offer(A, make_manifest(), queue_ms=60_000)
    assert producer.core.position(A) == 0
    scene.pipes[0].far.data_to_send = lambda: b""  # type: ignore[method-assign]
    scene.advance(DEFAULT_LIMITS.liveness_s + 1)
    assert producer.outcome(A) == ErrorCode.LIVENESS


def test_T078_memory_that_never_becomes_free_gives_a_typed_refusal_in_time() -> None:
    scene, producer, consumer = granted()
    consumer.core.cancel(A, "test", scene.now)  # its writer never drains
    producer.offer(B, make_manifest(), queue_ms=3000)
    scene.advance(4)
    assert producer.outcome(B) == ErrorCode.QUEUE_TIMEOUT
    producer.offer(C, make_manifest(tokens=2), queue_ms=3000)
    assert producer.outcome(C) == ErrorCode.TOO_LARGE
    assert consumer.core.state(C) is None


# ---- attachments


def test_T036_a_hidden_state_of_another_width_is_refused() -> None:
    scene, producer, consumer = one(expected={"hidden": Expected(dtype="bf16", shape=(None, 8))})
    wide = attach("hidden", "bf16", (1, 24), bytes(48))
    producer.offer(A, make_manifest(), attachments=[wide])
    assert producer.outcome(A) == ErrorCode.ATTACHMENT
    ended = consumer.ended(A)
    assert ended is not None
    assert "hidden is bf16[1, 24], this consumer expects bf16[None, 8]" in ended.reason
    producer.offer(B, make_manifest(), attachments=[attach("hidden", "bf16", (1, 8), bytes(16))])
    assert producer.grant(B) is not None
    nothing = scene.consumer.core.statistics().book.granted_bytes
    assert nothing == PAGE


def test_T036_shapes_of_every_shard_are_checked() -> None:
    scene = Scene(ranks=2, expected={"hidden": Expected(dtype="f32", shape=(2,), required=True)})
    first, second = scene.producers
    first.offer(A, make_manifest(0, 2), attachments=[attach("hidden", "f32", (2,), bytes(8))])
    second.offer(A, make_manifest(1, 2), attachments=[attach("hidden", "f32", (6,), bytes(24))])
    assert second.outcome(A) == ErrorCode.ATTACHMENT


def test_T037_missing_draft_seeds_are_seen_by_the_reader_and_never_made_up() -> None:
    expected = {"drafts": Expected(dtype="i64", shape=(None,)), "last_token": Expected(dtype="i64", required=True)}
    scene, producer, consumer = one(expected=expected)
    last = attach_int("last_token", 7, required=True)
    producer.offer(A, make_manifest(), declares=[last.spec])
    producer.move(A, attachments=[last])
    claim = consumer.core.claim(A)
    assert set(claim.attachments) == {"last_token"}
    consumer.core.release(A, scene.now)
    producer.offer(B, make_manifest())
    assert producer.outcome(B) == ErrorCode.ATTACHMENT


def test_T037_seeds_that_were_declared_and_do_not_come_are_simply_absent() -> None:
    _, producer, consumer = one()
    producer.offer(A, make_manifest(), declares=[attach_int("drafts", 1, 2, 3).spec])
    producer.move(A)
    assert consumer.core.claim(A).attachments == {}


def test_T037_required_values_that_do_not_come_fail_the_handoff() -> None:
    _, producer, consumer = one(expected={"first_token": Expected(dtype="i64", required=True)})
    producer.offer(A, make_manifest(), declares=[attach_int("first_token", 1).spec])
    producer.move(A)
    ended = consumer.ended(A)
    assert ended is not None
    assert ended.code == ErrorCode.ATTACHMENT


def test_rows_are_reported_as_they_land() -> None:
    _, producer, consumer = granted()
    producer.finish(A)
    assert consumer.of(Landed) == [Landed(A, 1, 0, (Span(0, 0, 1, 0, 1),))]
    assert consumer.core.begin_read(1)


def test_an_offer_that_nobody_announced_waits_briefly() -> None:
    scene, producer, consumer = one(unannounced=Unannounced.WAIT)
    producer.offer(A, make_manifest())
    assert producer.grant(A) is None
    consumer.core.announce(A, scene.now)
    scene.run()
    assert producer.grant(A) is not None
    producer.offer(B, make_manifest())
    scene.advance(DEFAULT_LIMITS.unannounced_s + 1)
    assert producer.outcome(B) == ErrorCode.NOT_ANNOUNCED
