from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdhandoff.ids import HandoffId
from pdhandoff_vllm.blocks import BlockTables
from pdhandoff_vllm.mark import KEY
from pdhandoff_vllm.meta import NOTHING, StepMeta, WorkerReport
from pdhandoff_vllm.notes import Outbox
from pdhandoff_vllm.objections import are_choices
from pdhandoff_vllm.scheduler_side import Facts, SchedulerSide
from support.connector_fakes import FakeClock, config_of, finish, mark_of, request_of, step_of

BLOCK = 64
OPEN: list[SchedulerSide] = []


@pytest.fixture(autouse=True)
def _close_all() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def side_of(*, groups: tuple[int, ...] = (BLOCK,), ranks: int = 1, clock: Any = None, **facts: Any) -> SchedulerSide:
    engine = Facts(group_tokens=groups, max_model_len=1024, ranks=ranks, **facts)
    OPEN.append(SchedulerSide(config_of(), engine, clock=clock or FakeClock()))
    return OPEN[-1]


class Engine:
    """One request on its way through the scheduler's side."""

    def __init__(self, tokens: int, **more: Any) -> None:
        self.side = side_of(**more)
        self.handoff = HandoffId.mint()
        self.request = request_of("r", tokens, mark_of(self.handoff))
        self.side.on_new_request(self.request)
        self.table: list[int] = []

    def step(self, computed: int, count: int, *blocks: int, new: bool = False, **more: Any) -> StepMeta:
        """A step that computes `count` tokens; `blocks` are those that it adds."""
        self.table += blocks
        entry = ("r", computed, [list(blocks)] if blocks else None)
        kind: dict[str, Any] = {"new": [("r", computed, [self.table])]} if new else {"cached": [entry]}
        return self.side.build_meta(step_of(tokens={"r": count}, tables={"r": [self.table]}, **kind, **more))

    def finish(self, *tokens: int, status: str = "FINISHED_LENGTH_CAPPED") -> tuple[bool, dict[str, Any]]:
        held, params = self.side.request_finished(finish(self.request, *tokens, status=status))
        assert params is not None
        answer: dict[str, Any] = params[KEY]
        return held, answer

    def idle(self) -> StepMeta:
        return self.side.build_meta(step_of(tables={}))


def chunks_of(meta: StepMeta) -> list[tuple[int, int, tuple[tuple[int, ...], ...]]]:
    return [(chunk.start, chunk.stop, chunk.blocks) for chunk in meta.chunks]


def test_a_request_without_a_mark_leaves_nothing_behind() -> None:
    side = side_of()
    for params in (None, {}, {"do_remote_decode": True}):
        request = request_of("r", 100, params)
        side.on_new_request(request)
        assert side.build_meta(step_of(new=[("r", 0, [[1, 2]])], tokens={"r": 100})) is NOTHING
        assert side.request_finished(finish(request, 5)) == (False, None)
    assert side.build_meta(step_of()) is NOTHING
    assert not side.has_pending_work()


def test_chunks_follow_the_tokens_and_not_the_blocks() -> None:
    """The last chunk adds no block: the look-ahead of the one before took it already (trap 10)."""
    engine = Engine(300)
    first = engine.step(0, 128, 1, 2, 3, new=True)
    assert chunks_of(first) == [(0, 128, ((1, 2),))]
    (begin,) = first.begins
    assert (begin.handoff, begin.consumer, begin.prompt_tokens) == (bytes(engine.handoff), ("127.0.0.1", 5556), 300)
    assert chunks_of(engine.step(128, 128, 4, 5)) == [(128, 256, ((3, 4),))]
    last = engine.step(256, 44)
    assert chunks_of(last) == [(256, 300, ((5,),))]
    assert not last.begins
    assert not last.commits


def test_T007_T008_pages_beyond_the_prompt_are_no_part_of_it() -> None:
    engine = Engine(10, groups=(1,))
    engine.table = list(range(100, 113))
    chunks = [engine.step(0, 4, new=True), engine.step(4, 4), engine.step(8, 2)]
    assert [chunks_of(meta)[0][:2] for meta in chunks] == [(0, 4), (4, 8), (8, 10)]
    assert chunks_of(chunks[2])[0][2] == ((108, 109),)
    assert chunks_of(engine.step(10, 1)) == []


