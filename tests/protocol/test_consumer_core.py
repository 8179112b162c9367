from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from pdhandoff.errors import ErrorCode, LayoutError, LocalError
from pdhandoff.ids import HandoffId
from pdhandoff.limits import DEFAULT_LIMITS, Limits
from pdhandoff.protocol.attachments import attach_int
from pdhandoff.protocol.consumer import Unannounced
from pdhandoff.protocol.consumer_table import ConsumerState
from pdhandoff.protocol.effects import ProveEnded, Send, Verify
from pdhandoff.protocol.manifest import Entry, Manifest
from pdhandoff.protocol.messages import Cancel, Drained, Draining, Offer, Pong, Progress, Refuse
from pdhandoff.protocol.spans import Span
from support.peers import PAGE, ConsumerPeer, ProducerPeer, Scene, handoff_id, make_manifest

A, B, C = handoff_id(1), handoff_id(2), handoff_id(3)


def one(pages: int = 1, **more: Any) -> tuple[Scene, ProducerPeer, ConsumerPeer]:
    scene = Scene(pages=pages, **more)
    return scene, scene.producers[0], scene.consumer


def two(pages: int = 2, **more: Any) -> tuple[Scene, ProducerPeer, ProducerPeer]:
    scene = Scene(pages=pages, ranks=2, **more)
    return scene, scene.producers[0], scene.producers[1]


def complete(**more: Any) -> tuple[Scene, ProducerPeer, ConsumerPeer]:
    scene, producer, consumer = one(**more)
    producer.offer(A, make_manifest())
    producer.move(A)
    return scene, producer, consumer


# ---- announcing and admission


def test_an_id_is_announced_once() -> None:
    scene, _, consumer = one()
    consumer.core.announce(A, scene.now)
    with pytest.raises(LocalError, match="announced before"):
        consumer.core.announce(A, scene.now)
    scene.advance(DEFAULT_LIMITS.announce_s)
    ended = consumer.ended(A)
    assert ended is not None
    assert (ended.code, ended.reason) == (ErrorCode.EXPIRED, "announced, and no producer ever offered it")
    consumer.core.announce(B, scene.now, wait_s=1.0)
    assert consumer.core.next_deadline() == scene.now + 1


def test_what_the_consumer_holds_already_is_not_granted() -> None:
    scene, producer, consumer = one(pages=4)
    consumer.core.announce(A, scene.now, start_token=3)
    producer.offer(A, make_manifest(tokens=4))
    grant = producer.grant(A)
    assert grant is not None
    assert (grant.start_token, consumer.free) == (3, 3)
    producer.start(A)
    producer.finish(A, spans=[Span(0, 0, 1, 3, 4)])
    producer.commit(A)
    assert consumer.core.claim(A).manifests[0].start_token == 3


def test_a_full_prefix_hit_needs_no_memory_and_waits_for_none() -> None:
    scene, producer, consumer = one()
    producer.offer(A, make_manifest())
    producer.offer(B, make_manifest(), queue_ms=1000)
    consumer.core.announce(C, scene.now, start_token=1)
    producer.offer(C, make_manifest())
    assert producer.core.position(B) == 0
    assert producer.commit(C)
    assert producer.outcome(C) == 0
    assert consumer.arrived(C)


def test_a_prefix_longer_than_the_prompt_is_refused() -> None:
    scene, producer, consumer = one()
    consumer.core.announce(A, scene.now, start_token=5)
    producer.offer(A, make_manifest())
    assert producer.outcome(A) == ErrorCode.OUT_OF_RANGE


def test_offers_that_nobody_announced_may_be_refused() -> None:
    scene, producer, consumer = one(unannounced=Unannounced.REFUSE)
    producer.offer(A, make_manifest())
    assert producer.outcome(A) == ErrorCode.NOT_ANNOUNCED
    consumer.core.announce(A, scene.now)  # it was not used up by the refusal
    producer.offer(A, make_manifest())
    assert producer.grant(A) is not None


def test_shards_may_wait_together_for_an_announcement() -> None:
    scene, first, second = two(unannounced=Unannounced.WAIT)
    first.offer(A, make_manifest(0, 2))
    second.offer(A, make_manifest(1, 2))
    assert first.grant(A) is None
    scene.consumer.core.announce(A, scene.now)
    scene.run()
    assert second.grant(A) is not None


