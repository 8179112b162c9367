"""Conversions in torch: the specification that compiled kernels are compared with, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

from pdhandoff.layouts.descriptor import Component
from pdhandoff.native.base import Finished, GatherPart
from pdhandoff.native.convert import convert_rows
from pdhandoff.native.digest import digest_rows
from pdhandoff.native.encodings import (
    ScaleRule,
    decode_ue8m0,
    decode_ue8m0x4,
    dequantise_blocks,
    encode_ue8m0,
    encode_ue8m0x4,
    quantise_blocks,
    reorder_rope,
)
from pdhandoff.native.gather import gather_parts
from pdhandoff.native.memmove import copy_plan
from pdhandoff.native.rotation import hadamard128
from pdhandoff.native.strided import gather_rows, scatter_rows

if TYPE_CHECKING:
    from pdhandoff.planner.conversions import Conversion
    from pdhandoff.planner.copies import CopyPlan
    from pdhandoff.planner.pages import PageTable
    from pdhandoff.planner.placement import Placement

__all__ = [
    "Reference",
    "ScaleRule",
    "decode_ue8m0",
    "decode_ue8m0x4",
    "dequantise_blocks",
    "encode_ue8m0",
    "encode_ue8m0x4",
    "gather_rows",
    "hadamard128",
    "quantise_blocks",
    "reorder_rope",
    "scatter_rows",
]


@final
class Reference:
    """`Native` on CPU memory. It has no state."""

    name = "reference"

    def copy(self, plan: CopyPlan) -> None:
        """Execute raw copies, see `Native.copy`."""
        copy_plan(plan)

    def gather(self, parts: Sequence[GatherPart], tokens: range, *, digest: bool, stream: int = 0) -> Finished:  # noqa: ARG002 - CPU memory has no streams
        """Rows into landing form, see `Native.gather`."""
        return Finished(gather_parts(parts, tokens, digest=digest))

    def convert(
        self,
        conversion: Conversion,
        *,
        source_bases: Sequence[int],
        source_pages: PageTable,
        destination_at: Placement,
        destination_pages: PageTable,
        tokens: range,
        zero_until: int,
        digest_layers: Sequence[int] | None = None,
    ) -> int:
        """Convert landed rows, see `Native.convert`."""
        return convert_rows(
            conversion,
            source_bases=source_bases,
            source_pages=source_pages,
            destination_at=destination_at,
            destination_pages=destination_pages,
            tokens=tokens,
            zero_until=zero_until,
            digest_layers=digest_layers,
        )

    def digest(
        self,
        component: Component,
        *,
        layers: Sequence[int],
        bases: Mapping[str, Sequence[int]],
        pages: PageTable,
        tokens: range,
        heads: range | None = None,
    ) -> int:
        """Digest of rows, see `Native.digest`."""
        return digest_rows(component, layers=layers, bases=bases, pages=pages, tokens=tokens, heads=heads)
