"""Block-scaled fp8, UE8M0 scales and rotary orders, on tensors: what every conversion kernel is compared with.

Arithmetic is in float32 with round-to-nearest-even, and division is a true division: a kernel that multiplies by a
reciprocal instead gives other codes for some values.
"""

from __future__ import annotations

import enum
from typing import Final, final

import torch

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts.descriptor import RopeOrder

__all__ = [
    "E4M3_MAX",
    "ScaleRule",
    "decode_ue8m0",
    "decode_ue8m0x4",
    "dequantise_blocks",
    "encode_ue8m0",
    "encode_ue8m0x4",
    "quantise_blocks",
    "reorder_rope",
]

E4M3_MAX: Final = 448.0
"largest finite float8_e4m3fn"

_SMALLEST_AMAX: Final = 1e-4
"vLLM's floor under the largest absolute value of a block, where scales are powers of two"
_MANTISSA_BITS: Final = 23
_MANTISSA: Final = (1 << _MANTISSA_BITS) - 1
_INFINITY_BITS: Final = 0xFF << _MANTISSA_BITS
_NAN_BITS: Final = 0x7FC00000
_UE8M0_NAN: Final = 0xFF


@final
class ScaleRule(enum.Enum):
    """How the scale of a block follows from `amax`, the largest absolute value among its finite elements."""

    AMAX = "amax"
    "amax / 448, and 1 where that is 0. vLLM's CUDA writer of fp8_ds_mla rows scales by amax / 448"
    POWER_OF_TWO = "power_of_two"
    """2 ** ceil(log2(max(amax, 1e-4) / 448)), exactly: the exponent comes from the float's bits, not from a logarithm.
    vLLM's writer of index keys (DeepGEMM's UE8M0 convention) uses this rule"""


