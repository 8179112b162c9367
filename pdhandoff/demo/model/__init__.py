"""A tiny real model and two engines around it: paged fp8 prefill as in vLLM, contiguous bf16 decode as in TileRT."""

from pdhandoff.demo.model.config import DEFAULT_CONFIG, ModelConfig
from pdhandoff.demo.model.decode import DecodeEngine
from pdhandoff.demo.model.layouts import decode_layout, decode_placements, prefill_layout, prefill_placements
from pdhandoff.demo.model.local import (
    WarmAndCold,
    convert_by_hand,
    decode_locally,
    decode_warm_and_cold,
    prefill_locally,
)
from pdhandoff.demo.model.loop import DecodeResult, DraftSeed, decode
from pdhandoff.demo.model.network import Network
from pdhandoff.demo.model.prefill import PrefillEngine, Progress
from pdhandoff.demo.model.prompts import prompt_text, prompt_tokens, text_of
from pdhandoff.demo.model.weights import fingerprint

__all__ = [
    "DEFAULT_CONFIG",
    "DecodeEngine",
    "DecodeResult",
    "DraftSeed",
    "ModelConfig",
    "Network",
    "PrefillEngine",
    "Progress",
    "WarmAndCold",
    "convert_by_hand",
    "decode",
    "decode_layout",
    "decode_locally",
    "decode_placements",
    "decode_warm_and_cold",
    "fingerprint",
    "prefill_layout",
    "prefill_locally",
    "prefill_placements",
    "prompt_text",
    "prompt_tokens",
    "text_of",
]
