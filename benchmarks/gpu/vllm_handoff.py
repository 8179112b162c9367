"""A real vLLM hands a sparse-attention model's state off over NIXL, GPU to GPU, and every row is compared.

    python benchmarks/gpu/vllm_handoff.py --model FOLDER --out FILE [--cache-dtype fp8_ds_mla|bfloat16] [--graphs]

Two processes on one GPU: an offline vLLM with pdhandoff's connector, and a consumer. FOLDER holds a DeepSeek-V3.2 or
GLM-5 shaped model with an MTP layer; a few layers with random weights and a vocabulary of 1,024 or more are enough.
Needs vllm, torch with CUDA, cupy, nixl, and the compiled CUDA conversions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from pdhandoff import Consumer, HandoffId, Limits, MemoryKind
from pdhandoff.layouts import decode_layout, encode_layout
from pdhandoff.layouts.descriptor import Component, Plane

__all__ = ["main"]

ARENA: Final = 1 << 30
VOCABULARY: Final = 1024
PROMPTS: Final = (1, 64, 65, 200, 333, 500)
"tokens; longer ones than the fp8 model's index_topk do not repeat bit by bit from run to run"
CHUNK: Final = 256
"tokens of one prefill step"
CACHES: Final = {
    "mla_latent": "model.layers.{}.self_attn.attn",
    "index_key": "model.layers.{}.self_attn.indexer.k_cache",
}
"component -> vLLM's name of a layer's cache. Source: vLLM 0.26.0, as it registers them"


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """GPU memory of this process as uint8 [nbytes]."""
    from cupy import ndarray, uint8
    from cupy.cuda import MemoryPointer, UnownedMemory

    view = ndarray((nbytes,), uint8, MemoryPointer(UnownedMemory(address, nbytes, None), 0))
    return torch.as_tensor(view, device="cuda")


def plane_rows(pages: torch.Tensor, plane: Plane, tokens: int, page_tokens: int) -> torch.Tensor:
    """Rows uint8 [tokens, row bytes] of one plane in pages uint8 [pages, page bytes]."""
    shape, strides = (len(pages), page_tokens, plane.row_bytes), (pages.stride(0), plane.token_stride, 1)
    return pages.as_strided(shape, strides, pages.storage_offset() + plane.offset).flatten(0, 1)[:tokens]


def landed_rows(arrival: Any) -> dict[str, torch.Tensor]:
    """Every landed row by vLLM's name and plane."""
    rows = {}
    for landed in arrival.rows():
        component: Component = landed.component
        step, count = component.planes[0].page_stride, len(landed.pages.ids)
        for layer, base in zip(landed.entry.layers, landed.placement.bases[""], strict=True):
            pages = bytes_at(base, step * count).view(count, step)
            name = CACHES[component.name].format(layer)
            for plane in component.planes:
                got = plane_rows(pages, plane, arrival.prompt_tokens, component.page_tokens)
                rows[f"{name}/{plane.name}"] = got.cpu()
    return rows


def consume(folder: Path) -> None:
    """The other process: for each handoff, say when it is READY; then, when asked, how many rows differ."""
    layout = decode_layout((folder / "layout").read_bytes())
    with Consumer(
        mover="nixl", layout=layout, arena_bytes=ARENA, memory=MemoryKind.CUDA, limits=Limits(announce_s=120.0)
    ) as consumer:
        say(consumer.address)
        for line in sys.stdin:
            ticket = consumer.announce(HandoffId.parse(line.strip()))
            consumer.statistics()
            say("announced")
            with ticket.wait(60) as arrival:
                say(time.monotonic_ns(), arrival.value("first_token"), arrival.nbytes)
                sys.stdin.readline()
                expected, have = load_file(folder / "expected"), landed_rows(arrival)
                missing = sorted(set(expected) ^ set(have))
                wrong = {name: differing(expected[name], have[name]) for name in expected if name in have}
                say(
                    json.dumps(
                        {"missing": missing, "wrong": {name: n for name, n in wrong.items() if n}, "planes": len(have)}
                    )
                )


def differing(expected: torch.Tensor, have: torch.Tensor) -> int:
    """Rows that are not equal."""
    return int((expected != have).any(1).sum())


