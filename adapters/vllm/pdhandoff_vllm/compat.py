"""Everything that is read off vLLM's own objects, and every difference between its versions 0.26 to 0.33.

Nothing here imports vLLM at import time: the objects come in as arguments. Sources: vLLM 0.26, 0.32 and 0.33,
vllm/config, vllm/v1/kv_cache_interface.py, vllm/model_executor/layers/attention_layer_base.py.
"""

from __future__ import annotations

import importlib
import re
from pathlib import PurePosixPath
from typing import Any, Final

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts import Element, RopeOrder
from pdhandoff_vllm.caches import CacheSpec, ModelFacts
from pdhandoff_vllm.config import Config
from pdhandoff_vllm.scheduler_side import Facts

__all__ = ["OLDEST", "cache_specs", "check_settings", "check_version", "model_facts", "scheduler_facts", "worker_ranks"]

OLDEST: Final = (0, 26)
"the oldest vLLM whose engine stays awake for blocks that are held"

_INTERLEAVED: Final = frozenset({"chatglm", "codegen", "cohere", "cohere2", "glm", "glm4", "gptj"})
"model types whose keys keep rotary pairs side by side; the others keep them in two halves"


def check_version(version: str) -> None:
    """Raise LocalError for a vLLM that is too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST and not version.startswith("0.0"):
        raise LocalError(
            ErrorCode.CONFIG, f"vLLM {version} is too old for pdhandoff: use {'.'.join(map(str, OLDEST))} or newer"
        )


def check_settings(vllm_config: Any) -> None:
    """Refuse to start with settings under which rows would be wrong or lost.

    Raises:
        LocalError: CONFIG; the sentence names the setting and says what to do.
    """
    for setting, wrong, why in _settings(vllm_config):
        if wrong:
            raise LocalError(ErrorCode.CONFIG, f"{setting} does not go with pdhandoff's connector: {why}")


def _settings(vllm_config: Any) -> list[tuple[str, bool, str]]:
    """(setting, whether it is wrong, what to do)."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    speculative = vllm_config.speculative_config
    attention = getattr(vllm_config, "attention_config", None)
    return [
        (
            "kv_role",
            not vllm_config.kv_transfer_config.is_kv_producer,
            "this side hands off and takes nothing; set kv_producer (or kv_both beside other connectors)",
        ),
        (
            "decode_context_parallel_size",
            getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "each rank keeps a part of every block's tokens; set it to 1",
        ),
        (
            "prefill_context_parallel_size",
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "each rank keeps a part of every block's tokens; set it to 1",
        ),
        (
            "attention_config.hisparse_config",
            getattr(attention, "hisparse_config", None) is not None,
            "some rows live in host memory only; leave it out",
        ),
        ("an encoder-decoder model", bool(model.is_encoder_decoder), "decoding needs the encoder's state too"),
        (
            "enable_sleep_mode",
            bool(getattr(model, "enable_sleep_mode", False)),
            "caches are unmapped while writes may read them; leave it out",
        ),
        (
            "speculative_config.disable_eagle_block_drop",
            bool(getattr(speculative, "disable_eagle_block_drop", False)),
            "draft rows of cached blocks may belong to another prompt; leave it out",
        ),
        (
            "speculative_config with several draft layers",
            _module_count(vllm_config) > 1,
            "later draft layers need tokens that do not exist at the end of prefill; use a model with one",
        ),
        (
            "pipeline_parallel_size",
            parallel.pipeline_parallel_size > 1
            and speculative is not None
            and not getattr(vllm_config, "use_v2_model_runner", False),
            "the V1 model runner ends no step on the first stages while it speculates; set it to 1",
        ),
    ]


