"""Block tables of requests, on the scheduler's side."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, final

__all__ = ["BlockTables", "table_slice"]


def table_slice(ids: Sequence[int], tokens: range, block_tokens: int) -> tuple[int, ...]:
    """The blocks that hold `tokens`, of a table that begins with token 0 and may reach further."""
    return tuple(ids[tokens.start // block_tokens : -(-tokens.stop // block_tokens)])


@final
class BlockTables:
    """The tables of the requests that are handed off.

    vLLM 0.32 hands them out while it builds a step's metadata (`kv_connector_block_state`). Before that they are kept
    here from what each step adds; a table that is given whole (a new request, or one that resumes) replaces what was
    known. Sources: vLLM 0.26 and 0.33, vllm/v1/core/sched/output.py.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[list[int]]] = {}

    def update(self, scheduled: Any, wanted: Container[str]) -> None:
        """Take in what a step adds, where vLLM does not hand tables out."""
        if getattr(scheduled, "kv_connector_block_state", None) is not None:
            return
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in wanted:
                self._kept[new.req_id] = [list(group) for group in new.block_ids]
        cached = scheduled.scheduled_cached_reqs
        for request, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request not in wanted or added is None:
                continue
            if request in cached.resumed_req_ids or request not in self._kept:
                self._kept[request] = [list(group) for group in added]
            else:
                for group, more in zip(self._kept[request], added, strict=True):
                    group.extend(more)

    def of(self, request: str, scheduled: Any) -> Sequence[Sequence[int]]:
        """The current table of a request that is scheduled now, for each cache group."""
        state = getattr(scheduled, "kv_connector_block_state", None)
        if state is not None:
            table: Sequence[Sequence[int]] | None = state.get_block_ids(request)
            if table is not None:
                return table
        return self._kept[request]

    def forget(self, request: str) -> None:
        """It has ended, or lost its blocks."""
        self._kept.pop(request, None)