def test_a_shard_that_is_never_offered_is_named() -> None:
    scene, first, _ = two()
    first.offer(A, make_manifest(0, 2), queue_ms=60_000)
    scene.advance(DEFAULT_LIMITS.assemble_s)
    ended = scene.consumer.ended(A)
    assert ended is not None
    assert ended.reason == "shards [1] of 2 never offered"
    assert first.outcome(A) == ErrorCode.EXPIRED


@pytest.mark.parametrize("manifest", [make_manifest(1, 3), make_manifest(1, 2, tokens=2)])
def test_shards_that_contradict_one_another_are_refused(manifest: Manifest) -> None:
    scene, first, second = two()
    first.offer(A, make_manifest(0, 2))
    second.offer(A, manifest)
    assert second.outcome(A) == ErrorCode.MANIFEST_MISMATCH
    assert first.outcome(A) == ErrorCode.SHARD_FAILED
    assert scene.consumer.free == 2


def offer(manifest: Manifest, handoff: bytes = A) -> Offer:
    return Offer(handoff=handoff, manifest=manifest)


def test_one_link_carries_one_shard_of_a_handoff() -> None:
    scene, producer, consumer = one()
    producer.offer(A, make_manifest(0, 2))
    scene.say(producer, offer(make_manifest(1, 2)))
    assert producer.outcome(A) == ErrorCode.MANIFEST_MISMATCH
    assert consumer.ended(A) is not None


def test_an_offer_starts_at_token_0() -> None:
    scene, producer, consumer = one()
    scene.say(producer, offer(make_manifest(tokens=2).starting_at(1)))
    ended = consumer.ended(A)
    assert ended is not None
    assert "starts at token 0" in ended.reason


def test_a_shard_belongs_to_who_offered_it_first() -> None:
    scene, first, second = two()
    first.offer(A, make_manifest())
    scene.say(first, offer(make_manifest()))
    second.offer(A, make_manifest())
    assert second.outcome(A) == ErrorCode.DUPLICATE
    assert scene.consumer.ignored("repeated offer") == 2
    first.move(A)
    assert first.outcome(A) == 0


def test_an_offer_after_assembly_harms_nobody_but_its_sender() -> None:
    scene, first, second = two()
    first.offer(A, make_manifest())
    second.offer(A, make_manifest(1, 2))
    assert second.outcome(A) == ErrorCode.DUPLICATE
    assert scene.consumer.ignored("offer after assembly") == 1
    first.move(A)
    assert first.outcome(A) == 0


def test_the_number_of_handoffs_is_bounded() -> None:
    limits = msgspec.structs.replace(DEFAULT_LIMITS, max_handoffs_per_link=1)
    scene, first, second = two(limits=limits)
    first.offer(A, make_manifest())
    second.offer(B, make_manifest())
    assert second.outcome(B) == ErrorCode.BUSY
    refusal = scene.consumer.of(Send)[-1].message
    assert isinstance(refusal, Refuse)
    assert refusal.retry_after_ms > 0


def test_the_queue_is_bounded() -> None:
    limits = msgspec.structs.replace(DEFAULT_LIMITS, max_queue=1)
    _, producer, consumer = one(limits=limits)
    for handoff in (A, B, C):
        producer.offer(handoff, make_manifest(), queue_ms=5000)
    assert producer.outcome(C) == ErrorCode.BUSY
    assert consumer.core.statistics().queue == 1


def test_a_consumer_may_look_at_every_offer_and_at_all_of_them() -> None:
    def admit(link: int, message: Offer) -> None:
        if message.manifest.prompt_tokens > 1:
            raise LayoutError(ErrorCode.LAYOUT_MISMATCH, f"link {link} is too long", field="tokens")

    def cover(handoff: HandoffId, manifests: Sequence[Manifest]) -> None:
        if handoff == B and len(manifests) > 1:
            raise LocalError(ErrorCode.MANIFEST_MISMATCH, "rows come twice")

    _, first, second = two(admit=admit, cover=cover)
    first.offer(A, make_manifest(tokens=2))
    assert first.outcome(A) == ErrorCode.LAYOUT_MISMATCH
    first.offer(B, make_manifest(0, 2))
    second.offer(B, make_manifest(1, 2))
    assert first.outcome(B) == ErrorCode.MANIFEST_MISMATCH
    first.offer(C, make_manifest())
    assert first.grant(C) is not None


