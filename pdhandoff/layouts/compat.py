"""Whether one layout's state can become another's: bridged, or refused with the field and what would have gone wrong.

Bridged without asking: page sizes, strides, regions, plane order, head ranges (the planner copies), rope orders that
both sides name, Hadamard rotation (conversions). Element types of latent rows and index keys are converted as the
policy allows. Everything that says *whose* state it is has to agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple, final

import msgspec

from pdhandoff.errors import ErrorCode, LayoutError
from pdhandoff.layouts.descriptor import Component, ComponentKind, Element, Layout, Model, Plane, RopeOrder

__all__ = [
    "CONVERTIBLE",
    "PARTS",
    "Bridge",
    "ComponentBridge",
    "LayerPair",
    "PartBridge",
    "Policy",
    "bridge",
]

PARTS: Final = {
    ComponentKind.MLA_LATENT: ("latent", "rope"),
    ComponentKind.INDEX_KEY: ("index_key",),
    ComponentKind.KEY_VALUE: ("key", "value"),
}
"the planes of values that a kind of state consists of; scale planes come on top"

_VALUES: Final = (Element.BF16, Element.F16, Element.F32, Element.E4M3)

CONVERTIBLE: Final = frozenset(product((ComponentKind.MLA_LATENT, ComponentKind.INDEX_KEY), _VALUES, _VALUES))
"""(kind, source element, destination element) converted by default: any stored value of latent rows and index keys,
e4m3 with its block scales. Keys and values are left out: engines scale fp8 keys and values by factors in the model's
weights, which no descriptor can vouch for."""


@final
class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator accepts. The default refuses whatever could cost correctness, or speed without a word."""

    conversions: frozenset[tuple[ComponentKind, Element, Element]] = CONVERTIBLE
    "encodings that may be converted; an encoding that is the same on both sides is always copied"
    cold_drafts: bool = False
    "accept that the two sides keep different draft layers: decode then starts without them (`Bridge.mtp_cold`)"
    other_spec_depth: bool = False
    "accept another speculation depth: rows of the prompt do not depend on it, drafts after them do"
    partial: bool = False
    "the source is one of several shards: what it lacks, others bring (check the cover of all manifests)"


DEFAULT_POLICY: Final = Policy()


class LayerPair(NamedTuple):
    """Where the rows of one destination layer come from."""

    destination: int
    source: int
    "the same global id, or the owner's whose rows the layer shares"


class PartBridge(NamedTuple):
    """One part of a component on both sides."""

    name: str
    source: Plane
    destination: Plane
    raw: bool
    "the stored bytes are the same: encoding, rope order and rotation agree, so rows are copied and not converted"


@final
class ComponentBridge(msgspec.Struct, frozen=True, kw_only=True):
    """One component on both sides."""

    source: Component
    destination: Component
    layers: tuple[LayerPair, ...]
    "one per destination layer that this source serves, ascending"
    parts: tuple[PartBridge, ...]

    @property
    def source_layers(self) -> tuple[int, ...]:
        """The layers whose rows move: each once, however many destination layers read it. Ascending."""
        return tuple(sorted({pair.source for pair in self.layers}))

    @property
    def raw(self) -> bool:
        """Whether every part is copied as it is."""
        return all(part.raw for part in self.parts)


@final
class Bridge(msgspec.Struct, frozen=True, kw_only=True):
    """How a source's state becomes a destination's."""

    source: Layout
    destination: Layout
    components: tuple[ComponentBridge, ...]
    "in the destination's order"
    mtp_cold: bool = False
    "the draft layers differ and the policy accepts it: start decoding without drafts, and say so"

    @property
    def unused(self) -> tuple[str, ...]:
        """Components of the source that this destination does not take."""
        used = {component.source.name for component in self.components}
        return tuple(component.name for component in self.source.components if component.name not in used)

    def pairs(self, component: str) -> tuple[LayerPair, ...]:
        """The layers of a destination component that this source serves; empty where it serves none."""
        return next((each.layers for each in self.components if each.destination.name == component), ())

    @property
    def landing(self) -> Layout:
        """The destination with the layers whose rows move in place of its own: what to plan transfers for.

        With `Policy.partial` it holds only what this source brings: see `joint.joint_landing` for the whole.
        """
        components = tuple(
            msgspec.structs.replace(component.destination, layers=component.source_layers, shared_layers=())
            for component in self.components
        )
        model = msgspec.structs.replace(self.destination.model, draft_layers=self.source.model.draft_layers)
        return msgspec.structs.replace(self.destination, model=model, components=components)


