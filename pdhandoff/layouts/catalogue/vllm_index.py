"""vLLM's index-key pages of sparse attention: values first, then scales, page by page."""

from __future__ import annotations

from collections.abc import Sequence

from pdhandoff.layouts.catalogue.options import refused
from pdhandoff.layouts.descriptor import Component, ComponentKind, Element, Plane, Quantisation, RopeOrder

__all__ = ["index_pages"]


def index_pages(
    *,
    layers: Sequence[int],
    rope_order: RopeOrder,
    page_tokens: int = 64,
    elements: int = 128,
    rope: int = 64,
    scales: Element = Element.F32,
    page_stride: int | None = None,
    shared_layers: Sequence[tuple[int, int]] = (),
) -> Component:
    """Planar index pages: `[page_tokens x 128 e4m3][page_tokens x 4-byte scale]`, 8,448 bytes for 64 tokens.

    The registered tensor has shape (blocks, 1, 64, 132), which looks like rows of 132 bytes and is not. Values are
    layer-normed keys with rotary leading elements, not Hadamard-rotated. Scales are powers of two: an f32, or on SM100
    four equal UE8M0 bytes. Source: vLLM 0.33, vllm/models/deepseek_v32/common/kernels.py (page),
    vllm/utils/deep_gemm.py (`pack_ue8m0_x4`), vllm/v1/attention/backends/mla/indexer.py (block size); f32 checked
    against pages of vLLM 0.26 on an H200.

    Args:
        layers: global ids of the layers that own an indexer, ascending.
        rope_order: HALF_SPLIT in DeepSeek-V3.2, INTERLEAVED in GLM-5.
        page_tokens: tokens in a page (64 on CUDA).
        elements: elements of an index key, all under one scale.
        rope: how many of them, from the first on, are rotary.
        scales: Element.F32, or Element.UE8M0X4 on SM100.
        page_stride: bytes from one page to the next; None: packed pages.
        shared_layers: `(layer, owner)` of layers that read an earlier layer's index keys.

    Raises:
        LayoutError: another element for the scales.
    """
    if scales not in {Element.F32, Element.UE8M0X4}:
        raise refused("index_key.scale", f"{scales.value} is no scale word of vLLM's index pages: f32 or ue8m0x4")
    values = page_tokens * elements
    stride = values + page_tokens * scales.nbytes if page_stride is None else page_stride
    return Component(
        name="index_key",
        kind=ComponentKind.INDEX_KEY,
        layers=tuple(layers),
        shared_layers=tuple(shared_layers),
        page_tokens=page_tokens,
        planes=(
            Plane(
                name="index_key",
                element=Element.E4M3,
                elements=elements,
                page_stride=stride,
                token_stride=elements,
                quantisation=Quantisation(scale_plane="index_key.scale", group=elements),
                rope_order=rope_order,
                rope_elements=rope,
            ),
            Plane(
                name="index_key.scale",
                element=scales,
                elements=1,
                offset=values,
                page_stride=stride,
                token_stride=scales.nbytes,
            ),
        ),
    )
