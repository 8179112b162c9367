"""Where components live: the base addresses of one allocation. Everything else about memory is in the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdhandoff.errors import ErrorCode, PlanError
from pdhandoff.layouts.descriptor import Component

__all__ = ["Placement", "layer_bases"]

_ADDRESS_LIMIT = 1 << 62


class Placement(NamedTuple):
    """One component in one allocation."""

    pages: int
    "pages per layer; page ids of this allocation are 0 .. pages - 1"
    bases: Mapping[str, Sequence[int]]
    "region -> absolute base address of each layer, in the order of `component.layers`"


def layer_bases(component: Component, placement: Placement, region: str, layers: Sequence[int]) -> list[int]:
    """The base addresses of `layers` in one region.

    Raises PlanError that names the component, region and layer when the placement does not have one.
    """
    bases = placement.bases.get(region)
    if bases is None:
        raise PlanError(ErrorCode.OUT_OF_RANGE, f"component {component.name}: the placement has no region {region!r}")
    if len(bases) != len(component.layers):
        raise PlanError(
            ErrorCode.OUT_OF_RANGE,
            f"component {component.name}, region {region!r}: {len(bases)} base addresses for"
            f" {len(component.layers)} layers",
        )
    at = dict(zip(component.layers, bases, strict=True))
    missing = next((layer for layer in layers if layer not in at), None)
    if missing is not None:
        raise PlanError(ErrorCode.OUT_OF_RANGE, f"component {component.name} has no layer {missing} on this side")
    chosen = [at[layer] for layer in layers]
    if chosen and not 0 <= min(chosen) <= max(chosen) < _ADDRESS_LIMIT:
        raise PlanError(
            ErrorCode.OUT_OF_RANGE, f"component {component.name}, region {region!r}: a base address is no address"
        )
    return chosen