def test_places_in_the_queue_are_told_as_they_change() -> None:
    scene, producer, consumer = one()
    for handoff in (A, B, C):
        producer.offer(handoff, make_manifest(), queue_ms=50_000)
    assert (producer.core.position(B), producer.core.position(C)) == (0, 1)
    producer.cancel(B)
    assert producer.core.position(C) == 1
    scene.advance(DEFAULT_LIMITS.heartbeat_s)
    assert producer.core.position(C) == 0
    scene.advance(DEFAULT_LIMITS.heartbeat_s)
    producer.cancel(A)
    assert producer.grant(C) is not None
    scene.advance(DEFAULT_LIMITS.heartbeat_s)
    assert consumer.core.statistics().queue == 0


# ---- draining


def test_a_draining_consumer_takes_nothing_new_and_finishes_the_rest() -> None:
    scene, producer, consumer = one()
    producer.offer(A, make_manifest())
    pipe = scene.pipes[0]
    consumer.core.drain()
    consumer.core.drain()
    assert [effect.message for effect in consumer.core.take_effects() if isinstance(effect, Send)] == [Draining()]
    with pytest.raises(LocalError, match="takes no new"):
        consumer.core.announce(B, scene.now)
    scene.say(producer, offer(make_manifest(), B))
    refusal = consumer.of(Send)[-1].message
    assert isinstance(refusal, Refuse)
    assert refusal.code == ErrorCode.DRAINING
    producer.move(A)
    assert producer.outcome(A) == 0
    late = scene.add_producer()
    with pytest.raises(LocalError, match="takes no new"):
        late.offer(B, make_manifest())
    assert not pipe.cut


# ---- moving and verifying


def test_rows_outside_the_manifest_fail_the_handoff() -> None:
    scene, producer, consumer = one()
    producer.offer(A, make_manifest())
    scene.say(producer, Progress(handoff=A, generation=1, shard=0, spans=(Span(0, 0, 1, 0, 5),)))
    ended = consumer.ended(A)
    assert ended is not None
    assert (ended.code, ended.shard) == (ErrorCode.MANIFEST_MISMATCH, 0)


def test_progress_over_its_bound_fails_the_handoff() -> None:
    scene, producer, consumer = one(limits=Limits(max_progress_layers=2))
    producer.offer(A, make_manifest())
    scene.say(producer, Progress(handoff=A, generation=1, shard=0, spans=(Span(0, 0, 1, 0, 1),) * 3))
    ended = consumer.ended(A)
    assert ended is not None
    assert (ended.code, ended.shard) == (ErrorCode.OVERSIZED, 0)


def test_the_costliest_progress_is_bounded() -> None:
    """4096 spans of 77 of 78 layers would count 315,392 layers."""
    layers = tuple(range(78))
    entry = Entry(component="k", layers=layers, row_bytes=1, page_tokens=1, page_bytes=1)
    manifest = Manifest(prompt_tokens=8192, shard=0, shards=1, entries=(entry,))
    scene, producer, consumer = one(pages=4096)
    producer.offer(A, manifest)
    spans = tuple(Span(0, 0, 77, 2 * at, 2 * at + 1) for at in range(4096))
    scene.say(producer, Progress(handoff=A, generation=1, shard=0, spans=spans))
    ended = consumer.ended(A)
    assert ended is not None
    assert ended.code == ErrorCode.OVERSIZED
    assert consumer.core.landed(A) is None


def test_what_can_never_fit_is_not_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Manifest, "pieces", None)  # a call would fail
    scene, producer, _ = one()
    producer.offer(A, make_manifest(tokens=DEFAULT_LIMITS.max_prompt_tokens))
    assert producer.outcome(A) == ErrorCode.TOO_LARGE
    assert scene.consumer.free == 1


def test_a_promised_digest_must_come_and_goes_to_whoever_verifies() -> None:
    _, producer, consumer = one()
    producer.offer(A, make_manifest(), digest=True)
    producer.move(A)
    assert producer.outcome(A) == ErrorCode.DIGEST_MISMATCH
    producer.offer(B, make_manifest(), digest=True)
    producer.move(B, payload_digest=b"12345678")
    assert consumer.of(Verify)[-1].digests == {0: b"12345678"}


def test_T040_a_digest_that_differs_fails_before_anything_is_read() -> None:
    scene, producer, consumer = one()
    consumer.verify = False
    producer.offer(A, make_manifest())
    producer.move(A)
    with pytest.raises(LocalError, match="wait until it is ready"):
        consumer.core.claim(A)
    consumer.core.verification_failed(A, 1, 0, "row 7 differs", scene.now)
    scene.run()
    assert producer.outcome(A) == ErrorCode.DIGEST_MISMATCH
    assert consumer.core.statistics().failed == {ErrorCode.DIGEST_MISMATCH: 1}
    assert consumer.free == 1
    consumer.core.verification_failed(A, 1, 0, "again", scene.now)
    assert consumer.ignored("late verification") == 1