def scheduler_facts(vllm_config: Any, kv_cache_config: Any) -> Facts:
    """What the scheduler's side needs."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    return Facts(
        group_tokens=tuple(int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups),
        max_model_len=int(vllm_config.model_config.max_model_len),
        draft_tokens=0 if speculative is None else int(speculative.num_speculative_tokens or 0),
        ranks=int(parallel.pipeline_parallel_size) * int(parallel.tensor_parallel_size),
    )


def worker_ranks() -> tuple[int, int]:
    """Tensor- and pipeline-parallel rank of this worker."""
    state = importlib.import_module("vllm.distributed.parallel_state")
    if not state.model_parallel_is_initialized():
        return 0, 0
    return int(state.get_tensor_model_parallel_rank()), int(state.get_pp_group().rank_in_group)


def cache_specs(vllm_config: Any, kv_cache_config: Any) -> dict[str, CacheSpec]:
    """What vLLM says of each layer's cache on this worker."""
    layers = vllm_config.compilation_config.static_forward_context
    specs: dict[str, CacheSpec] = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        each = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            spec = each.get(name, group.kv_cache_spec)
            specs[name] = CacheSpec(
                group=number,
                block_tokens=int(group.kv_cache_spec.block_size),
                kind=type(spec).__name__,
                heads=int(getattr(spec, "num_kv_heads", 1)),
                head_size=int(getattr(spec, "head_size", 0)),
                element=str(getattr(spec, "cache_dtype_str", None) or ""),
                backend=_backend(layers.get(name)),
            )
    return specs


def model_facts(vllm_config: Any, config: Config, *, tp_rank: int, pp_rank: int) -> ModelFacts:
    """What a worker needs to know of its model."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text = model.hf_text_config
    speculative = vllm_config.speculative_config
    layers = int(text.num_hidden_layers)
    pp_size = int(parallel.pipeline_parallel_size)
    drafts: tuple[int, ...] | None = None
    if pp_size > 1:  # the draft layers' caches are on the last stage only, and all stages say what the model has
        drafts = tuple(range(layers, layers + _module_count(vllm_config)))
    interleaved = getattr(text, "model_type", "") in _INTERLEAVED
    return ModelFacts(
        name=config.model_name or PurePosixPath(str(model.model)).name,
        revision=config.revision,
        layers=layers,
        draft_layers=drafts,
        draft_tokens=0 if speculative is None else int(speculative.num_speculative_tokens or 0),
        kv_heads=int(model.get_total_num_kv_heads()),
        latent=int(getattr(text, "kv_lora_rank", None) or 512),
        rope=int(getattr(text, "qk_rope_head_dim", None) or 64),
        index_rope_order=(
            RopeOrder.INTERLEAVED if getattr(text, "indexer_rope_interleave", False) else RopeOrder.HALF_SPLIT
        ),
        index_scales=_index_scales(),
        key_rope_order=config.rope() or (RopeOrder.INTERLEAVED if interleaved else RopeOrder.HALF_SPLIT),
        key_rope_share=_rope_share(text),
        tp_rank=tp_rank,
        tp_size=int(parallel.tensor_parallel_size),
        pp_rank=pp_rank,
        pp_size=pp_size,
    )


def _module_count(vllm_config: Any) -> int:
    """Draft layers that keep rows of their own. Other methods than MTP keep none, or name one layer."""
    speculative = vllm_config.speculative_config
    if speculative is None or "mtp" not in str(speculative.method):
        return 0
    return int(getattr(vllm_config.model_config.hf_text_config, "num_nextn_predict_layers", None) or 1)


def _rope_share(text: Any) -> float:
    """Share of a head's elements that is rotary."""
    said = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    share = said.get("partial_rotary_factor") if isinstance(said, dict) else None
    return float(share or getattr(text, "partial_rotary_factor", None) or 1.0)


def _backend(layer: Any) -> str:
    """The attention backend of a layer."""
    ask = getattr(layer, "get_attn_backend", None)
    return "" if ask is None else str(ask().get_name())


def _index_scales() -> Element:
    """How index keys' scales are stored: four equal exponents on SM100 from vLLM 0.33 on, else an f32.

    Source: vLLM 0.33, `mqa_logits_use_mx_scales` in vllm/utils/deep_gemm.py.
    """
    try:
        asked = getattr(importlib.import_module("vllm.utils.deep_gemm"), "mqa_logits_use_mx_scales", None)
    except ImportError:
        return Element.F32
    return Element.UE8M0X4 if asked is not None and asked() else Element.F32
