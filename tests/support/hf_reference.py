"""Llama and DeepSeek-V3 once more, plainly: float64, one token at a time, nothing absorbed, nothing batched.

It reads the files itself and shares no code with the engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["PlainModel"]


class PlainModel:
    """A model of one folder, and the keys and values that it has seen.

    Args:
        folder: config.json and safetensors files.
    """

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._tensors = {
            name: tensor.double()
            for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        self._past: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def feed(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append tokens. Returns hidden states after the last norm [n, hidden], and logits [n, vocabulary]."""
        hidden = []
        for token in tokens:
            x = self._tensors["model.embed_tokens.weight"][token]
            position = len(self._past.get(0, []))
            for layer in range(self.config["num_hidden_layers"]):
                x = self._layer(layer, position, x)
            hidden.append(self._norm("model.norm", x))
        states = torch.stack(hidden)
        return states, states @ self._head.T

    def draft(self, hidden: Tensor, next_tokens: Sequence[int]) -> Tensor:
        """Append rows of the draft layer: hidden states [n, hidden] and the tokens after them. Returns logits."""
        layer = self.config["num_hidden_layers"]
        at = f"model.layers.{layer}"
        out = []
        for state, token in zip(hidden, next_tokens, strict=True):
            position = len(self._past.get(layer, []))
            embedded = self._tensors["model.embed_tokens.weight"][token] * (position > 0)
            both = torch.cat((self._norm(f"{at}.enorm", embedded), self._norm(f"{at}.hnorm", state)))
            x = self._layer(layer, position, self._map(f"{at}.eh_proj", both))
            out.append(self._head @ self._norm(f"{at}.shared_head.norm", x))
        return torch.stack(out)

    @property
    def _head(self) -> Tensor:
        return self._tensors["model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"]

    def _layer(self, layer: int, position: int, x: Tensor) -> Tensor:
        at = f"model.layers.{layer}"
        attend = self._latent if "kv_lora_rank" in self.config else self._grouped
        x = x + attend(layer, position, self._norm(f"{at}.input_layernorm", x))
        normed = self._norm(f"{at}.post_attention_layernorm", x)
        if layer >= self.config.get("first_k_dense_replace", math.inf):
            return x + self._experts(f"{at}.mlp", normed)
        return x + self._mlp(f"{at}.mlp", normed)

    def _grouped(self, layer: int, position: int, x: Tensor) -> Tensor:
        at, config = f"model.layers.{layer}.self_attn", self.config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        query, key, value = (
            self._map(f"{at}.{name}_proj", x).reshape(count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        turn = self._angles(position, query.shape[1])
        half = query.shape[1] // 2
        query, key = (_turned(part[:, :half], part[:, half:], turn, interleaved=False) for part in (query, key))
        past = self._past.setdefault(layer, [])
        past.append((key, value))
        out = []
        for head in range(heads):
            served = head // (heads // kv_heads)
            scores = torch.stack([old[served] @ query[head] for old, _ in past]) / math.sqrt(query.shape[1])
            out.append(scores.softmax(0) @ torch.stack([old[served] for _, old in past]))
        return self._map(f"{at}.o_proj", torch.cat(out))

    def _latent(self, layer: int, position: int, x: Tensor) -> Tensor:
        at, config = f"model.layers.{layer}.self_attn", self.config
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        if config.get("q_lora_rank") is None:
            query = self._map(f"{at}.q_proj", x)
        else:
            query = self._map(f"{at}.q_b_proj", self._norm(f"{at}.q_a_layernorm", self._map(f"{at}.q_a_proj", x)))
        query = query.reshape(heads, nope + rope)
        down = self._map(f"{at}.kv_a_proj_with_mqa", x)
        up = self._map(f"{at}.kv_b_proj", self._norm(f"{at}.kv_a_layernorm", down[:rank])).reshape(heads, nope + value)
        turn = self._angles(position, rope)
        shared = down[None, rank:]
        rope_key = _turned(shared[:, 0::2], shared[:, 1::2], turn, interleaved=True)
        asked = query[:, nope:]
        query = torch.cat((query[:, :nope], _turned(asked[:, 0::2], asked[:, 1::2], turn, interleaved=True)), dim=1)
        past = self._past.setdefault(layer, [])
        past.append((torch.cat((up[:, :nope], rope_key.expand(heads, rope)), dim=1), up[:, nope:]))
        scale = (nope + rope) ** -0.5
        scaling = config.get("rope_scaling")
        if scaling is not None:
            scale *= (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2
        out = []
        for head in range(heads):
            scores = torch.stack([key[head] @ query[head] for key, _ in past]) * scale
            out.append(scores.softmax(0) @ torch.stack([old[head] for _, old in past]))
        return self._map(f"{at}.o_proj", torch.cat(out))

    def _experts(self, at: str, x: Tensor) -> Tensor:
        config = self.config
        logits = self._map(f"{at}.gate", x)
        scores = torch.sigmoid(logits) if config["scoring_func"] == "sigmoid" else logits.softmax(0)
        judged = scores + self._tensors.get(f"{at}.gate.e_score_correction_bias", torch.zeros(len(scores)))
        size = len(scores) // config.get("n_group", 1)
        groups = [range(first, first + size) for first in range(0, len(scores), size)]
        groups.sort(key=lambda group: -sum(sorted((float(judged[i]) for i in group), reverse=True)[:2]))
        open_experts = [expert for group in groups[: config.get("topk_group", 1)] for expert in group]
        chosen = sorted(open_experts, key=lambda expert: -float(judged[expert]))[: config["num_experts_per_tok"]]
        total = sum(float(scores[expert]) for expert in chosen) if config["norm_topk_prob"] else 1.0
        out = torch.zeros_like(x)
        for expert in chosen:
            out += float(scores[expert]) / total * self._mlp(f"{at}.experts.{expert}", x)
        out *= config.get("routed_scaling_factor", 1.0)
        return out + self._mlp(f"{at}.shared_experts", x) if config.get("n_shared_experts") else out

    def _mlp(self, at: str, x: Tensor) -> Tensor:
        gate = self._map(f"{at}.gate_proj", x)
        return self._map(f"{at}.down_proj", gate * torch.sigmoid(gate) * self._map(f"{at}.up_proj", x))

    def _map(self, name: str, x: Tensor) -> Tensor:
        out = self._tensors[f"{name}.weight"] @ x
        return out + self._tensors[f"{name}.bias"] if f"{name}.bias" in self._tensors else out

    def _norm(self, name: str, x: Tensor) -> Tensor:
        epsilon: float = self.config["rms_norm_eps"]
        return x / (x.square().mean() + epsilon).sqrt() * self._tensors[f"{name}.weight"]

    def _angles(self, position: int, elements: int) -> Tensor:
        """Complex numbers to multiply the pairs of one head by."""
        turns = []
        scaling = self.config.get("rope_scaling") or {"rope_type": "default"}
        kind = scaling.get("rope_type") or scaling["type"]
        gain = 1.0
        for pair in range(elements // 2):
            frequency = self.config["rope_theta"] ** (-2 * pair / elements)
            if kind == "llama3":
                frequency = _llama3(frequency, scaling)
            elif kind == "yarn":
                frequency = self._yarn(frequency, pair, elements, scaling)
            turns.append(position * frequency)
        if kind == "yarn":
            of, over = (0.1 * scaling[name] * math.log(scaling["factor"]) + 1 for name in ("mscale", "mscale_all_dim"))
            gain = of / over
        angles = torch.tensor(turns, dtype=torch.float64)
        return torch.polar(torch.full_like(angles, gain), angles)

    def _yarn(self, frequency: float, pair: int, elements: int, scaling: dict[str, Any]) -> float:
        trained, theta = scaling["original_max_position_embeddings"], self.config["rope_theta"]
        edges = [
            elements * math.log(trained / (scaling[name] * 2 * math.pi)) / (2 * math.log(theta))
            for name in ("beta_fast", "beta_slow")
        ]
        low, high = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), elements - 1)
        slow = min(max((pair - low) / (high - low), 0), 1)
        return frequency * (1 - slow) + frequency / float(scaling["factor"]) * slow


def _llama3(frequency: float, scaling: dict[str, Any]) -> float:
    wave = 2 * math.pi / frequency
    trained, low, high = (
        scaling[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    if wave < trained / high:
        return frequency
    if wave > trained / low:
        return frequency / float(scaling["factor"])
    smooth = float((trained / wave - low) / (high - low))
    return (1 - smooth) * frequency / float(scaling["factor"]) + smooth * frequency


def _turned(real: Tensor, imaginary: Tensor, turn: Tensor, *, interleaved: bool) -> Tensor:
    """Pairs as complex numbers times `turn`, in the order that they had."""
    out = torch.complex(real.contiguous(), imaginary.contiguous()) * turn
    if interleaved:
        return torch.view_as_real(out).flatten(-2)
    return torch.cat((out.real, out.imag), dim=-1)
