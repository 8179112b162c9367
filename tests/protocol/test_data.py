"""Manifests, spans, attachments, tables, tombstones, deadlines: the data that the machines stand on."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdhandoff.errors import ErrorCode, PlanError, RemoteError
from pdhandoff.ids import HandoffId
from pdhandoff.limits import Limits
from pdhandoff.protocol.attachments import (
    Expected,
    attach,
    attach_int,
    check_attachments,
    check_values,
    read_int,
)
from pdhandoff.protocol.deadlines import Deadlines
from pdhandoff.protocol.manifest import PIECE_ALIGNMENT, Entry, Manifest, Piece, place_pieces
from pdhandoff.protocol.messages import Attachment, AttachmentSpec
from pdhandoff.protocol.spans import Hole, IntervalSet, Ledger, Span
from pdhandoff.protocol.table import Machine, Name, Table
from pdhandoff.protocol.tombstones import Tombstones

ENTRY = Entry(component="k", layers=(3, 5), row_bytes=10, page_tokens=4, page_bytes=48)
MANIFEST = Manifest(prompt_tokens=9, shard=0, shards=1, entries=(ENTRY,))


def change(item: msgspec.Struct, **fields: object) -> msgspec.Struct:
    return msgspec.structs.replace(item, **fields)


# ---- manifest


def test_a_manifest_counts_rows_pages_and_pieces() -> None:
    assert MANIFEST.nbytes == 9 * 10 * 2
    assert MANIFEST.pages(ENTRY) == 3
    assert list(MANIFEST.pieces(0)) == [Piece(0, 3, 3 * 128)]
    assert list(MANIFEST.pieces(1)) == []
    assert MANIFEST.destinations == (0,)


def test_a_manifest_may_start_inside_a_page_or_move_nothing() -> None:
    assert MANIFEST.starting_at(6).pages(ENTRY) == 2
    empty = MANIFEST.starting_at(9)
    assert (empty.tokens, empty.nbytes, empty.pages(ENTRY)) == (0, 0, 0)
    with pytest.raises(PlanError, match="start token 10"):
        MANIFEST.starting_at(10)
    with pytest.raises(PlanError, match="start token 5"):
        MANIFEST.starting_at(6).starting_at(5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_tokens", 0),
        ("prompt_tokens", 1 << 40),
        ("start_token", -1),
        ("start_token", 10),
        ("shards", 0),
        ("shard", 1),
        ("entries", (ENTRY,) * 4097),
    ],
)
def test_a_manifest_out_of_bounds_names_its_field(field: str, value: object) -> None:
    broken = change(MANIFEST, **{field: value})
    assert isinstance(broken, Manifest)
    with pytest.raises(PlanError, match=rf"manifest\.{field}"):
        broken.validate()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("component", ""),
        ("layers", ()),
        ("layers", (1, 1)),
        ("layers", (-1,)),
        ("row_bytes", 0),
        ("page_tokens", 0),
        ("page_bytes", 0),
        ("page_bytes", 39),
        ("heads", 0),
        ("head_start", -1),
        ("destination", -1),
    ],
)
def test_an_entry_out_of_bounds_names_its_field(field: str, value: object) -> None:
    broken = change(MANIFEST, entries=(change(ENTRY, **{field: value}),))
    assert isinstance(broken, Manifest)
    with pytest.raises(PlanError, match=r"manifest\.entry\."):
        broken.validate()
    assert MANIFEST.validate() is MANIFEST


@pytest.mark.parametrize("field", ["prompt_tokens", "shard", "shards", "start_token"])
def test_the_digest_depends_on_every_field(field: str) -> None:
    assert change(MANIFEST, **{field: 7}).digest() != MANIFEST.digest()  # type: ignore[attr-defined]


def test_pieces_never_span_two_extents() -> None:
    pieces = [100] * 3
    assert place_pieces(pieces, [(0, 300), (1024, 128)]) == [0, 128, 1024]
    assert PIECE_ALIGNMENT == 64
    with pytest.raises(PlanError, match="smaller than the manifest"):
        place_pieces(pieces, [(0, 300)])


# ---- spans


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))), st.integers(0, 30), st.integers(0, 30))
def test_an_interval_set_is_a_set(intervals: list[tuple[int, int]], start: int, stop: int) -> None:
    have = {number for low, high in intervals for number in range(low, high)}
    found = IntervalSet(intervals)
    assert {number for low, high in found for number in range(low, high)} == have
    assert all(before[1] < after[0] for before, after in zip(list(found), list(found)[1:], strict=False))
    missing = [number for number in range(start, stop) if number not in have]
    gap = found.first_gap(start, stop)
    if gap is None:
        assert not missing
    else:
        assert missing[: gap[1] - gap[0]] == list(range(*gap))
        assert gap[1] == stop or gap[1] in have


def test_rows_are_counted_by_identity() -> None:
    ledger = Ledger(MANIFEST)
    for _ in range(3):
        ledger.add(Span(0, 0, 2, 0, 4))
    assert ledger.first_hole() == Hole("k", 3, 4, 9)
    ledger.add(Span(0, 0, 1, 4, 9))
    assert ledger.first_hole() == Hole("k", 5, 4, 9)
    ledger.add(Span(0, 1, 2, 4, 9))
    assert ledger.first_hole() is None
    ledger.clear()
    assert ledger.first_hole() == Hole("k", 3, 0, 9)


def test_the_layers_of_one_message_are_bounded() -> None:
    ledger = Ledger(MANIFEST)
    limits = Limits(max_progress_layers=3, max_fragments=2)
    ledger.add_all((Span(0, 0, 2, 0, 1), Span(0, 0, 1, 1, 2), Span(0, 1, 2, 1, 2)), limits)  # all layers count as one
    with pytest.raises(RemoteError, match="more than 3 layers in one message") as raised:
        ledger.add_all((Span(0, 0, 1, 5, 6),) * 4, limits)
    assert raised.value.code == ErrorCode.OVERSIZED
    assert ledger.first_hole() == Hole("k", 3, 2, 9), "nothing of that message was counted"


@pytest.mark.parametrize("layers", [(0, 2), (0, 1)])
def test_the_fragments_of_rows_are_bounded(layers: tuple[int, int]) -> None:
    ledger = Ledger(MANIFEST)
    limits = Limits(max_fragments=2)
    ledger.add_all([Span(0, *layers, at, at + 1) for at in (0, 2, 1, 4)], limits)
    with pytest.raises(RemoteError, match="more than 2 fragments") as raised:
        ledger.add_all([Span(0, *layers, 6, 7)], limits)
    assert raised.value.code == ErrorCode.OVERSIZED


@pytest.mark.parametrize(
    "span",
    [Span(1, 0, 1, 0, 1), Span(0, 0, 3, 0, 1), Span(0, 1, 1, 0, 1), Span(0, 0, 1, 0, 10), Span(0, 0, 1, 3, 3)],
)
def test_rows_outside_the_manifest_are_refused(span: Span) -> None:
    with pytest.raises(RemoteError, match="outside the manifest") as raised:
        Ledger(MANIFEST).add(span)
    assert raised.value.code == ErrorCode.MANIFEST_MISMATCH


def test_a_manifest_that_moves_nothing_is_complete() -> None:
    assert Ledger(MANIFEST.starting_at(9)).first_hole() is None
    assert Ledger(Manifest(prompt_tokens=9, shard=0, shards=1, entries=())).first_hole() is None


# ---- attachments


def test_integers_go_there_and_back() -> None:
    assert read_int(attach_int("x", -5)) == (-5,)
    assert read_int(attach_int("x", 1, 2)) == (1, 2)
    assert attach_int("x", 1).spec.shape == ()
    with pytest.raises(ValueError, match="not i64"):
        read_int(attach("x", "u8", (8,), bytes(8)))


@pytest.mark.parametrize(("dtype", "shape"), [("f32", (3,)), ("f99", (2,))])
def test_an_attachment_that_is_not_what_it_says_cannot_be_made(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="8 bytes are not"):
        attach("x", dtype, shape, bytes(8))


def spec(
    name: str = "x", dtype: str = "f32", shape: tuple[int, ...] = (2,), *, required: bool = False
) -> AttachmentSpec:
    return AttachmentSpec(name=name, dtype=dtype, shape=shape, required=required)


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ([spec(), spec()], "repeated"),
        ([spec(shape=(1 << 40,))], "exceed"),
        ([spec(dtype="f99")], "unknown dtype"),
        ([spec("other", required=True)], "unknown to this consumer"),
        ([spec(dtype="f16")], "expects f32"),
        ([spec(shape=(2, 1))], "expects f32"),
        ([spec("other")], "x is required by the consumer"),
    ],
)
def test_declarations_are_held_against_what_is_known(specs: list[AttachmentSpec], says: str) -> None:
    with pytest.raises(RemoteError, match=says) as raised:
        check_attachments(specs, {"x": Expected(dtype="f32", shape=(2,), required=True)})
    assert raised.value.code == ErrorCode.ATTACHMENT


def test_unknown_optional_attachments_pass() -> None:
    check_attachments([spec("other"), spec()], {"x": Expected(dtype="f32", shape=(None,), required=True)})


def test_values_are_held_against_their_declarations() -> None:
    good = attach("x", "f32", (2,), bytes(8))
    check_values([good], [good.spec])
    check_values([], [good.spec])
    for values in ([good, good], [attach("x", "f32", (1,), bytes(4))], [attach_int("y", 1)]):
        with pytest.raises(RemoteError, match="came where"):
            check_values(values, [good.spec])
    with pytest.raises(RemoteError, match="7 bytes, not 8"):
        check_values([Attachment(spec=good.spec, data=bytes(7))], [good.spec])
    with pytest.raises(RemoteError, match="did not come"):
        check_values([], [good.spec], ["x"])


# ---- tables


class State(Name):
    A = 1
    B = 2


class Input(Name):
    GO = 1


def test_a_machine_follows_its_table() -> None:
    table: Table[State, Input] = Table(
        "t", initial=State.A, terminal=[State.B], rows=[(State.A, Input.GO, State.B, "act")]
    )
    machine = Machine(table)
    assert not machine.ended
    assert machine.feed(Input.GO) == "act"
    assert machine.feed(Input.GO) is None
    assert machine.ended
    assert len(table) == 1  # type: ignore[unreachable]
    assert [row.action for row in table] == ["act"]


def test_a_table_is_checked() -> None:
    row = (State.A, Input.GO, State.B, "")
    with pytest.raises(ValueError, match="two rows"):
        Table("t", initial=State.A, terminal=[], rows=[row, row])
    with pytest.raises(ValueError, match="terminal"):
        Table("t", initial=State.A, terminal=[State.A], rows=[row])


def test_tombstones_forget_the_oldest() -> None:
    ids = [HandoffId(bytes([number]) * 16) for number in range(3)]
    stones = Tombstones(limit=2)
    for code, each in enumerate(ids):
        stones.bury(each, code)
    stones.bury(ids[2], 99)
    assert ids[0] not in stones
    assert (stones.code(ids[0]), stones.code(ids[2])) == (None, 2)


@given(st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.floats(0, 10)))), st.floats(0, 10))
def test_deadlines_agree_with_a_dictionary(steps: list[tuple[int, float | None]], now: float) -> None:
    deadlines: Deadlines[int] = Deadlines()
    want: dict[int, float] = {}
    for key, at in steps:
        if at is None:
            deadlines.clear(key)
            want.pop(key, None)
        else:
            deadlines.set(key, at)
            want[key] = at
    assert deadlines.next() == min(want.values(), default=None)
    due = deadlines.due(now)
    assert sorted(due) == sorted(key for key, at in want.items() if at <= now)
    assert [want[key] for key in due] == sorted(want[key] for key in due)


def test_cleared_deadlines_do_not_pile_up() -> None:
    deadlines: Deadlines[int] = Deadlines()
    deadlines.set(-1, 5.0)
    for key in range(1000):  # each far off, and cleared long before: as the READY deadlines of a busy producer
        deadlines.set(key, 3600.0 + key)
        if key:
            deadlines.clear(key - 1)
    assert len(deadlines._heap) < 100
    assert deadlines.next() == 5.0
    assert deadlines.due(5.0) == [-1]
    assert deadlines.due(1e9) == [999]
    assert deadlines.next() is None


def test_gaps_are_all_that_is_missing() -> None:
    some = IntervalSet([(2, 4), (6, 8)])
    assert some.gaps(0, 10) == [range(2), range(4, 6), range(8, 10)]
    assert some.gaps(2, 4) == []
    assert IntervalSet().gaps(3, 3) == []


def test_whole_rows_are_those_that_landed_with_all_layers_at_once() -> None:
    ledger = Ledger(MANIFEST)
    ledger.add(Span(0, 0, 2, 4, 6))
    ledger.add(Span(0, 0, 1, 8, 9))
    assert ledger.whole_rows() == [[range(4, 6)]]
