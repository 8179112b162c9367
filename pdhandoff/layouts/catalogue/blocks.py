"""vLLM's manager blocks: larger than a kernel's pages, or with all layers inside one block."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdhandoff.layouts.catalogue.options import refused
from pdhandoff.layouts.descriptor import Component, Layout

__all__ = ["block_outermost", "expand_blocks"]


def expand_blocks(blocks: Sequence[int], *, block_tokens: int, page_tokens: int, null: int | None = 0) -> list[int]:
    """Kernel pages of a manager's block table: block b is pages b * n to b * n + n - 1, n = block_tokens / page_tokens.

    The null block stays the null page, n times, so that one id marks what is missing. Source: vLLM 0.33,
    `group_kernel_blocks` in vllm/v1/kv_cache_interface.py; seen on an H200 with --block-size 128 and 64-token pages.

    Args:
        blocks: block ids in token order.
        block_tokens: tokens in a block of the manager (vLLM's --block-size).
        page_tokens: tokens in a page of the kernel (the registered tensor's).
        null: the id of the block that is never real (vLLM: 0); None: there is none.

    Raises:
        LayoutError: a block is no whole number of pages.
    """
    if page_tokens <= 0 or block_tokens <= 0 or block_tokens % page_tokens:
        raise refused(
            "block_tokens", f"a block of {block_tokens} tokens is no whole number of {page_tokens}-token pages"
        )
    factor = block_tokens // page_tokens
    return [block if block == null else block * factor + i for block in blocks for i in range(factor)]


def block_outermost(layout: Layout) -> Layout:
    """The same pages with all layers of a block side by side: the page stride is the sum of a block's pages.

    For layouts whose pages are contiguous runs and whose blocks are one page each (manager and kernel agree). The
    per-layer base addresses, read from the registered tensors, say where in a block each layer's page lies. Source:
    vLLM 0.33, layouts BLHNC and BLNHC in vllm/v1/core/kv_cache_layout.py and `KVCacheTensor.block_stride` in
    vllm/v1/kv_cache_interface.py; 201,728 bytes for four layers of 41,984 + 8,448.

    Raises:
        LayoutError: components with pages of different lengths, or with several regions: they share no block.
    """
    if len({component.page_tokens for component in layout.components}) > 1:
        raise refused("page_tokens", "components of one block hold the same tokens, and these pages differ in length")
    if any(len(component.regions) > 1 for component in layout.components):
        raise refused("region", "a block-outermost cache is one allocation, and a component here has several regions")
    block = sum(len(component.layers) * _page_bytes(component) for component in layout.components)
    return msgspec.structs.replace(
        layout, components=tuple(_with_page_stride(component, block) for component in layout.components)
    ).validate()


def _page_bytes(component: Component) -> int:
    return component.region_page_bytes(component.regions[0])


def _with_page_stride(component: Component, stride: int) -> Component:
    planes = tuple(msgspec.structs.replace(plane, page_stride=stride) for plane in component.planes)
    return msgspec.structs.replace(component, planes=planes)