def bridge(source: Layout, destination: Layout, policy: Policy = DEFAULT_POLICY) -> Bridge:
    """How the state in `source` becomes the state that `destination` describes.

    Args:
        source: what the prefill rank holds.
        destination: what the decode rank needs.
        policy: what the operator accepts.

    Returns:
        The component pairs, with the source layer of every destination layer.

    Raises:
        LayoutError: the two cannot be bridged. It names the field, both values and what would have gone wrong.
    """
    source.validate()
    destination.validate()
    _compare_models(source.model, destination.model, policy)
    mtp_cold = source.model.draft_layers != destination.model.draft_layers
    unheld = frozenset(destination.model.draft_layers) - frozenset(source.model.draft_layers)
    components = tuple(_components(source, destination, unheld, policy))
    return Bridge(source=source, destination=destination, components=components, mtp_cold=mtp_cold)


def _refuse(
    field: str, source: object, destination: object, consequence: str, code: ErrorCode = ErrorCode.LAYOUT_MISMATCH
) -> LayoutError:
    return LayoutError(code, f"{field}: source has {source}, destination has {destination}: {consequence}", field=field)


_MODEL_FIELDS: Final = {
    "name": "state of another model decodes to fluent nonsense; point both sides at one model",
    "revision": "state of other weights decodes to fluent nonsense; load one revision on both sides",
    "weight_epoch": "the weights changed on one side only: old state would be decoded with new weights; update both",
    "layers": "rows of one depth would be read as another's; point both sides at one model",
}


def _compare_models(source: Model, destination: Model, policy: Policy) -> None:
    for name, consequence in _MODEL_FIELDS.items():
        ours, theirs = getattr(source, name), getattr(destination, name)
        if ours != theirs:
            raise _refuse(f"model.{name}", repr(ours), repr(theirs), consequence)
    if source.draft_layers != destination.draft_layers:
        if not policy.cold_drafts:
            raise _refuse(
                "model.draft_layers",
                source.draft_layers,
                destination.draft_layers,
                "decode would draft from rows that were never written, or drop rows that were, and accept few drafts "
                "without saying why; run the same draft layers on both sides, or accept a cold start (cold_drafts)",
            )
    elif source.spec_depth != destination.spec_depth and not policy.other_spec_depth:
        raise _refuse(
            "model.spec_depth",
            source.spec_depth,
            destination.spec_depth,
            "draft rows past the prompt would be taken for another number of drafts; set one depth on both sides, or "
            "accept it (other_spec_depth)",
        )


def _components(
    source: Layout, destination: Layout, unheld: frozenset[int], policy: Policy
) -> Iterator[ComponentBridge]:
    held = {component.name: component for component in source.components}
    for wanted in destination.components:
        have = held.get(wanted.name)
        if have is None:
            if policy.partial:
                continue
            raise _missing_component(source, destination, wanted)
        yield _component(have, wanted, unheld, policy)


def _missing_component(source: Layout, destination: Layout, wanted: Component) -> LayoutError:
    def count(layout: Layout) -> str:
        parts = ", ".join(f"{component.name} {len(component.layers)}" for component in layout.components)
        return f"{sum(len(component.layers) for component in layout.components)} layers of state ({parts})"

    return LayoutError(
        ErrorCode.LAYOUT_MISMATCH,
        f"components: source registers {count(source)}, destination declares {count(destination)}: without "
        f"{wanted.name} decode would attend to what its memory held before; register all caches of the prefill engine",
        field=f"components.{wanted.name}",
    )


def _component(have: Component, wanted: Component, unheld: frozenset[int], policy: Policy) -> ComponentBridge:
    at = wanted.name
    if have.kind is not wanted.kind:
        raise _refuse(
            f"{at}.kind", have.kind.value, wanted.kind.value, "one kind of state would be read as another; rename one"
        )
    for side, component in (("source", have), ("destination", wanted)):
        _need_parts(side, component)
    _compare_heads(have, wanted, policy)
    return ComponentBridge(
        source=have,
        destination=wanted,
        layers=tuple(_layer_pairs(have, wanted, unheld, policy)),
        parts=tuple(_part(have, wanted, name, policy) for name in PARTS[wanted.kind]),
    )