def test_a_prefix_hit_sends_all_rows() -> None:
    engine = Engine(300)
    assert chunks_of(engine.step(192, 108, 1, 2, 3, 5, 6, new=True)) == [(0, 300, ((1, 2, 3, 5, 6),))]


def test_T009_T006_small_last_chunks_are_sent() -> None:
    engine = Engine(20, groups=(16,))
    assert chunks_of(engine.step(0, 17, 1, 2, new=True)) == [(0, 17, ((1, 2),))]
    assert chunks_of(engine.step(17, 3)) == [(17, 20, ((2,),))]


def test_T016_each_group_has_its_own_blocks() -> None:
    side = side_of(groups=(64, 16))
    side.on_new_request(request_of("r", 100, mark_of()))
    tables = {"r": [[5, 6], [5, 9, 8, 7, 1, 2, 3]]}
    meta = side.build_meta(step_of(new=[("r", 0, tables["r"])], tokens={"r": 100}, tables=tables))
    assert chunks_of(meta) == [(0, 100, ((5, 6), (5, 9, 8, 7, 1, 2, 3)))]


def test_the_end_commits_holds_the_blocks_and_answers() -> None:
    engine = Engine(100)
    engine.step(0, 100, 1, 2, new=True)
    held, answer = engine.finish(42)
    assert held
    assert answer == {
        "handoff": str(engine.handoff),
        "consumer": "127.0.0.1:5556",
        "prompt_tokens": 100,
        "first_token": 42,
        "status": "sent",
        "reason": "",
    }
    meta = engine.idle()
    (commit,) = meta.commits
    assert (commit.last_token, commit.first_token) == (7 * 99 % 250, 42)
    assert meta.held == ("r",)
    assert not meta.cancels
    assert engine.idle() is NOTHING


def test_a_request_that_goes_on_decoding_is_committed_when_its_first_token_is_known() -> None:
    engine = Engine(100)
    assert not engine.step(0, 100, 1, 2, new=True).commits
    engine.request.output_token_ids.append(42)
    meta = engine.step(100, 1)
    assert [commit.first_token for commit in meta.commits] == [42]
    assert not meta.chunks
    engine.request.output_token_ids.append(43)
    assert engine.step(101, 1) is NOTHING
    held, answer = engine.finish(44)
    assert held
    assert answer["first_token"] == 42
    assert not engine.idle().commits


def test_T098_a_first_token_that_stops_is_handed_off_as_any_other() -> None:
    engine = Engine(100)
    engine.step(0, 100, 1, 2, new=True)
    assert engine.finish(2, status="FINISHED_STOPPED")[1]["status"] == "sent"


@pytest.mark.parametrize("computed", [0, 64])
def test_T062_a_preempted_request_starts_over_with_its_new_blocks(computed: int) -> None:
    """V1: it comes back among the requests that go on, with its whole table (trap 9)."""
    engine = Engine(300)
    engine.step(0, 128, 1, 2, 3, new=True)
    gone = engine.side.build_meta(step_of(preempted={"r"}, tables={}))
    assert gone.restarts == ("r",)
    engine.table = []
    again = engine.step(computed, 300 - computed, 7, 8, 9, 10, 11, resumed=["r"])
    assert chunks_of(again) == [(0, 300, ((7, 8, 9, 10, 11),))]
    assert not again.begins
    assert engine.finish(42)[1]["status"] == "sent"


def test_T062_a_preempted_request_that_comes_back_as_new() -> None:
    """V2: it comes back as a new request, with tokens that it generated behind its prompt (trap 9)."""
    engine = Engine(200)
    engine.step(0, 200, 1, 2, 3, 4, new=True)
    engine.request.output_token_ids.append(42)
    assert engine.step(200, 1).commits
    engine.side.build_meta(step_of(preempted={"r"}, tables={}))
    engine.table = []
    again = engine.step(64, 137, 5, 6, 7, 8, new=True)
    assert chunks_of(again) == [(0, 200, ((5, 6, 7, 8),))]
    assert not again.begins
    assert not again.commits, "the worker commits before it pushes this step's rows"
    assert [commit.first_token for commit in engine.step(201, 1).commits] == [42]


