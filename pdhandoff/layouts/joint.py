"""What several shards together bring to one destination."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdhandoff.errors import ErrorCode, LayoutError
from pdhandoff.layouts.compat import Bridge
from pdhandoff.layouts.descriptor import Component, Layout

__all__ = ["joint_landing"]


def joint_landing(bridges: Sequence[Bridge]) -> Layout:
    """The destination with the layers whose rows move in place of its own, when each source brings a part.

    What `Bridge.landing` is for one source that brings everything: the layout to check the cover of all manifests
    against. Heads are left to that check; here, every layer of every component needs a source.

    Args:
        bridges: one or more, from each shard's layout to the same destination (`Policy.partial`).

    Raises:
        LayoutError: no bridge, other destinations, two shards that disagree on whose rows a shared layer reads, or a
            component or layer that no shard brings.
    """
    if not bridges:
        raise _refuse("destination", "no shard has announced a layout, so nothing would land")
    destination, model = bridges[0].destination, bridges[0].source.model
    if any(bridge.destination != destination for bridge in bridges):
        raise _refuse("destination", "the shards were bridged to different destinations; join them per destination")
    if any(bridge.source.model != model for bridge in bridges):
        raise _refuse("model", "the shards hold state of different models or draft layers; start them alike")
    cold = frozenset(destination.model.draft_layers) - frozenset(model.draft_layers)
    components = tuple(_joint_component(wanted, bridges, cold) for wanted in destination.components)
    return msgspec.structs.replace(
        destination,
        model=msgspec.structs.replace(destination.model, draft_layers=model.draft_layers),
        components=components,
    )


def _joint_component(wanted: Component, bridges: Sequence[Bridge], cold: frozenset[int]) -> Component:
    at = f"{wanted.name}.layers"
    served: dict[int, int] = {}
    for pair in (pair for bridge in bridges for pair in bridge.pairs(wanted.name)):
        if served.setdefault(pair.destination, pair.source) != pair.source:
            raise _refuse(
                at,
                f"one shard serves layer {pair.destination} with the rows of layer {served[pair.destination]}, another "
                f"with those of {pair.source}: describe the same shared_layers on all ranks",
            )
    missing = [layer for layer in wanted.layers if layer not in served and layer not in cold]
    if missing:
        raise _refuse(
            at,
            f"the shards bring {len(served)} layers of {wanted.name}, destination declares {len(wanted.layers)}; "
            f"nobody serves layer {', '.join(map(str, missing))}: it would keep what its memory held before",
        )
    return msgspec.structs.replace(wanted, layers=tuple(sorted(set(served.values()))), shared_layers=())


def _refuse(field: str, reason: str) -> LayoutError:
    return LayoutError(ErrorCode.LAYOUT_MISMATCH, f"{field}: {reason}", field=field)
