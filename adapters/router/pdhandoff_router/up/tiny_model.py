"""A model of a megabyte in Hugging Face's format, for those who have none at hand. What it says makes no sense."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

__all__ = ["make_tiny_model"]

_SEED: Final = 20
_BYTES: Final = 256
_SPECIAL: Final = ("<unk>", "<s>", "</s>")
_VOCABULARY: Final = 288
_HIDDEN: Final = 128
_INNER: Final = 256
_HEADS: Final = 4
_KEY_HEADS: Final = 2
_WIDTH: Final = 32
"of a head"
_LAYERS: Final = 3
_PRINTABLE: Final = slice(0x20, 0x7F)
"the tokens that it ever generates"

_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": _BYTES + 1,
    "eos_token_id": _BYTES + 2,
    "head_dim": _WIDTH,
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": _HEADS,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": _KEY_HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": _VOCABULARY,
}
_TEMPLATE: Final = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def make_tiny_model(folder: Path) -> Path:
    """Write a Llama of three layers with a byte tokenizer: config, weights from a fixed seed, tokenizer, chat template.

    Args:
        folder: where it goes; made when it is not there.

    Returns:
        `folder`.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write(folder / "config.json", _CONFIG)
    _write(folder / "generation_config.json", {"bos_token_id": _BYTES + 1, "eos_token_id": _BYTES + 2})
    _write(folder / "tokenizer.json", _tokenizer())
    _write(
        folder / "tokenizer_config.json",
        {
            **names,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": _TEMPLATE,
        },
    )
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights() -> dict[str, torch.Tensor]:
    """All tensors [bfloat16] by their names in a checkpoint."""
    import torch

    random = torch.Generator().manual_seed(_SEED)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * (gain / math.sqrt(columns))

    def norm() -> torch.Tensor:
        return 1 + torch.randn(_HIDDEN, generator=random) * 0.1

    tensors = {"model.embed_tokens.weight": normal(_VOCABULARY, _HIDDEN, math.sqrt(_HIDDEN))}
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": norm(),
            f"{name}.self_attn.q_proj.weight": normal(_HEADS * _WIDTH, _HIDDEN, 1.5),
            f"{name}.self_attn.k_proj.weight": normal(_KEY_HEADS * _WIDTH, _HIDDEN, 1.5),
            f"{name}.self_attn.v_proj.weight": normal(_KEY_HEADS * _WIDTH, _HIDDEN),
            f"{name}.self_attn.o_proj.weight": normal(_HIDDEN, _HEADS * _WIDTH),
            f"{name}.post_attention_layernorm.weight": norm(),
            f"{name}.mlp.gate_proj.weight": normal(_INNER, _HIDDEN, 1.5),
            f"{name}.mlp.up_proj.weight": normal(_INNER, _HIDDEN, 1.5),
            f"{name}.mlp.down_proj.weight": normal(_HIDDEN, _INNER),
        }
    head = torch.zeros(_VOCABULARY, _HIDDEN)
    head[_PRINTABLE] = normal(_PRINTABLE.stop - _PRINTABLE.start, _HIDDEN, 3.0)
    tensors |= {"model.norm.weight": norm(), "lm_head.weight": head}
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def _tokenizer() -> dict[str, Any]:
    """One token per byte (no merges, so that everything falls back to bytes), then the special ones."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": _BYTES + number, "content": name, **flags} for number, name in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {f"<0x{byte:02X}>": byte for byte in range(_BYTES)},
            "merges": [],
        },
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
