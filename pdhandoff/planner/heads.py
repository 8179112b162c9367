"""Which heads two sides have in common. Heads are counted over the whole model, never by a rank's own position."""

from __future__ import annotations

from pdhandoff.errors import ErrorCode, LayoutError, PlanError
from pdhandoff.layouts.descriptor import Component

__all__ = ["common_heads"]


def common_heads(source: Component, destination: Component) -> range:
    """The heads that both sides hold, counted over the whole model.

    Raises PlanError when there are none, LayoutError when the two sides count different heads in the model.
    """
    if source.heads_total != destination.heads_total:
        raise LayoutError(
            ErrorCode.LAYOUT_MISMATCH,
            f"{destination.name}.heads_total: the source counts {source.heads_total} heads in the model,"
            f" the destination {destination.heads_total}",
            field=f"{destination.name}.heads_total",
        )
    have = range(source.head_start, source.head_start + source.heads)
    need = range(destination.head_start, destination.head_start + destination.heads)
    common = range(max(have.start, need.start), min(have.stop, need.stop))
    if not common:
        raise PlanError(
            ErrorCode.OUT_OF_RANGE,
            f"component {destination.name}: the source holds heads {have.start}..{have.stop - 1}, the destination"
            f" needs {need.start}..{need.stop - 1}: none in common",
        )
    return common
