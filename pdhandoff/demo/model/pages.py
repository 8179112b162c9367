"""The prefill side's memory: vLLM's paged caches, and the allocator of their pages.

Per layer there are two tensors, as vLLM 0.33 registers them for a DeepSeek-V3.2 model on SM90:

- latent rows, uint8 [pages, 64, 656]: 512 e4m3, 4 f32 scales (amax / 448, one per 128), 64 bf16 rotary (`fp8_ds_mla`;
  vllm/v1/attention/backends/mla/flashmla_sparse.py);
- index keys, uint8 [pages, 64, 132], which are no rows: each page holds 64 x 128 e4m3, then 64 f32 scales, powers of
  two (vllm/models/deepseek_v32/common/kernels.py). They are not Hadamard-rotated.

All layers share page ids, and page 0 is the null page that no request gets.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, final

import torch
from torch import Tensor

from pdhandoff.demo.model.config import ModelConfig
from pdhandoff.demo.model.layers import INDEX_BLOCK
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.native.reference import ScaleRule, dequantise_blocks, quantise_blocks

__all__ = ["INDEX_SCALE_BYTES", "LATENT_GROUP", "PageAllocator", "PagedCache", "PagedTensors"]

LATENT_GROUP: Final = 128
"latent elements that share a scale"
INDEX_SCALE_BYTES: Final = 4


@final
class PageAllocator:
    """Free page ids, in shuffled order. A freed page goes to the end of the queue.

    Args:
        pages: how many there are, the null page included.
        seed: of the shuffle.
    """

    def __init__(self, pages: int, seed: int) -> None:
        ids = list(range(1, pages))
        random.Random(seed).shuffle(ids)  # noqa: S311  # an order, not a secret
        self._free = deque(ids)

    @property
    def free_pages(self) -> int:
        """Pages that could be taken now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """That many page ids. Raises LocalError, and takes none, when there are fewer."""
        if count > len(self._free):
            raise LocalError(
                ErrorCode.BUSY,
                f"{count} pages are needed and {len(self._free)} are free: free or preempt a request first",
            )
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, ids: Iterable[int]) -> None:
        """Pages that nobody reads or writes any more."""
        self._free.extend(ids)


@final
class PagedTensors:
    """The paged caches of all layers.

    Args:
        config: the model's.
        pages: pages per layer, the null page included.
    """

    def __init__(self, config: ModelConfig, pages: int) -> None:
        self.config = config
        self.pages = pages
        row = config.latent + config.latent // LATENT_GROUP * 4 + config.rope * 2
        index_row = config.index_key + INDEX_SCALE_BYTES
        layers = len(config.all_layers)
        self.latent = list(torch.zeros(layers, pages, config.page_tokens, row, dtype=torch.uint8))
        "per layer, uint8 [pages, 64, 656]"
        self.index = list(torch.zeros(layers, pages, config.page_tokens, index_row, dtype=torch.uint8))
        "per layer, uint8 [pages, 64, 132], planar inside a page"


@final
class PagedCache:
    """One request's view of the paged caches: a `Cache` that quantises what it keeps.

    Args:
        tensors: the caches.
        table: the request's page ids; it may grow.
    """

    def __init__(self, tensors: PagedTensors, table: Sequence[int]) -> None:
        self._tensors = tensors
        self._config = tensors.config
        self._table = table

    def write(self, layer: int, positions: Tensor, latent: Tensor, rope: Tensor, index_key: Tensor) -> None:
        """Quantise rows and keep them."""
        page, slot = self._locate(positions)
        values, scales = quantise_blocks(latent, LATENT_GROUP, ScaleRule.AMAX)
        row = torch.cat((_bytes(values), _bytes(scales), _bytes(rope.to(torch.bfloat16))), dim=-1)
        self._tensors.latent[layer][page, slot] = row
        keys, scale = quantise_blocks(index_key, self._config.index_key, ScaleRule.POWER_OF_TWO)
        key_plane, scale_plane = self._index_planes(layer)
        key_plane[page, slot] = _bytes(keys)
        scale_plane[page, slot] = _bytes(scale)

    def index_query(self, query: Tensor) -> Tensor:
        """Queries as they are: this cache keeps its keys unrotated."""
        return query

    def index_keys(self, layer: int, tokens: int) -> Tensor:
        """Dequantised keys of whole pages."""
        count = -(-tokens // INDEX_BLOCK) * INDEX_BLOCK
        pages = torch.tensor(self._table[: -(-count // self._config.page_tokens)])
        key_plane, scale_plane = self._index_planes(layer)
        keys = key_plane[pages].view(torch.float8_e4m3fn).reshape(-1, self._config.index_key)
        scales = scale_plane[pages].view(torch.float32).reshape(-1, 1)
        return dequantise_blocks(keys, scales, self._config.index_key)[:count]

    def rows(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantised latents and rotary keys."""
        page, slot = self._locate(positions)
        row = self._tensors.latent[layer][page, slot]
        scale_end = self._config.latent + self._config.latent // LATENT_GROUP * 4
        values = row[..., : self._config.latent].contiguous().view(torch.float8_e4m3fn)
        scales = row[..., self._config.latent : scale_end].contiguous().view(torch.float32)
        rope = row[..., scale_end:].contiguous().view(torch.bfloat16)
        return dequantise_blocks(values, scales, LATENT_GROUP), rope.float()

    def _locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Page ids and slots of positions, in the positions' shape."""
        page_tokens = self._config.page_tokens
        return torch.tensor(self._table)[positions // page_tokens], positions % page_tokens

    def _index_planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of a layer's index pages: keys [pages, 64, 128] and scale bytes [pages, 64, 4]."""
        config = self._config
        flat = self._tensors.index[layer].view(self._tensors.pages, -1)
        keys = config.page_tokens * config.index_key
        key_plane = flat[:, :keys].unflatten(1, (config.page_tokens, config.index_key))
        return key_plane, flat[:, keys:].unflatten(1, (config.page_tokens, INDEX_SCALE_BYTES))


def _bytes(x: Tensor) -> Tensor:
    """[..., n] of any type as its bytes, uint8 [..., n * itemsize]."""
    return x.contiguous().view(torch.uint8)
