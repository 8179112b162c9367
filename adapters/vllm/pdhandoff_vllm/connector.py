"""The connector as vLLM loads it: `PDHandoffConnector`, and `TileRTConnector` for configurations that name it so.

One process may hold either side or both. The classes are also looked at in vLLM's API server, so importing this module
opens nothing and touches no device. Contract: vLLM 0.26 to 0.33,
vllm/distributed/kv_transfer/kv_connector/v1/base.py; hooks that a version does not know are never called by it.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Final

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff_vllm import build, compat
from pdhandoff_vllm.config import read_config
from pdhandoff_vllm.hooks import LOG, guarded
from pdhandoff_vllm.meta import NOTHING, StepMeta, WorkerReport
from pdhandoff_vllm.plugin import register
from pdhandoff_vllm.scheduler_side import SchedulerSide
from pdhandoff_vllm.stats import HandoffPromMetrics, HandoffStats
from pdhandoff_vllm.worker_side import WorkerSide

with warnings.catch_warnings():  # as in stats
    warnings.simplefilter("ignore")
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )

__all__ = ["PDHandoffConnector", "TileRTConnector"]

KVConnectorMetadata.register(StepMeta)
KVConnectorWorkerMetadata.register(WorkerReport)

_NOT_OURS: Final = (False, None)


def _nothing() -> None:
    return None


class PDHandoffConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands marked requests off while vLLM computes them. A request without a mark costs a look-up in a dictionary."""

    metrics_prefix: ClassVar[str] = "pdhandoff"
    other_spec_depth: ClassVar[bool] = False
    "accept that decode speculates another number of tokens than prefill, without being told to"

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        compat.check_version(vllm.__version__)
        compat.check_settings(vllm_config)
        self._config = read_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._meta: StepMeta = NOTHING
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = build.scheduler_side(self._config, vllm_config, kv_cache_config)

    def fault(self, hook: str, error: Exception) -> None:
        """A hook has raised: give handoffs up, keep the engine."""
        if self._scheduler is not None:
            self._scheduler.fault(hook, error)
        if self._worker is not None:
            self._worker.fault(hook, error, self._meta)

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The caches exist. Raises, and so stops the server's start, when they cannot be handed off."""
        if self._worker is not None:
            raise LocalError(ErrorCode.MISUSE, "caches were registered twice: start the server again")
        self._worker = build.worker_side(
            self._config,
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            ranks=compat.worker_ranks(),
            other_spec_depth=self.other_spec_depth,
        )

    @guarded(_nothing)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before anything of a step is overwritten. Comes before `bind_connector_metadata`."""
        if self._worker is not None and kv_connector_metadata:
            self._worker.handle_preemptions(kv_connector_metadata)

    @guarded(_nothing)
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._meta = connector_metadata
        if self._worker is not None and connector_metadata:
            self._worker.bind(connector_metadata)

    @guarded(_nothing)
    def clear_connector_metadata(self) -> None:
        """A step ends."""
        super().clear_connector_metadata()
        self._meta = NOTHING

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: some models' layers never call it, so rows are taken from the registered caches."""

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        """Every row of the step, draft layers too, has been computed or is in the stream."""
        if self._worker is not None and self._meta:
            self._worker.wait_for_save(self._meta)

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may go, each once, and only such as `request_finished` has held."""
        return (None if self._worker is None else self._worker.finished(finished_req_ids)), None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Nothing is loaded."""
        return set()

    @guarded(_nothing)
    def get_kv_connector_stats(self) -> Any:
        """What has ended since the last step. The scheduler's side counts nothing."""
        tally = None if self._worker is None else self._worker.tally()
        return None if tally is None else HandoffStats(data=tally.data)

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> Any:
        """What the scheduler's side should know."""
        return None if self._worker is None else self._worker.report()

    def get_handshake_metadata(self) -> None:
        """None: consumers are met over links of our own."""

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Another connector's, under MultiConnector."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Another connector's, under MultiConnector."""

    @guarded(_nothing)
    def shutdown(self) -> None:
        """The server ends: what is under way is ended, within seconds."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.close()

    # ---- scheduler side

    @guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        """A request arrives."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self,
        request: Any,  # noqa: ARG002 - vLLM's hook
        num_computed_tokens: int,  # noqa: ARG002 - vLLM's hook
    ) -> tuple[int, bool]:
        """Nothing is loaded, and nothing is waited for."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded."""

    @guarded(lambda: NOTHING)
    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        """What the workers need to know of a step."""
        return NOTHING if self._scheduler is None else self._scheduler.build_meta(scheduler_output)

    @guarded(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report."""
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and report is not None:
            self._scheduler.update_output(report)

    @guarded(lambda: _NOT_OURS)
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """A request has ended."""
        return _NOT_OURS if self._scheduler is None else self._scheduler.request_finished(request)

    @guarded(lambda: _NOT_OURS)
    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: Any,  # noqa: ARG002 - vLLM's hook
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended."""
        return _NOT_OURS if self._scheduler is None else self._scheduler.request_finished(request)

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Whether an engine without requests should go on making steps."""
        return self._scheduler is not None and self._scheduler.has_pending_work()

    # ---- asked of the class, in vLLM's API server

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003 - vLLM's hook
        """False: no hook of a layer is used."""
        return False

    @classmethod
    def supports_sleep_mode(cls, *_: Any) -> bool:
        """False: writes may read caches that sleep would unmap."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ARG003 - vLLM's hook
        """None: caches are described by their strides, whatever they are."""
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HandoffStats:
        """What crossed to this process as plain data."""
        return HandoffStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HandoffPromMetrics | None:
        """Counters and histograms, under names that belong to this class."""
        try:
            return HandoffPromMetrics(cls.metrics_prefix, vllm_config, metric_types, labelnames, per_engine_labelvalues)
        except ValueError:
            LOG.exception("metrics of handoffs are not shown: their names are taken")
            return None


class TileRTConnector(PDHandoffConnector):
    """The name, configuration keys and request mark of the published integration with TileRT.

    TileRT verifies four tokens a step, and vLLM drafts one: the depth is no reason to refuse here.
    """

    metrics_prefix: ClassVar[str] = "tilert"
    other_spec_depth: ClassVar[bool] = True


register()
