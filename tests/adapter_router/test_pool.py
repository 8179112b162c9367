from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack

import pytest

from pdhandoff_router.config import DecodeNode
from pdhandoff_router.decode_pool import DecodePool, Node
from pdhandoff_router.refusals import Refusal


def pool_of(*credits_: int, max_queue: int = 8, length: int = 100) -> DecodePool:
    pool = DecodePool(max_queue)
    pool.configure([DecodeNode(url=f"http://n{place}", credits=each) for place, each in enumerate(credits_)], max_queue)
    for node in pool.nodes.values():
        node.looked_at({"max_seq_len": length}, "")
    return pool


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.wait([asyncio.ensure_future(_nothing())])


async def _nothing() -> None:
    return None


class Holder:
    """Takes a credit on a task, and gives it back when told."""

    def __init__(self, pool: DecodePool, client: str = "a", within_s: float = 5.0, avoid: str = "") -> None:
        self.node: Node | None = None
        self._leave = asyncio.Event()
        self._pool = pool
        self.task = asyncio.create_task(self._hold(client, within_s, avoid))

    async def _hold(self, client: str, within_s: float, avoid: str) -> None:
        tried = frozenset([avoid]) if avoid else frozenset[str]()
        async with self._pool.lease(client, needs=10, avoid=tried, within_s=within_s) as node:
            self.node = node
            await self._leave.wait()

    async def leave(self) -> None:
        self._leave.set()
        await self.task


def test_credits_bound_what_a_node_has_and_the_emptier_node_is_taken() -> None:
    async def main() -> None:
        pool = pool_of(1, 2)
        holders = [Holder(pool) for _ in range(4)]
        await settle()
        assert [node.held for node in pool.nodes.values()] == [1, 2]
        assert pool.queued == 1
        await holders[0].leave()
        await settle()
        assert pool.queued == 0
        for holder in holders[1:]:
            await holder.leave()
        assert [node.held for node in pool.nodes.values()] == [0, 0]

    run(main)


def test_clients_take_turns_and_one_clients_requests_keep_their_order() -> None:
    async def main() -> None:
        pool = pool_of(1)
        first = Holder(pool, "a")
        await settle()
        waiting = [Holder(pool, name) for name in ("a", "a", "a", "b")]
        await settle()
        order = []
        await first.leave()
        for _ in range(4):
            await settle()
            place = next(at for at, each in enumerate(waiting) if each.node is not None and not each.task.done())
            order.append(place)
            await waiting[place].leave()
        assert order == [0, 3, 1, 2]

    run(main)


def test_a_full_queue_refuses_with_retry_after() -> None:
    async def main() -> None:
        pool = pool_of(1, max_queue=1)
        holders = [Holder(pool), Holder(pool)]
        await settle()
        with pytest.raises(Refusal) as found:
            await Holder(pool).task
        assert found.value.status == 429
        assert "retry-after" in found.value.headers
        for holder in holders:
            await holder.leave()

    run(main)


def test_waiting_ends_at_its_deadline_and_gives_nothing_away() -> None:
    async def main() -> None:
        pool = pool_of(1)
        holder = Holder(pool)
        await settle()
        with pytest.raises(Refusal) as found:
            await Holder(pool, within_s=0.01).task
        assert (found.value.status, found.value.code) == (503, "QUEUE_TIMEOUT")
        assert pool.queued == 0
        await holder.leave()
        assert pool.nodes["http://n0"].held == 0

    run(main)


def test_a_waiter_that_is_cancelled_just_as_it_was_granted_gives_its_credit_back() -> None:
    async def main() -> None:
        pool = pool_of(1)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(pool.lease("a", needs=1, avoid=frozenset(), within_s=5))
            waiter = Holder(pool)
            await settle()
        waiter.task.cancel()  # the lease was given back in this step of the loop: it has been granted, and not woken
        await asyncio.gather(waiter.task, return_exceptions=True)
        assert pool.nodes["http://n0"].held == 0
        assert pool.queued == 0

    run(main)


def test_without_a_usable_node_everybody_is_told_at_once() -> None:
    async def main() -> None:
        pool = pool_of(1)
        holder = Holder(pool)
        await settle()
        waiter = Holder(pool)
        await settle()
        pool.nodes["http://n0"].looked_at(None, "it does not answer")
        pool.serve()
        with pytest.raises(Refusal, match="it does not answer"):
            await waiter.task
        with pytest.raises(Refusal, match="it does not answer"):
            await Holder(pool).task
        await holder.leave()

    run(main)


def test_a_node_that_was_tried_is_avoided_while_there_is_another() -> None:
    async def main() -> None:
        pool = pool_of(4, 4)
        other = Holder(pool, avoid="http://n0")
        await settle()
        assert other.node is pool.nodes["http://n1"]
        pool.nodes["http://n1"].looked_at(None, "gone")
        same = Holder(pool, avoid="http://n0")
        await settle()
        assert same.node is pool.nodes["http://n0"]
        await other.leave()
        await same.leave()

    run(main)


def test_a_new_list_keeps_what_is_under_way_and_drains_what_has_gone() -> None:
    async def main() -> None:
        pool = pool_of(1, 1)
        holders = [Holder(pool), Holder(pool)]
        await settle()
        gone = pool.nodes["http://n0"]
        pool.configure([DecodeNode(url="http://n1", credits=3)], 8)
        assert pool.nodes["http://n1"].held == 1
        assert (gone.retired, gone.held) == (True, 1)
        for holder in holders:
            await holder.leave()
        assert gone.held == 0

    run(main)


def test_three_failures_in_a_row_take_a_node_out_until_it_answers_a_probe() -> None:
    node = pool_of(1).nodes["http://n0"]
    for _ in range(3):
        assert node.usable()
        node.outcome(Refusal(502, "lost", code="LINK_LOST"))
    assert not node.usable()
    node.looked_at({}, "")
    assert node.usable()
    node.outcome(Refusal(400, "the client's fault", code="BAD_REQUEST"))
    node.outcome(Refusal(503, "draining", code="DRAINING"))
    assert node.problem == "draining"


def test_a_request_that_no_node_can_hold_is_refused_with_the_limit() -> None:
    pool = pool_of(1, length=50)
    pool.refuse_long(40, 10)
    with pytest.raises(Refusal, match="the 50 that a decode node holds"):
        pool.refuse_long(40, 11)
