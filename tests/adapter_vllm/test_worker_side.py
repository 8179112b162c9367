from __future__ import annotations

from typing import Any

import pytest

from pdhandoff.errors import ErrorCode, HandoffFailed, LocalError
from pdhandoff.ids import HandoffId
from pdhandoff.layouts import Layout, Model
from pdhandoff.layouts.catalogue import index_pages, mla_rows
from pdhandoff.layouts.descriptor import RopeOrder
from pdhandoff.planner import PageTable, Placement, Shard
from pdhandoff.runtime.address import Address
from pdhandoff_vllm.caches import Caches
from pdhandoff_vllm.meta import Begin, Chunk, Commit, StepMeta, WorkerReport
from pdhandoff_vllm.worker_side import WorkerSide
from support.connector_fakes import FakeClock, FakeOutgoing, FakeProducer, config_of

PAGE = 64
LAYERS = 2
CACHES = Caches(
    layout=Layout(
        name="test",
        model=Model(name="test", layers=LAYERS),
        components=(
            mla_rows(layers=range(LAYERS)),
            index_pages(layers=range(LAYERS), rope_order=RopeOrder.HALF_SPLIT),
        ),
    ).validate(),
    placements={name: Placement(64, {"": [4096, 8192]}) for name in ("mla_latent", "index_key")},
    memory=(),
    groups={"mla_latent": (0, 1), "index_key": (0, 2)},
    replicas=Shard(0, 1),
    block_bytes=(1000,),
)


class Worker:
    """A worker's side between fakes."""

    def __init__(self, *, device: Any = None, **keys: Any) -> None:
        self.clock = FakeClock()
        self.producer = FakeProducer()
        self.side = WorkerSide(
            config_of(**{"hold_bytes": 1 << 40, **keys}),
            CACHES,
            self.producer,  # type: ignore[arg-type]
            device=device,
            clock=self.clock,
        )

    def begin(self, name: str = "r", tokens: int = 200) -> FakeOutgoing:
        """The first step of a request, without its chunk."""
        handoff = HandoffId.mint()
        self.step(
            begins=(
                Begin(
                    request=name,
                    handoff=bytes(handoff),
                    consumer=("127.0.0.1", 5556),
                    prompt_tokens=tokens,
                    queue_s=3,
                ),
            )
        )
        return self.producer.offers[handoff]

    def step(self, **fields: Any) -> None:
        meta = StepMeta(**fields)
        self.side.handle_preemptions(meta)
        self.side.bind(meta)
        self.side.wait_for_save(meta)

    def chunk(self, start: int, stop: int, *blocks: int, name: str = "r") -> None:
        self.step(chunks=(Chunk(request=name, start=start, stop=stop, blocks=(blocks,)),))

    def commit(self, name: str = "r") -> None:
        self.step(commits=(Commit(request=name, last_token=1, first_token=2),))

    def held(self, name: str = "r") -> set[str] | None:
        """The request has ended, and its blocks are left to the worker."""
        self.step(held=(name,))
        return self.side.finished({name})

    def failures(self) -> dict[str, str]:
        report = self.side.report()
        return {} if report is None else report.failed


def test_a_request_from_offer_to_ready() -> None:
    worker = Worker()
    outgoing = worker.begin()
    arguments = worker.producer.arguments[outgoing.handoff]
    assert arguments == {
        "consumer": Address("127.0.0.1", 5556),
        "prompt_tokens": 200,
        "queue_s": 3,
        "traceparent": "",
    }
    worker.chunk(0, 128, 5, 6)
    worker.chunk(128, 200, 7, 9)
    assert [chunk.tokens for chunk in outgoing.chunks] == [range(128), range(128, 200)]
    assert worker.side.finished(set()) is None
    worker.commit()
    assert outgoing.commits == [(1, 2)]
    assert worker.held() is None
    outgoing.free()
    assert worker.side.finished(set()) == {"r"}
    assert worker.side.finished(set()) is None
    worker.clock.now += 2
    outgoing.settled.set_result(None)
    tally = worker.side.tally()
    assert tally is not None
    assert (tally.ready, tally.tokens, tally.seconds, tally.tail_seconds) == (1, 200, [2.0], [2.0])
    assert tally.nbytes == 200 * LAYERS * (1152 + 132)
    assert worker.side.report() == WorkerReport(ended={"r": 1})
    assert worker.side.tally() is None
    assert worker.side.report() is None


def test_each_component_has_a_table_of_its_own_pages() -> None:
    """A block of the manager is two pages of the index (trap 13), and a chunk begins in the middle of a block."""
    worker = Worker()
    outgoing = worker.begin(tokens=1000)
    worker.chunk(128 + 100, 300, 5, 9)
    tables = outgoing.chunks[0].tables
    assert tables["index_key"] == PageTable([10, 11, 18, 19], PAGE, 128, null=0)
    assert tables["mla_latent"] == PageTable([5, 9], PAGE, 192, null=0)


