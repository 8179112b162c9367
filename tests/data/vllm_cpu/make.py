"""Writes the files beside it: what a real vLLM on CPU keeps and says for the tiny models of `support.vllm_models`.

    .venv-vllm/bin/python tests/data/vllm_cpu/make.py KIND

One file a kind, float32: the pages of each layer after a prefill of the first prompt, in block-table order, and as
metadata all prompts, 64 greedy tokens of each, and a digest of the weights that they were made with.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOKENS = 64
LENGTHS = (30, 1, 5, 64, 130, 200)


def main(kind: str) -> None:
    """Run vLLM in this process, so that its caches can be read."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_CI_ENV="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
    )
    sys.path.insert(0, str(HERE.parents[1]))
    import vllm
    from safetensors.torch import save_file

    from support.vllm_models import cached_model

    folder = cached_model(kind)
    draw = random.Random(kind)
    prompts = [[draw.randrange(32, 127) for _ in range(length)] for length in LENGTHS]
    speculation: dict[str, Any] = (
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if kind.endswith("mtp") else {}
    )
    llm = vllm.LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        **speculation,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompts[0]}], sampling)
    pages = read_pages(llm, len(prompts[0]))
    sampling.max_tokens = TOKENS
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    metadata = {
        "vllm": vllm.__version__,
        "weights": hashlib.blake2b((folder / "model.safetensors").read_bytes(), digest_size=8).hexdigest(),
        "prompts": json.dumps(prompts),
        "tokens": json.dumps([list(output.outputs[0].token_ids) for output in outputs]),
    }
    save_file(pages, HERE / f"{kind}.safetensors", metadata=metadata)


def read_pages(llm: Any, tokens: int) -> dict[str, Any]:
    """Layer -> its pages. Nothing else has run, so the request had the first ones after the null page."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    found = {}
    for name, layer in runner.vllm_config.compilation_config.static_forward_context.items():
        cache = getattr(layer, "kv_cache", None)
        if cache is None:
            continue
        whole = cache[0] if isinstance(cache, list | tuple) else cache
        count = -(-tokens // whole.shape[-2])
        found[name] = whole[1 : 1 + count].clone().contiguous()
    return found


if __name__ == "__main__":
    main(sys.argv[1])
