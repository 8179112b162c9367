"""What a Hugging Face folder's config.json says of a model, for the families that this engine computes.

Source of the names: transformers' LlamaConfig and DeepseekV3Config. What would change a result and is not computed here
is refused by its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar, final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["Experts", "GroupedShape", "HfConfig", "LatentShape", "Rope", "read_config"]

_MAX_CONFIG_BYTES: Final = 1 << 20
_FAMILIES: Final = ("LlamaForCausalLM", "DeepseekV3ForCausalLM")

T = TypeVar("T")

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class GroupedShape(NamedTuple):
    """Grouped-query attention."""

    heads: int
    "query heads"
    kv_heads: int
    elements: int
    "of one head"


class LatentShape(NamedTuple):
    """Multi-head latent attention."""

    heads: int
    query_rank: int | None
    "None: queries come straight from the hidden state"
    latent: int
    nope: int
    "elements of a head's query and key without position"
    rope: int
    value: int


class Rope(NamedTuple):
    """Rotary embedding."""

    theta: float
    kind: str = "default"
    "default, llama3 or yarn"
    factor: float = 1.0
    trained_positions: int = 0
    low_factor: float = 1.0
    "llama3: where the slow frequencies end"
    high_factor: float = 4.0
    beta_fast: float = 32.0
    "yarn"
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all: float = 0.0


class Experts(NamedTuple):
    """A mixture of MLPs."""

    routed: int
    shared: int
    per_token: int
    groups: int
    groups_kept: int
    width: int
    first_layer: int
    every: int
    scale: float
    normalise: bool
    sigmoid: bool
    "scores are sigmoids; otherwise a softmax"
    corrected: bool
    "experts are chosen by score plus a learned correction (noaux_tc)"


@final
class HfConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    family: str
    hidden: int
    layers: int
    draft_layers: int
    vocabulary: int
    mlp_width: int
    epsilon: float
    positions: int
    "the longest sequence the model was made for"
    tied: bool
    "the embedding is the output matrix too"
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    "of the weights: bfloat16, float16 or float32"
    attention: GroupedShape | LatentShape
    rope: Rope
    experts: Experts | None
    end_tokens: tuple[int, ...]

    def is_mixture(self, layer: int) -> bool:
        """Whether this layer mixes experts."""
        return self.experts is not None and layer >= self.experts.first_layer and layer % self.experts.every == 0


@final
class _RawRope(msgspec.Struct, frozen=True, kw_only=True):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Positive | None = None
    factor: _Positive = 1.0
    original_max_position_embeddings: _Count | None = None
    low_freq_factor: _Positive = 1.0
    high_freq_factor: _Positive = 4.0
    beta_fast: _Positive = 32.0
    beta_slow: _Positive = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@final
class _Raw(msgspec.Struct, frozen=True, kw_only=True):
    """The file's own names."""

    architectures: list[str]
    hidden_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    vocab_size: _Count
    intermediate_size: _Count
    rms_norm_eps: _Positive = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: _Count = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    torch_dtype: str | None = None
    dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    rope_theta: _Positive = 10000.0
    rope_scaling: _RawRope | None = None
    rope_parameters: _RawRope | None = None
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    q_lora_rank: _Count | None = None
    kv_lora_rank: _Count | None = None
    qk_nope_head_dim: _Count | None = None
    qk_rope_head_dim: _Count | None = None
    v_head_dim: _Count | None = None
    n_routed_experts: _Count | None = None
    n_shared_experts: Annotated[int, msgspec.Meta(ge=0, le=1 << 10)] | None = None
    num_experts_per_tok: _Count = 1
    n_group: _Count | None = None
    topk_group: _Count | None = None
    moe_intermediate_size: _Count | None = None
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0)] = 0
    moe_layer_freq: _Count = 1
    routed_scaling_factor: _Positive = 1.0
    norm_topk_prob: bool = True
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    num_nextn_predict_layers: Annotated[int, msgspec.Meta(ge=0, le=1 << 10)] = 0
    quantization_config: dict[str, Any] | None = None
    index_topk: int | None = None
    layer_types: list[str] | None = None


@final
class _Generation(msgspec.Struct, frozen=True, kw_only=True):
    eos_token_id: int | list[int] | None = None


def read_config(folder: Path) -> HfConfig:
    """The model that a folder holds.

    Raises:
        LocalError: there is no readable config.json, or it names something that this engine does not compute.
    """
    raw = _read(folder / "config.json", _Raw)
    generation_file = folder / "generation_config.json"
    generation = _read(generation_file, _Generation) if generation_file.is_file() else _Generation()
    family = next((name for name in raw.architectures if name in _FAMILIES), None)
    if family is None:
        raise _refused("architectures", f"{', '.join(raw.architectures)}: known are {' and '.join(_FAMILIES)}")
    _refuse_the_unknown(raw)
    latent = family == "DeepseekV3ForCausalLM"
    dtype = raw.dtype or raw.torch_dtype or "bfloat16"
    if dtype not in {"bfloat16", "float16", "float32"}:
        raise _refused("torch_dtype", f"{dtype}: known are bfloat16, float16 and float32")
    return HfConfig(
        family=family,
        hidden=raw.hidden_size,
        layers=raw.num_hidden_layers,
        draft_layers=raw.num_nextn_predict_layers if latent else 0,
        vocabulary=raw.vocab_size,
        mlp_width=raw.intermediate_size,
        epsilon=raw.rms_norm_eps,
        positions=raw.max_position_embeddings,
        tied=raw.tie_word_embeddings,
        attention_bias=raw.attention_bias,
        mlp_bias=raw.mlp_bias and not latent,
        dtype=dtype,
        attention=_latent(raw) if latent else _grouped(raw),
        rope=_rope(raw, latent=latent),
        experts=_experts(raw) if latent else None,
        end_tokens=tuple(sorted({*_tokens(raw.eos_token_id), *_tokens(generation.eos_token_id)})),
    )