def test_rows_that_are_computed_anew_are_sent_anew() -> None:
    engine = Engine(300)
    engine.step(0, 128, 1, 2, 3, new=True)
    meta = engine.step(64, 64)
    assert meta.restarts == ("r",)
    assert chunks_of(meta) == [(0, 128, ((1, 2),))]


def test_a_preempted_request_that_nobody_knows_is_nobodys() -> None:
    engine = Engine(300)
    assert engine.side.build_meta(step_of(preempted={"r", "other"}, tables={})) is NOTHING


@pytest.mark.parametrize("moment", ["before", "waiting", "prefill", "preempted", "decoding"])
def test_T060_T064_an_abort_at_any_moment_ends_the_handoff(moment: str) -> None:
    engine = Engine(300)
    if moment in {"prefill", "preempted"}:
        engine.step(0, 128, 1, 2, 3, new=True)
    if moment == "preempted":
        engine.side.build_meta(step_of(preempted={"r"}, tables={}))
    if moment == "decoding":
        engine.step(0, 300, 1, 2, 3, 4, 5, new=True)
    if moment == "waiting":
        assert engine.side.build_meta(step_of(tables={})) is NOTHING
    held, answer = engine.finish(status="FINISHED_ABORTED")
    assert answer["status"] == "failed"
    meta = engine.idle()
    if moment in {"before", "waiting"}:
        assert not held
        assert meta is NOTHING
    else:
        assert held
        assert meta.held == ("r",)
        assert [request for request, _ in meta.cancels] == ["r"]
    assert not meta.commits
    assert engine.idle() is NOTHING


def test_an_abort_after_the_commit_harms_nobody() -> None:
    engine = Engine(100)
    engine.step(0, 100, 1, 2, new=True)
    engine.request.output_token_ids.append(42)
    engine.step(100, 1)
    held, _ = engine.finish(status="FINISHED_ABORTED")
    meta = engine.idle()
    assert held
    assert meta.held == ("r",)
    assert not meta.cancels


def test_a_failure_that_a_worker_reports_is_in_the_answer() -> None:
    engine = Engine(300)
    engine.step(0, 128, 1, 2, 3, new=True)
    engine.side.update_output(WorkerReport(failed={"r": "127.0.0.1:5556: Connection refused", "other": "x"}))
    assert chunks_of(engine.step(128, 172)) == []
    held, answer = engine.finish(42)
    assert held
    assert (answer["status"], answer["reason"]) == ("failed", "127.0.0.1:5556: Connection refused")
    assert answer["first_token"] == 42
    assert not engine.idle().commits


def test_a_note_that_a_worker_sends_is_in_the_answer_of_the_same_step() -> None:
    engine = Engine(100)
    (begin,) = engine.step(0, 100, 1, 2, new=True).begins
    outbox = Outbox()
    outbox.open(begin.postbox)
    outbox.send(begin.postbox, "r", "refused")
    outbox.close()
    assert engine.finish(42)[1]["reason"] == "refused"
    engine.side.close()


def test_siblings_reports_are_not_ours() -> None:
    engine = Engine(100)
    reports: tuple[object, ...] = (None, {}, SimpleNamespace(failed={"r": "x"}), (None, None))
    for report in reports:
        engine.side.update_output(report)
    engine.step(0, 100, 1, 2, new=True)
    assert engine.finish(42)[1]["status"] == "sent"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"prompt_token_ids": None}, "embeddings"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"pooling_params": object()}, "pooling"),
        ({"mm_features": [object()]}, "images"),
        ({"lora_request": object()}, "adapter"),
    ],
)
def test_what_cannot_be_handed_off_runs_as_any_other(more: dict[str, Any], says: str) -> None:
    side = side_of()
    request = request_of("r", 100, mark_of(), **more)
    side.on_new_request(request)
    assert side.build_meta(step_of(new=[("r", 0, [[1, 2]])], tokens={"r": 100}, tables={})) is NOTHING
    held, params = side.request_finished(finish(request, 42))
    assert not held
    assert params is not None
    assert says in params[KEY]["reason"]
    assert side.request_finished(request) == (False, None)


def test_a_prompt_that_is_too_long_is_refused() -> None:
    side = SchedulerSide(config_of(tilert_max_seq_len=99), Facts(group_tokens=(BLOCK,), max_model_len=1024))
    request = request_of("r", 100, mark_of())
    side.on_new_request(request)
    params = side.request_finished(finish(request, 42))[1]
    assert params is not None
    assert "tilert_max_seq_len" in params[KEY]["reason"]


