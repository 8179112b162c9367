"""The decode nodes: who has room, who waits, in which order. Runs on one event loop; nothing here touches a network."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, final

from pdhandoff_router.config import DecodeNode
from pdhandoff_router.refusals import Refusal, bad_request

__all__ = ["DecodePool", "Node"]

_AHEAD: Final = 2
"credits beyond what a node parks: one request that decodes, and one that lands"
_FAILURES: Final = 3
"in a row, after which a node is left alone until it has answered a probe"


@final
class Node:
    """One decode node, as the router knows it.

    Attributes:
        config: what the operator says.
        status: its last status page; empty: none yet.
        problem: why nothing is sent there; empty: something may.
        held: credits in use.
        retired: it is no longer in the configuration.
    """

    def __init__(self, config: DecodeNode) -> None:
        self.config = config
        self.status: Mapping[str, Any] = {}
        self.problem = "it has not been looked at yet"
        self.held = 0
        self.retired = False
        self._failures = 0

    @property
    def name(self) -> str:
        """As people and metrics call it: host and port."""
        return self.config.url.partition("://")[2]

    @property
    def credits(self) -> int:
        """Requests that may be there at a time."""
        if self.config.credits is not None:
            return self.config.credits
        parking, queue = int(self.status.get("parking", 1)), int(self.status.get("max_queue", 1))
        return max(1, min(parking + _AHEAD, queue + 1))

    @property
    def max_seq_len(self) -> int:
        """Tokens of one request there; 0: not known."""
        return int(self.status.get("max_seq_len", 0))

    @property
    def control(self) -> str:
        """Its control address, as prefill servers reach it."""
        return self.config.control or str(self.status.get("control", ""))

    def usable(self) -> bool:
        """Something may be sent there."""
        return not self.problem and not self.retired

    def looked_at(self, status: Mapping[str, Any] | None, problem: str) -> None:
        """A probe has its answer."""
        if status is not None:
            self.status = status
        self.problem = problem
        if not problem:
            self._failures = 0

    def outcome(self, refusal: Refusal | None) -> None:
        """A handoff there has ended. None: well."""
        if refusal is None:
            self._failures = 0
        elif refusal.status >= 500:
            self._failures += 1
            if refusal.code in {"UNREACHABLE", "DRAINING"}:
                self.problem = refusal.reason
            elif self._failures >= _FAILURES:
                self.problem = f"{self._failures} handoffs in a row have failed, the last one with {refusal.code}"


@final
class _Waiter:
    def __init__(self, needs: int, avoid: frozenset[str]) -> None:
        self.needs = needs
        self.avoid = avoid
        self.granted: asyncio.Future[Node] = asyncio.get_running_loop().create_future()


@final
class DecodePool:
    """Hands out credits. Clients take turns; one client's requests keep their order.

    Args:
        max_queue: requests that may wait.
    """

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.nodes: dict[str, Node] = {}
        self._queues: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        "client -> its waiting requests; the client at the front is served next"

    def configure(self, configs: Sequence[DecodeNode], max_queue: int) -> None:
        """Take a new list of nodes. What is under way on a node that has gone from it ends in peace."""
        self.max_queue = max_queue
        fresh: dict[str, Node] = {}
        for config in configs:
            node = self.nodes.get(config.url) or Node(config)
            node.config = config
            fresh[config.url] = node
        for url, node in self.nodes.items():
            node.retired = url not in fresh
        self.nodes = fresh
        self.serve()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._queues.values()))

    def layouts(self) -> frozenset[str]:
        """Layout digests of the nodes that are used: more than one means that nodes differ."""
        return frozenset(str(node.status.get("layout_digest")) for node in self.nodes.values() if node.usable())

    def room(self) -> int:
        """Tokens of the longest request that any node takes; 0: no node is usable."""
        return max((node.max_seq_len for node in self.nodes.values() if node.usable()), default=0)

    def refuse_long(self, prompt_tokens: int, output_tokens: int) -> None:
        """Refuse what no node can hold. Raises Refusal."""
        room = self.room()
        if room and prompt_tokens + output_tokens > room:
            raise bad_request(
                "max_tokens" if prompt_tokens < room else "messages",
                f"{prompt_tokens} prompt tokens and at least {output_tokens} output tokens exceed the {room} that a "
                "decode node holds: shorten the prompt or ask for fewer tokens",
                unsupported=True,
            )

    @asynccontextmanager
    async def lease(
        self,
        client: str,
        *,
        needs: int,
        avoid: frozenset[str],
        within_s: float,
    ) -> AsyncIterator[Node]:
        """Hold one credit of a node.

        Args:
            client: requests of one client keep their order, clients take turns.
            needs: tokens of the request.
            avoid: URLs of nodes that are taken only if there is no other.
            within_s: how long to wait.

        Raises:
            Refusal: 429 when the queue is full, 503 when no node is usable or the time is up.
        """
        node = await self._take(_Waiter(needs, avoid), client, within_s)
        try:
            yield node
        finally:
            node.held -= 1
            self.serve()

    async def _take(self, waiter: _Waiter, client: str, within_s: float) -> Node:
        if not any(node.usable() for node in self.nodes.values()):
            raise self._none_usable()
        node = self._free_node(waiter) if not self._queues else None
        if node is not None:
            node.held += 1
            return node
        ahead = self.queued
        if ahead >= self.max_queue:
            reason = f"all decode nodes are busy and {ahead} requests wait already: try again later"
            raise Refusal(429, reason, code="QUEUE_FULL", retry_after_s=2)
        self._queues.setdefault(client, deque()).append(waiter)
        self.serve()
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.shield(waiter.granted)
        except TimeoutError:
            self._give_up(waiter, client)
            reason = f"no decode node became free within {within_s:.3g} s, {ahead} requests were ahead"
            raise Refusal(503, reason, code="QUEUE_TIMEOUT", retry_after_s=2) from None
        except asyncio.CancelledError:
            self._give_up(waiter, client)
            raise

    def _give_up(self, waiter: _Waiter, client: str) -> None:
        """A waiter goes, whether or not it was granted something meanwhile."""
        if waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
            waiter.granted.result().held -= 1
        else:
            waiter.granted.cancel()
            queue = self._queues.get(client)
            if queue is not None and waiter in queue:
                queue.remove(waiter)
                if not queue:
                    del self._queues[client]
        self.serve()

    def serve(self) -> None:
        """Give what is free to who waits; with no usable node, tell everybody so."""
        if self._queues and not any(node.usable() for node in self.nodes.values()):
            for queue in self._queues.values():
                for waiter in queue:
                    waiter.granted.set_exception(self._none_usable())
            self._queues.clear()
        stuck = 0
        while self._queues and stuck < len(self._queues):
            client, queue = next(iter(self._queues.items()))
            node = self._free_node(queue[0])
            self._queues.move_to_end(client)
            if node is None:
                stuck += 1
                continue
            stuck = 0
            node.held += 1
            queue.popleft().granted.set_result(node)
            if not queue:
                del self._queues[client]

    def _free_node(self, waiter: _Waiter) -> Node | None:
        """The node with most room among those that can take it; one to avoid only if nobody else is usable."""
        usable = [node for node in self.nodes.values() if node.usable()]
        fit = [node for node in usable if not node.max_seq_len or waiter.needs <= node.max_seq_len]
        others = [node for node in fit if node.config.url not in waiter.avoid] or fit
        free = [node for node in others if node.held < node.credits]
        return min(free, key=lambda node: node.held / node.credits, default=None)

    def _none_usable(self) -> Refusal:
        said = "; ".join(f"{node.name}: {node.problem}" for node in self.nodes.values()) or "none is configured"
        return Refusal(503, f"no decode node is usable ({said})", code="NO_DECODE_NODE", retry_after_s=2)
