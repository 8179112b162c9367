"""What memory holds: components, planes, strides, encodings. Described, never inferred from a shape or a flag.

A *layout* is what one engine rank holds of a model's attention state. It is a list of *components* (kinds of state with
one geometry each), a component is a list of *planes* (strided arrays) over `[layer, page, token, head, element]`:

    address(layer, page, token, head, element) =
        base[component, region, layer] + page * page_stride + offset + token * token_stride
                                       + head * head_stride + element * element_stride

Bases are no part of a layout: they belong to one allocation (`planner.Placement`). A contiguous cache of L tokens is a
paged cache with one page of L tokens. All offsets and strides are in bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Self, final

import msgspec

from pdhandoff.errors import ErrorCode, LayoutError
from pdhandoff.limits import DEFAULT_LIMITS, Limits

__all__ = [
    "Component",
    "ComponentKind",
    "Element",
    "Layout",
    "Model",
    "Plane",
    "Quantisation",
    "RopeOrder",
    "Rotation",
]


@final
class Element(enum.Enum):
    """One stored element. The value is its name on the wire."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"
    E4M3 = "e4m3"  # float8_e4m3fn: no infinity, largest 448
    UE8M0 = "ue8m0"  # one byte: 2 ** (byte - 127)
    UE8M0X4 = "ue8m0x4"  # four equal UE8M0 bytes that stand for one scale

    @property
    def nbytes(self) -> int:
        """Bytes of one stored element."""
        return _ELEMENT_BYTES[self]


_ELEMENT_BYTES: Final = {
    Element.BF16: 2,
    Element.F16: 2,
    Element.F32: 4,
    Element.E4M3: 1,
    Element.UE8M0: 1,
    Element.UE8M0X4: 4,
}


@final
class Rotation(enum.Enum):
    """An orthogonal transform that the stored values went through, along the element axis."""

    NONE = "none"
    HADAMARD128 = "hadamard128"  # Sylvester-ordered 128 x 128 Hadamard matrix times 128 ** -0.5


@final
class RopeOrder(enum.Enum):
    """How rotary dimensions are ordered in a plane that holds any."""

    NONE = "none"
    INTERLEAVED = "interleaved"  # pair i is elements 2i, 2i + 1
    HALF_SPLIT = "half_split"  # pair i is elements i, i + rope / 2


@final
class ComponentKind(enum.Enum):
    """What a component means to a model. An unknown kind is refused, never skipped."""

    MLA_LATENT = "mla_latent"  # parts: latent, rope
    INDEX_KEY = "index_key"  # part: index_key
    KEY_VALUE = "key_value"  # parts: key, value


