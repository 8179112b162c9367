"""From a checkpoint's tensors to a network's weights. Names as Llama and DeepSeek-V3 checkpoints have them."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor

from pdhandoff.demo.hf.attention import GroupedAttention, LatentAttention
from pdhandoff.demo.hf.checkpoint import Checkpoint
from pdhandoff.demo.hf.config import Experts, GroupedShape, HfConfig, LatentShape
from pdhandoff.demo.hf.layers import Linear, Mixture, Mlp, Norm
from pdhandoff.demo.hf.rope import softmax_gain

__all__ = ["DraftWeights", "LayerWeights", "Weights", "load_weights"]


class LayerWeights(NamedTuple):
    """One decoder layer."""

    attention_norm: Norm
    attention: GroupedAttention | LatentAttention
    mlp_norm: Norm
    mlp: Mlp | Mixture


class DraftWeights(NamedTuple):
    """The draft (MTP) layer. Embedding and output matrix are the target's."""

    token_norm: Norm
    hidden_norm: Norm
    project: Linear
    "[hidden, 2 * hidden]: of the next token's embedding, then the hidden state"
    layer: LayerWeights
    norm: Norm


class Weights(NamedTuple):
    """A whole model."""

    embedding: Tensor
    "[vocabulary, hidden]"
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Linear
    draft: DraftWeights | None


def load_weights(config: HfConfig, checkpoint: Checkpoint, *, draft: bool) -> Weights:
    """Read a model.

    Args:
        config: says which tensors there are, and their shapes.
        checkpoint: where they are.
        draft: read the draft layer too.

    Raises:
        LocalError: a tensor is missing or has another shape.
    """
    return _Loader(config, checkpoint).weights(draft=draft)


@final
class _Loader:
    def __init__(self, config: HfConfig, checkpoint: Checkpoint) -> None:
        self._config = config
        self._checkpoint = checkpoint

    def weights(self, *, draft: bool) -> Weights:
        config = self._config
        table = (config.vocabulary, config.hidden)
        embedding = self._checkpoint.tensor("model.embed_tokens.weight", table)
        head = embedding if config.tied else self._checkpoint.tensor("lm_head.weight", table)
        return Weights(
            embedding=embedding,
            layers=tuple(self._layer(layer) for layer in range(config.layers)),
            norm=self._norm("model.norm", config.hidden),
            head=Linear(head),
            draft=self._draft(config.layers) if draft else None,
        )

    def _draft(self, layer: int) -> DraftWeights:
        at, hidden = f"model.layers.{layer}", self._config.hidden
        return DraftWeights(
            token_norm=self._norm(f"{at}.enorm", hidden),
            hidden_norm=self._norm(f"{at}.hnorm", hidden),
            project=self._linear(f"{at}.eh_proj", hidden, 2 * hidden),
            layer=self._layer(layer),
            norm=self._norm(f"{at}.shared_head.norm", hidden),
        )

    def _layer(self, layer: int) -> LayerWeights:
        at, config = f"model.layers.{layer}", self._config
        shape = config.attention
        experts = config.experts
        return LayerWeights(
            attention_norm=self._norm(f"{at}.input_layernorm", config.hidden),
            attention=self._latent(f"{at}.self_attn", shape)
            if isinstance(shape, LatentShape)
            else self._grouped(f"{at}.self_attn", shape),
            mlp_norm=self._norm(f"{at}.post_attention_layernorm", config.hidden),
            mlp=self._mixture(f"{at}.mlp", experts)
            if experts is not None and config.is_mixture(layer)
            else self._mlp(f"{at}.mlp", config.mlp_width),
        )

    def _grouped(self, at: str, shape: GroupedShape) -> GroupedAttention:
        hidden, bias = self._config.hidden, self._config.attention_bias
        queries, keys = shape.heads * shape.elements, shape.kv_heads * shape.elements
        return GroupedAttention(
            shape=shape,
            query=self._linear(f"{at}.q_proj", queries, hidden, bias=bias),
            key=self._linear(f"{at}.k_proj", keys, hidden, bias=bias),
            value=self._linear(f"{at}.v_proj", keys, hidden, bias=bias),
            output=self._linear(f"{at}.o_proj", hidden, queries, bias=bias),
            scale=shape.elements**-0.5,
        )

    def _latent(self, at: str, shape: LatentShape) -> LatentAttention:
        config, hidden, rank = self._config, self._config.hidden, shape.query_rank
        queries = shape.heads * (shape.nope + shape.rope)
        up = self._checkpoint.tensor(
            f"{at}.kv_b_proj.weight", (shape.heads * (shape.nope + shape.value), shape.latent)
        ).view(shape.heads, shape.nope + shape.value, shape.latent)
        return LatentAttention(
            shape=shape,
            query_down=None if rank is None else self._linear(f"{at}.q_a_proj", rank, hidden),
            query_norm=None if rank is None else self._norm(f"{at}.q_a_layernorm", rank),
            query=self._linear(f"{at}.q_proj", queries, hidden)
            if rank is None
            else self._linear(f"{at}.q_b_proj", queries, rank),
            latent=self._linear(f"{at}.kv_a_proj_with_mqa", shape.latent + shape.rope, hidden),
            latent_norm=self._norm(f"{at}.kv_a_layernorm", shape.latent),
            up_key=up[:, : shape.nope].contiguous(),
            up_value=up[:, shape.nope :].transpose(1, 2).contiguous(),
            output=self._linear(f"{at}.o_proj", hidden, shape.heads * shape.value),
            scale=(shape.nope + shape.rope) ** -0.5 * softmax_gain(config.rope),
        )

    def _mlp(self, at: str, width: int) -> Mlp:
        hidden, bias = self._config.hidden, self._config.mlp_bias
        return Mlp(
            gate=self._linear(f"{at}.gate_proj", width, hidden, bias=bias),
            up=self._linear(f"{at}.up_proj", width, hidden, bias=bias),
            down=self._linear(f"{at}.down_proj", hidden, width, bias=bias),
        )

    def _mixture(self, at: str, shape: Experts) -> Mixture:
        hidden = self._config.hidden
        each = [self._mlp(f"{at}.experts.{expert}", shape.width) for expert in range(shape.routed)]
        correction = None
        if shape.corrected:
            name = f"{at}.gate.e_score_correction_bias"
            correction = self._checkpoint.tensor(name, (shape.routed,), dtype=torch.float32)
        return Mixture(
            shape=shape,
            router=self._linear(f"{at}.gate", shape.routed, hidden),
            correction=correction,
            gate_up=torch.stack([torch.cat((one.gate.weight, one.up.weight)) for one in each]),
            down=torch.stack([one.down.weight for one in each]),
            shared=self._mlp(f"{at}.shared_experts", shape.width * shape.shared) if shape.shared else None,
        )

    def _linear(self, name: str, outputs: int, inputs: int, *, bias: bool = False) -> Linear:
        return Linear(
            self._checkpoint.tensor(f"{name}.weight", (outputs, inputs)),
            self._checkpoint.tensor(f"{name}.bias", (outputs,)) if bias else None,
        )

    def _norm(self, name: str, width: int) -> Norm:
        return Norm(self._checkpoint.tensor(f"{name}.weight", (width,)), self._config.epsilon)
