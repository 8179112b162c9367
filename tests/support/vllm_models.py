"""Tiny models with saved weights in Hugging Face's format, the same in every run: for vLLM and for the demo engine.

Weights are drawn from a fixed seed and scaled so that attention is selective, every layer matters to the answer, and
greedy decoding meets few ties. The tokenizer has one token per byte; only bytes are ever generated.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

__all__ = ["KINDS", "REVISION", "cached_model", "make_model"]

REVISION: Final = "4"
"changes whenever what is written changes: a cached folder of another revision is never read"

_BYTES: Final = 256
_VOCABULARY: Final = 320
_SPECIAL: Final = ("<unk>", "<s>", "</s>", "<pad>")
_HIDDEN: Final = 128
_HEADS: Final = 4

_COMMON: Final[dict[str, Any]] = {
    "bos_token_id": _BYTES + 1,
    "eos_token_id": _BYTES + 2,
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "num_attention_heads": _HEADS,
    "num_hidden_layers": 3,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": _VOCABULARY,
}
_GQA: Final[dict[str, Any]] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 32,
    "mlp_bias": False,
    "model_type": "llama",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
_MLA: Final[dict[str, Any]] = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_key_value_heads": _HEADS,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
_YARN: Final[dict[str, Any]] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 1024,
    "type": "yarn",
}
_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "gqa": _GQA,
    "mla": {**_MLA, "rope_scaling": _YARN},
    "mla_mtp": {**_MLA, "num_nextn_predict_layers": 1, "rope_scaling": _YARN},
}

KINDS: Final = tuple(_CONFIGS)
"`gqa`: Llama. `mla`: DeepSeek-V3 with yarn and experts. `mla_mtp`: the same with a draft layer"


def make_model(kind: str, folder: Path) -> Path:
    """Write a model folder: config, bfloat16 weights, tokenizer.

    Args:
        kind: one of `KINDS`.
        folder: where it goes; made when it is not there.

    Returns:
        `folder`.
    """
    config = _CONFIGS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"bos_token_id": _BYTES + 1, "eos_token_id": _BYTES + 2})
    weights = _Weights(seed=1 + KINDS.index(kind)).model(config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def cached_model(kind: str) -> Path:
    """The folder of a model, written once per machine and user. Runs at the same time do not disturb one another."""
    root = Path(tempfile.gettempdir()) / f"pdhandoff-models-{os.getuid()}-{REVISION}"
    folder = root / kind
    if not folder.is_dir():
        root.mkdir(exist_ok=True)
        fresh = make_model(kind, Path(tempfile.mkdtemp(dir=root)) / kind)
        try:
            fresh.rename(folder)
        except OSError:  # another run was faster, and wrote the same bytes
            if not folder.is_dir():
                raise
        shutil.rmtree(fresh.parent)
    return folder


class _Weights:
    """Draws the tensors of a model, by their names in a checkpoint."""

    def __init__(self, *, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._tensors: dict[str, torch.Tensor] = {}

    def model(self, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """All tensors [bfloat16] of a model of this configuration."""
        layers, drafts = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
        self._normal("model.embed_tokens", _VOCABULARY, _HIDDEN, std=1.0)
        for layer in range(layers):
            # where there is a draft layer, the last layer decides most: its copy then often guesses right
            quiet = drafts and layer < layers - 1
            self._layer(f"model.layers.{layer}", config, layer, gain=0.1 if quiet else 1.0)
        self._norm("model.norm", _HIDDEN)
        head = self._draw(_VOCABULARY, _HIDDEN, std=3.0 / math.sqrt(_HIDDEN))
        head[_BYTES:] = 0  # nothing but bytes is ever the likeliest token
        self._put("lm_head.weight", head)
        if drafts:
            self._draft_layer(f"model.layers.{layers}", layers)
        return self._tensors

    def _draft_layer(self, name: str, layer: int) -> None:
        """A draft layer that often guesses right: it sees the next token, then works as the last layer does."""
        last = f"model.layers.{layer - 1}."
        for known, tensor in list(self._tensors.items()):
            if known.startswith(last):
                self._put(f"{name}.{known.removeprefix(last)}", tensor.clone())
        self._put(f"{name}.embed_tokens.weight", self._tensors["model.embed_tokens.weight"].clone())
        self._put(f"{name}.shared_head.head.weight", self._tensors["lm_head.weight"].clone())
        self._put(f"{name}.shared_head.norm.weight", self._tensors["model.norm.weight"].clone())
        self._norm(f"{name}.enorm", _HIDDEN)
        self._norm(f"{name}.hnorm", _HIDDEN)
        hidden = self._draw(_HIDDEN, _HIDDEN, std=0.1 / math.sqrt(_HIDDEN))
        self._put(f"{name}.eh_proj.weight", torch.cat([torch.eye(_HIDDEN), hidden], dim=1))

    def _layer(self, name: str, config: Mapping[str, Any], layer: int, *, gain: float) -> None:
        """`gain` scales what the layer adds to the residual stream."""
        self._norm(f"{name}.input_layernorm", _HIDDEN)
        self._norm(f"{name}.post_attention_layernorm", _HIDDEN)
        if "kv_lora_rank" in config:
            self._latent_attention(f"{name}.self_attn", config, gain=gain)
        else:
            self._grouped_attention(f"{name}.self_attn", config, gain=gain)
        if layer >= config.get("first_k_dense_replace", config["num_hidden_layers"]):
            self._experts(f"{name}.mlp", config, gain=gain)
        else:
            self._mlp(f"{name}.mlp", config["intermediate_size"], gain=gain)

    def _grouped_attention(self, name: str, config: Mapping[str, Any], *, gain: float) -> None:
        width = config["head_dim"]
        self._linear(f"{name}.q_proj", _HEADS * width, _HIDDEN, gain=1.5)
        self._linear(f"{name}.k_proj", config["num_key_value_heads"] * width, _HIDDEN, gain=1.5)
        self._linear(f"{name}.v_proj", config["num_key_value_heads"] * width, _HIDDEN)
        self._linear(f"{name}.o_proj", _HIDDEN, _HEADS * width, gain=gain)

    def _latent_attention(self, name: str, config: Mapping[str, Any], *, gain: float) -> None:
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        latent, query = config["kv_lora_rank"], config["q_lora_rank"]
        self._linear(f"{name}.q_a_proj", query, _HIDDEN)
        self._norm(f"{name}.q_a_layernorm", query)
        self._linear(f"{name}.q_b_proj", _HEADS * (nope + rope), query, gain=1.5)
        self._linear(f"{name}.kv_a_proj_with_mqa", latent + rope, _HIDDEN)
        self._norm(f"{name}.kv_a_layernorm", latent)
        self._linear(f"{name}.kv_b_proj", _HEADS * (nope + value), latent, gain=1.5)
        self._linear(f"{name}.o_proj", _HIDDEN, _HEADS * value, gain=gain)

    def _experts(self, name: str, config: Mapping[str, Any], *, gain: float) -> None:
        experts = config["n_routed_experts"]
        self._linear(f"{name}.gate", experts, _HIDDEN, gain=2.0)
        bias = self._draw(experts, 1, std=0.05).flatten()
        self._tensors[f"{name}.gate.e_score_correction_bias"] = bias  # kept in float32, as published checkpoints do
        for expert in range(experts):
            # a token between two experts may go either way by rounding: one expert may not change much
            self._mlp(f"{name}.experts.{expert}", config["moe_intermediate_size"], gain=0.3 * gain)
        self._mlp(f"{name}.shared_experts", config["moe_intermediate_size"] * config["n_shared_experts"], gain=gain)

    def _mlp(self, name: str, width: int, *, gain: float) -> None:
        self._linear(f"{name}.gate_proj", width, _HIDDEN, gain=1.5)
        self._linear(f"{name}.up_proj", width, _HIDDEN, gain=1.5)
        self._linear(f"{name}.down_proj", _HIDDEN, width, gain=gain)

    def _linear(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        self._normal(name, rows, columns, std=gain / math.sqrt(columns))

    def _normal(self, name: str, rows: int, columns: int, *, std: float) -> None:
        self._put(f"{name}.weight", self._draw(rows, columns, std=std))

    def _norm(self, name: str, width: int) -> None:
        self._put(f"{name}.weight", 1 + self._draw(width, 1, std=0.1).flatten())

    def _draw(self, rows: int, columns: int, *, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._random) * std

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor.to(torch.bfloat16)


def _write_tokenizer(folder: Path) -> None:
    """One token per byte, spelled as byte-level tokenizers spell bytes; then the special tokens."""
    vocabulary = {spelling: number for number, spelling in enumerate(_byte_spellings())}
    special = [{"id": _BYTES + number, "content": name} for number, name in enumerate(_SPECIAL)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**token, **flags} for token in special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    _write(folder / "tokenizer.json", tokenizer)
    _write(folder / "special_tokens_map.json", names)
    _write(
        folder / "tokenizer_config.json",
        {
            **names,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _COMMON["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )


def _byte_spellings() -> list[str]:
    """For each byte the character that stands for it: itself when it is visible, else one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spellings, unseen = [], 0
    for byte in range(_BYTES):
        if byte in visible:
            spellings.append(chr(byte))
        else:
            spellings.append(chr(0x100 + unseen))
            unseen += 1
    return spellings


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
