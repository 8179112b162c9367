"""Landed rows into the decode engine's layout: decode, the planner's steps in their order, encode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, final

import torch

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts.descriptor import Component, Element, Plane, RopeOrder
from pdhandoff.native.checks import check_convert, local_heads
from pdhandoff.native.digest import digest_slots
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
from pdhandoff.native.rotation import hadamard128
from pdhandoff.native.strided import Slots, from_bytes, gather_bytes, locate, scatter_bytes, to_bytes
from pdhandoff.planner.conversions import COPY, Conversion, ConversionPart
from pdhandoff.planner.pages import PageTable
from pdhandoff.planner.placement import Placement

__all__ = ["convert_part", "convert_rows", "decode_rows", "encode_rows"]

_CHUNK_TOKENS: Final = 4096
"rows converted at a time: bounds the float32 copies"

_FLOATS: Final = {Element.BF16: torch.bfloat16, Element.F16: torch.float16, Element.F32: torch.float32}

_SCALE_DECODERS: Final[Mapping[Element, Callable[[torch.Tensor], torch.Tensor]]] = {
    Element.F32: torch.Tensor.float,
    Element.UE8M0: decode_ue8m0,
    Element.UE8M0X4: decode_ue8m0x4,
}

_SCALE_ENCODERS: Final[Mapping[Element, Callable[[torch.Tensor], torch.Tensor]]] = {
    Element.F32: torch.Tensor.float,
    Element.UE8M0: encode_ue8m0,
    Element.UE8M0X4: encode_ue8m0x4,
}


def decode_rows(plane: Plane, scale: Plane | None, values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What stored elements mean.

    Args:
        plane: the values' plane.
        scale: the scales' plane, where the values are block-scaled.
        values: [..., elements] as stored.
        scales: [..., elements // group] as stored (UE8M0X4: [..., elements // group, 4]).

    Returns:
        [..., elements] as float32.

    """
    if plane.quantisation is None or scale is None or scales is None:
        return values.to(torch.float32)
    return dequantise_blocks(values, _scale_codec(_SCALE_DECODERS, scale)(scales), plane.quantisation.group)


