"""Makes the two sides of the connector from what vLLM gives it. What is wrong is said here, at the server's start."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, final

from pdhandoff.engines.base import MemoryKind
from pdhandoff.engines.registry import create
from pdhandoff.runtime.producer import Producer
from pdhandoff.runtime.sender import Staging
from pdhandoff_vllm import compat
from pdhandoff_vllm.caches import Caches, describe_caches, piece_tokens
from pdhandoff_vllm.config import Config
from pdhandoff_vllm.hooks import LOG
from pdhandoff_vllm.scheduler_side import SchedulerSide
from pdhandoff_vllm.worker_side import WorkerSide

__all__ = ["CudaDevice", "scheduler_side", "worker_side"]

_UNUSED_RING: Final = 1 << 16
"bytes: a producer has a ring in any case"


@final
class CudaDevice:
    """The forward pass's device, asked through the torch that vLLM runs on."""

    def __init__(self) -> None:
        self._cuda = sys.modules["torch"].cuda

    def stream(self) -> int:
        """Handle of the current stream."""
        return int(self._cuda.current_stream().cuda_stream)

    def event(self) -> Any:
        """An event after what was launched on it so far."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream())
        return event


def scheduler_side(config: Config, vllm_config: Any, kv_cache_config: Any) -> SchedulerSide:
    """The scheduler's side."""
    return SchedulerSide(config, compat.scheduler_facts(vllm_config, kv_cache_config))


def worker_side(
    config: Config,
    vllm_config: Any,
    kv_cache_config: Any,
    tensors: Mapping[str, Any],
    *,
    ranks: tuple[int, int],
    other_spec_depth: bool,
) -> WorkerSide:
    """A worker's side, with a producer that runs.

    Args:
        config: the operator's.
        vllm_config: vLLM's.
        kv_cache_config: this worker's.
        tensors: the caches, as vLLM registers them.
        ranks: tensor- and pipeline-parallel rank of this worker.
        other_spec_depth: accept that decode speculates another number of tokens.

    Raises:
        PdHandoffError: caches that cannot be described, a mover that cannot be made, memory that cannot be registered.
    """
    facts = compat.model_facts(vllm_config, config, tp_rank=ranks[0], pp_rank=ranks[1])
    specs = compat.cache_specs(vllm_config, kv_cache_config)
    caches = describe_caches(tensors, specs, facts, num_blocks=int(kv_cache_config.num_blocks))
    piece_tokens(config, caches)
    mover = create(config.mover_name, **config.mover_options)
    try:
        producer = _producer(config, caches, mover, facts.shard, other_spec_depth=other_spec_depth)
    except BaseException:
        mover.close()
        raise
    LOG.info(
        "hands off %s by %s as rank %d of %d: %s",
        caches.layout.name,
        mover.name,
        *facts.shard,
        ", ".join(f"{component.name} of {len(component.layers)} layers" for component in caches.layout.components),
    )
    return WorkerSide(config, caches, producer, mover=mover, device=CudaDevice() if caches.on_cuda else None)


def _producer(config: Config, caches: Caches, mover: Any, shard: Any, *, other_spec_depth: bool) -> Producer:
    staging = Staging(config.staging)
    device = next((piece.device for piece in caches.memory if piece.kind is MemoryKind.CUDA), 0)
    direct = staging is Staging.DIRECT
    # the ring lies where the rows are copied, or summed up; without either it is not used
    ring_on_cuda = caches.on_cuda and (config.digest or not direct)
    return Producer(
        mover=mover,
        layout=caches.layout,
        placements=caches.placements,
        memory=() if staging is Staging.STAGED else caches.memory,
        shard=shard,
        replicas=caches.replicas,
        policy=config.policy(other_spec_depth=other_spec_depth),
        staging_bytes=_UNUSED_RING if direct else config.staging_bytes,
        staging=staging,
        ring_kind=MemoryKind.CUDA if ring_on_cuda else MemoryKind.CPU,
        ring_device=device if ring_on_cuda else 0,
        digest=config.digest,
        secret=config.secret(),
        tls=config.tls,
        allow=config.allowed,
        name=config.name,
    )