def _need_parts(side: str, component: Component) -> None:
    """The value planes of a component are exactly those of its kind."""
    scales = {plane.quantisation.scale_plane for plane in component.planes if plane.quantisation is not None}
    values = {plane.name for plane in component.planes} - scales
    needed = PARTS[component.kind]
    if values != set(needed):
        raise LayoutError(
            ErrorCode.LAYOUT_MISMATCH,
            f"{component.name}.planes: {side} has {', '.join(sorted(values))} where {component.kind.value} needs "
            f"{', '.join(needed)}: attention would run on half a key; describe every buffer of the component",
            field=f"{component.name}.planes",
        )


def _compare_heads(have: Component, wanted: Component, policy: Policy) -> None:
    at = wanted.name
    if have.heads_total != wanted.heads_total:
        raise _refuse(
            f"{at}.heads_total", have.heads_total, wanted.heads_total, "one head's rows would be read as another's"
        )
    ours = range(have.head_start, have.head_start + have.heads)
    theirs = range(wanted.head_start, wanted.head_start + wanted.heads)
    inside = ours.start <= theirs.start and theirs.stop <= ours.stop
    if not (inside or policy.partial):
        raise _refuse(
            f"{at}.heads",
            f"{ours.start}..{ours.stop - 1}",
            f"{theirs.start}..{theirs.stop - 1}",
            "some heads would keep what their memory held before; bring the other tensor-parallel ranks (partial)",
        )


def _layer_pairs(have: Component, wanted: Component, unheld: frozenset[int], policy: Policy) -> Iterator[LayerPair]:
    owners = {layer: layer for layer in have.layers} | dict(have.shared_layers)
    missing = [layer for layer in wanted.layers if layer not in owners and layer not in unheld]
    if missing and not policy.partial:
        raise LayoutError(
            ErrorCode.LAYOUT_MISMATCH,
            f"{wanted.name}.layers: source registers {len(have.layers)} layers of {wanted.name}, destination declares "
            f"{len(wanted.layers)}; nobody serves layer {', '.join(map(str, missing))}: it would keep what its memory "
            "held before; register the missing caches, or describe which layer each shares (shared_layers)",
            field=f"{wanted.name}.layers",
        )
    for layer in wanted.layers:
        if layer in owners:
            yield LayerPair(destination=layer, source=owners[layer])


def _part(have: Component, wanted: Component, name: str, policy: Policy) -> PartBridge:
    ours, theirs = have.plane(name), wanted.plane(name)
    at = f"{wanted.name}.{name}"
    if ours.elements != theirs.elements:
        raise _refuse(f"{at}.elements", ours.elements, theirs.elements, "rows of one width would be read as another's")
    _compare_rope(at, ours, theirs)
    same = _encoding(have, ours) == _encoding(wanted, theirs)
    if not same and (wanted.kind, ours.element, theirs.element) not in policy.conversions:
        raise _refuse(
            f"{at}.element",
            _spell(have, ours),
            _spell(wanted, theirs),
            f"the bytes of one would be read as the other, and {wanted.kind.value} is not converted; use one "
            "cache dtype on both sides",
        )
    raw = same and ours.rotation is theirs.rotation and ours.rope_order is theirs.rope_order
    return PartBridge(name=name, source=ours, destination=theirs, raw=raw)


def _compare_rope(at: str, ours: Plane, theirs: Plane) -> None:
    if ours.rope_order is not theirs.rope_order and RopeOrder.NONE in {ours.rope_order, theirs.rope_order}:
        raise _refuse(
            f"{at}.rope_order",
            ours.rope_order.value,
            theirs.rope_order.value,
            "positions would be read off the wrong pairs; name the order on both sides",
        )
    if ours.rope_elements != theirs.rope_elements:
        raise _refuse(
            f"{at}.rope_elements",
            ours.rope_elements,
            theirs.rope_elements,
            "elements would be paired with the wrong partners; describe the same rotary width on both sides",
        )


def _encoding(component: Component, plane: Plane) -> tuple[Element, Element | None, int]:
    """Element, the element of its scales, and how many share one."""
    if plane.quantisation is None:
        return plane.element, None, 0
    return plane.element, component.plane(plane.quantisation.scale_plane).element, plane.quantisation.group


def _spell(component: Component, plane: Plane) -> str:
    element, scale, group = _encoding(component, plane)
    scaled = "" if scale is None else f" with one {scale.value} scale per {group}"
    size = element.nbytes
    return f"{element.value}{scaled} ({size} byte{'s' if size > 1 else ''} an element)"