def test_big_chunks_are_handed_over_in_pieces_that_the_ring_takes() -> None:
    worker = Worker(staging_bytes=8 * 2 * PAGE * LAYERS * (1152 + 132))
    outgoing = worker.begin(tokens=1000)
    worker.chunk(0, 300, 1, 2, 3, 4, 5)
    assert [chunk.tokens for chunk in outgoing.chunks] == [range(128), range(128, 256), range(256, 300)]
    with pytest.raises(LocalError, match="staging_bytes"):
        Worker(staging_bytes=1 << 20)


def test_an_id_that_vllm_has_not_called_finished_is_not_reported() -> None:
    """Trap 4: only after `request_finished` has held it and it was among `finished_req_ids`; once."""
    worker = Worker()
    outgoing = worker.begin()
    worker.chunk(0, 200, 1, 2, 3, 4)
    outgoing.free()
    assert worker.side.finished({"r"}) is None
    assert worker.side.finished(set()) is None
    worker.step(held=("r",))
    assert worker.side.finished({"other"}) == {"r"}
    worker.step(held=("unseen",))
    assert worker.side.finished(set()) is None
    assert worker.side.finished({"unseen"}) == {"unseen"}


def test_a_request_without_a_handoff_is_not_reported() -> None:
    worker = Worker()
    assert worker.side.finished({"a", "b"}) is None
    worker.begin()
    assert worker.side.finished({"a", "b"}) is None


def test_a_cancel_ends_the_handoff_and_waits_for_its_readers() -> None:
    worker = Worker()
    outgoing = worker.begin()
    worker.chunk(0, 128, 1, 2)
    worker.step(cancels=(("r", "the client has gone"), ("other", "x")), held=("r",))
    assert outgoing.cancels == ["the client has gone"]
    assert worker.side.finished({"r"}) is None
    worker.chunk(128, 200, 3, 4)
    assert len(outgoing.chunks) == 1
    outgoing.settled.set_exception(HandoffFailed(ErrorCode.CANCELLED, "said twice"))
    outgoing.free()
    assert worker.side.finished(set()) == {"r"}
    tally = worker.side.tally()
    assert tally is not None
    assert tally.failed == {"cancelled": 1}


def test_an_offer_that_is_refused_fails_the_handoff() -> None:
    worker = Worker()
    worker.producer.refuses = LocalError(ErrorCode.MISUSE, "this producer is closed")
    begin = Begin(request="r", handoff=bytes(16), consumer=("127.0.0.1", 1), prompt_tokens=9, queue_s=0)
    worker.step(begins=(begin,))
    worker.chunk(0, 9, 1)
    worker.commit()
    assert worker.failures() == {"r": "this producer is closed"}
    assert worker.held() == {"r"}


def test_a_push_that_is_refused_fails_the_handoff() -> None:
    worker = Worker()
    outgoing = worker.begin()
    outgoing.refuses = LocalError(ErrorCode.OUT_OF_RANGE, "no such page")
    worker.chunk(0, 128, 1, 2)
    assert outgoing.cancels == ["no such page"]
    worker.commit()
    assert not outgoing.commits
    assert worker.failures() == {"r": "no such page"}
    assert worker.held() == {"r"}


def test_a_failure_of_the_library_is_reported() -> None:
    worker = Worker()
    outgoing = worker.begin()
    outgoing.settled.set_exception(HandoffFailed(ErrorCode.LINK_LOST, "gone"))
    worker.chunk(0, 128, 1, 2)
    assert not outgoing.chunks
    assert worker.failures() == {"r": "gone"}
    other = worker.begin("other")
    other.settled.set_exception(RuntimeError("no error of ours"))
    assert "no error of ours" in worker.failures()["other"]


def test_T062_preemption_restarts_the_handoff() -> None:
    worker = Worker()
    outgoing = worker.begin()
    worker.chunk(0, 128, 1, 2)
    worker.step(restarts=("r", "other"))
    assert outgoing.restarts == 1
    worker.chunk(0, 200, 7, 8, 9, 10)
    worker.commit()
    assert outgoing.commits == [(1, 2)]


def test_preemption_after_the_end_of_prefill_changes_nothing_once_rows_are_out() -> None:
    worker = Worker()
    outgoing = worker.begin()
    worker.chunk(0, 200, 1, 2, 3, 4)
    worker.commit()
    outgoing.free()
    worker.step(restarts=("r",))
    worker.chunk(0, 200, 7, 8, 9, 10)
    worker.commit()
    worker.step(cancels=(("r", "the client has gone"),), held=("r",))
    assert (outgoing.restarts, len(outgoing.chunks), outgoing.commits, outgoing.cancels) == (0, 1, [(1, 2)], [])
    assert worker.side.finished({"r"}) == {"r"}


def test_preemption_while_rows_are_read_starts_over() -> None:
    worker = Worker()
    outgoing = worker.begin()
    worker.chunk(0, 200, 1, 2, 3, 4)
    worker.commit()
    worker.step(restarts=("r",))
    worker.chunk(0, 200, 7, 8, 9, 10)
    worker.commit()
    assert (outgoing.restarts, len(outgoing.chunks), len(outgoing.commits)) == (1, 2, 2)


