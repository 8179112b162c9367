"""The parts of a decoder layer that are the same in every family: linear maps, norms, MLPs and mixtures of them.

Values are rounded to the model's type where vLLM 0.32 rounds them on CPU (its native RMSNorm and SiluAndMul, and the
grouped expert products, which keep float32 between the two matrices of an expert up to the activation).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as fn

from pdhandoff.demo.hf.config import Experts

__all__ = ["Linear", "Mixture", "Mlp", "Norm", "add_and_norm", "linear", "mixture", "mlp", "rms_norm", "route"]


class Linear(NamedTuple):
    """A linear map."""

    weight: Tensor
    "[outputs, inputs]"
    bias: Tensor | None = None
    "[outputs]"


class Norm(NamedTuple):
    """A root-mean-square norm."""

    weight: Tensor
    "[n]"
    epsilon: float


class Mlp(NamedTuple):
    """A gated MLP."""

    gate: Linear
    up: Linear
    down: Linear


class Mixture(NamedTuple):
    """A mixture of gated MLPs."""

    shape: Experts
    router: Linear
    correction: Tensor | None
    "[experts], float32: added to a score when experts are chosen, and not when they are weighed"
    gate_up: Tensor
    "[experts, 2 * width, hidden]"
    down: Tensor
    "[experts, hidden, width]"
    shared: Mlp | None


def linear(x: Tensor, weights: Linear) -> Tensor:
    """`x` [..., inputs] mapped to [..., outputs]."""
    return fn.linear(x, weights.weight, weights.bias)


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """`x` [..., n] over its root mean square, times the weights."""
    return _normed(x.float(), norm)


def add_and_norm(x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The norm of the sum of both [..., n], and the sum. The norm sees it before it is rounded."""
    total = x.float() + residual.float()
    return _normed(total, norm), total.to(x.dtype)


def mlp(x: Tensor, weights: Mlp) -> Tensor:
    """[tokens, hidden] through a gated MLP."""
    return linear(fn.silu(linear(x, weights.gate)) * linear(x, weights.up), weights.down)


def mixture(x: Tensor, weights: Mixture) -> Tensor:
    """[tokens, hidden] through the experts that each token chooses, and through the shared ones."""
    share, chosen = route(linear(x, weights.router), weights.shape, weights.correction)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in sorted(set(chosen.flatten().tolist())):
        token, place = torch.nonzero(chosen == expert, as_tuple=True)
        gate, up = fn.linear(x[token].float(), weights.gate_up[expert].float()).chunk(2, dim=-1)
        inner = (fn.silu(gate) * up).to(x.dtype)
        out = fn.linear(inner.float(), weights.down[expert].float())
        total.index_add_(0, token, out * share[token, place, None])
    routed = total.to(x.dtype) * weights.shape.scale
    return routed if weights.shared is None else mlp(x, weights.shared) + routed


def route(logits: Tensor, shape: Experts, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which experts each token uses, and how much each counts, both [tokens, per_token]; weights are float32.

    Experts stand in groups. The best groups are kept (by their best expert, or with a correction by the sum of their
    two best), then the best experts in them. Source: DeepSeek-V3's report, and `topk_method` noaux_tc of its config.
    """
    logits = logits.float()
    scores = logits.sigmoid() if shape.sigmoid else logits.softmax(-1)
    judged = scores if correction is None else scores + correction
    grouped = judged.view(len(judged), shape.groups, -1)
    of_group = grouped.amax(-1) if correction is None else grouped.topk(2, dim=-1).values.sum(-1)
    kept = of_group.topk(shape.groups_kept, dim=-1).indices
    open_groups = torch.zeros_like(of_group, dtype=torch.bool).scatter(-1, kept, value=True)
    chosen = grouped.where(open_groups[..., None], -torch.inf).flatten(-2).topk(shape.per_token, dim=-1).indices
    share = scores.gather(-1, chosen)
    return (share / share.sum(-1, keepdim=True) if shape.normalise else share), chosen


def _normed(x: Tensor, norm: Norm) -> Tensor:
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon)
    return scaled.to(norm.weight.dtype) * norm.weight