def quantise_blocks(values: torch.Tensor, group: int, rule: ScaleRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-scaled fp8 codes of `values`.

    A code is round-to-nearest-even(value / scale), saturated at +-448. Infinities saturate, NaN stays NaN, and neither
    takes part in the scale of its block.

    Args:
        values: [..., n], any float type; computed in float32.
        group: elements that share one scale; divides n.
        rule: how scales are chosen.

    Returns:
        codes [..., n] as float8_e4m3fn, and scales [..., n // group] as float32.

    Raises:
        LocalError: group does not divide n.

    """
    blocks = _blocks(values.to(torch.float32), group)
    amax = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(dim=-1)
    scales = _scales(amax, rule)
    # torch versions differ in what the cast makes of larger values: 448 or NaN
    scaled = (blocks / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).reshape(values.shape), scales


def dequantise_blocks(values: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """`values * scales`, each scale standing for `group` elements.

    The product of a 4-bit and a 24-bit significand is rounded once, to float32; with power-of-two scales it is exact.

    Args:
        values: [..., n], float8_e4m3fn codes (or any float type).
        scales: [..., n // group], float32.
        group: elements that share one scale.

    Returns:
        [..., n] as float32.

    Raises:
        LocalError: the shapes do not belong together.

    """
    blocks = _blocks(values.to(torch.float32), group)
    if scales.shape != blocks.shape[:-1]:
        raise LocalError(
            ErrorCode.MISUSE,
            f"scales have shape {tuple(scales.shape)}, but values {tuple(values.shape)} in groups of {group} need "
            f"{tuple(blocks.shape[:-1])}: values would be multiplied by other blocks' scales",
        )
    return (blocks * scales.to(torch.float32).unsqueeze(-1)).reshape(values.shape)


def encode_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Scales as one exponent byte each: the smallest power of two that is not below the scale.

    Exact for powers of two from 2 ** -127 to 2 ** 127. Smaller positive scales and 0 give byte 0 (2 ** -127); what has
    no power of two (NaN, infinity, negative, above 2 ** 127) gives 255, which decodes to NaN.
    """
    values = scales.to(torch.float32).contiguous()
    bits = values.view(torch.int32)
    exponents = (bits >> _MANTISSA_BITS) + ((bits & _MANTISSA) != 0)
    # A subnormal has exponent field 0: 2 ** -127 and below round up to byte 0, the rest up to 2 ** -126.
    subnormal = (bits <= _MANTISSA) & (bits >= 0)
    exponents = torch.where(subnormal, (bits > (1 << (_MANTISSA_BITS - 1))).to(exponents.dtype), exponents)
    bad = (values < 0) | ~values.isfinite()
    exponents = torch.where(values == 0, 0, exponents)
    return torch.where(bad, _UE8M0_NAN, exponents).to(torch.uint8)


def decode_ue8m0(exponents: torch.Tensor) -> torch.Tensor:
    """2 ** (byte - 127) as float32, from uint8 of any shape. Byte 0 is 2 ** -127 (subnormal), byte 255 is NaN.

    Source: UE8M0 is the scale type E8M0 of the OCP Microscaling Formats specification, version 1.0.
    """
    wide = exponents.to(torch.int32)
    bits = torch.where(wide == 0, 1 << (_MANTISSA_BITS - 1), wide << _MANTISSA_BITS)
    return torch.where(wide == _UE8M0_NAN, _NAN_BITS, bits).to(torch.int32).view(torch.float32)


def encode_ue8m0x4(scales: torch.Tensor) -> torch.Tensor:
    """Scales [..., n] as four equal exponent bytes each: uint8 [..., n, 4].

    Source: vLLM 0.33, vllm/utils/deep_gemm.py, the packed scale word of index-key pages on SM100.
    """
    return encode_ue8m0(scales).unsqueeze(-1).expand(*scales.shape, 4).contiguous()


def decode_ue8m0x4(words: torch.Tensor) -> torch.Tensor:
    """Float32 scales [..., n] from four exponent bytes each, uint8 [..., n, 4].

    Where the four bytes differ the word was no such scale (an f32 scale in disguise, or damage), and the result is NaN.
    """
    first = words[..., 0]
    equal = (words == first.unsqueeze(-1)).all(dim=-1)
    return torch.where(equal, decode_ue8m0(first), torch.nan)


def reorder_rope(x: torch.Tensor, source: RopeOrder, destination: RopeOrder, rope_elements: int) -> torch.Tensor:
    """Rotary elements in another order.

    Args:
        x: [..., n]; the first `rope_elements` of n are rotary, the rest keep their places.
        source: order of x. Pair i is elements (2i, 2i + 1) interleaved, or (i, i + rope_elements / 2) half-split.
        destination: order of the result.
        rope_elements: even, at most n.

    Returns:
        [..., n] of the same type; x itself where nothing changes.

    Raises:
        LocalError: one order is NONE and the other is not, so that the pairs are unknown.

    """
    if source is destination or rope_elements == 0:
        return x
    if RopeOrder.NONE in (source, destination):
        raise LocalError(
            ErrorCode.LAYOUT_MISMATCH,
            f"rope order {source.value} cannot become {destination.value}: which elements form a pair is not described",
        )
    rotary = x[..., :rope_elements]
    pairs = (2, rope_elements // 2) if source is RopeOrder.HALF_SPLIT else (rope_elements // 2, 2)
    reordered = rotary.reshape(*rotary.shape[:-1], *pairs).transpose(-1, -2).reshape(rotary.shape)
    return torch.cat((reordered, x[..., rope_elements:]), dim=-1)


def _blocks(values: torch.Tensor, group: int) -> torch.Tensor:
    """[..., n] as [..., n // group, group]."""
    elements = values.shape[-1]
    if group <= 0 or elements % group:
        raise LocalError(ErrorCode.MISUSE, f"{elements} elements cannot be divided into blocks of {group}")
    return values.reshape(*values.shape[:-1], elements // group, group)


def _scales(amax: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    if rule is ScaleRule.AMAX:
        scales = amax / E4M3_MAX
        return torch.where(scales > 0, scales, 1.0)
    mantissa, exponent = torch.frexp(amax.clamp(min=_SMALLEST_AMAX) / E4M3_MAX)
    # frexp gives mantissas in [0.5, 1): exactly 0.5 is a power of two already.
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(amax), exponent)