@pytest.mark.parametrize(("tokens", "status"), [(1021, "sent"), (1022, "failed")])
def test_prompts_for_which_vllm_drafts_nothing(tokens: int, status: str) -> None:
    engine = Engine(tokens, draft_tokens=3)
    engine.table = list(range(1, 17))
    engine.step(0, tokens, new=True)
    assert engine.finish(42)[1]["status"] == status


@pytest.mark.parametrize("begun", [False, True])
def test_T103_several_choices_of_one_request_are_not_handed_off(*, begun: bool) -> None:
    """They share its mark, and one consumer cannot tell them apart."""
    side, mark = side_of(), mark_of(HandoffId.mint())
    first, second = request_of("0_r", 100, mark), request_of("1_r", 100, mark)
    side.on_new_request(first)
    if begun:
        side.build_meta(step_of(new=[("0_r", 0, [[1, 2]])], tokens={"0_r": 100}, tables={"0_r": [[1, 2]]}))
    side.on_new_request(second)
    for request in (first, second):
        held, params = side.request_finished(finish(request, 42))
        assert held == (begun and request is first)
        assert params is not None
        assert "n=1" in params[KEY]["reason"]
    meta = side.build_meta(step_of(tables={}))
    assert [request for request, _ in meta.cancels] == (["0_r"] if begun else [])


def test_T096_an_id_is_used_once() -> None:
    side, mark = side_of(), mark_of(HandoffId.mint())
    requests = [request_of(name, 100, mark) for name in ("job-1", "job-2", "2_job")]
    for request in requests:
        side.on_new_request(request)
    meta = side.build_meta(
        step_of(
            new=[(request.request_id, 0, [[1, 2]]) for request in requests],
            tokens={request.request_id: 100 for request in requests},
            tables={request.request_id: [[1, 2]] for request in requests},
        )
    )
    assert [begin.request for begin in meta.begins] == ["job-1"]
    answers = [side.request_finished(finish(request, 42))[1] for request in requests]
    assert [answer[KEY]["status"] for answer in answers if answer is not None] == ["sent", "failed", "failed"]
    late = request_of("later", 100, mark)
    side.on_new_request(late)
    params = side.request_finished(finish(late, 42))[1]
    assert params is not None
    assert "mint a new id" in params[KEY]["reason"]


def test_ids_without_a_name_are_minted_for_each_request() -> None:
    side = side_of()
    for name in ("job-1", "job-2", "0_job-1", "job-1-deadbeef"):
        side.on_new_request(request_of(name, 10, mark_of()))
    names = ("job-1", "job-2", "0_job-1", "job-1-deadbeef")
    meta = side.build_meta(
        step_of(
            new=[(name, 0, [[1]]) for name in names],
            tokens=dict.fromkeys(names, 10),
            tables={name: [[1]] for name in names},
        )
    )
    assert len({begin.handoff for begin in meta.begins}) == 4


def test_a_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    engine = Engine(100)
    engine.side.on_new_request(request_of("r", 50, mark_of()))
    engine.step(0, 100, 1, 2, new=True)
    held, answer = engine.finish(42)
    assert held
    assert (answer["prompt_tokens"], answer["status"]) == (100, "sent")


def test_outcomes_keep_an_idle_engine_awake_for_a_while_only() -> None:
    clock = FakeClock()
    engine = Engine(100, clock=clock, ranks=2)
    engine.step(0, 100, 1, 2, new=True)
    assert not engine.side.has_pending_work()
    engine.finish(42)
    assert engine.side.has_pending_work()
    engine.side.update_output(WorkerReport(ended={"r": 1}))
    assert engine.side.has_pending_work()
    engine.side.update_output(WorkerReport(ended={"r": 1}))
    assert not engine.side.has_pending_work()

    again = Engine(100, clock=clock)
    again.step(0, 100, 1, 2, new=True)
    again.finish(42)
    clock.now += 6
    assert not again.side.has_pending_work()


def test_a_handoff_that_is_over_before_its_request_keeps_nobody_awake() -> None:
    engine = Engine(100)
    engine.step(0, 100, 1, 2, new=True)
    engine.side.update_output(WorkerReport(ended={"r": 1}))
    engine.finish(42)
    assert not engine.side.has_pending_work()


