"""The interface between pdhandoff and what moves and converts bytes inside one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, final, runtime_checkable

if TYPE_CHECKING:
    from pdhandoff.layouts.descriptor import Component
    from pdhandoff.planner.conversions import Conversion
    from pdhandoff.planner.copies import CopyPlan
    from pdhandoff.planner.pages import PageTable
    from pdhandoff.planner.placement import Placement

__all__ = ["Finished", "GatherPart", "Gathered", "Native"]


@final
class GatherPart(NamedTuple):
    """Rows of one component that go from an engine's pages into landing form. All addresses are absolute."""

    source: Component
    "as the engine holds it"
    source_bases: Mapping[str, Sequence[int]]
    "region -> one address per entry of `layers`"
    source_pages: PageTable
    destination: Component
    "landing form of the source (`planner.landing_component`): one region"
    destination_bases: Sequence[int]
    "one address per entry of `layers`"
    destination_pages: PageTable
    layers: Sequence[int]
    "global layer ids"
    heads: range
    "that move, counted over the whole model; both sides hold them"


@runtime_checkable
class Gathered(Protocol):
    """A gather that was started."""

    def query(self) -> bool:
        """Whether it is done. Never blocks. Raises LocalError when the device reports an error."""

    def wait(self, timeout_s: float = 60.0) -> None:
        """Wait until it is done. Raises LocalError when it is not after `timeout_s`, or the device reports an error."""

    @property
    def digest(self) -> int:
        """Payload digest of the rows that were gathered; 0 where none was asked for.

        Valid once `query` was True or `wait` has returned; LocalError before.
        """


@final
class Finished:
    """A `Gathered` that was done when the call returned: gathers in CPU memory are."""

    __slots__ = ("digest",)

    def __init__(self, digest: int) -> None:
        self.digest: int = digest

    def query(self) -> bool:
        """True."""
        return True

    def wait(self, timeout_s: float = 60.0) -> None:
        """Return at once."""


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

    def gather(self, parts: Sequence[GatherPart], tokens: range, *, digest: bool, stream: int = 0) -> Gathered:
        """Bring rows of all parts into landing form, in one launch where the memory is a GPU's.

        Tokens that lie on a null page of either side are skipped. Nothing else is written.

        Args:
            parts: what goes where. No two may write the same bytes.
            tokens: absolute token numbers, step 1.
            digest: also compute the payload digest of the rows that move, as `digest` would.
            stream: CUDA: the stream handle to launch on (`torch.cuda.Stream.cuda_stream`); the pages may change hands
                in the order of that stream as soon as the call has returned. CPU memory: not used, all is done on
                return.

        Returns:
            A handle that tells when the rows are there.

        Raises:
            LocalError: pages, heads, layers or bases do not fit the components. Nothing was written then.

        """

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
            digest_layers: also compute the payload digest of the landed rows that are converted; the global layer that
                each of `source_bases` holds. None: no digest.

        Returns:
            The digest; 0 where none was asked for.

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