@final
class Quantisation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Block scaling of a plane of values: value = stored * scale[element // group]."""

    scale_plane: str
    "name of the plane, in the same component, that holds the scales"
    group: int
    "elements that share one scale"


@final
class Plane(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One strided array of a component, over `[page, token, head, element]`."""

    name: str
    "the logical part it holds (latent, rope, index_key, key, value), or the scales of one (latent.scale)"
    element: Element
    elements: int
    "elements per token and head"
    page_stride: int
    token_stride: int
    offset: int = 0
    "bytes from the start of a page to its first element"
    head_stride: int = 0
    element_stride: int = 0
    "0 means dense: the element's own size"
    region: str = ""
    "planes with the same region share one base address per layer"
    quantisation: Quantisation | None = None
    rotation: Rotation = Rotation.NONE
    rope_order: RopeOrder = RopeOrder.NONE
    rope_elements: int = 0
    "how many leading elements are rotary, where rope_order is not none"

    @property
    def element_step(self) -> int:
        """Bytes from one element to the next."""
        return self.element_stride or self.element.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes that one token of one head occupies, gaps not counted."""
        return self.elements * self.element.nbytes

    @property
    def row_is_dense(self) -> bool:
        """Whether one token of one head is one run of bytes."""
        return self.element_step == self.element.nbytes


@final
class Component(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of state, the same geometry in every layer that has it, as one rank holds it."""

    name: str
    "unique in the layout"
    kind: ComponentKind
    layers: tuple[int, ...]
    "global layer ids, ascending; draft (MTP) layers follow the target's"
    page_tokens: int
    "tokens in one page"
    planes: tuple[Plane, ...]
    heads: int = 1
    "heads that this rank holds"
    head_start: int = 0
    "the first of them, counted over the whole model"
    heads_total: int = 1
    "heads of the whole model; 1 for state that all ranks hold alike"
    shared_layers: tuple[tuple[int, int], ...] = ()
    "(layer, owner): this layer keeps no rows here, the model reads the owner's in its place; ascending"

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer: all planes, all local heads."""
        return sum(plane.row_bytes for plane in self.planes) * self.heads

    @property
    def regions(self) -> tuple[str, ...]:
        """The distinct regions of its planes, in plane order."""
        return tuple(dict.fromkeys(plane.region for plane in self.planes))

    def plane(self, name: str) -> Plane:
        """The plane of that name. Raises LayoutError when there is none."""
        for plane in self.planes:
            if plane.name == name:
                return plane
        have = ", ".join(plane.name for plane in self.planes)
        raise _bad(f"component {self.name} has no plane {name!r} (it has {have})", f"{self.name}.planes")

    def region_page_bytes(self, region: str) -> int:
        """Bytes from the start of a page to the end of the last byte that a plane of this region uses in it."""
        return max(_plane_end(self, plane) for plane in self.planes if plane.region == region)


@final
class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose state it is. Two sides that differ here would decode fluent nonsense."""

    name: str
    "family and shape, for example glm5"
    revision: str = ""
    "of the weights, as the operator names it"
    weight_epoch: int = 0
    "raised when weights change under a running engine"
    layers: int
    "target layers"
    draft_layers: tuple[int, ...] = ()
    "global ids of the draft (MTP) layers; empty: this engine keeps no draft state"
    spec_depth: int = 0
    "draft tokens per verify step that the draft state was built for; 0: none"


@final
class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All attention state of one model as one engine rank holds it."""

    name: str
    "for people; changes no byte and is in no digest"
    model: Model
    components: tuple[Component, ...]

    def component(self, name: str) -> Component:
        """The component of that name. Raises LayoutError when there is none."""
        for component in self.components:
            if component.name == name:
                return component
        have = ", ".join(component.name for component in self.components)
        raise LayoutError(
            ErrorCode.UNKNOWN_COMPONENT,
            f"layout {self.name} has no component {name!r} (it has {have})",
            field="components",
        )

    def validate(self, limits: Limits = DEFAULT_LIMITS) -> Self:
        """This layout, if it is consistent and within bounds. Raises LayoutError that names the field otherwise."""
        _check(0 < len(self.components) <= limits.max_components, "needs 1 to max_components components", "components")
        names = [component.name for component in self.components]
        _check(len(set(names)) == len(names), "two components share a name", "components")
        _validate_model(self.model, limits)
        for component in self.components:
            _validate_component(component, self.model, limits)
        return self


def _bad(reason: str, field: str) -> LayoutError:
    return LayoutError(ErrorCode.LAYOUT_MISMATCH, f"{field}: {reason}", field=field)


def _check(condition: bool, reason: str, field: str) -> None:  # noqa: FBT001
    if not condition:
        raise _bad(reason, field)


def _ascend(layers: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(layers))


def _plane_end(component: Component, plane: Plane) -> int:
    """Offset, from the start of a page, of the first byte after the last one that the plane uses."""
    return (
        plane.offset
        + (component.page_tokens - 1) * plane.token_stride
        + (component.heads - 1) * plane.head_stride
        + (plane.elements - 1) * plane.element_step
        + plane.element.nbytes
    )


def _validate_model(model: Model, limits: Limits) -> None:
    _check(0 < len(model.name) <= limits.max_string, "is empty or too long", "model.name")
    _check(len(model.revision) <= limits.max_string, "is too long", "model.revision")
    _check(0 < model.layers <= limits.max_layers, "must lie in 1..max_layers", "model.layers")
    _check(model.weight_epoch >= 0, "is negative", "model.weight_epoch")
    _check(0 <= model.spec_depth <= limits.max_layers, "is out of range", "model.spec_depth")
    drafts = model.draft_layers
    _check(len(drafts) <= limits.max_layers, "has too many layers", "model.draft_layers")
    _check(all(layer >= model.layers for layer in drafts), "overlaps the target layers", "model.draft_layers")
    _check(_ascend(drafts), "must ascend", "model.draft_layers")


def _validate_component(component: Component, model: Model, limits: Limits) -> None:
    at = component.name
    _check(0 < len(at) <= limits.max_string, "is empty or too long", "component.name")
    _check(0 < component.page_tokens <= limits.max_page_tokens, "must lie in 1..max_page_tokens", f"{at}.page_tokens")
    layers = component.layers
    _check(len(layers) <= limits.max_layers, "has too many layers", f"{at}.layers")
    _check(_ascend(layers), "must ascend", f"{at}.layers")
    known = {*range(model.layers), *model.draft_layers}
    _check(known.issuperset(layers), "names a layer the model has not", f"{at}.layers")
    _validate_sharing(component, known, limits)
    _check(component.heads > 0, "must be positive", f"{at}.heads")
    _check(
        0 <= component.head_start
        and component.head_start + component.heads <= component.heads_total <= limits.max_row_bytes,
        "leaves heads_total",
        f"{at}.heads",
    )
    _check(0 < len(component.planes) <= limits.max_planes, "needs 1 to max_planes planes", f"{at}.planes")
    names = [plane.name for plane in component.planes]
    _check(len(set(names)) == len(names), "two planes share a name", f"{at}.planes")
    for plane in component.planes:
        _validate_plane(component, plane, limits)


def _validate_sharing(component: Component, known: set[int], limits: Limits) -> None:
    at = f"{component.name}.shared_layers"
    sharing = [layer for layer, _ in component.shared_layers]
    _check(len(sharing) <= limits.max_layers, "has too many layers", at)
    _check(_ascend(sharing), "must ascend", at)
    _check(known.issuperset(sharing), "names a layer the model has not", at)
    _check(not set(sharing) & set(component.layers), "a layer with rows of its own shares another's", at)
    _check({owner for _, owner in component.shared_layers} <= set(component.layers), "an owner has no rows", at)


def _validate_plane(component: Component, plane: Plane, limits: Limits) -> None:
    at = f"{component.name}.{plane.name}"
    _check(
        0 < len(plane.name) <= limits.max_string and len(plane.region) <= limits.max_string, "bad name", f"{at}.name"
    )
    _check(plane.elements > 0, "must be positive", f"{at}.elements")
    _check(plane.row_bytes * component.heads <= limits.max_row_bytes, "a row exceeds max_row_bytes", f"{at}.elements")
    strides = {
        "offset": plane.offset,
        "token_stride": plane.token_stride,
        "head_stride": plane.head_stride,
        "element_stride": plane.element_stride,
        "page_stride": plane.page_stride,
    }
    for name, stride in strides.items():
        _check(0 <= stride < 1 << 48, "is negative or absurd", f"{at}.{name}")
    _validate_axes(component, plane)
    rope = plane.rope_elements
    _check(0 <= rope <= plane.elements and rope % 2 == 0, "is odd or too large", f"{at}.rope_elements")
    named = plane.rope_order is not RopeOrder.NONE
    _check(named == (rope > 0), "needs a rope order, and a rope order needs it", f"{at}.rope_elements")
    _check(plane.rotation is Rotation.NONE or plane.elements == 128, "hadamard128 needs 128 elements", f"{at}.rotation")
    if plane.quantisation is not None:
        _validate_quantisation(component, plane, plane.quantisation)
    elif plane.element is Element.E4M3:
        raise _bad(
            "fp8 values without scales would decode to other numbers: name their scale plane", f"{at}.quantisation"
        )


def _validate_axes(component: Component, plane: Plane) -> None:
    """No two elements of a plane share a byte: from the innermost axis out, each stride clears what lies inside it.

    How many pages there are is not known here: an axis outside the pages has to clear two of them.
    """
    axes = (
        (plane.element_step, plane.elements, "element"),
        (plane.token_stride, component.page_tokens, "token"),
        (plane.head_stride, component.heads, "head"),
        (plane.page_stride, 2, "page"),
    )
    clear = plane.element.nbytes
    for stride, count, axis in sorted(axes):
        if count == 1:
            continue
        _check(stride >= clear, f"{axis}s overlap", f"{component.name}.{plane.name}.{axis}_stride")
        clear += stride * (count - 1)


def _validate_quantisation(component: Component, plane: Plane, quantisation: Quantisation) -> None:
    at = f"{component.name}.{plane.name}.quantisation"
    _check(quantisation.group > 0, "group must be positive", at)
    scales = next((p for p in component.planes if p.name == quantisation.scale_plane), None)
    if scales is None:
        raise _bad(f"scale plane {quantisation.scale_plane!r} is missing: the values could not be decoded", at)
    _check(scales.elements * quantisation.group == plane.elements, "scales x group differs from the elements", at)
