from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pdhandoff.ids import HandoffId
from pdhandoff.protocol.book import ExtentBook, Record
from pdhandoff.protocol.consumer import ConsumerCore
from pdhandoff.protocol.consumer_ends import Ends
from pdhandoff.protocol.messages import Cancel, Drained, Failed
from pdhandoff.protocol.owed import OwedDrains
from pdhandoff.protocol.producer import ProducerCore
from pdhandoff.protocol.producer_shard import ProducerShard
from support.explorer.explore import Explorer
from support.explorer.world import Budget, Violation

# Every world has two producer ranks, each with one shard of each handoff. Two handoffs compete for memory for one.
WORLDS: dict[str, dict[str, Any]] = {
    "two handoffs, offers at any time": {"handoffs": 2, "budget": Budget(), "offered": False},
    "two handoffs, a cancel by either side": {"handoffs": 2, "budget": Budget(cancels=1)},
    "two handoffs, a lost link": {"handoffs": 2, "budget": Budget(losses=1)},
    "two handoffs, a crash": {"handoffs": 2, "budget": Budget(crashes=1)},
    "two handoffs, an expiry": {"handoffs": 2, "budget": Budget(expiries=1)},
    "two handoffs, a digest that differs": {"handoffs": 2, "budget": Budget(bad_digests=1, quiet_failures=1)},
    "two handoffs, a crash and a late write": {"handoffs": 2, "budget": Budget(crashes=1, loud_failures=1)},
    "one handoff, a crash and a lost link": {"handoffs": 1, "budget": Budget(crashes=1, losses=1)},
    "one handoff, two expiries": {"handoffs": 1, "budget": Budget(expiries=2)},
    "one handoff, two cancels": {"handoffs": 1, "budget": Budget(cancels=2)},
    "one handoff, two lost links": {"handoffs": 1, "budget": Budget(losses=2)},
    "one handoff, a lost link and an expiry": {"handoffs": 1, "budget": Budget(losses=1, expiries=1)},
    "one handoff, a lost link and a cancel": {"handoffs": 1, "budget": Budget(losses=1, cancels=1)},
    "one handoff, a lost link and a late write": {"handoffs": 1, "budget": Budget(losses=1, loud_failures=1)},
    "one handoff, a lost link and a restart": {"handoffs": 1, "budget": Budget(losses=1, restarts=1)},
    "one handoff, a crash, an expiry, a fence": {"handoffs": 1, "budget": Budget(crashes=1, expiries=1), "fence": True},
    "one handoff in two writes that fail": {"handoffs": 1, "budget": Budget(quiet_failures=2), "tokens": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_every_interleaving_keeps_the_invariants(world: str, record_property: Callable[[str, object], None]) -> None:
    report = Explorer(**WORLDS[world]).run()
    line = f"{world}: {report.states} states, {report.transitions} transitions, {report.settled} ways to come to rest"
    print(line)
    record_property("explored", line)
    assert not report.capped
    assert report.settled > 0


@pytest.mark.slow
def test_a_large_world_keeps_the_invariants_as_far_as_it_is_visited(
    record_property: Callable[[str, object], None],
) -> None:
    budget = Budget(cancels=1, crashes=1, losses=1, expiries=1, loud_failures=1, restarts=1)
    report = Explorer(handoffs=2, budget=budget, fence=True, offered=False, cap=40_000).run()
    line = f"everything at once: {report.states} states, {report.transitions} transitions, capped: NOT exhaustive"
    print(line)
    record_property("explored", line)
    assert report.capped


# ---- the explorer must be able to fail: each breaks one rule, and is found


def frees_in_spite_of_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = ExtentBook._settle

    def broken(book: ExtentBook, record: Record) -> bool:
        if record.ended:
            record.writers.clear()
        return settle(book, record)

    monkeypatch.setattr(ExtentBook, "_settle", broken)


def frees_in_spite_of_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExtentBook, "add_reader", lambda *_: True)
    monkeypatch.setattr(ExtentBook, "remove_reader", lambda book, generation: generation not in book.records)


def a_lost_link_ends_its_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ConsumerCore.link_lost

    def broken(core: ConsumerCore, link: int, reason: str, now: float) -> None:
        incarnation = core._r.links[link]
        lost(core, link, reason, now)
        core.proven_ended(incarnation, now)

    monkeypatch.setattr(ConsumerCore, "link_lost", broken)


def cancels_claim_to_be_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(shard: ProducerShard, reason: str) -> Cancel:
        rank, generation = shard.manifest.shard, shard.generation
        return Cancel(handoff=shard.handoff, generation=generation, shard=rank, reason=reason, drained=True)

    monkeypatch.setattr(ProducerShard, "cancelled", broken)


def drained_is_said_once_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Sequence[Drained]:
        return []

    monkeypatch.setattr(OwedDrains, "say", broken)


def crossing_ends_forget_that_drained_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ProducerCore._ended_by_peer

    def broken(core: ProducerCore, shard: ProducerShard, message: Failed | Cancel) -> None:
        ended(core, shard, message)
        shard.tell_drained = False

    monkeypatch.setattr(ProducerCore, "_ended_by_peer", broken)


def a_last_failed_write_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ProducerCore.write_failed

    def broken(core: ProducerCore, handoff: HandoffId, write: int, reason: str, *, quiet: bool) -> None:
        monkeypatch.setattr(ProducerCore, "_quiet", lambda *_: None)
        failed(core, handoff, write, reason, quiet=quiet)
        monkeypatch.setattr(ProducerCore, "_quiet", right)

    right = ProducerCore._quiet
    monkeypatch.setattr(ProducerCore, "write_failed", broken)


def an_early_drained_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ends: Ends, link: int, message: Drained, now: float) -> None:
        del now
        ends._writer_drained(link, message)

    monkeypatch.setattr(Ends, "drained", broken)


def commits_while_a_write_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProducerCore, "_quiet", _quiet_at_once(ProducerCore._quiet))


def _quiet_at_once(
    quiet: Callable[[ProducerCore, ProducerShard], None],
) -> Callable[[ProducerCore, ProducerShard], None]:
    def broken(core: ProducerCore, shard: ProducerShard) -> None:
        flying, shard.in_flight = shard.in_flight, set()
        quiet(core, shard)
        shard.in_flight = flying

    return broken


BREAKS = [
    (frees_in_spite_of_writers, Budget(cancels=1), "lands in memory"),
    (frees_in_spite_of_readers, Budget(cancels=1), "its memory is not its own"),
    (a_lost_link_ends_its_writers, Budget(losses=1), "lands in memory"),
    (cancels_claim_to_be_drained, Budget(cancels=1), "lands in memory"),
    (drained_is_said_once_only, Budget(losses=1), "are left"),
    (crossing_ends_forget_that_drained_is_due, Budget(cancels=2), "are left"),
    (a_last_failed_write_is_not_the_end, Budget(quiet_failures=1), "are left|is never free"),
    (an_early_drained_is_forgotten, Budget(losses=1), "are left"),
    (commits_while_a_write_is_in_flight, Budget(), "while a write reads it|never ended|lands in memory|are left"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("break_it", "budget", "found"), BREAKS, ids=[each[0].__name__ for each in BREAKS])
def test_a_broken_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], budget: Budget, found: str
) -> None:
    break_it(monkeypatch)
    with pytest.raises(Violation, match=found):
        Explorer(handoffs=1, budget=budget).run()
