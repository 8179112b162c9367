"""Rotary embedding: tables of angles, and the two ways in which elements are paired.

Frequencies as transformers defines them for its rope types default, llama3 and yarn, and rounding as vLLM 0.32 does it
on CPU (model_executor/layers/rotary_embedding): tables in the model's type; a product and sum in float32 that is
rounded once, but for yarn, where each product and the sum are rounded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pdhandoff.demo.hf.config import Rope

__all__ = ["RopeTable", "rope_table", "rotate", "softmax_gain"]


class RopeTable(NamedTuple):
    """Cosines and sines of the rotary angles, [position, pair]."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    "pair i is elements 2i and 2i + 1; otherwise i and i + n / 2"
    rounds_once: bool

    def at(self, start: int, tokens: int) -> RopeTable:
        """The rows of `tokens` positions from `start` on, to be used over heads: [tokens, 1, pair]."""
        rows = slice(start, start + tokens)
        return self._replace(cos=self.cos[rows, None], sin=self.sin[rows, None])


def rope_table(rope: Rope, *, elements: int, positions: int, interleaved: bool, dtype: torch.dtype) -> RopeTable:
    """The table of one kind of head.

    Args:
        rope: the model's.
        elements: rotary elements of a head.
        positions: how many the table has.
        interleaved: how elements are paired.
        dtype: the model's.
    """
    exponents = torch.arange(0, elements, 2, dtype=torch.float32) / elements
    frequencies = 1.0 / rope.theta**exponents
    gain = 1.0
    if rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _yarn(rope, frequencies, elements)
        gain = _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return RopeTable(
        cos=(angles.cos() * gain).to(dtype),
        sin=(angles.sin() * gain).to(dtype),
        interleaved=interleaved,
        rounds_once=rope.kind != "yarn",
    )


def softmax_gain(rope: Rope) -> float:
    """What yarn multiplies attention scores by."""
    return _mscale(rope.factor, rope.mscale_all) ** 2 if rope.kind == "yarn" else 1.0


def rotate(x: Tensor, table: RopeTable) -> Tensor:
    """Turn every pair of `x` [tokens, heads, elements] by its angle, in the type of `x`."""
    cos, sin = table.cos, table.sin
    values = x.float() if table.rounds_once else x
    if table.rounds_once:
        cos, sin = cos.float(), sin.float()
    one, other = (values[..., 0::2], values[..., 1::2]) if table.interleaved else values.chunk(2, dim=-1)
    turned = (one * cos - other * sin, other * cos + one * sin)
    out = torch.stack(turned, dim=-1).flatten(-2) if table.interleaved else torch.cat(turned, dim=-1)
    return out.to(x.dtype)


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, and those in between blended."""
    turns = rope.trained_positions * frequencies / (2 * math.pi)
    span = rope.high_factor - rope.low_factor
    kept = ((turns - rope.low_factor) / span).clamp(0, 1) if span else (turns >= rope.low_factor).float()
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: Rope, frequencies: Tensor, elements: int) -> Tensor:
    """Pairs that turn often within the trained length are kept, those that turn seldom divided by the factor."""

    def pair_that_turns(times: float) -> float:
        return elements * math.log(rope.trained_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(rope.beta_slow)), elements - 1)
    ramp = (torch.arange(elements // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return frequencies / rope.factor * (1 - kept) + frequencies * kept


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
