"""What is read of a folder in Hugging Face's format, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pdhandoff.demo.hf import create
from pdhandoff.demo.hf.checkpoint import Checkpoint
from pdhandoff.demo.hf.config import GroupedShape, LatentShape, Rope, read_config
from pdhandoff.errors import ErrorCode, LocalError
from support.hf_models import VARIANTS, write_model


def config_only(folder: Path, variant: str = "llama", **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**VARIANTS[variant], **changes}), encoding="utf-8")
    return folder


def test_a_llama(tmp_path: Path) -> None:
    config = read_config(config_only(tmp_path, "llama_tied"))
    assert config.attention == GroupedShape(heads=4, kv_heads=2, elements=8)
    assert (config.layers, config.draft_layers, config.tied, config.attention_bias) == (2, 0, True, True)
    assert (config.rope.kind, config.rope.factor, config.rope.trained_positions) == ("llama3", 8.0, 64)
    assert config.experts is None
    assert not config.is_mixture(1)


def test_a_deepseek(tmp_path: Path) -> None:
    config = read_config(config_only(tmp_path, "deepseek"))
    assert config.attention == LatentShape(heads=4, query_rank=16, latent=24, nope=8, rope=8, value=6)
    assert config.draft_layers == 1
    assert [config.is_mixture(layer) for layer in range(3)] == [False, True, True]
    assert (config.rope.kind, config.rope.mscale_all) == ("yarn", 0.7)


@pytest.mark.parametrize(
    ("of_config", "of_generation", "expected"),
    [(7, None, (7,)), ([9, 3], None, (3, 9)), (None, 4, (4,)), (7, [7, 8], (7, 8)), (None, None, ())],
)
def test_end_tokens_come_from_both_files(
    tmp_path: Path, of_config: object, of_generation: object, expected: tuple[int, ...]
) -> None:
    config_only(tmp_path, eos_token_id=of_config)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": of_generation}), encoding="utf-8")
    assert read_config(tmp_path).end_tokens == expected


def test_newer_names_are_read_too(tmp_path: Path) -> None:
    config = read_config(
        config_only(tmp_path, dtype="float16", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    )
    assert config.dtype == "float16"
    assert config.rope == Rope(5.0)


@pytest.mark.parametrize(
    ("variant", "changes", "named"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, "architectures: GPT2LMHeadModel"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act: gelu"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("llama", {"torch_dtype": "int8"}, "torch_dtype: int8"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads: 3"),
        ("llama", {"head_dim": 7}, "head_dim: 7"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling: yarn"),
        ("llama_tied", {"rope_scaling": {"type": "llama3", "factor": 2}}, "original_max_position_embeddings"),
        ("deepseek", {"index_topk": 64}, "index_topk"),
        ("deepseek", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("deepseek", {"n_group": 4}, "n_group"),
        ("deepseek", {"topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok: 3"),
        ("deepseek", {"scoring_func": "sqrtsoftplus"}, "scoring_func: sqrtsoftplus"),
        ("llama", {"hidden_size": -1}, "hidden_size"),
        ("llama", {"hidden_size": "big"}, "hidden_size"),
        ("llama", {"vocab_size": 1 << 40}, "vocab_size"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, variant: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(LocalError) as caught:
        read_config(config_only(tmp_path, variant, **changes))
    assert caught.value.code is ErrorCode.CONFIG
    assert named in str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"config\.json"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(LocalError, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(" " * (1 << 20) + "{}", encoding="utf-8")
    with pytest.raises(LocalError, match="this is no config"):
        read_config(tmp_path)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "model")
    checkpoint = Checkpoint(folder, torch.float32)
    assert "model.norm.weight" in checkpoint
    with pytest.raises(LocalError, match=r"no tensor 'model\.nothing'"):
        checkpoint.tensor("model.nothing", (1,))
    with pytest.raises(LocalError, match=r"\[32\].*asks for \[31\]"):
        checkpoint.tensor("model.norm.weight", (31,))
    with pytest.raises(LocalError, match=r"model\.layers\.2\.input_layernorm"):
        create(model=config_only(folder, num_hidden_layers=3))


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(LocalError, match=r"cannot read .*model\.safetensors"):
        Checkpoint(tmp_path, torch.float32)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]", encoding="utf-8")
    with pytest.raises(LocalError, match=r"cannot read .*index\.json"):
        Checkpoint(tmp_path, torch.float32)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}), encoding="utf-8")
    with pytest.raises(LocalError, match="outside its folder"):
        Checkpoint(tmp_path, torch.float32)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}), encoding="utf-8")
    with pytest.raises(LocalError, match=r"cannot read .*gone\.safetensors"):
        Checkpoint(tmp_path, torch.float32).tensor("a", (1,))


@pytest.mark.parametrize(
    ("variant", "options", "named"),
    [
        ("llama", {"dtype": "float8"}, "dtype=float8"),
        ("llama", {"max_seq_len": 1}, "max_seq_len=1"),
        ("llama", {"parked": -1}, "parked=-1"),
        ("llama", {"drafts": 1}, "drafts=1: the model has 0 draft layers"),
        ("deepseek", {"drafts": -1}, "drafts=-1"),
        ("deepseek", {"spec_depth": -1}, "spec_depth=-1"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, variant: str, options: dict[str, Any], named: str) -> None:
    folder = write_model(variant, tmp_path / "model")
    with pytest.raises(LocalError, match=named):
        create(model=folder, **options)


def test_what_an_engine_says_of_itself(tmp_path: Path) -> None:
    folder = write_model("deepseek", tmp_path / "tiny")
    engine = create(model=str(folder), revision="r1", spec_depth=2)
    assert (engine.model, engine.max_seq_len, engine.end_token_ids) == ("tiny", 512, frozenset({95}))
    model = engine.layout.model
    assert (model.name, model.revision, model.draft_layers, model.spec_depth) == ("tiny", "r1", (2,), 2)
    plain = create(model=folder, name="other", drafts=0, max_seq_len=100).layout
    assert (plain.model.name, plain.model.draft_layers, plain.model.spec_depth) == ("other", (), 0)
    assert plain.component("mla_latent").page_tokens == 100
    grouped = create(model=write_model("llama", tmp_path / "llama"), dtype="bfloat16").layout
    assert grouped.component("key_value").plane("key").element.value == "bf16"