def _read(path: Path, kind: type[T]) -> T:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
        if len(text) > _MAX_CONFIG_BYTES:
            raise LocalError(ErrorCode.CONFIG, f"{path} has more than {_MAX_CONFIG_BYTES} bytes: this is no config")
        return msgspec.json.decode(text, type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise LocalError(
            ErrorCode.CONFIG, f"cannot read {path}: {error}; name a folder in Hugging Face's format"
        ) from error


def _refused(field: str, reason: str) -> LocalError:
    return LocalError(ErrorCode.CONFIG, f"config.json, {field}: {reason}")


def _refuse_the_unknown(raw: _Raw) -> None:
    if raw.hidden_act != "silu":
        raise _refused("hidden_act", f"{raw.hidden_act}: only silu is computed here")
    if raw.quantization_config is not None:
        raise _refused("quantization_config", "quantised weights are not computed here: use the original ones")
    if raw.index_topk is not None:
        raise _refused("index_topk", "sparse attention is not computed here")
    if any(kind != "full_attention" for kind in raw.layer_types or ()):
        raise _refused("layer_types", "only full attention is computed here")


def _tokens(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else value


def _grouped(raw: _Raw) -> GroupedShape:
    heads = raw.num_attention_heads
    kv_heads = raw.num_key_value_heads or heads
    if heads % kv_heads:
        raise _refused("num_key_value_heads", f"{kv_heads} do not divide {heads} query heads")
    elements = raw.head_dim or raw.hidden_size // heads
    if elements % 2:
        raise _refused("head_dim", f"{elements} is odd, and rotary elements come in pairs")
    return GroupedShape(heads, kv_heads, elements)


def _latent(raw: _Raw) -> LatentShape:
    latent, nope, rope, value = raw.kv_lora_rank, raw.qk_nope_head_dim, raw.qk_rope_head_dim, raw.v_head_dim
    if latent is None or nope is None or rope is None or value is None or rope % 2:
        raise _refused(
            "kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim",
            f"{latent}, {nope}, {rope}, {value}: latent attention needs all four, and an even rope",
        )
    return LatentShape(raw.num_attention_heads, raw.q_lora_rank, latent, nope, rope, value)


def _rope(raw: _Raw, *, latent: bool) -> Rope:
    said = raw.rope_parameters or raw.rope_scaling or _RawRope()
    theta = said.rope_theta or raw.rope_theta
    kind = said.rope_type or said.type or "default"
    if kind == "default":
        return Rope(theta)
    if kind != ("yarn" if latent else "llama3"):
        raise _refused("rope_scaling", f"{kind} is not computed here for this family")
    trained = said.original_max_position_embeddings
    if trained is None:
        raise _refused("rope_scaling", f"{kind} needs original_max_position_embeddings")
    return Rope(
        theta=theta,
        kind=kind,
        factor=said.factor,
        trained_positions=trained,
        low_factor=said.low_freq_factor,
        high_factor=said.high_freq_factor,
        beta_fast=said.beta_fast,
        beta_slow=said.beta_slow,
        mscale=said.mscale,
        mscale_all=said.mscale_all_dim,
    )


def _experts(raw: _Raw) -> Experts | None:
    if raw.n_routed_experts is None:
        return None
    groups = raw.n_group or 1
    kept = raw.topk_group or 1
    width = raw.moe_intermediate_size
    if width is None or raw.n_routed_experts % groups or kept > groups:
        raise _refused(
            "n_group, topk_group, moe_intermediate_size",
            f"{groups}, {kept}, {width} do not fit {raw.n_routed_experts} experts",
        )
    if raw.num_experts_per_tok > raw.n_routed_experts // groups * kept:
        raise _refused("num_experts_per_tok", f"{raw.num_experts_per_tok} is more than the kept groups hold")
    if raw.scoring_func not in {"sigmoid", "softmax"}:
        raise _refused("scoring_func", f"{raw.scoring_func}: known are sigmoid and softmax")
    return Experts(
        routed=raw.n_routed_experts,
        shared=raw.n_shared_experts or 0,
        per_token=raw.num_experts_per_tok,
        groups=groups,
        groups_kept=kept,
        width=width,
        first_layer=raw.first_k_dense_replace,
        every=raw.moe_layer_freq,
        scale=raw.routed_scaling_factor,
        normalise=raw.norm_topk_prob,
        sigmoid=raw.scoring_func == "sigmoid",
        corrected=raw.topk_method == "noaux_tc",
    )
