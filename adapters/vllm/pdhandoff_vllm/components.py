"""One registered cache as a component of a layout, by its shape, strides and spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdhandoff.errors import ErrorCode, LayoutError
from pdhandoff.layouts import Component, Element, RopeOrder
from pdhandoff.layouts.catalogue import (
    PageOrder,
    cpu_attention_pages,
    fp8_ds_mla_rows,
    head_range,
    index_pages,
    key_value_pages,
    mla_rows,
)

if TYPE_CHECKING:
    from pdhandoff_vllm.caches import CacheSpec, ModelFacts

__all__ = ["describe"]

_ELEMENTS: Final = {"torch.bfloat16": Element.BF16, "torch.float16": Element.F16, "torch.float32": Element.F32}
_INDEX_ROW: Final = 132
"bytes of an index key: 128 e4m3 and one scale"
_FP8_ROW: Final = 656
"bytes of an fp8_ds_mla row"

_KEY_THEN_VALUE: Final = frozenset({"FLASH_ATTN", "FLASHINFER"})
"backends whose pages hold a key, then its value, for each token and head"
_MLA_SPECS: Final = frozenset({"MLAAttentionSpec"})
_FULL_SPECS: Final = frozenset({"FullAttentionSpec"})


def describe(
    name: str, tensor: Any, spec: CacheSpec, facts: ModelFacts, *, layers: Sequence[int], index: bool
) -> Component:
    """The component that a cache is one layer of.

    Args:
        name: the layer's.
        tensor: the cache: `[page, token, row]` or `[page, head, token, row]`, with any strides.
        spec: what vLLM says of it.
        facts: the model.
        layers: global ids of all layers of the component.
        index: whether it is an indexer's, by its name.

    Raises:
        LayoutError: it cannot be described; the sentence names the layer and says what to change.
    """
    if index:
        return _index(name, tensor, facts, layers)
    if spec.kind in _MLA_SPECS:
        return _latent(name, tensor, spec, facts, layers)
    if spec.kind in _FULL_SPECS:
        return _keys_and_values(name, tensor, spec, facts, layers)
    raise _bad(name, f"a {spec.kind} cannot be handed off: only full attention, latent attention and its indexer can")


def _bad(name: str, reason: str) -> LayoutError:
    return LayoutError(ErrorCode.LAYOUT_MISMATCH, f"cache {name}: {reason}", field=name)


def _rows(name: str, tensor: Any) -> tuple[int, int, int]:
    """(tokens in a page, bytes of a row, bytes from page to page) of a cache whose pages are runs of rows."""
    shape, strides, size = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.element_size())
    if len(shape) == 4 and shape[1] == 1:
        shape, strides = (shape[0], *shape[2:]), (strides[0], *strides[2:])
    if len(shape) != 3:
        raise _bad(name, f"its shape {tuple(tensor.shape)} is none of pages of rows")
    _, tokens, elements = shape
    if strides[2] != 1 or (tokens > 1 and strides[1] != elements):
        raise _bad(name, f"its strides {strides} leave gaps inside a page: choose another VLLM_KV_CACHE_LAYOUT")
    return tokens, elements * size, strides[0] * size


def _index(name: str, tensor: Any, facts: ModelFacts, layers: Sequence[int]) -> Component:
    tokens, row, stride = _rows(name, tensor)
    if row != _INDEX_ROW or str(tensor.dtype) != "torch.uint8":
        raise _bad(
            name,
            f"an index key of {row} bytes as {tensor.dtype} is not 128 fp8 values and a scale: leave indexer_kv_dtype "
            "at its default",
        )
    return index_pages(
        layers=layers,
        rope_order=facts.index_rope_order,
        page_tokens=tokens,
        scales=facts.index_scales,
        page_stride=stride,
    )


def _latent(name: str, tensor: Any, spec: CacheSpec, facts: ModelFacts, layers: Sequence[int]) -> Component:
    tokens, row, stride = _rows(name, tensor)
    element = _ELEMENTS.get(str(tensor.dtype))
    if element is not None and row == (facts.latent + facts.rope) * element.nbytes:
        return mla_rows(
            layers=layers,
            page_tokens=tokens,
            latent=facts.latent,
            rope=facts.rope,
            element=element,
            page_stride=stride,
        )
    if spec.element == "fp8_ds_mla" and row == _FP8_ROW and (facts.latent, facts.rope) == (512, 64):
        return fp8_ds_mla_rows(layers=layers, page_tokens=tokens, page_stride=stride)
    raise _bad(
        name,
        f"latent rows of {row} bytes as {tensor.dtype} (cache type {spec.element or 'not named'}) cannot be decoded "
        "elsewhere: use --kv-cache-dtype auto or fp8_ds_mla",
    )


def _keys_and_values(name: str, tensor: Any, spec: CacheSpec, facts: ModelFacts, layers: Sequence[int]) -> Component:
    element = _ELEMENTS.get(str(tensor.dtype))
    if element is None:
        raise _bad(
            name, f"keys and values as {tensor.dtype} have scales that are in no cache: use --kv-cache-dtype auto"
        )
    page, head, token, inner = (stride * int(tensor.element_size()) for stride in _four_axes(name, tensor, spec))
    if inner != element.nbytes:
        raise _bad(name, f"its elements are {inner} bytes apart: choose another VLLM_KV_CACHE_LAYOUT")
    rope = int(spec.head_size * facts.key_rope_share) // 2 * 2
    common: dict[str, Any] = {
        "layers": layers,
        "heads": _heads(name, spec, facts),
        "heads_total": facts.kv_heads,
        "head_elements": spec.head_size,
        "page_tokens": int(tensor.shape[2]),
        "element": element,
        "rope_order": facts.key_rope_order if rope else RopeOrder.NONE,
        "rope": rope,
        "page_stride": page,
    }
    if tensor.device.type == "cpu":
        return _cpu_pages(name, spec, cpu_attention_pages(**common), token=token, head=head)
    if spec.backend not in _KEY_THEN_VALUE:
        raise _bad(
            name,
            f"pages of the attention backend {spec.backend or '(not known)'} are not described here: use "
            f"--attention-backend {' or '.join(sorted(_KEY_THEN_VALUE))}",
        )
    component = key_value_pages(order=PageOrder.NHD, **common)
    planes = tuple(msgspec.structs.replace(plane, head_stride=head, token_stride=token) for plane in component.planes)
    return msgspec.structs.replace(component, planes=planes)


def _four_axes(name: str, tensor: Any, spec: CacheSpec) -> tuple[int, int, int, int]:
    """Strides, in elements, of a cache `[page, head, token, key | value]`."""
    shape = tuple(tensor.shape)
    if len(shape) != 4 or shape[1] != spec.heads or shape[3] != 2 * spec.head_size:
        raise _bad(
            name,
            f"its shape {shape} is not (pages, {spec.heads} heads, tokens, 2 x {spec.head_size}): this attention "
            f"backend ({spec.backend or 'not known'}) or version of vLLM is not supported",
        )
    page, head, token, inner = tensor.stride()
    return page, head, token, inner


def _heads(name: str, spec: CacheSpec, facts: ModelFacts) -> range:
    """The heads that this rank holds, counted over the model."""
    heads = head_range(facts.kv_heads, tp_rank=facts.tp_rank, tp_size=facts.tp_size)
    if len(heads) != spec.heads:
        raise _bad(
            name,
            f"it has {spec.heads} heads where rank {facts.tp_rank} of {facts.tp_size} has {len(heads)} of "
            f"{facts.kv_heads}",
        )
    return heads


def _cpu_pages(name: str, spec: CacheSpec, component: Component, *, token: int, head: int) -> Component:
    """CPU attention turns the inside of a head's page around, so that page must be one run."""
    if spec.backend not in {"", "CPU_ATTN"}:
        raise _bad(name, f"pages of the attention backend {spec.backend} are not described here: use CPU_ATTN")
    value = component.plane("value")
    row = value.row_bytes * 2
    if (component.page_tokens > 1 and token != row) or (component.heads > 1 and head != row * component.page_tokens):
        raise _bad(name, f"a head's page is no run of bytes (strides {head}, {token}): unset VLLM_KV_CACHE_LAYOUT")
    return component