def say(*words: object) -> None:
    """A line for the other side."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def expected_rows(handoff: str, tokens: int) -> dict[str, torch.Tensor]:
    """What vLLM's own pages hold."""
    from vllm_watch import SEEN as seen  # noqa: N811 - of this process, where vLLM is installed

    rows = {}
    for component in seen.layout.components:
        for layer in component.layers:
            name = CACHES[component.name].format(layer)
            cache = seen.caches[name]
            flat = cache.view(torch.uint8).flatten(1)[seen.blocks[handoff][: -(-tokens // component.page_tokens)]]
            for plane in component.planes:
                rows[f"{name}/{plane.name}"] = plane_rows(flat, plane, tokens, component.page_tokens).cpu().contiguous()
    return rows


def start_vllm(options: argparse.Namespace) -> Any:
    """An offline engine in this process, so that its caches can be looked at."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    extra = {
        "mover": "nixl",
        "allow": ["127.0.0.1"],
        "staging": options.staging,
        "staging_bytes": 256 << 20,
        "digest": True,
    }
    return LLM(
        model=options.model,
        enforce_eager=not options.graphs,
        max_model_len=2048,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=8,
        gpu_memory_utilization=0.25,
        kv_cache_dtype=options.cache_dtype,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        disable_log_stats=True,
        seed=0,
        skip_tokenizer_init=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        kv_transfer_config={
            "kv_connector": "WatchedConnector",
            "kv_connector_module_path": "vllm_watch",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": extra,
        },
    )


def prefill(llm: Any, tokens: list[int], mark: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
    """Run a prompt for one token. Returns it, and what the connector answered."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": mark} if mark else None
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, extra_args=extra)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    return output.outputs[0].token_ids[0], (output.kv_transfer_params or {}).get("pdhandoff", {})


def keep_stepping(llm: Any, lines: Any) -> None:
    """Turn the engine, as a server's loop does, until the other process has said something."""
    deadline = time.monotonic() + 20
    while not select.select([lines], [], [], 0)[0]:
        if time.monotonic() > deadline:
            raise RuntimeError("no handoff within 20 s")
        llm.llm_engine.step()


def hand_off(llm: Any, child: Any, folder: Path, address: str, tokens: list[int]) -> dict[str, Any]:
    """One prompt through both processes."""
    handoff = HandoffId.mint()
    child.stdin.write(f"{handoff}\n")
    child.stdin.flush()
    child.stdout.readline()
    started = time.monotonic_ns()
    token, answer = prefill(llm, tokens, {"pdhandoff": {"consumer": address, "handoff": str(handoff)}})
    done = time.monotonic_ns()
    if answer.get("status") != "sent":
        raise RuntimeError(f"the connector answered {answer}")
    keep_stepping(llm, child.stdout)
    ready, first_token, nbytes = map(int, child.stdout.readline().split())
    save_file(expected_rows(str(handoff), len(tokens)), folder / "expected")
    child.stdin.write("compare\n")
    child.stdin.flush()
    report = json.loads(child.stdout.readline())
    return {
        "tokens": len(tokens),
        "bytes": nbytes,
        "prefill_ms": (done - started) / 1e6,
        "ready_after_prefill_ms": (ready - done) / 1e6,
        "first_token_equal": first_token == token,
        **report,
    }


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All prompts, and one with a prefix hit."""
    llm = start_vllm(options)
    from vllm_watch import SEEN

    (folder / "layout").write_bytes(encode_layout(SEEN.layout))
    rng = random.Random(7)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(count)] for count in PROMPTS]
    prompts.append(prompts[-1][:320] + [rng.randrange(3, VOCABULARY) for _ in range(100)])
    command = [sys.executable, __file__, "--consume", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        address = child.stdout.readline().strip()  # type: ignore[union-attr]
        results = [hand_off(llm, child, folder, address, prompt) for prompt in prompts]
        results += [hand_off(llm, child, folder, address, prompts[3] + [at + 3]) for at in range(10)]
        child.stdin.close()  # type: ignore[union-attr]
        child.wait(60)
    return results


def report(options: argparse.Namespace, results: list[dict[str, Any]], wrong: int) -> dict[str, Any]:
    """What is kept."""
    return {
        "what": "vLLM with pdhandoff's connector hands off over NIXL between two processes on one GPU",
        "card": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("vllm", "torch", "nixl-cu13", "msgspec")},
        "options": {name: getattr(options, name) for name in ("cache_dtype", "staging", "graphs")},
        "rows_wrong": wrong,
        "first_tokens_equal": all(result["first_token_equal"] for result in results),
        "median_ready_after_prefill_ms": statistics.median(each["ready_after_prefill_ms"] for each in results),
        "handoffs": results,
    }


def main() -> int:
    """Measure, and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cache-dtype", default="fp8_ds_mla")
    parser.add_argument("--staging", default="staged", choices=["staged", "direct", "auto"])
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--consume", type=Path)
    options = parser.parse_args()
    if options.consume:
        consume(options.consume)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options, Path(folder))
    wrong = sum(sum(result["wrong"].values()) + len(result["missing"]) for result in results)
    options.out.write_text(json.dumps(report(options, results, wrong), indent=2) + "\n")
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