def test_a_verdict_counts_once() -> None:
    scene, _, consumer = complete()
    consumer.core.verified(A, 1, scene.now)
    consumer.core.verification_failed(A, 1, 0, "late", scene.now)
    assert consumer.ignored("late verification") == 2
    assert consumer.core.claim(A).handoff == A


def test_of_equal_names_the_lowest_shards_value_is_claimed() -> None:
    scene, first, second = two()
    second.offer(A, make_manifest(1, 2), attachments=[attach_int("x", 2), attach_int("y", 2)], traceparent="other")
    first.offer(A, make_manifest(0, 2), attachments=[attach_int("x", 1)], traceparent="trace")
    first.move(A)
    second.move(A)
    claim = scene.consumer.core.claim(A)
    assert claim.attachments["x"] == attach_int("x", 1)
    assert claim.attachments["y"] == attach_int("y", 2)
    assert claim.traceparent == "trace"


def test_an_unknown_reference_is_said_to_be_unknown() -> None:
    _, _, consumer = one()
    with pytest.raises(LocalError) as raised:
        consumer.core.claim(A)
    assert raised.value.code == ErrorCode.UNKNOWN_HANDOFF


def test_early_reading_holds_the_memory_of_a_handoff_that_fails() -> None:
    scene, producer, consumer = one()
    producer.offer(A, make_manifest())
    assert consumer.core.begin_read(1)
    producer.cancel(A)
    assert consumer.free == 0
    consumer.core.end_read(1, scene.now)
    assert consumer.free == 1
    consumer.core.end_read(1, scene.now)
    assert consumer.free == 1


def test_what_has_landed_may_be_read_until_the_handoff_is_read_or_over() -> None:
    scene, producer, consumer = one()
    assert consumer.core.landed(A) is None
    manifest = make_manifest()
    producer.offer(A, manifest)
    landed = consumer.core.landed(A)
    assert landed is not None
    assert (landed.generation, landed.prompt_tokens, landed.digest) == (1, manifest.prompt_tokens, False)
    assert landed.rows == {0: [[] for _ in manifest.entries]}
    producer.move(A)
    scene.run()
    landed = consumer.core.landed(A)
    assert landed is not None
    assert landed.rows == {0: [[range(manifest.prompt_tokens)] for _ in manifest.entries]}
    consumer.core.claim(A)
    assert consumer.core.landed(A) is None


# ---- ends


def test_a_fence_may_be_reported_late() -> None:
    scene, producer, consumer = one()
    producer.offer(A, make_manifest())
    producer.cancel(A)
    consumer.core.fenced(1, 0, scene.now)
    assert consumer.free == 1


def test_manifests_of_a_handoff_under_way_can_be_seen() -> None:
    _, producer, consumer = one()
    producer.offer(A, make_manifest())
    assert consumer.core.manifests(A) == {0: make_manifest()}
    assert consumer.core.manifests(B) == {}


def test_a_grant_that_cannot_be_described_fails_and_frees() -> None:
    scene, producer, consumer = one()
    consumer.lost_grants = True
    producer.offer(A, make_manifest())
    consumer.core.grant_failed(A, 9, "another generation", scene.now)
    consumer.core.grant_failed(A, 1, "no memory handle", scene.now)
    scene.run()
    assert producer.outcome(A) == ErrorCode.MOVER_FAILED
    assert consumer.free == 1


def test_memory_does_not_go_to_a_handoff_that_lost_the_same_link() -> None:
    scene, producer, consumer = one()
    producer.offer(A, make_manifest())
    producer.offer(B, make_manifest(), queue_ms=5000)
    consumer.core.fenced(1, 0, scene.now)
    scene.lose(scene.pipes[0])
    assert consumer.core.statistics().book.grants == 1
    assert consumer.free == 1


def test_a_lost_link_asks_for_proof_only_while_its_peer_may_write() -> None:
    scene, producer, consumer = complete()
    consumer.core.link_lost(99, "never was", scene.now)
    scene.lose(scene.pipes[0])
    assert consumer.of(ProveEnded) == []
    assert consumer.core.claim(A).handoff == A
    assert producer.outcome(A) == 0


