"""Rows of a plane by absolute address: gather and scatter, vectorised over tokens.

A plane is viewed as `[page, token, head, element]` straight over the memory it lives in, so that any stride works:
row-packed pages, planes that follow each other in a page, transposed keys, block-outermost pages. To be quick the view
is made of the widest words (up to 8 bytes) that its strides and its address allow. What the words mean is never looked
at, so every bit survives, payloads of NaN included.

The caller promises that the addresses are live memory of this process. Pages, tokens and heads are checked.
"""

from __future__ import annotations

import ctypes
import math
from typing import Final, NamedTuple, final

import torch

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts.descriptor import Component, Element, Plane
from pdhandoff.native.checks import check_table
from pdhandoff.planner.pages import PageTable

__all__ = ["Slots", "from_bytes", "gather_bytes", "gather_rows", "locate", "scatter_bytes", "scatter_rows", "to_bytes"]

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES: Final = {
    Element.BF16: torch.bfloat16,
    Element.F16: torch.float16,
    Element.F32: torch.float32,
    Element.E4M3: torch.float8_e4m3fn,
    Element.UE8M0: torch.uint8,
    Element.UE8M0X4: torch.uint8,
}


@final
class Slots(NamedTuple):
    """Where tokens lie in pages, as columns of one length."""

    token: torch.Tensor
    "absolute token numbers, ascending; int64"
    page: torch.Tensor
    "page ids, int64"
    slot: torch.Tensor
    "positions inside the page, int64"
    real: torch.Tensor
    "False where the page is the table's null page; bool"

    def only(self, keep: torch.Tensor) -> Slots:
        """The tokens for which `keep`, a bool column of the same length, holds."""
        return Slots(*(column[keep] for column in self))

    def part(self, rows: slice) -> Slots:
        """Some rows of every column, without copying."""
        return Slots(*(column[rows] for column in self))


def locate(component: Component, pages: PageTable, tokens: range, *, page_count: int | None = None) -> Slots:
    """Page and slot of every token, null pages included (they are marked).

    Args:
        component: whose pages they are.
        pages: the page table of one request.
        tokens: absolute token numbers, step 1.
        page_count: pages that one layer has; None where that is not known.

    Returns:
        One row per token.

    Raises:
        LocalError: the table has another page size, starts inside a page, is too short, or names a page out of range.

    """
    used = check_table(component, pages, tokens, page_count)
    size = pages.page_tokens
    token = torch.arange(tokens.start, max(tokens.start, tokens.stop), dtype=torch.int64)
    ids = torch.tensor(list(pages.ids[used.start : used.stop]), dtype=torch.int64)
    page = ids[(token - pages.first_token) // size - used.start]
    real = torch.ones_like(token, dtype=torch.bool) if pages.null is None else page != pages.null
    return Slots(token, page, token % size, real)


def gather_bytes(
    component: Component, plane: Plane, base: int, at: Slots, *, heads: range | None = None
) -> torch.Tensor:
    """Bytes of a plane's rows.

    Args:
        component: that has the plane.
        plane: what to read.
        base: absolute address of the layer's region.
        at: the tokens; all of them are read, whatever `at.real` says.
        heads: local heads, step 1; None: all.

    Returns:
        uint8 [tokens, heads, plane.row_bytes], a copy.

    """
    wanted = range(component.heads) if heads is None else heads
    shape = (len(at.token), len(wanted), plane.row_bytes)
    if 0 in shape:
        return torch.empty(shape, dtype=torch.uint8)
    return _view(component, plane, base, at, wanted)[at.page, at.slot].view(torch.uint8).reshape(shape)


def scatter_bytes(
    component: Component, plane: Plane, base: int, at: Slots, rows: torch.Tensor, *, heads: range | None = None
) -> None:
    """Write rows, uint8 [tokens, heads, plane.row_bytes], to where `gather_bytes` reads. Nothing else is touched."""
    wanted = range(component.heads) if heads is None else heads
    if 0 in rows.shape:
        return
    view = _view(component, plane, base, at, wanted)
    view[at.page, at.slot] = rows.contiguous().view(view.dtype).reshape(-1, *view.shape[2:])


def gather_rows(
    component: Component, plane: Plane, base: int, pages: PageTable, tokens: range, *, heads: range | None = None
) -> torch.Tensor:
    """Stored elements of a plane, [tokens, heads, elements], as the plane's own type. Null pages are left out.

    UE8M0 is uint8; UE8M0X4 is uint8 [tokens, heads, elements, 4].
    """
    at = locate(component, pages, tokens)
    return from_bytes(plane, gather_bytes(component, plane, base, at.only(at.real), heads=heads))


def scatter_rows(
    component: Component,
    plane: Plane,
    base: int,
    pages: PageTable,
    tokens: range,
    *,
    rows: torch.Tensor,
    heads: range | None = None,
) -> None:
    """Store elements, shaped and typed as `gather_rows` returns them. Null pages take no rows."""
    at = locate(component, pages, tokens)
    scatter_bytes(component, plane, base, at.only(at.real), to_bytes(plane, rows), heads=heads)


def from_bytes(plane: Plane, rows: torch.Tensor) -> torch.Tensor:
    """Bytes [..., plane.row_bytes] as its elements [..., elements] (UE8M0X4: [..., elements, 4]). A bit cast."""
    if plane.element is Element.UE8M0X4:
        return rows.reshape(*rows.shape[:-1], plane.elements, plane.element.nbytes)
    return rows.contiguous().view(_DTYPES[plane.element])


def to_bytes(plane: Plane, rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `from_bytes`. Raises LocalError where type or width are not the plane's."""
    wide = plane.element is Element.UE8M0X4
    width = (plane.elements, plane.element.nbytes) if wide else (plane.elements,)
    if rows.dtype is not _DTYPES[plane.element] or tuple(rows.shape[-len(width) :]) != width:
        raise LocalError(
            ErrorCode.MISUSE,
            f"plane {plane.name} stores {plane.elements} x {plane.element.value}, not {rows.dtype} {tuple(rows.shape)}",
        )
    return rows.contiguous().view(torch.uint8).reshape(*rows.shape[: -len(width)], plane.row_bytes)


def _view(component: Component, plane: Plane, base: int, at: Slots, heads: range) -> torch.Tensor:
    """The plane as words: [page, token, head, word], or [page, token, head, element, word] if rows are not dense."""
    if not 0 <= heads.start < heads.stop <= component.heads:
        raise LocalError(
            ErrorCode.OUT_OF_RANGE,
            f"heads {heads.start}..{heads.stop} leave the {component.heads} local heads of {component.name}",
        )
    sizes = [int(at.page.max()) + 1, component.page_tokens, len(heads)]
    strides = [plane.page_stride, plane.token_stride, plane.head_stride]
    if plane.row_is_dense:
        run = plane.row_bytes
    else:
        run = plane.element.nbytes
        sizes.append(plane.elements)
        strides.append(plane.element_step)
    start = base + plane.offset + heads.start * plane.head_stride
    word = math.gcd(8, start, run, *(stride for size, stride in zip(sizes, strides, strict=True) if size > 1))
    span = run + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = torch.frombuffer((ctypes.c_ubyte * span).from_address(start), dtype=_WORDS[word])
    return memory.as_strided([*sizes, run // word], [*(stride // word for stride in strides), 1])
