"""The staging ring, against a model that counts bytes one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.runtime.ring import RING_ALIGNMENT, Ring, Stretch

BASE = 1 << 20


def test_stretches_are_aligned_and_inside() -> None:
    ring = Ring(BASE, 1000)
    assert ring.capacity == 960
    stretch = ring.take(1, granted=True)
    assert stretch is not None
    assert stretch.length == RING_ALIGNMENT
    assert stretch.address % RING_ALIGNMENT == 0
    assert stretch.address + stretch.length <= BASE + 960
    assert ring.used == RING_ALIGNMENT


def test_what_can_never_fit_is_refused_at_once() -> None:
    ring = Ring(BASE, 640)
    assert ring.largest == 320
    with pytest.raises(LocalError, match="push less at once") as caught:
        ring.take(321, granted=True)
    assert caught.value.code == ErrorCode.RING_FULL
    assert ring.used == 0


def test_freeing_twice_is_freeing_once() -> None:
    ring = Ring(BASE, 640)
    first = ring.take(64, granted=True)
    second = ring.take(64, granted=True)
    assert first is not None
    assert second is not None
    ring.free(first)
    ring.free(first)
    assert ring.used == 64
    ring.free(second)
    assert ring.used == 0


def test_what_has_no_grant_never_blocks_what_has_one() -> None:
    ring = Ring(BASE, 1024)
    waiting = [ring.take(64, granted=False) for _ in range(9)]
    assert waiting[7] is not None
    assert waiting[8] is None, "half is the most"
    for _ in range(100):
        stretch = ring.take(512, granted=True)
        assert stretch is not None
        ring.free(stretch)


def test_an_old_stretch_does_not_hold_back_what_was_freed_behind_it() -> None:
    ring = Ring(BASE, 1024)
    assert ring.take(64, granted=True) is not None
    for _ in range(100):
        stretch = ring.take(448, granted=True)
        assert stretch is not None
        ring.free(stretch)


def test_a_ring_without_memory_has_room_for_nothing() -> None:
    with pytest.raises(LocalError):
        Ring(BASE, 0).take(1, granted=True)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 700), st.booleans()),
        st.tuples(st.just("free"), st.integers(0), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(length=st.integers(64, 1500), steps=STEPS)
def test_it_agrees_with_a_map_of_bytes(length: int, steps: list[tuple[str, int, bool]]) -> None:
    ring = Ring(BASE, length)
    half = ring.capacity // 2 // RING_ALIGNMENT * RING_ALIGNMENT
    owner: list[int] = [0] * ring.capacity
    live: list[Stretch] = []
    for what, number, flag in steps:
        if what == "free":
            if live:
                stretch = live.pop(number % len(live))
                ring.free(stretch)
                owner = [0 if who == stretch.number else who for who in owner]
            continue
        need = max(-(-number // 64) * 64, 64)
        if need > half:
            with pytest.raises(LocalError):
                ring.take(number, granted=flag)
            continue
        taken = ring.take(number, granted=flag)
        end = ring.capacity if flag else half
        fits = any(not any(owner[at : at + need]) for at in range(0, end - need + 1, 64))
        assert (taken is not None) == fits
        if taken is not None:
            start = taken.address - BASE
            assert taken.length == need
            assert not any(owner[start : start + need])
            assert 0 <= start <= start + need <= end
            owner[start : start + need] = [taken.number] * need
            live.append(taken)
        assert ring.used == sum(1 for who in owner if who)
    for stretch in live:
        ring.free(stretch)
    assert ring.used == 0
    if half:
        assert ring.take(half, granted=True) is not None, "everything is one run again"