def test_a_peer_that_is_proven_to_have_ended_fails_what_waits_for_it() -> None:
    scene, producer, consumer = one()
    producer.offer(A, make_manifest())
    consumer.core.proven_ended(producer.incarnation, scene.now)
    ended = consumer.ended(A)
    scene.run()
    ended = consumer.ended(A)
    assert ended is not None
    assert ended.code == ErrorCode.STALE_INCARNATION
    assert consumer.free == 1


def test_drained_is_believed_from_the_incarnation_that_was_granted_only() -> None:
    scene, first, second = two(pages=1)
    first.offer(A, make_manifest())
    first.start(A)
    scene.consumer.core.cancel(A, "test", scene.now)
    scene.run()
    scene.say(second, Drained(handoff=A, generation=1, shard=0))
    scene.say(second, Cancel(handoff=A, generation=1, reason="", drained=True))
    assert scene.consumer.free == 0
    assert scene.consumer.ignored("stale Drained") == 1
    first.finish(A)
    assert scene.consumer.free == 1


def test_drained_of_a_handoff_that_is_moving_fails_it() -> None:
    scene, first, second = two()
    first.offer(A, make_manifest(0, 2))
    second.offer(A, make_manifest(1, 2))
    scene.say(first, Drained(handoff=A, generation=1, shard=0))
    assert second.outcome(A) == ErrorCode.SHARD_FAILED
    assert scene.consumer.free == 2


@pytest.mark.parametrize("offered", [True, False])
def test_drained_before_a_grant_forbids_one(*, offered: bool) -> None:
    scene, producer, consumer = one()
    producer.offer(B, make_manifest())
    if offered:
        producer.offer(A, make_manifest(), queue_ms=5000)
    scene.say(producer, Drained(handoff=A, generation=0, shard=0))
    if not offered:
        producer.offer(A, make_manifest(), queue_ms=5000)
        assert producer.outcome(A) == ErrorCode.SHARD_FAILED
    ended = consumer.ended(A)
    assert (ended is not None) is offered
    producer.cancel(B)
    assert consumer.free == 1
    assert consumer.core.statistics().book.grants == 1


def test_a_late_offer_learns_how_its_handoff_ended() -> None:
    scene, first, second = two()
    first.offer(A, make_manifest(0, 2))
    first.cancel(A)
    second.offer(A, make_manifest(1, 2))
    assert second.outcome(A) == ErrorCode.CANCELLED
    first.offer(B, make_manifest())
    first.move(B)
    scene.consumer.core.claim(B)
    scene.consumer.core.release(B, scene.now)
    second.offer(B, make_manifest())
    assert second.outcome(B) == ErrorCode.DUPLICATE


def test_messages_for_nobody_are_counted() -> None:
    scene, producer, consumer = one()
    consumer.core.receive(1, Pong(number=1), scene.now)
    consumer.core.receive(99, offer(make_manifest()), scene.now)
    assert set(consumer.core.statistics().ignored) == {"unexpected Pong", "offer over a closed link"}
    assert not consumer.core.cancel(A, "unknown", scene.now)
    assert consumer.core.state(A) is None
    producer.offer(A, make_manifest())
    assert consumer.core.state(A) is ConsumerState.LANDING
    assert consumer.core.statistics().book.granted_bytes == PAGE


def test_the_whole_handoff_has_a_bound() -> None:
    limits = msgspec.structs.replace(DEFAULT_LIMITS, handoff_s=20.0)
    scene, producer, consumer = one(limits=limits)
    producer.offer(A, make_manifest())
    scene.advance(20.0)
    ended = consumer.ended(A)
    assert ended is not None
    assert ended.code == ErrorCode.TRANSFER_TIMEOUT


def test_two_deadlines_of_one_handoff_in_one_tick_end_it_once() -> None:
    limits = msgspec.structs.replace(DEFAULT_LIMITS, handoff_s=5.0, lease_s=5.0)
    scene, producer, consumer = one(limits=limits)
    producer.offer(A, make_manifest())
    consumer.core.tick(scene.now + 100)
    scene.run()
    assert consumer.ended(A) is not None


def test_a_reader_that_outlives_the_drain_time_is_no_quarantine() -> None:
    scene, producer, consumer = one()
    producer.offer(A, make_manifest())
    consumer.core.begin_read(1)
    producer.cancel(A)
    scene.advance(DEFAULT_LIMITS.drain_s + 1)
    assert consumer.core.book.statistics().quarantines == 0
    consumer.core.end_read(1, scene.now)
    assert consumer.free == 1
