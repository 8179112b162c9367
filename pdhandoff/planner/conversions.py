"""From landed rows to the decode engine's planes: which conversion each part needs, derived from the descriptors.

A conversion is decode -> rotate -> reorder -> rotate -> encode, with the steps that change nothing left out. Its name
says what it does:

    kernel   = "copy" | encoding ">" encoding ("+" step)*
    encoding = element ["." scale element "x" elements per scale]
    step     = "hadamard128" | "interleaved" rotary elements | "half_split" rotary elements

`e4m3.f32x128>bf16+hadamard128` decodes fp8 values with one f32 scale per 128, applies the Hadamard transform and stores
bf16. Steps run after decoding, before encoding, in the order written; `half_split64` reorders the first 64 elements
from interleaved pairs to half-split ones. The Hadamard transform is its own inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdhandoff.errors import ErrorCode, LayoutError, PlanError
from pdhandoff.layouts.descriptor import Component, Plane, RopeOrder, Rotation
from pdhandoff.planner.heads import common_heads

__all__ = ["COPY", "Conversion", "ConversionPart", "derive_conversion"]

COPY = "copy"
"kernel of a part whose bytes are the same on both sides"


class ConversionPart(NamedTuple):
    """One logical part of a component: its values and, where they are block-scaled, its scales."""

    name: str
    "the part: latent, rope, index_key, key, value"
    source: Plane
    source_scale: Plane | None
    destination: Plane
    destination_scale: Plane | None
    kernel: str
    "what to do, see the module's text"

    @property
    def steps(self) -> tuple[str, ...]:
        """What happens between decoding and encoding, in order. Empty for `copy`."""
        return tuple(self.kernel.split("+")[1:])


class Conversion(NamedTuple):
    """Everything that turns rows of `source` into rows of `destination`. Addresses and pages come with the call."""

    source: Component
    "as the rows have landed"
    destination: Component
    "as the decode engine holds them"
    layers: tuple[int, ...]
    "layers of the destination to fill; the call passes one source base for each"
    parts: tuple[ConversionPart, ...]
    heads: range
    "heads that both sides hold, counted over the whole model: those that are converted"


def derive_conversion(source: Component, destination: Component, layers: Sequence[int] | None = None) -> Conversion:
    """The conversion of landed rows into a destination component.

    Args:
        source: landing component, as the rows have landed.
        destination: the decode engine's component.
        layers: layers of the destination to fill. Default: all that both sides hold.

    Raises LayoutError, naming the field, when a part is missing on either side or has another width, and PlanError when
    the two sides have no head in common or the destination lacks a layer.
    """
    if source.kind is not destination.kind:
        raise _bad(
            f"the source holds {source.kind.value}, the destination {destination.kind.value}",
            f"{destination.name}.kind",
        )
    return Conversion(
        source,
        destination,
        _layers(source, destination, layers),
        tuple(_part(source, destination, name) for name in _part_names(source, destination)),
        common_heads(source, destination),
    )


def _layers(source: Component, destination: Component, layers: Sequence[int] | None) -> tuple[int, ...]:
    if layers is None:
        held = set(source.layers)
        return tuple(layer for layer in destination.layers if layer in held)
    missing = next((layer for layer in layers if layer not in destination.layers), None)
    if missing is not None:
        raise PlanError(
            ErrorCode.OUT_OF_RANGE, f"component {destination.name} has no layer {missing} at the destination"
        )
    return tuple(layers)


def _scales(component: Component) -> set[str]:
    return {plane.quantisation.scale_plane for plane in component.planes if plane.quantisation is not None}


def _part_names(source: Component, destination: Component) -> list[str]:
    """Logical parts in destination order. A part that only one side has would be lost or left stale."""
    have = [plane.name for plane in source.planes if plane.name not in _scales(source)]
    want = [plane.name for plane in destination.planes if plane.name not in _scales(destination)]
    for name in want:
        if name not in have:
            raise _bad(
                "the source has no such part: the destination would decode from stale memory",
                f"{destination.name}.{name}",
            )
    for name in have:
        if name not in want:
            raise _bad("the destination has no place for this part: it would be dropped", f"{destination.name}.{name}")
    return want


def _part(source: Component, destination: Component, name: str) -> ConversionPart:
    a, b = source.plane(name), destination.plane(name)
    if a.elements != b.elements:
        raise _bad(
            f"the source has {a.elements} elements a row, the destination {b.elements}",
            f"{destination.name}.{name}.elements",
        )
    scale_a = None if a.quantisation is None else source.plane(a.quantisation.scale_plane)
    scale_b = None if b.quantisation is None else destination.plane(b.quantisation.scale_plane)
    encodings = _encoding(a, scale_a), _encoding(b, scale_b)
    steps = _steps(a, b, f"{destination.name}.{name}")
    same = encodings[0] == encodings[1] and not steps
    kernel = COPY if same else "+".join([">".join(encodings), *steps])
    return ConversionPart(name, a, scale_a, b, scale_b, kernel)


def _encoding(plane: Plane, scale: Plane | None) -> str:
    if plane.quantisation is None or scale is None:
        return plane.element.value
    return f"{plane.element.value}.{scale.element.value}x{plane.quantisation.group}"


def _steps(a: Plane, b: Plane, at: str) -> list[str]:
    if a.rope_elements != b.rope_elements:
        raise _bad(
            f"the source rotates {a.rope_elements} elements, the destination {b.rope_elements}", f"{at}.rope_elements"
        )
    if (a.rope_order is RopeOrder.NONE) is not (b.rope_order is RopeOrder.NONE):
        raise _bad(
            f"the source orders rotary pairs {a.rope_order.value}, the destination {b.rope_order.value}",
            f"{at}.rope_order",
        )
    if a.rope_order is b.rope_order:
        return [] if a.rotation is b.rotation else [Rotation.HADAMARD128.value]
    return [
        *([a.rotation.value] if a.rotation is not Rotation.NONE else []),
        f"{b.rope_order.value}{b.rope_elements}",
        *([b.rotation.value] if b.rotation is not Rotation.NONE else []),
    ]


def _bad(reason: str, field: str) -> LayoutError:
    return LayoutError(ErrorCode.LAYOUT_MISMATCH, f"{field}: {reason}", field=field)
