"""vLLM's latent rows: bf16, and fp8 with block scales (`fp8_ds_mla`)."""

from __future__ import annotations

from collections.abc import Sequence

from pdhandoff.layouts.catalogue.options import Options, model_layers, need_mla, page_size, refused
from pdhandoff.layouts.catalogue.vllm_index import index_pages
from pdhandoff.layouts.descriptor import Component, ComponentKind, Element, Layout, Plane, Quantisation, RopeOrder
from pdhandoff.layouts.profiles import Profile

__all__ = ["FP8_GROUP", "fp8_ds_mla", "fp8_ds_mla_rows", "mla_plain", "mla_rows"]

FP8_GROUP = 128
"elements that share one scale in an fp8_ds_mla row"
_PAGE_TOKENS = 64


def mla_rows(
    *,
    layers: Sequence[int],
    page_tokens: int = _PAGE_TOKENS,
    latent: int = 512,
    rope: int = 64,
    element: Element = Element.BF16,
    page_stride: int | None = None,
) -> Component:
    """Unquantised latent rows, `[layer, page, token, latent | rope]`: 1,152 bytes a token in bf16.

    The rope part is stored as interleaved pairs. Source: vLLM 0.33, kv_cache_dtype "auto", shape (blocks, 1, tokens,
    576) in vllm/v1/attention/backends/mla; pair order from `_fused_norm_rope_kernel` in
    vllm/models/deepseek_v32/common/kernels.py, checked against pages of vLLM 0.26 on an H200.

    Args:
        layers: global layer ids, ascending.
        page_tokens: tokens in a page of the kernel (64 for sparse MLA on CUDA).
        latent: elements of the latent.
        rope: elements of the rotary key.
        element: BF16, F16 or F32.
        page_stride: bytes from one page to the next; None: packed pages.
    """
    row = (latent + rope) * element.nbytes
    stride = page_tokens * row if page_stride is None else page_stride
    return Component(
        name="mla_latent",
        kind=ComponentKind.MLA_LATENT,
        layers=tuple(layers),
        page_tokens=page_tokens,
        planes=(
            Plane(name="latent", element=element, elements=latent, page_stride=stride, token_stride=row),
            Plane(
                name="rope",
                element=element,
                elements=rope,
                offset=latent * element.nbytes,
                page_stride=stride,
                token_stride=row,
                rope_order=RopeOrder.INTERLEAVED,
                rope_elements=rope,
            ),
        ),
    )


def fp8_ds_mla_rows(
    *,
    layers: Sequence[int],
    page_tokens: int = _PAGE_TOKENS,
    latent: int = 512,
    rope: int = 64,
    page_stride: int | None = None,
) -> Component:
    """`fp8_ds_mla` rows: 512 e4m3 | 4 f32 scales | 64 bf16 rope = 656 bytes, `[layer, page, token, 656]`.

    One scale per 128 elements, value = e4m3 * scale. Scales are any f32: the compiled CUDA writer stores amax / 448,
    the Triton writer a power of two. Rope is interleaved and not quantised. Source: vLLM 0.33,
    vllm/v1/attention/backends/mla/flashmla_sparse.py (row), vllm/models/deepseek_v32/common/kernels.py (writer);
    checked against pages of vLLM 0.26 on an H200.

    Args:
        layers: global layer ids, ascending.
        page_tokens: tokens in a page of the kernel (64 on CUDA).
        latent: elements of the latent, a multiple of 128.
        rope: elements of the rotary key.
        page_stride: bytes from one page to the next; None: packed pages.

    Raises:
        LayoutError: latent is no multiple of 128.
    """
    if latent % FP8_GROUP:
        raise refused("mla_latent.latent", f"{latent} elements are no multiple of the {FP8_GROUP} that share a scale")
    scales = latent // FP8_GROUP
    scale_end = latent + scales * Element.F32.nbytes
    row = scale_end + rope * Element.BF16.nbytes
    stride = page_tokens * row if page_stride is None else page_stride
    return Component(
        name="mla_latent",
        kind=ComponentKind.MLA_LATENT,
        layers=tuple(layers),
        page_tokens=page_tokens,
        planes=(
            Plane(
                name="latent",
                element=Element.E4M3,
                elements=latent,
                page_stride=stride,
                token_stride=row,
                quantisation=Quantisation(scale_plane="latent.scale", group=FP8_GROUP),
            ),
            Plane(
                name="latent.scale",
                element=Element.F32,
                elements=scales,
                offset=latent,
                page_stride=stride,
                token_stride=row,
            ),
            Plane(
                name="rope",
                element=Element.BF16,
                elements=rope,
                offset=scale_end,
                page_stride=stride,
                token_stride=row,
                rope_order=RopeOrder.INTERLEAVED,
                rope_elements=rope,
            ),
        ),
    )


def mla_plain(profile: Profile, options: Options) -> Layout:
    """The layout of vLLM with an unquantised latent cache, and index pages where the model has an indexer."""
    return _layout("vllm.mla", profile, options)


def fp8_ds_mla(profile: Profile, options: Options) -> Layout:
    """The layout of vLLM with an fp8_ds_mla cache, and index pages where the model has an indexer."""
    return _layout("vllm.fp8_ds_mla", profile, options)


def _layout(name: str, profile: Profile, options: Options) -> Layout:
    shape = need_mla(profile, name)
    model, layers = model_layers(profile, options)
    page_tokens = page_size(options, _PAGE_TOKENS)
    if name == "vllm.fp8_ds_mla":
        rows = fp8_ds_mla_rows(layers=layers, page_tokens=page_tokens, latent=shape.latent, rope=shape.rope)
    else:
        rows = mla_rows(
            layers=layers, page_tokens=page_tokens, latent=shape.latent, rope=shape.rope, element=options.element
        )
    components = [rows]
    if profile.indexer is not None:
        owners = [layer for layer in profile.indexer.owners if layer in layers]
        components.append(
            index_pages(
                layers=owners,
                rope_order=profile.indexer.rope_order,
                page_tokens=page_tokens,
                elements=profile.indexer.elements,
                rope=profile.indexer.rope,
                scales=options.index_scales,
                shared_layers=profile.indexer_sharing,
            )
        )
    return Layout(name=f"{name}/{profile.name}", model=model, components=tuple(components)).validate()