def test_blocks_are_not_kept_for_ever() -> None:
    """Trap 5: vLLM has no time-out of its own. First the handoff ends, and only then the blocks go."""
    worker = Worker(hold_s=30)
    outgoing = worker.begin()
    worker.chunk(0, 200, 1, 2, 3, 4)
    assert worker.held() is None
    worker.clock.now += 29
    assert worker.side.finished(set()) is None
    assert not outgoing.cancels
    worker.clock.now += 2
    assert worker.side.finished(set()) is None
    assert "hold_s" in outgoing.cancels[0]
    outgoing.free()
    assert worker.side.finished(set()) == {"r"}
    tally = worker.side.tally()
    assert tally is not None
    assert (tally.expired, tally.stuck, tally.failed) == (1, 0, {"lease_expired": 1})


def test_blocks_go_even_under_a_write_that_never_ends() -> None:
    worker = Worker(hold_s=30)
    worker.begin()
    worker.chunk(0, 200, 1, 2, 3, 4)
    worker.held()
    worker.clock.now += 31
    assert worker.side.finished(set()) is None
    worker.clock.now += 9
    assert worker.side.finished(set()) is None
    worker.clock.now += 2
    assert worker.side.finished(set()) == {"r"}
    tally = worker.side.tally()
    assert tally is not None
    assert tally.stuck == 1


def test_finished_requests_keep_no_more_than_hold_bytes_together() -> None:
    """The oldest goes first. Each has four blocks of 1,000 bytes."""
    worker = Worker(hold_bytes=9_000)
    outgoings = []
    for name in ("a", "b", "c"):
        outgoings.append(worker.begin(name))
        worker.chunk(0, 200, 1, 2, 3, 4, name=name)
        assert worker.held(name) is None
    worker.clock.now += 0.9
    assert worker.side.finished(set()) is None
    assert not any(outgoing.cancels for outgoing in outgoings)
    worker.clock.now += 0.2
    assert worker.side.finished(set()) is None
    assert [len(outgoing.cancels) for outgoing in outgoings] == [1, 0, 0]
    assert "hold_bytes" in outgoings[0].cancels[0]
    outgoings[0].free()
    assert worker.side.finished(set()) == {"a"}
    outgoings[2].free()
    assert worker.side.finished(set()) == {"c"}
    assert not outgoings[1].cancels


def test_T065_two_requests_of_one_step_are_two_handoffs() -> None:
    worker = Worker()
    one, two = worker.begin("one"), worker.begin("two")
    worker.step(
        chunks=(
            Chunk(request="one", start=0, stop=64, blocks=((1,),)),
            Chunk(request="two", start=0, stop=64, blocks=((2,),)),
            Chunk(request="nobody", start=0, stop=64, blocks=((3,),)),
        )
    )
    assert [list(each.chunks[0].tables["mla_latent"].ids) for each in (one, two)] == [[1], [2]]


class Gpu:
    """A device that counts its events."""

    def __init__(self) -> None:
        self.events = 0

    def stream(self) -> int:
        return 77

    def event(self) -> str:
        self.events += 1
        return f"event {self.events}"


def test_T074_in_gpu_memory_rows_are_staged_on_the_stream_that_computed_them() -> None:
    device = Gpu()
    worker = Worker(device=device)
    outgoing = worker.begin()
    assert device.events == 0
    worker.chunk(0, 128, 1, 2)
    worker.chunk(128, 200, 3, 4)
    assert [(chunk.stream, chunk.after) for chunk in outgoing.chunks] == [(77, "event 1"), (77, "event 2")]


def test_a_fault_ends_every_handoff_and_gives_blocks_back() -> None:
    worker = Worker()
    outgoing, sealed = worker.begin(), worker.begin("sealed")
    worker.chunk(0, 200, 1, 2, 3, 4, name="sealed")
    worker.commit("sealed")
    sealed.free()
    worker.step(restarts=("sealed",))
    worker.side.fault("wait_for_save", KeyError("x"), StepMeta())
    assert "fault in the connector's wait_for_save" in outgoing.cancels[0]
    assert not sealed.cancels
    assert "KeyError" in worker.failures()["r"]
    assert worker.held() == {"r"}


def test_a_fault_loses_no_request_that_the_step_told_of() -> None:
    worker = Worker()
    begin = Begin(request="new", handoff=bytes(16), consumer=("127.0.0.1", 1), prompt_tokens=9, queue_s=0)
    worker.side.fault("bind", KeyError("x"), StepMeta(begins=(begin,), held=("old",)))
    assert "KeyError" in worker.failures()["new"]
    assert worker.side.finished({"old"}) == {"old"}
    assert worker.held("new") == {"new"}


def test_shutdown_closes_what_was_made() -> None:
    worker = Worker()
    worker.begin()
    worker.side.shutdown()
    assert worker.producer.closed


def test_reports_of_ranks_are_added_up() -> None:
    one = WorkerReport(failed={"r": "first"}, ended={"r": 1, "a": 1})
    two = WorkerReport(failed={"r": "second", "b": "x"}, ended={"r": 1})
    assert one.aggregate(two) == WorkerReport(failed={"r": "first", "b": "x"}, ended={"r": 2, "a": 1})
