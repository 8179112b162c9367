"""The Hadamard rotation of index keys."""

from __future__ import annotations

from typing import Final

import torch

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["HADAMARD_ELEMENTS", "hadamard128"]

HADAMARD_ELEMENTS: Final = 128
_SCALE: Final = 128.0**-0.5


def hadamard128(x: torch.Tensor) -> torch.Tensor:
    """`x @ H * 128 ** -0.5`, where H is the 128 x 128 Hadamard matrix in Sylvester order. Its own inverse.

    Element (i, j) of H is -1 to the number of bits that i and j have in common. Computed as seven butterfly stages in
    float32, widest last, and scaled once at the end; a kernel that follows the same order gives the same bits.

    Args:
        x: [..., 128], any float type.

    Returns:
        [..., 128] as float32.

    Raises:
        LocalError: the last axis is not 128 wide.

    """
    if x.shape[-1] != HADAMARD_ELEMENTS:
        raise LocalError(
            ErrorCode.MISUSE, f"the last axis has {x.shape[-1]} elements: the rotation needs {HADAMARD_ELEMENTS}"
        )
    y = x.to(torch.float32)
    width = 1
    while width < HADAMARD_ELEMENTS:
        pairs = y.reshape(*x.shape[:-1], HADAMARD_ELEMENTS // (2 * width), 2, width)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), dim=-2).reshape(x.shape)
        width *= 2
    return y * _SCALE
