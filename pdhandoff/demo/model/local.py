"""What the handoff is compared with: prefill in this process, and a conversion written out by hand.

It shares no code with the planner and the conversions: rows are cut out of pages byte by byte as the comments in
`pages` and `planes` say, and index keys are rotated by an explicit matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdhandoff.demo.model.decode import DecodeEngine, LayerRows
from pdhandoff.demo.model.loop import DecodeResult, DraftSeed, decode
from pdhandoff.demo.model.network import Network
from pdhandoff.demo.model.prefill import PrefillEngine
from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["WarmAndCold", "convert_by_hand", "decode_locally", "decode_warm_and_cold", "prefill_locally"]


class WarmAndCold(NamedTuple):
    """One prompt decoded twice."""

    warm: DecodeResult
    "with the draft layer's rows of the prompt"
    cold: DecodeResult
    "without them: the same tokens, and fewer drafts accepted"


def decode_locally(
    network: Network, prompt: Sequence[int], *, max_tokens: int, chunk: int = 128, devices: int = 1
) -> DecodeResult:
    """Prefill and decode in this process, without pages that are handed over.

    Args:
        network: the model.
        prompt: its tokens.
        max_tokens: at most that many tokens, the first one included.
        chunk: tokens per prefill step; it changes nothing.
        devices: of the decode engine.
    """
    rows, first_token = prefill_locally(network, prompt, chunk=chunk)
    return _decode_rows(network, rows, prompt, first_token, max_tokens, devices=devices, seed=DraftSeed.REPLAY)


def decode_warm_and_cold(network: Network, prompt: Sequence[int], *, max_tokens: int) -> WarmAndCold:
    """Prefill in this process, then decode with and without the draft layer's rows."""
    rows, first_token = prefill_locally(network, prompt)
    *target, draft = rows
    without = [*target, (torch.zeros_like(draft[0]), torch.zeros_like(draft[1]), torch.zeros_like(draft[2]))]
    return WarmAndCold(
        _decode_rows(network, rows, prompt, first_token, max_tokens, devices=1, seed=DraftSeed.REPLAY),
        _decode_rows(network, without, prompt, first_token, max_tokens, devices=1, seed=DraftSeed.MISSING),
    )


def prefill_locally(network: Network, prompt: Sequence[int], *, chunk: int = 128) -> tuple[list[LayerRows], int]:
    """Prefill a prompt: its rows as the decode engine wants them, and the sampled token."""
    engine = PrefillEngine(network, pages=2 + len(prompt) // network.config.page_tokens)
    request = engine.add(prompt)
    progress = engine.step(request, chunk)
    while not progress.finished:
        progress = engine.step(request, chunk)
    if progress.first_token is None:
        raise LocalError(ErrorCode.INTERNAL, "prefill ended without a token: report it")
    return convert_by_hand(engine, request), progress.first_token


def convert_by_hand(engine: PrefillEngine, request: int) -> list[LayerRows]:
    """A request's rows of every layer: index keys [n, 128], latents [n, 512], rotary keys [n, 64], bf16."""
    tokens = engine.progress(request).draft_tokens
    table = engine.block_table(request)
    rotation = _rotation()
    out = []
    for latent_pages, index_pages in zip(engine.tensors.latent, engine.tensors.index, strict=True):
        index_keys, latents, ropes = [], [], []
        for page in table:
            rows = latent_pages[page]
            values = _cast(rows[:, 0:512], torch.float8_e4m3fn)
            scales = _cast(rows[:, 512:528], torch.float32)
            latents.append(values * scales.repeat_interleave(128, dim=1))
            ropes.append(_cast(rows[:, 528:656], torch.bfloat16))
            planar = index_pages[page].reshape(-1)
            keys = _cast(planar[: 64 * 128].reshape(64, 128), torch.float8_e4m3fn)
            scale = _cast(planar[64 * 128 :].reshape(64, 4), torch.float32)
            index_keys.append((keys * scale) @ rotation * 128**-0.5)
        out.append(
            (
                torch.cat(index_keys)[:tokens].to(torch.bfloat16),
                torch.cat(latents)[:tokens].to(torch.bfloat16),
                torch.cat(ropes)[:tokens].to(torch.bfloat16),
            )
        )
    return out


def _decode_rows(
    network: Network,
    rows: Sequence[LayerRows],
    prompt: Sequence[int],
    first_token: int,
    max_tokens: int,
    *,
    devices: int,
    seed: DraftSeed,
) -> DecodeResult:
    engine = DecodeEngine(network, devices=devices)
    engine.inject_cache(rows)
    return decode(
        engine,
        prompt_last_token=prompt[-1],
        first_token=first_token,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        seed=seed,
    )


def _cast(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [n, m] read as `dtype`, in float32."""
    return raw.contiguous().view(dtype).float()


def _rotation() -> Tensor:
    """The 128 x 128 Hadamard matrix: -1 where the numbers of row and column have an odd number of bits in common."""
    return torch.tensor([[1.0 - 2.0 * ((row & column).bit_count() % 2) for column in range(128)] for row in range(128)])
