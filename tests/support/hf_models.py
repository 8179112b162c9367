"""Very small models in Hugging Face's format, of every shape that the engine knows: weights from a fixed seed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

__all__ = ["VARIANTS", "VOCABULARY", "write_model"]

VOCABULARY: Final = 96
_HIDDEN: Final = 32

_COMMON: Final[dict[str, Any]] = {
    "eos_token_id": VOCABULARY - 1,
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
}
_LLAMA: Final[dict[str, Any]] = {**_COMMON, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2}
_DEEPSEEK: Final[dict[str, Any]] = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "moe_intermediate_size": 12,
    "moe_layer_freq": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
}
VARIANTS: Final[Mapping[str, dict[str, Any]]] = {
    "llama": {**_LLAMA, "head_dim": 12},
    "llama_tied": {
        **_LLAMA,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": True,
    },
    "deepseek": {
        **_DEEPSEEK,
        "n_group": 3,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 16,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 4,
            "beta_slow": 1,
            "original_max_position_embeddings": 128,
        },
        "routed_scaling_factor": 1.7,
        "scoring_func": "sigmoid",
        "topk_group": 2,
        "topk_method": "noaux_tc",
    },
    "deepseek_plain": {
        **_DEEPSEEK,
        "norm_topk_prob": False,
        "num_nextn_predict_layers": 0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    },
}
"llama; tied with biases and llama3 rope; DeepSeek with everything; DeepSeek without ranks, groups or shared experts"


def write_model(variant: str, folder: Path, *, split: bool = False, **changes: Any) -> Path:
    """Write config and weights.

    Args:
        variant: one of `VARIANTS`.
        folder: an empty one, or one that is not there.
        split: over two files with an index.
        changes: of the config.
    """
    config = {**VARIANTS[variant], **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = _tensors(config)
    if not split:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    files = {name: f"model-{1 + (place % 2)}-of-2.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * gain / math.sqrt(columns)

    tensors: dict[str, torch.Tensor] = {}
    for name, shape in _shapes(config):
        if len(shape) == 2:
            tensors[f"{name}.weight"] = matrix(*shape, gain=4.0 if name.endswith(("head", "tokens")) else 1.5)
        elif name.endswith("bias"):
            tensors[name] = torch.randn(shape[0], generator=draw) * 0.2
        else:
            tensors[f"{name}.weight"] = 1 + torch.randn(shape[0], generator=draw) * 0.2
    return tensors


def _shapes(config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor's name, without `.weight`, and shape."""
    layers = config["num_hidden_layers"]
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens", (VOCABULARY, _HIDDEN)),
        ("model.norm", (_HIDDEN,)),
    ]
    if not config["tie_word_embeddings"]:
        shapes.append(("lm_head", (VOCABULARY, _HIDDEN)))
    for layer in range(layers + config.get("num_nextn_predict_layers", 0)):
        at = f"model.layers.{layer}"
        shapes += [(f"{at}.input_layernorm", (_HIDDEN,)), (f"{at}.post_attention_layernorm", (_HIDDEN,))]
        shapes += (
            _latent(f"{at}.self_attn", config) if "kv_lora_rank" in config else _grouped(f"{at}.self_attn", config)
        )
        mixed = layer >= config.get("first_k_dense_replace", layers)
        shapes += _experts(f"{at}.mlp", config) if mixed else _mlp(f"{at}.mlp", config["intermediate_size"], config)
        if layer == layers:
            shapes += [(f"{at}.{name}", (_HIDDEN,)) for name in ("enorm", "hnorm", "shared_head.norm")]
            shapes.append((f"{at}.eh_proj", (_HIDDEN, 2 * _HIDDEN)))
    return shapes


def _grouped(at: str, config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    elements = config.get("head_dim", _HIDDEN // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * elements, config["num_key_value_heads"] * elements
    linear: list[tuple[str, tuple[int, ...]]] = [
        (f"{at}.q_proj", (queries, _HIDDEN)),
        (f"{at}.k_proj", (keys, _HIDDEN)),
        (f"{at}.v_proj", (keys, _HIDDEN)),
        (f"{at}.o_proj", (_HIDDEN, queries)),
    ]
    return linear + _biases(linear, wanted=config.get("attention_bias", False))


def _latent(at: str, config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    heads, rank = config["num_attention_heads"], config.get("q_lora_rank")
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    latent = config["kv_lora_rank"]
    shapes: list[tuple[str, tuple[int, ...]]] = [
        (f"{at}.kv_a_proj_with_mqa", (latent + rope, _HIDDEN)),
        (f"{at}.kv_a_layernorm", (latent,)),
        (f"{at}.kv_b_proj", (heads * (nope + value), latent)),
        (f"{at}.o_proj", (_HIDDEN, heads * value)),
    ]
    if rank is None:
        return [*shapes, (f"{at}.q_proj", (heads * (nope + rope), _HIDDEN))]
    return [
        *shapes,
        (f"{at}.q_a_proj", (rank, _HIDDEN)),
        (f"{at}.q_a_layernorm", (rank,)),
        (f"{at}.q_b_proj", (heads * (nope + rope), rank)),
    ]


def _experts(at: str, config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    width, experts = config["moe_intermediate_size"], config["n_routed_experts"]
    shapes: list[tuple[str, tuple[int, ...]]] = [(f"{at}.gate", (experts, _HIDDEN))]
    if config["topk_method"] == "noaux_tc":
        shapes.append((f"{at}.gate.e_score_correction_bias", (experts,)))
    for expert in range(experts):
        shapes += _mlp(f"{at}.experts.{expert}", width, {})
    if config.get("n_shared_experts"):
        shapes += _mlp(f"{at}.shared_experts", width * config["n_shared_experts"], {})
    return shapes


def _mlp(at: str, width: int, config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    linear: list[tuple[str, tuple[int, ...]]] = [
        (f"{at}.gate_proj", (width, _HIDDEN)),
        (f"{at}.up_proj", (width, _HIDDEN)),
        (f"{at}.down_proj", (_HIDDEN, width)),
    ]
    return linear + _biases(linear, wanted=config.get("mlp_bias", False))


def _biases(linear: list[tuple[str, tuple[int, ...]]], *, wanted: bool) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"{name}.bias", (shape[0],)) for name, shape in linear] if wanted else []
