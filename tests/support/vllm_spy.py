"""The connector under test, watched: it also writes the rows of every handed-off prompt to a file, for comparison.

The scheduler side sends each request's block table along with the connector's own metadata; the worker side reads the
rows when the step that completes the prompt has been saved. Folder: variable `PDHANDOFF_SPY`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.vllm_rows import read_rows, row_views

with warnings.catch_warnings():  # as in vllm_engine
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from pdhandoff_vllm.connector import PDHandoffConnector

__all__ = ["SpyConnector", "spied_rows"]


@dataclass(frozen=True)
class _Complete:
    """A prompt that a step completes."""

    handoff: str
    tokens: int
    blocks: tuple[int, ...]


@dataclass
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    own: KVConnectorMetadata
    complete: list[_Complete]


class SpyConnector(PDHandoffConnector):
    """Writes `<handoff>.<number>.safetensors` with one tensor `[token, head, element]` per layer."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._spied: dict[str, tuple[str, int]] = {}
        self._caches: dict[str, list[torch.Tensor]] = {}
        self._complete: list[_Complete] = []
        self._count = 0

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        mark = (request.kv_transfer_params or {}).get("pdhandoff")
        if isinstance(mark, Mapping) and isinstance(mark.get("handoff"), str):
            self._spied[request.request_id] = (mark["handoff"], request.num_prompt_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state, cached = scheduler_output.kv_connector_block_state, scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        complete = []
        for name, (handoff, tokens) in self._spied.items():
            count = scheduler_output.num_scheduled_tokens.get(name)
            if count is not None and computed[name] < tokens <= computed[name] + count:
                (blocks,) = state.get_block_ids(name)
                complete.append(_Complete(handoff, tokens, tuple(blocks)))
        return _Metadata(super().build_connector_meta(scheduler_output), complete)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        for name, cache in kv_caches.items():
            self._caches[name] = row_views(cache, keys_first=cache.shape[1] > 1)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        super().handle_preemptions(kv_connector_metadata.own)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata.own)
        self._complete = connector_metadata.complete

    def wait_for_save(self) -> None:
        super().wait_for_save()
        for each in self._complete:
            rows = {
                name: read_rows(views, each.blocks, range(each.tokens)).contiguous()
                for name, views in self._caches.items()
            }
            # a preempted request is computed again, and may differ in the last bits: both are kept
            path = Path(os.environ["PDHANDOFF_SPY"]) / f"{each.handoff}.{self._count}.safetensors"
            self._count += 1
            save_file(rows, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        self._complete = []


def spied_rows(folder: Path, handoff: str) -> list[list[torch.Tensor]]:
    """For each time that the prompt of a handoff was computed, its rows in the order of the layers."""
    times = []
    for path in sorted(folder.glob(f"{handoff}.*.safetensors"), key=lambda path: int(path.name.split(".")[1])):
        rows = load_file(path)
        times.append([rows[name] for name in sorted(rows, key=lambda name: int(name.split(".")[2]))])
    return times