def test_versions_without_block_state_have_their_tables_kept() -> None:
    """vLLM 0.26: what each step adds, and whole tables of requests that come back."""
    side = side_of()
    side.on_new_request(request_of("r", 300, mark_of()))

    def step(**more: Any) -> StepMeta:
        return side.build_meta(step_of(**more))

    assert chunks_of(step(new=[("r", 0, [[1, 2, 3]])], tokens={"r": 128})) == [(0, 128, ((1, 2),))]
    assert chunks_of(step(cached=[("r", 128, [[4, 5]])], tokens={"r": 128})) == [(128, 256, ((3, 4),))]
    assert step(preempted={"r"}).restarts == ("r",)
    again = step(cached=[("r", 0, [[9, 8, 7]])], resumed=["r"], tokens={"r": 128})
    assert chunks_of(again) == [(0, 128, ((9, 8),))]
    assert chunks_of(step(cached=[("r", 128, None)], tokens={"r": 64})) == [(128, 192, ((7,),))]


def test_a_fault_gives_up_what_may_lack_a_chunk_and_nothing_else() -> None:
    engine = Engine(300)
    engine.step(0, 128, 1, 2, 3, new=True)
    whole = request_of("whole", 10, mark_of())
    engine.side.on_new_request(whole)
    tables = {"whole": [[9]]}
    engine.side.build_meta(step_of(new=[("whole", 0, [[9]])], tokens={"whole": 10}, tables=tables))
    whole.output_token_ids.append(1)
    assert engine.side.build_meta(step_of(tables={})).commits
    engine.side.fault("build_connector_meta", KeyError("x"))
    meta = engine.idle()
    assert [request for request, _ in meta.cancels] == ["r"]
    held, answer = engine.finish(42)
    assert held
    assert "fault" in answer["reason"]
    assert engine.side.request_finished(finish(whole, 2))[1]["pdhandoff"]["status"] == "sent"  # type: ignore[index]


def test_a_commit_that_a_step_never_carried_is_a_cancel() -> None:
    engine = Engine(100)
    engine.step(0, 100, 1, 2, new=True)
    engine.request.output_token_ids.append(42)
    other = request_of("other", 100, mark_of())
    engine.side.on_new_request(other)
    with pytest.raises(KeyError):  # nobody knows the table of the other one
        engine.side.build_meta(step_of(new=[("other", 0, [])], tokens={"other": 100}, tables={}))
    engine.side.fault("build_connector_meta", KeyError("x"))
    meta = engine.idle()
    assert not meta.commits
    assert [request for request, _ in meta.cancels] == ["r"]
    assert engine.finish(43)[1]["status"] == "failed"


def test_rows_that_are_computed_anew_are_not_committed_before() -> None:
    engine = Engine(100)
    engine.step(0, 100, 1, 2, new=True)
    engine.request.output_token_ids.append(42)
    meta = engine.step(64, 37)
    assert meta.restarts == ("r",)
    assert not meta.commits
    assert chunks_of(meta) == [(0, 100, ((1, 2),))]


def test_choices_of_one_request() -> None:
    assert are_choices("0_cmpl-a-0-12345678", "1_cmpl-a-0-12345678")
    for one, other in (("0_a", "1_b"), ("0_", "1_"), ("a_b", "c_b"), ("0a", "1a"), ("job-1", "job-2")):
        assert not are_choices(one, other)


def test_a_table_that_is_given_whole_replaces_what_was_known() -> None:
    tables = BlockTables()
    tables.update(step_of(new=[("r", 0, [[1, 2]])]), {"r"})
    again = step_of(cached=[("r", 0, [[8, 9]])], resumed=["r"])
    tables.update(again, {"r"})
    assert tables.of("r", again) == [[8, 9]]


def test_a_commit_that_a_fault_swallowed_is_a_cancel() -> None:
    engine = Engine(100)
    engine.step(0, 100, 1, 2, new=True)
    engine.finish(42)
    engine.side.fault("build_connector_meta", KeyError("x"))
    meta = engine.idle()
    assert not meta.commits
    assert [request for request, _ in meta.cancels] == ["r"]
    assert meta.held == ("r",)
