"""From the threads of the node to a coroutine: events in order, and what has gathered meanwhile in one piece."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import final

from pdhandoff_tilert.node.job import Event

__all__ = ["Mailbox"]


@final
class Mailbox:
    """Made on an event loop; `put` from any thread, `take` on that loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[Event, ...]] = deque()
        self._came = asyncio.Event()

    def put(self, events: tuple[Event, ...]) -> None:
        """Never blocks; what is put together is taken together. After the loop's end it goes nowhere."""
        self._events.append(events)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._came.set)

    async def take(self, timeout_s: float) -> list[Event]:
        """All events that have come, at least one. Raises TimeoutError."""
        taken: list[Event] = []
        async with asyncio.timeout(timeout_s):
            while not taken:
                await self._came.wait()
                self._came.clear()
                while self._events:
                    taken += self._events.popleft()
        return taken
