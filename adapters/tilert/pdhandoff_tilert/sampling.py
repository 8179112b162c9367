"""Sampling parameters in the engine's terms. What the engine cannot do is refused, by name.

Source: TileRT 0.1.6.post3, `update_sampling_params(temperature, top_p, top_k, use_topp)` and
`decode_layer.set_sampling_seed(seed)`; its sampling kernel looks at the 256 most likely tokens, and its published
integration asks for `top_k=1, use_topp=False` where a request is greedy.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from typing import Final

from pdhandoff_tilert.engine import DecodeRequest
from pdhandoff_tilert.generator import Calls

__all__ = ["POOL", "apply_sampling", "refusal"]

POOL: Final = 256
"candidates that the engine samples from"
_GREEDY_BELOW: Final = 1e-5
_SEED_BITS: Final = 63


def refusal(request: DecodeRequest, *, can_seed: bool) -> str:
    """The name of a parameter that the engine cannot honour, and why. Empty: it can.

    Args:
        request: the whole request.
        can_seed: the engine takes a seed.
    """
    return next(_problems(request, can_seed=can_seed), "")


def apply_sampling(calls: Calls, request: DecodeRequest) -> None:
    """Tell the engine. It captures its graphs anew where the parameters differ from those of the request before.

    Args:
        calls: the engine's.
        request: not refused. Without a seed it gets one of its own, so that equal requests differ.
    """
    if request.temperature < _GREEDY_BELOW:
        calls.generator.update_sampling_params(temperature=1.0, top_p=1.0, top_k=1, use_topp=False)
        return
    calls.generator.update_sampling_params(
        temperature=request.temperature, top_p=request.top_p, top_k=request.top_k or POOL, use_topp=True
    )
    if calls.can_seed:
        seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
        calls.layer.set_sampling_seed(seed, with_mtp=calls.with_mtp)


def _problems(request: DecodeRequest, *, can_seed: bool) -> Iterator[str]:
    if request.min_tokens > 1:
        yield f"min_tokens {request.min_tokens}: this engine cannot keep end tokens from being sampled"
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        yield f"temperature {request.temperature}: it is a finite number, 0 or more"
    if request.temperature < _GREEDY_BELOW:
        return  # the others choose among likely tokens, and there is one most likely token
    if not 0 < request.top_p <= 1:
        yield f"top_p {request.top_p}: it lies above 0, up to 1"
    if not 0 <= request.top_k <= POOL:
        yield f"top_k {request.top_k}: this engine samples from the {POOL} most likely tokens; ask for 0 to {POOL}"
    if request.seed is not None and not can_seed:
        yield f"seed {request.seed}: this engine takes none"
    if request.seed is not None and not 0 <= request.seed < 1 << _SEED_BITS:
        yield f"seed {request.seed}: it lies between 0 and 2 ** {_SEED_BITS} - 1"
