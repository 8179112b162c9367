"""Why a marked request cannot be handed off, as far as the request itself shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["are_choices", "objection"]


def are_choices(one: str, other: str) -> bool:
    """Whether two ids are those of two choices of one request (n > 1), which vLLM runs as requests of their own.

    Source: vLLM 0.26 to 0.33, `ParentRequest.get_child_info` in vllm/v1/engine/parallel_sampling.py: the number of the
    choice, an underscore, the id of the request. They are only asked this when they share a handoff id.
    """
    (first, _, parent), (second, _, same) = one.partition("_"), other.partition("_")
    return first.isdecimal() and second.isdecimal() and parent == same != ""


def objection(request: Any, *, longest: int | None, draft_tokens: int, max_model_len: int) -> str:
    """The first thing that speaks against handing a request off, with what to do; empty: nothing does.

    Args:
        request: vLLM's.
        longest: longest prompt that the operator hands off, in tokens; None: any.
        draft_tokens: that vLLM speculates per step.
        max_model_len: of vLLM, in tokens.
    """
    return next(_objections(request, longest, draft_tokens, max_model_len), "")


def _objections(request: Any, longest: int | None, draft_tokens: int, max_model_len: int) -> Iterator[str]:
    tokens = int(request.num_prompt_tokens)
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        yield "its prompt is embeddings, and the decode side knows tokens only"
    if getattr(request, "pooling_params", None) is not None:
        yield "it is a pooling request, and nothing follows its prompt"
    if getattr(request, "mm_features", None):
        yield "its prompt has images or sound, and the decode side knows tokens only"
    if getattr(request, "lora_request", None) is not None:
        yield "its rows are computed with an adapter, which the decode side does not have"
    if longest is not None and tokens > longest:
        yield f"its prompt of {tokens} tokens exceeds tilert_max_seq_len, {longest}"
    if draft_tokens > 1 and tokens + draft_tokens > max_model_len:
        yield (
            f"vLLM drafts nothing for a prompt of {tokens} tokens this close to max_model_len ({max_model_len}): its "
            "draft rows would be missing"
        )
