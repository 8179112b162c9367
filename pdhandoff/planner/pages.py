"""Tokens to pages: which rows of which page on one side meet which rows of which page on the other.

The token range decides what moves. A page table may be longer than the prompt (look-ahead pages), may start late (a
prefix that the other side holds) and may have holes (window layers); none of that is ever read off its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple, Self

from pdhandoff.errors import ErrorCode, PlanError

__all__ = ["PageTable", "TokenRuns", "admit_length", "token_runs"]


class PageTable(NamedTuple):
    """The pages that hold one request's rows on one side, in token order. The block table of a paged cache."""

    ids: Sequence[int]
    "page ids; position i holds tokens `first_token + [i * page_tokens, (i + 1) * page_tokens)`"
    page_tokens: int
    "tokens in one page"
    first_token: int = 0
    "token that position 0 starts at, a multiple of `page_tokens`"
    null: int | None = None
    "an id that marks a missing page (vLLM uses 0): its tokens are skipped"

    @classmethod
    def packed(cls, tokens: range, page_tokens: int) -> Self:
        """Pages 0, 1, 2, ... that hold `tokens`: a landing piece, or a chunk in a staging ring."""
        first = tokens.start // page_tokens
        last = -(-tokens.stop // page_tokens) if tokens else first
        return cls(range(last - first), page_tokens, first * page_tokens)

    def has_null(self, tokens: range) -> bool:
        """Whether a page that holds some of `tokens` is missing."""
        if self.null is None or not tokens:
            return False
        first = (tokens.start - self.first_token) // self.page_tokens
        last = -(-(tokens.stop - self.first_token) // self.page_tokens)
        return self.null in self.ids[max(first, 0) : last]

    @property
    def stop_token(self) -> int:
        """First token that the table has no page for."""
        return self.first_token + len(self.ids) * self.page_tokens


class TokenRuns(NamedTuple):
    """Runs of tokens that stay inside one page on both sides, as columns of one length, in token order."""

    source_page: list[int]
    "page id"
    source_slot: list[int]
    "first token of the run, counted from the start of that page"
    destination_page: list[int]
    destination_slot: list[int]
    length: list[int]
    "tokens"

    @property
    def tokens(self) -> int:
        """Tokens in all runs: those of the range whose page is missing on neither side."""
        return sum(self.length)


def token_runs(tokens: range, source: PageTable, destination: PageTable) -> TokenRuns:
    """Pair the pages of two tables over `tokens`, split where either side's page ends. Null pages are skipped.

    Raises PlanError that names the token when a table has no page for one of them, and when the destination table
    names one page twice (its rows would be written twice).
    """
    if tokens.step != 1 or tokens.start < 0:
        raise PlanError(ErrorCode.OUT_OF_RANGE, f"tokens must be an ascending range without gaps, got {tokens}")
    _check_table(tokens, source, "source")
    _check_table(tokens, destination, "destination")
    if not tokens:
        return TokenRuns([], [], [], [], [])
    starts = _starts(tokens, source.page_tokens, destination.page_tokens)
    length = [stop - start for start, stop in zip(starts, [*starts[1:], tokens.stop], strict=True)]
    source_page, source_slot = _locate(starts, source)
    destination_page, destination_slot = _locate(starts, destination)
    runs = TokenRuns(source_page, source_slot, destination_page, destination_slot, length)
    if source.null is not None or destination.null is not None:
        keep = [s != source.null and d != destination.null for s, d in zip(source_page, destination_page, strict=True)]
        runs = TokenRuns(*(list(compress(column, keep)) for column in runs))
    _check_unique(tokens, destination)
    return runs


def admit_length(prompt_tokens: int, limit: int) -> int:
    """`prompt_tokens`, if a decode engine that holds `limit` tokens can take it: room for one output token at least.

    Raises PlanError before anything is reserved or computed.
    """
    if prompt_tokens < 1:
        raise PlanError(ErrorCode.OUT_OF_RANGE, f"a prompt needs at least one token, got {prompt_tokens}")
    if prompt_tokens > limit - 1:
        raise PlanError(
            ErrorCode.TOO_LARGE,
            f"a prompt of {prompt_tokens} tokens leaves no room for an output token on a decode engine that holds"
            f" {limit}: shorten it to {limit - 1}, or send it to an engine with a longer limit",
        )
    return prompt_tokens


def _check_table(tokens: range, table: PageTable, side: str) -> None:
    if table.page_tokens < 1 or table.first_token < 0 or table.first_token % table.page_tokens:
        raise PlanError(
            ErrorCode.OUT_OF_RANGE,
            f"{side} page table: first token {table.first_token} is no multiple of {table.page_tokens} tokens a page",
        )
    if tokens and tokens.start < table.first_token:
        raise PlanError(
            ErrorCode.OUT_OF_RANGE,
            f"{side} page table starts at token {table.first_token}: it has no page for token {tokens.start}",
        )
    if tokens and tokens.stop > table.stop_token:
        missing = max(tokens.start, table.stop_token)
        raise PlanError(
            ErrorCode.OUT_OF_RANGE,
            f"{side} page table has {len(table.ids)} pages of {table.page_tokens} tokens:"
            f" it has no page for token {missing}",
        )


def _check_unique(tokens: range, table: PageTable) -> None:
    first = (tokens.start - table.first_token) // table.page_tokens
    last = -(-(tokens.stop - table.first_token) // table.page_tokens)
    used = table.ids[first:last]
    if isinstance(used, range) or len(set(used)) == len(used):
        return
    seen: set[int] = set()
    for page in used:
        if page in seen and page != table.null:
            raise PlanError(
                ErrorCode.OUT_OF_RANGE, f"destination page table names page {page} twice: its rows would be lost"
            )
        seen.add(page)


def _starts(tokens: range, a: int, b: int) -> list[int]:
    """Where runs start: the first token, and every page start of either side inside the range."""
    small, large = min(a, b), max(a, b)
    inner: list[int] = list(range(tokens.start // small * small + small, tokens.stop, small))
    if large % small:
        inner = sorted({*inner, *range(tokens.start // large * large + large, tokens.stop, large)})
    return [tokens.start, *inner]


def _locate(starts: list[int], table: PageTable) -> tuple[list[int], list[int]]:
    """Page id and slot of each run."""
    ids, page_tokens, first = table.ids, table.page_tokens, table.first_token
    begin, end = (starts[0] - first) // page_tokens, (starts[-1] - first) // page_tokens
    if end - begin + 1 == len(starts):  # one run a page: no arithmetic per run
        return list(ids[begin : end + 1]), [starts[0] % page_tokens] + [0] * (end - begin)
    return [ids[(start - first) // page_tokens] for start in starts], [start % page_tokens for start in starts]
