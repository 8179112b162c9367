"""The caches of a TileRT engine with eight devices, on CPU, for the demo's model to compute with.

Kept byte by byte as TileRT 0.1.6.post3 keeps them (`get_cache_vars` of its mla_v2.py): device 0 holds index keys in
full and length-1 latents and rotary keys, the others the reverse; or every device holds everything. Every row of a part
is written on all devices that hold it, and read from another one on every layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdhandoff.demo.model import ModelConfig
from pdhandoff.demo.model.layers import INDEX_BLOCK
from pdhandoff.native.reference import ScaleRule, dequantise_blocks, hadamard128, quantise_blocks

__all__ = ["DEVICES", "PAD", "DeviceTensors"]

DEVICES = 8
PAD = 8
"rows beyond max_seq_len (`kv_cache_pad`)"
INDEX, LATENT, ROPE = range(3)
GROUP = 128


class DeviceTensors:
    """A `Cache` of the demo's model over `by_device[device][3 * layer + part]`, each [1, length, elements].

    Args:
        config: the model's; its max_seq_len is the tensors' length, padding included.
        layers: that are kept; without the draft layer one fewer than the model has.
        roles: devices have roles; otherwise each holds everything.
        fp8: latents are uint8 rows of e4m3 values and f32 scales.
    """

    def __init__(self, config: ModelConfig, *, layers: int, roles: bool, fp8: bool) -> None:
        self.config = config
        self.fp8 = fp8
        self.length = config.max_seq_len
        self.by_device = [
            [
                tensor
                for _ in range(layers)
                for tensor in (
                    self._part(config.index_key, full=not roles or device == 0),
                    self._latent(full=not roles or device > 0),
                    self._part(config.rope, full=not roles or device > 0),
                )
            ]
            for device in range(DEVICES)
        ]
        self._index_devices = [0] if roles else list(range(DEVICES))
        self._row_devices = list(range(1, DEVICES)) if roles else list(range(DEVICES))

    def devices_of(self, part: int) -> list[int]:
        """Which devices hold a part in full."""
        return self._index_devices if part == INDEX else self._row_devices

    def write(self, layer: int, positions: Tensor, latent: Tensor, rope: Tensor, index_key: Tensor) -> None:
        """Keep rows, on every device that holds them."""
        rows = (
            hadamard128(index_key).to(torch.bfloat16),
            self._encode(latent),
            rope.to(torch.bfloat16),
        )
        for part, values in enumerate(rows):
            for device in self.devices_of(part):
                self.by_device[device][3 * layer + part][0, positions] = values

    def index_query(self, query: Tensor) -> Tensor:
        """Queries rotated as the keys are."""
        return hadamard128(query)

    def index_keys(self, layer: int, tokens: int) -> Tensor:
        """Rotated keys."""
        kept = self._read(INDEX, layer)
        return kept[: -(-tokens // INDEX_BLOCK) * INDEX_BLOCK].float()

    def rows(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Latents and rotary keys."""
        latent = self._read(LATENT, layer)[positions]
        return self._decode(latent), self._read(ROPE, layer)[positions].float()

    def _read(self, part: int, layer: int) -> Tensor:
        devices = self.devices_of(part)
        return self.by_device[devices[layer % len(devices)]][3 * layer + part][0]

    def _encode(self, latent: Tensor) -> Tensor:
        if not self.fp8:
            return latent.to(torch.bfloat16)
        values, scales = quantise_blocks(latent, GROUP, ScaleRule.AMAX)
        return torch.cat((values.view(torch.uint8), scales.contiguous().view(torch.uint8)), dim=-1)

    def _decode(self, rows: Tensor) -> Tensor:
        if not self.fp8:
            return rows.float()
        values = rows[..., : self.config.latent].contiguous().view(torch.float8_e4m3fn)
        scales = rows[..., self.config.latent :].contiguous().view(torch.float32)
        return dequantise_blocks(values, scales, GROUP)

    def _part(self, elements: int, *, full: bool) -> Tensor:
        # what an earlier request left behind: nothing may depend on it
        return torch.full((1, self.length if full else 1, elements), 3.0, dtype=torch.bfloat16)

    def _latent(self, *, full: bool) -> Tensor:
        if not self.fp8:
            return self._part(self.config.latent, full=full)
        width = self.config.latent + self.config.latent // GROUP * 4
        return torch.full((1, self.length if full else 1, width), 0x3C, dtype=torch.uint8)
