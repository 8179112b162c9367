"""A connector that moves nothing: it tells what a step wrote, when every row of the step is said to be there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

with warnings.catch_warnings():  # as in vllm_engine
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        SupportsHMA,
    )
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["RecordingConnector", "Written"]


@dataclass(frozen=True)
class Written:
    """What one step adds to one request."""

    name: str
    tokens: range
    "rows of this step, of the prompt only"
    blocks: tuple[int, ...]
    prompt: int


@dataclass
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    written: list[Written] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Records `handle_preemptions` and `wait_for_save`. It holds the blocks of every request that says `hold`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._prompts: dict[str, int] = {}
        self._held: set[str] = set()
        self.calls: list[str] = []
        self.written: Callable[[Written], None] = lambda _: None
        "called in wait_for_save"

    # scheduler side

    def on_new_request(self, request: Any) -> None:
        self._prompts[request.request_id] = request.num_prompt_tokens

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state, cached = scheduler_output.kv_connector_block_state, scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        metadata = _Metadata(preempted=frozenset(scheduler_output.preempted_req_ids or ()))
        for name, count in scheduler_output.num_scheduled_tokens.items():
            prompt = self._prompts[name]
            tokens = range(computed[name], min(computed[name] + count, prompt))
            if tokens:
                (blocks,) = state.get_block_ids(name)
                metadata.written.append(Written(name, tokens, tuple(blocks), prompt))
        return metadata

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        del self._prompts[request.request_id]
        return bool((request.kv_transfer_params or {}).get("hold")), None

    # worker side

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.calls += [f"preempted {name}" for name in sorted(kv_connector_metadata.preempted)]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.calls.append("start_load_kv")

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        self.calls.append("wait_for_save")
        for written in self._get_connector_metadata().written:
            self.written(written)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.calls.append("get_finished")
        return self._held.intersection(finished_req_ids) or None, None

    def hold(self, name: str) -> None:
        """Report this request as sent when it has finished: it said `hold`."""
        self._held.add(name)
