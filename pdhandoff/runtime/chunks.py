"""A chunk of one handoff on its way out, and what it is cut into."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol, final

from pdhandoff.native.base import Gathered
from pdhandoff.planner import PageTable
from pdhandoff.runtime.ring import Stretch

__all__ = ["Chunk", "ChunkState", "Event"]


class Event(Protocol):
    """Something on a device that must have happened before pages may be read; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has happened."""


@final
class ChunkState(enum.Enum):
    """Where a chunk is. The order is the order of its life."""

    WAITING = "waiting"  # for its event, for room in the ring, or for a grant
    GATHERING = "gathering"
    STAGED = "staged"  # in the ring, or left in its pages; waits for a grant
    DIGESTING = "digesting"
    WRITING = "writing"
    LANDED = "landed"
    DROPPED = "dropped"


@final
class Chunk:
    """Rows `tokens` of every entry, as the engine pushed them.

    Attributes:
        tokens: positions in the prompt.
        staged: its gather was launched on the engine's stream by `Outgoing.stage`: work that comes later on that
            stream may overwrite the pages.
        source_free: set when the source pages are not read any more.
    """

    def __init__(self, tokens: range, tables: Mapping[str, PageTable], after: Event | None, epoch: int) -> None:
        self.tokens = tokens
        self.tables = tables
        "component -> its pages at the time of the push"
        self.after = after
        self.epoch = epoch
        "how often the handoff had restarted when it was pushed"
        self.staged = False
        self.source_free = threading.Event()
        # everything below belongs to the producer's loop, once the chunk is there
        self.state = ChunkState.WAITING
        self.stretch: Stretch | None = None
        self.gathered: Gathered | None = None
        "how its gather stands"
        self.digest: int | None = None
        "of all its rows, once they have been gathered, if the handoff has one"
        self.padded = False
        "what follows its last row in the ring's last page is zeros, and nobody's"
        self.whole: Chunk | None = None
        "what it was cut from"
        self.parts: list[Chunk] = []
        "what it was cut into"

    @property
    def over(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.state in {ChunkState.LANDED, ChunkState.DROPPED}

    @property
    def done(self) -> bool:
        """Whether it is over, and its pages are not read any more."""
        return self.over and self.source_free.is_set()

    def free_source(self) -> None:
        """Its pages are not read any more. A chunk that was cut is free when all its parts are."""
        self.source_free.set()
        whole = self.whole
        if whole is not None and all(part.source_free.is_set() for part in whole.parts):
            whole.source_free.set()

    def cut(self, first: int, most: int, page_tokens: int) -> list[Chunk]:
        """This chunk, or parts of it that end where pages do, each with a way of its own.

        Args:
            first: tokens of the first part, about; each that follows has twice as many as the one before it.
            most: tokens of any part.
            page_tokens: tokens of a page, which every part has at least.
        """
        start, stop = self.tokens.start, self.tokens.stop
        cuts = [start]
        pages, most_pages = max(1, first // page_tokens), max(1, most // page_tokens)
        at = start // page_tokens
        while (at + pages) * page_tokens < stop:
            at += pages
            cuts.append(at * page_tokens)
            pages = min(2 * pages, most_pages)
        if len(cuts) == 1:
            return [self]
        cuts.append(stop)
        parts = [Chunk(range(a, b), self.tables, self.after, self.epoch) for a, b in pairwise(cuts)]
        for part in parts:
            part.whole = self
        self.parts = parts
        return parts