def encode_rows(plane: Plane, scale: Plane | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The inverse of `decode_rows`, rounding to nearest even. Returns values and scales as stored.

    Blocks are scaled by amax where scales are float32, and by powers of two where they are UE8M0.
    """
    if plane.quantisation is None or scale is None:
        dtype = _FLOATS.get(plane.element)
        if dtype is None:
            raise LocalError(
                ErrorCode.LAYOUT_MISMATCH,
                f"plane {plane.name}: nothing can be stored as {plane.element.value} without scales",
            )
        return x.to(dtype), None
    encode = _scale_codec(_SCALE_ENCODERS, scale)
    rule = ScaleRule.AMAX if scale.element is Element.F32 else ScaleRule.POWER_OF_TWO
    values, scales = quantise_blocks(x, plane.quantisation.group, rule)
    return values, encode(scales)


def convert_part(
    part: ConversionPart, values: torch.Tensor, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One part's rows from the source's encoding into the destination's.

    Args:
        part: what to do; its kernel is not `copy`.
        values: [..., elements] as the source stores them.
        scales: the source's scales as stored, where it has any.

    Returns:
        Values and scales as the destination stores them.

    """
    old, new = part.source_scale, part.destination_scale
    if scales is not None and old is not None and new is not None and _keeps_codes(part, old):
        decoded = _scale_codec(_SCALE_DECODERS, old)(scales)
        return values, _scale_codec(_SCALE_ENCODERS, new)(decoded)
    x = decode_rows(part.source, part.source_scale, values, scales)
    for step in part.steps:
        x = _apply(step, x)
    return encode_rows(part.destination, part.destination_scale, x)


def convert_rows(
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
    """`Native.convert`, on CPU memory."""
    source, destination = conversion.source, conversion.destination
    bases = check_convert(
        conversion,
        source_bases=source_bases,
        source_pages=source_pages,
        destination_at=destination_at,
        destination_pages=destination_pages,
        tokens=tokens,
        zero_until=zero_until,
        digest_layers=digest_layers,
    )
    here = locate(source, source_pages, tokens)
    there = locate(destination, destination_pages, tokens, page_count=destination_at.pages)
    tail_tokens = range(tokens.stop, max(tokens.stop, zero_until))
    tail = locate(destination, destination_pages, tail_tokens, page_count=destination_at.pages)
    real = here.real & there.real
    here, there, tail = here.only(real), there.only(real), tail.only(tail.real)
    from_heads, to_heads = local_heads(source, conversion.heads), local_heads(destination, conversion.heads)
    for index, source_base in enumerate(source_bases):
        landed = _Side(source, {source.regions[0]: source_base}, here, from_heads)
        base = {region: bases[region][index] for region in bases}
        live = _Side(destination, base, there, to_heads)
        for start in range(0, len(here.token), _CHUNK_TOKENS):
            rows = slice(start, start + _CHUNK_TOKENS)
            for part in conversion.parts:
                _convert_chunk(part, landed.part(rows), live.part(rows))
        _zero(_Side(destination, base, tail, to_heads))
    if digest_layers is None:
        return 0
    landed_bases = {source.regions[0]: source_bases}
    return digest_slots(source, layers=digest_layers, bases=landed_bases, at=here, heads=conversion.heads)


@final
class _Side(NamedTuple):
    """Some rows of one layer of one component, and how to reach them."""

    component: Component
    bases: Mapping[str, int]
    at: Slots
    heads: range

    def part(self, rows: slice) -> _Side:
        return self._replace(at=self.at.part(rows))

    def take(self, plane: Plane) -> torch.Tensor:
        return gather_bytes(self.component, plane, self.bases[plane.region], self.at, heads=self.heads)

    def put(self, plane: Plane, rows: torch.Tensor) -> None:
        scatter_bytes(self.component, plane, self.bases[plane.region], self.at, rows, heads=self.heads)


def _convert_chunk(part: ConversionPart, landed: _Side, live: _Side) -> None:
    if part.kernel == COPY:
        live.put(part.destination, landed.take(part.source))
        if part.source_scale is not None and part.destination_scale is not None:
            live.put(part.destination_scale, landed.take(part.source_scale))
        return
    stored = None if part.source_scale is None else from_bytes(part.source_scale, landed.take(part.source_scale))
    values, scales = convert_part(part, from_bytes(part.source, landed.take(part.source)), stored)
    live.put(part.destination, to_bytes(part.destination, values))
    if part.destination_scale is not None and scales is not None:
        live.put(part.destination_scale, to_bytes(part.destination_scale, scales))


def _zero(tail: _Side) -> None:
    for plane in tail.component.planes:
        tail.put(plane, torch.zeros((len(tail.at.token), len(tail.heads), plane.row_bytes), dtype=torch.uint8))


def _keeps_codes(part: ConversionPart, old: Plane) -> bool:
    """Whether only the scales' encoding differs, and the destination's can hold every scale of the source.

    Re-quantising would then round once more for nothing. Float32 scales may be no power of two, so they do not qualify.
    """
    a, b = part.source.quantisation, part.destination.quantisation
    return (
        old.element in {Element.UE8M0, Element.UE8M0X4}
        and not part.steps
        and a is not None
        and b is not None
        and a.group == b.group
    )


def _apply(step: str, x: torch.Tensor) -> torch.Tensor:
    """One step of a kernel's name, see `planner.conversions`."""
    if step == "hadamard128":
        return hadamard128(x)
    for order, former in ((RopeOrder.INTERLEAVED, RopeOrder.HALF_SPLIT), (RopeOrder.HALF_SPLIT, RopeOrder.INTERLEAVED)):
        elements = step.removeprefix(order.value)
        if elements != step and elements.isdecimal():
            return reorder_rope(x, former, order, int(elements))
    raise LocalError(
        ErrorCode.MISUSE, f"no conversion step is called {step!r}: planner and conversions differ in version"
    )


def _scale_codec(
    codecs: Mapping[Element, Callable[[torch.Tensor], torch.Tensor]], scale: Plane
) -> Callable[[torch.Tensor], torch.Tensor]:
    codec = codecs.get(scale.element)
    if codec is None:
        raise LocalError(ErrorCode.LAYOUT_MISMATCH, f"plane {scale.name}: {scale.element.value} is no type of scale")
    return codec
