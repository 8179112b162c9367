"""The interface between pdhandoff and what moves and converts bytes inside one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pdhandoff.layouts.descriptor import Component
    from pdhandoff.planner.conversions import Conversion
    from pdhandoff.planner.copies import CopyPlan
    from pdhandoff.planner.pages import PageTable
    from pdhandoff.planner.placement import Placement

__all__ = ["Native"]


@runtime_checkable
class Native(Protocol):
    """Copies, conversions and digests where the bytes are. All addresses are absolute and belong to this process.

    Implementations give the same bytes and the same digests as the reference, and may be called from any thread.
    """

    @property
    def name(self) -> str:
        """As in `load`: reference, cpu or cuda."""

    def copy(self, plan: CopyPlan) -> None:
        """Execute raw copies."""

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
    ) -> None:
        """Convert landed rows into the destination's layout, then zero its rows `[tokens.stop, zero_until)`.

        Tokens that lie on a null page of either side are skipped. Nothing else is written.

        Args:
            conversion: from the planner: the two components, the layers, and what happens to each part.
            source_bases: one address per layer of the conversion.
            source_pages: pages of the landed rows.
            destination_at: where the destination component lives.
            destination_pages: its pages of this request.
            tokens: absolute token numbers, step 1.
            zero_until: first token after the rows to zero; at or below tokens.stop: none.

        Raises:
            LocalError: pages, heads or layers do not fit what the conversion and the placement say.

        """

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
        """Placement-free digest of rows: an unsigned 64-bit integer that adds up over disjoint rows, modulo 2**64.

        Args:
            component: how the rows lie in memory.
            layers: global layer ids.
            bases: region -> one address per entry of `layers`.
            pages: the page table of one request; tokens on null pages are no rows.
            tokens: absolute token numbers, step 1.
            heads: counted over the whole model; None: all that the component has.

        """
