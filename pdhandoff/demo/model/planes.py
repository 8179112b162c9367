"""The decode side's memory: TileRT's contiguous bf16 planes, on one device or divided by role over two.

`caches[3 * layer + k]` is `[1, length, dim]` in bf16: k = 0 index keys (128, Hadamard-rotated), 1 latents (512), 2
rotary keys (64). With divided roles, device 0 holds the index keys in full and latents and rotary keys of length 1,
the other device the reverse. Source: TileRT 0.1.6.post3, tilert/models/deepseek_v3_2 (`_get_device_result`,
`inject_cache`).
"""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor

from pdhandoff.demo.model.config import ModelConfig
from pdhandoff.demo.model.layers import INDEX_BLOCK
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.native.reference import hadamard128

__all__ = ["INDEX_PLANE", "LATENT_PLANE", "PLANES", "ROPE_PLANE", "PlaneCache"]

INDEX_PLANE: Final = 0
LATENT_PLANE: Final = 1
ROPE_PLANE: Final = 2
PLANES: Final = 3
"tensors per layer"


@final
class PlaneCache:
    """The planes of all layers: a `Cache` that keeps bf16 rows, and index keys rotated.

    Args:
        config: the model's.
        devices: 1, or 2 for divided roles.

    Raises:
        LocalError: another number of devices, or a length that index blocks do not divide.
    """

    def __init__(self, config: ModelConfig, devices: int = 1) -> None:
        if devices not in {1, 2}:
            raise LocalError(ErrorCode.CONFIG, f"{devices} devices: the demo knows 1, and 2 with divided roles")
        if config.max_seq_len % INDEX_BLOCK:
            raise LocalError(ErrorCode.CONFIG, f"max_seq_len {config.max_seq_len} is no multiple of {INDEX_BLOCK}")
        self.by_device = [
            _device_planes(config, keeps_index=device == 0, keeps_latent=device == devices - 1)
            for device in range(devices)
        ]
        self._index = self.by_device[0][INDEX_PLANE::PLANES]
        self._latent = self.by_device[-1][LATENT_PLANE::PLANES]
        self._rope = self.by_device[-1][ROPE_PLANE::PLANES]

    def write(self, layer: int, positions: Tensor, latent: Tensor, rope: Tensor, index_key: Tensor) -> None:
        """Round rows to bf16 and keep them."""
        self._latent[layer][0, positions] = latent.to(torch.bfloat16)
        self._rope[layer][0, positions] = rope.to(torch.bfloat16)
        self._index[layer][0, positions] = hadamard128(index_key).to(torch.bfloat16)

    def index_query(self, query: Tensor) -> Tensor:
        """Queries rotated as the keys are: the rotation is orthogonal, so products stay what they were."""
        return hadamard128(query)

    def index_keys(self, layer: int, tokens: int) -> Tensor:
        """Rotated keys."""
        return self._index[layer][0, : -(-tokens // INDEX_BLOCK) * INDEX_BLOCK].float()

    def rows(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Latents and rotary keys."""
        return self._latent[layer][0, positions].float(), self._rope[layer][0, positions].float()


def _device_planes(config: ModelConfig, *, keeps_index: bool, keeps_latent: bool) -> list[Tensor]:
    index_length = config.max_seq_len if keeps_index else 1
    latent_length = config.max_seq_len if keeps_latent else 1
    shapes = ((index_length, config.index_key), (latent_length, config.latent), (latent_length, config.rope))
    return [
        torch.zeros(1, length, elements, dtype=torch.bfloat16) for _ in config.all_layers for length, elements in shapes
    ]
