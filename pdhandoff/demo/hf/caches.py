"""The decode engine's memory: contiguous rows of one request, for both kinds of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from pdhandoff.demo.hf.config import GroupedShape, LatentShape
from pdhandoff.planner import Placement

__all__ = ["KeyValueCache", "LatentCache"]


@final
class KeyValueCache:
    """Keys and values, a tensor each per layer, `[kv_heads, length, elements]`.

    Args:
        shape: of the attention.
        layers: how many layers keep rows.
        length: tokens that it holds.
        dtype: of the rows.
    """

    def __init__(self, shape: GroupedShape, *, layers: int, length: int, dtype: torch.dtype) -> None:
        self.keys = list(torch.zeros(layers, shape.kv_heads, length, shape.elements, dtype=dtype))
        self.values = list(torch.zeros(layers, shape.kv_heads, length, shape.elements, dtype=dtype))
        self.first_draft_row = 0
        "the draft layer has no rows before this token"

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Component -> where its rows are."""
        return {"key_value": Placement(1, {"key": _addresses(self.keys), "value": _addresses(self.values)})}

    def keep(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write the rows of tokens `start` and on, both [tokens, kv_heads, elements]."""
        rows = slice(start, start + len(keys))
        self.keys[layer][:, rows] = keys.transpose(0, 1)
        self.values[layer][:, rows] = values.transpose(0, 1)


@final
class LatentCache:
    """Latent rows, a tensor per layer, `[length, latent | rope]`.

    Args:
        shape: of the attention.
        layers: how many layers keep rows, the draft layer included.
        length: tokens that it holds.
        dtype: of the rows.
    """

    def __init__(self, shape: LatentShape, *, layers: int, length: int, dtype: torch.dtype) -> None:
        self.rows = list(torch.zeros(layers, length, shape.latent + shape.rope, dtype=dtype))
        self.first_draft_row = 0
        "the draft layer has no rows before this token"

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Component -> where its rows are."""
        return {"mla_latent": Placement(1, {"": _addresses(self.rows)})}

    def keep(self, layer: int, start: int, latent: Tensor, rope: Tensor) -> None:
        """Write the rows of tokens `start` and on: [tokens, latent] and [tokens, rope]."""
        self.rows[layer][start : start + len(latent)] = torch.cat((latent, rope), dim=-1)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
