"""Block tables as engines give them, made into page tables that are safe to read later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts import Component
from pdhandoff.planner import PageTable, Placement

__all__ = ["BlockTable", "page_tables"]

BlockTable = Sequence[int] | PageTable | Mapping[str, PageTable]
"page ids for all components alike (they must share one page size), one page table, or one per component"


def page_tables(
    block_table: BlockTable,
    tokens: range,
    *,
    components: Mapping[str, Component],
    placements: Mapping[str, Placement],
) -> dict[str, PageTable]:
    """One page table per component, copied, checked to reach the tokens. Raises LocalError."""
    tables: dict[str, PageTable] = {}
    for name, component in components.items():
        table = _table_of(block_table, name, component)
        if table.page_tokens != component.page_tokens:
            raise LocalError(
                ErrorCode.MISUSE,
                f"component {name} has pages of {component.page_tokens} tokens, its table {table.page_tokens}",
            )
        if table.has_null(tokens):
            raise LocalError(
                ErrorCode.MISUSE, f"the block table of {name} has no page for some of {tokens}: push what there is"
            )
        if tokens and tokens.stop > table.stop_token:
            raise LocalError(
                ErrorCode.OUT_OF_RANGE,
                f"the block table of {name} ends at token {table.stop_token}, not {tokens.stop}",
            )
        tables[name] = table._replace(ids=tuple(table.ids))
        _check_pages(name, tables[name], tokens, placements[name].pages)
    return tables


def _table_of(block_table: BlockTable, name: str, component: Component) -> PageTable:
    if isinstance(block_table, PageTable):
        return block_table
    if not isinstance(block_table, Mapping):
        return PageTable(block_table, component.page_tokens)
    if name not in block_table:
        raise LocalError(ErrorCode.MISUSE, f"there is no block table for component {name}")
    return block_table[name]


def _check_pages(name: str, table: PageTable, tokens: range, have: int) -> None:
    """Every page that holds some of the tokens exists: what reads them later asks no more."""
    first = (tokens.start - table.first_token) // table.page_tokens
    ids = table.ids[first : -(-(tokens.stop - table.first_token) // table.page_tokens)] if tokens else ()
    if ids and not 0 <= min(ids) <= max(ids) < have:
        raise LocalError(
            ErrorCode.OUT_OF_RANGE,
            f"the block table of {name} names pages {min(ids)}..{max(ids)}, its cache has pages 0..{have - 1}",
        )
