"""What an operator chooses about a catalogue layout, and the checks that all entries share."""

from __future__ import annotations

from typing import final

import msgspec

from pdhandoff.errors import ErrorCode, LayoutError
from pdhandoff.layouts.descriptor import Element, Model
from pdhandoff.layouts.profiles import GqaShape, MlaShape, Profile

__all__ = ["Options", "head_range", "model_layers", "need_gqa", "need_length", "need_mla", "page_size", "refused"]


@final
class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of one engine. Entries ignore what does not concern them (a contiguous cache has no page size)."""

    model: Model | None = None
    "whose state it is; None: `profile.model()`, with all draft layers"
    page_tokens: int | None = None
    "tokens in a page of the kernel; None: the engine's default"
    length: int | None = None
    "tokens of a contiguous cache"
    element: Element = Element.BF16
    "element of unquantised rows"
    index_scales: Element = Element.F32
    "element of the index scales: F32, or UE8M0X4 on SM100"
    tp_rank: int = 0
    tp_size: int = 1


def refused(field: str, reason: str) -> LayoutError:
    """The error of a layout that the catalogue cannot describe."""
    return LayoutError(ErrorCode.LAYOUT_MISMATCH, f"{field}: {reason}", field=field)


def model_layers(profile: Profile, options: Options) -> tuple[Model, tuple[int, ...]]:
    """The model of a layout, and its target and draft layers. Raises LayoutError when it has another depth."""
    model = profile.model() if options.model is None else options.model
    if model.layers != profile.layers:
        raise refused("model.layers", f"{model.layers} given, but profile {profile.name} has {profile.layers}")
    return model, (*range(model.layers), *model.draft_layers)


def page_size(options: Options, default: int) -> int:
    """Tokens in a page: what the operator chose, or the engine's default."""
    return default if options.page_tokens is None else options.page_tokens


def need_mla(profile: Profile, entry: str) -> MlaShape:
    """The latent shape of a profile. Raises LayoutError when it has none."""
    if profile.mla is None:
        raise refused("profile.mla", f"{entry} keeps latent rows, and {profile.name} has no latent attention")
    return profile.mla


def need_gqa(profile: Profile, entry: str) -> GqaShape:
    """The key/value shape of a profile. Raises LayoutError when it has none."""
    if profile.gqa is None:
        raise refused("profile.gqa", f"{entry} keeps keys and values per head, and {profile.name} has latent attention")
    return profile.gqa


def need_length(options: Options, entry: str) -> int:
    """The length of a contiguous cache, in tokens. Raises LayoutError when none was given."""
    if options.length is None:
        raise refused("options.length", f"{entry} is contiguous: say how many tokens its tensors hold")
    return options.length


def head_range(heads_total: int, *, tp_rank: int, tp_size: int) -> range:
    """The key/value heads that one tensor-parallel rank holds.

    With at most `heads_total` ranks, each holds `heads_total / tp_size` of them. With more, each head is replicated on
    `tp_size / heads_total` neighbouring ranks. Source: vLLM 0.33, QKVParallelLinear in
    vllm/model_executor/layers/linear.py (num_kv_head_replicas).

    Raises LayoutError when the rank is out of range or the numbers do not divide.
    """
    if not 0 <= tp_rank < tp_size:
        raise refused("options.tp_rank", f"{tp_rank} lies outside 0..{tp_size - 1}")
    if tp_size <= heads_total and heads_total % tp_size == 0:
        share = heads_total // tp_size
        return range(tp_rank * share, (tp_rank + 1) * share)
    if tp_size > heads_total and tp_size % heads_total == 0:
        head = tp_rank // (tp_size // heads_total)
        return range(head, head + 1)
    raise refused("options.tp_size", f"{tp_size} ranks cannot share {heads_total} heads evenly")
