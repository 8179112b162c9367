"""Components with memory and the pages of one request, and copies between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdhandoff.layouts.descriptor import Component
from pdhandoff.planner import CopyPlan, PageTable, Placement, plan_copies
from support.memory import Memory, row_cells


class Held(NamedTuple):
    """One component of one rank, with the pages of one request."""

    component: Component
    at: Placement
    pages: PageTable


def held(
    memory: Memory, component: Component, ids: Sequence[int], *, pages: int | None = None, null: int | None = None
) -> Held:
    """Memory for a component. By default just as many pages as the ids name."""
    room = max(ids, default=-1) + 1 if pages is None else pages
    return Held(component, memory.place(component, room), PageTable(ids, component.page_tokens, null=null))


def fill(memory: Memory, source: Held) -> None:
    """Give every row of every page in the table its identity, look-ahead pages included."""
    memory.fill(row_cells(*source, range(source.pages.first_token, source.pages.stop_token)))


def plan(source: Held, destination: Held, tokens: range, layers: Sequence[int] | None = None) -> CopyPlan:
    """The copies from one to the other."""
    return plan_copies(
        source=source.component,
        source_at=source.at,
        source_pages=source.pages,
        destination=destination.component,
        destination_at=destination.at,
        destination_pages=destination.pages,
        tokens=tokens,
        layers=layers,
    )


def rows(side: Held, tokens: range, *, heads: range | None = None) -> dict[int, int]:
    """Address -> identity of every byte of these rows."""
    return dict(row_cells(*side, tokens, heads=heads))
