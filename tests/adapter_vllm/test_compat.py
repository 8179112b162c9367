from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts import Element, RopeOrder
from pdhandoff_vllm import compat
from support.connector_fakes import config_of


def text_config(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(model_type="deepseek_v3", num_hidden_layers=61, **more)


def vllm_config(
    *,
    text: Any = None,
    speculative: Any = None,
    model: dict[str, Any] | None = None,
    producer: bool = True,
    **more: Any,
) -> SimpleNamespace:
    """As much of vLLM's VllmConfig as is looked at."""
    text = text or text_config(num_nextn_predict_layers=1, kv_lora_rank=512, qk_rope_head_dim=64)
    parallel = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    parallel |= {key: more.pop(key) for key in list(more) if key in parallel}
    chosen = {
        "model": "org/Model-7B",
        "max_model_len": 1024,
        "is_encoder_decoder": False,
        "enable_sleep_mode": False,
        "hf_text_config": text,
        "get_total_num_kv_heads": lambda: 8,
        **(model or {}),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**chosen),
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=speculative,
        kv_transfer_config=SimpleNamespace(is_kv_producer=producer),
        compilation_config=SimpleNamespace(static_forward_context={}),
        **more,
    )


def mtp(tokens: int = 1, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(method="mtp", num_speculative_tokens=tokens, **more)


def refused(config: Any) -> str:
    with pytest.raises(LocalError) as caught:
        compat.check_settings(config)
    assert caught.value.code is ErrorCode.CONFIG
    return caught.value.reason


def test_ordinary_settings_pass() -> None:
    compat.check_settings(vllm_config())
    compat.check_settings(vllm_config(speculative=mtp(), tensor_parallel_size=8))
    compat.check_settings(vllm_config(speculative=mtp(), pipeline_parallel_size=2, use_v2_model_runner=True))
    compat.check_settings(vllm_config(pipeline_parallel_size=2))
    compat.check_settings(vllm_config(attention_config=SimpleNamespace(hisparse_config=None)))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"producer": False}, "kv_role"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"attention_config": SimpleNamespace(hisparse_config=object())}, "hisparse_config"),
        ({"model": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model": {"enable_sleep_mode": True}}, "enable_sleep_mode"),
        ({"speculative": mtp(disable_eagle_block_drop=True)}, "disable_eagle_block_drop"),
        ({"speculative": mtp(), "text": text_config(num_nextn_predict_layers=2)}, "draft layers"),
        ({"speculative": mtp(), "pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"speculative": mtp(), "pipeline_parallel_size": 2, "use_v2_model_runner": False}, "pipeline_parallel_size"),
    ],
)
def test_settings_that_would_lose_rows_are_refused_by_name(more: dict[str, Any], named: str) -> None:
    assert named in refused(vllm_config(**more))


def test_versions() -> None:
    for version in ("0.26.0", "0.32.0+cpu", "0.33.0rc1", "1.0", "0.0.0.dev1", "unknown"):
        compat.check_version(version)
    for version in ("0.19.1", "0.25.9"):
        with pytest.raises(LocalError, match="too old"):
            compat.check_version(version)


def test_what_a_worker_knows_of_its_model() -> None:
    facts = compat.model_facts(
        vllm_config(speculative=mtp(), tensor_parallel_size=4), config_of(), tp_rank=3, pp_rank=0
    )
    assert (facts.name, facts.layers, facts.draft_tokens, facts.draft_layers) == ("Model-7B", 61, 1, None)
    assert (facts.latent, facts.rope, facts.kv_heads) == (512, 64, 8)
    assert (facts.tp_rank, facts.tp_size, facts.pp_size) == (3, 4, 1)
    assert facts.index_scales is Element.F32
    assert facts.index_rope_order is RopeOrder.HALF_SPLIT


def test_names_that_the_operator_gives_come_first() -> None:
    config = config_of(tilert_model="glm-5", revision="r2")
    assert compat.model_facts(vllm_config(), config, tp_rank=0, pp_rank=0).name == "glm5"
    assert compat.model_facts(vllm_config(), config, tp_rank=0, pp_rank=0).revision == "r2"
    config = config_of(tilert_model="glm-5", model="mine")
    assert compat.model_facts(vllm_config(), config, tp_rank=0, pp_rank=0).name == "mine"


@pytest.mark.parametrize(
    ("speculative", "drafts"),
    [(None, ()), (mtp(), (61,)), (SimpleNamespace(method="ngram", num_speculative_tokens=4), ())],
)
def test_pipeline_stages_agree_on_the_draft_layers(speculative: Any, drafts: tuple[int, ...]) -> None:
    config = vllm_config(speculative=speculative, pipeline_parallel_size=2)
    facts = compat.model_facts(config, config_of(), tp_rank=0, pp_rank=1)
    assert facts.draft_layers == drafts
    assert facts.pp_rank == 1


@pytest.mark.parametrize(
    ("text", "share", "order"),
    [
        ({"model_type": "llama"}, 1.0, RopeOrder.HALF_SPLIT),
        ({"model_type": "glm4", "partial_rotary_factor": 0.5}, 0.5, RopeOrder.INTERLEAVED),
        ({"model_type": "phi", "rope_parameters": {"partial_rotary_factor": 0.4}}, 0.4, RopeOrder.HALF_SPLIT),
    ],
)
def test_rotary_elements_of_keys(text: dict[str, Any], share: float, order: RopeOrder) -> None:
    config = vllm_config(text=SimpleNamespace(num_hidden_layers=2, **text))
    facts = compat.model_facts(config, config_of(), tp_rank=0, pp_rank=0)
    assert (facts.key_rope_share, facts.key_rope_order) == (share, order)
    chosen = compat.model_facts(config, config_of(rope_order="half_split"), tp_rank=0, pp_rank=0)
    assert chosen.key_rope_order is RopeOrder.HALF_SPLIT


def test_the_indexers_rope_order_is_in_the_models_configuration() -> None:
    config = vllm_config(text=text_config(indexer_rope_interleave=True))
    assert compat.model_facts(config, config_of(), tp_rank=0, pp_rank=0).index_rope_order is RopeOrder.INTERLEAVED


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class MLAAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class Backend:
    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"


def test_specs_of_layers_alone_and_in_groups_of_different_ones() -> None:
    mla = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, cache_dtype_str="fp8_ds_mla")
    index = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, cache_dtype_str=None)
    mixed = SimpleNamespace(block_size=64, kv_cache_specs={"a": mla, "b": index})
    full = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128)
    groups = [
        SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=mixed),
        SimpleNamespace(layer_names=["c"], kv_cache_spec=full),
    ]
    config = vllm_config()
    config.compilation_config.static_forward_context["a"] = SimpleNamespace(get_attn_backend=lambda: Backend)
    specs = compat.cache_specs(config, SimpleNamespace(kv_cache_groups=groups))
    assert (specs["a"].kind, specs["a"].element, specs["a"].backend) == (
        "MLAAttentionSpec",
        "fp8_ds_mla",
        "FLASHMLA_SPARSE",
    )
    assert (specs["b"].head_size, specs["b"].element, specs["b"].backend) == (132, "", "")
    assert (specs["c"].group, specs["c"].kind, specs["c"].heads, specs["c"].block_tokens) == (
        1,
        "FullAttentionSpec",
        8,
        16,
    )


def test_what_the_schedulers_side_knows() -> None:
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in (64, 16)]
    config = vllm_config(speculative=mtp(3), tensor_parallel_size=4, pipeline_parallel_size=2)
    facts = compat.scheduler_facts(config, SimpleNamespace(kv_cache_groups=groups))
    assert (facts.group_tokens, facts.max_model_len, facts.draft_tokens, facts.ranks) == ((64, 16), 1024, 3, 8)
