"""vLLM's own scheduler and connector plumbing around a pretended model: every order of hooks without a GPU.

The scheduler is the installed vLLM's, plain or asynchronous. The worker is pretended: it keeps block tables as vLLM's
model runners do, writes recognisable rows into real memory, poisons every page that is given out afresh, and calls the
worker side of the connector in the order of the runner that it stands for.

Sources of the orders: vLLM 0.32, vllm/v1/worker/gpu/kv_connector.py and model_runner.py (V2),
vllm/v1/worker/kv_connector_model_runner_mixin.py and gpu_model_runner.py (V1); vLLM 0.33 for V2 with a late finish.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from unittest.mock import patch

import torch

from support.vllm_models import cached_model
from support.vllm_rows import Rows, chain, sample
from support.vllm_server import free_port

with warnings.catch_warnings():  # what vLLM's own packages complain about is not these tests' matter
    warnings.simplefilter("ignore")
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, KVCacheSpec, MLAAttentionSpec
    from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.utils import allocate_kv_cache

__all__ = ["Answer", "Order", "PretendedEngine", "Shape"]

for _name in ("vllm.platforms.cpu", "vllm.config.vllm", "vllm.distributed.kv_transfer.kv_connector.v1.base"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # one warning per engine, and thousands of engines

_HEAD_ELEMENTS = 576
_HOLDS_BACK = 3
"one draft in so many is wrong"


class Order(Enum):
    """In which order a runner calls the worker side of a connector."""

    V1 = "V1: results, then the draft pass, then wait_for_save"
    V2 = "V2 of 0.32: the draft pass, then wait_for_save, then results"
    V2_LATE = "V2 of 0.33: results, then the draft pass, then wait_for_save"

    @property
    def v2(self) -> bool:
        """Resumed requests come as new ones, and worker state of preempted ones is dropped."""
        return self is not Order.V1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is pretended."""

    order: Order
    asynchronous: bool
    draft: bool = True
    blocks: int = 64
    batch_tokens: int = 128
    block_tokens: int = 16
    layers: int = 3
    attention: str = "mla"
    "`mla`: latent rows. `gqa`: keys and values of two heads"


@dataclass(frozen=True)
class Answer:
    """What a client gets of a request."""

    tokens: tuple[int, ...]
    params: dict[str, Any] | None
    reason: str


@dataclass
class _Request:
    """A request as the worker knows it."""

    tokens: list[int]
    blocks: list[int]
    computed: int
    prompt: int
    drafts: list[int] = field(default_factory=list)


@dataclass
class _Step:
    """A scheduled step on its way."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput | None = None
    drafts: dict[str, list[int]] = field(default_factory=dict)


class PretendedEngine:
    """One engine with one connector. `advance` is one turn of the engine core's loop; tests may also turn its parts.

    Args:
        shape: what is pretended.
        connector: `KVTransferConfig`'s arguments.
    """

    def __init__(self, shape: Shape, connector: Mapping[str, Any]) -> None:
        self.shape = shape
        self.answers: dict[str, Answer] = {}
        self.preemptions = 0
        self._unmended: set[int] = set()
        "tokens whose draft row the V1 runner built from the wrong token, in some request"
        self._hits: dict[str, int] = {}
        "request -> tokens that it took from the prefix cache"
        self._steps: deque[_Step] = deque()
        self._known: dict[str, _Request] = {}
        self._generated: dict[str, list[int]] = {}
        config = _vllm_config(shape, connector)
        with patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=str(int(shape.order.v2))):
            self._build(shape, config)

    def _build(self, shape: Shape, config: VllmConfig) -> None:
        _join_world_of_one(config)
        specs = _specs(shape)
        kv_config = _kv_cache_config(shape, config, specs)
        layout = config.cache_config.get_resolved_kv_cache_layout()
        caches = allocate_kv_cache(kv_config, torch.device("cpu"), layout, [shape.block_tokens])
        self.rows = Rows(caches, draft=frozenset(list(specs)[shape.layers :]), keys_first=shape.attention == "gqa")
        self.rows.poison(range(shape.blocks))
        self.worker: KVConnectorBase_V1 = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=kv_config
        )
        self.worker.register_kv_caches(caches)
        self.worker.set_host_xfer_buffer_ops(lambda *_: None)
        self.scheduler: Scheduler = (AsyncScheduler if shape.asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_cache_utils.generate_scheduler_kv_cache_config([kv_config]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=shape.block_tokens,
            hash_block_size=shape.block_tokens,
            log_stats=False,
        )
        hashing = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hashing)
        self._hasher = kv_cache_utils.get_request_block_hasher(shape.block_tokens, hashing)

    def close(self) -> None:
        """End both sides, as a server that shuts down does."""
        self.worker.shutdown()
        self.scheduler.shutdown()

    def add(self, name: str, prompt: Sequence[int], *, max_tokens: int, params: dict[str, Any] | None = None) -> None:
        """A client's request arrives."""
        extra = None if params is None else {"kv_transfer_params": params}
        self._generated[name] = []
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=list(prompt),
                sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra),
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    def abort(self, name: str) -> None:
        """The client of a request has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def busy(self) -> bool:
        """The engine core's loop would go on."""
        return bool(self._steps) or self.scheduler.has_requests()

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds (block 0 never counts)."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def in_flight(self) -> int:
        """Steps that are scheduled and whose results the scheduler has not seen."""
        return len(self._steps)

    def stale_drafts(self, name: str) -> set[int]:
        """Tokens of a request whose draft row vLLM itself may hold wrongly, which costs acceptance and no correctness.

        They are what the V1 runner does not mend at the ends of chunks, and the last row of each block that came from
        the prefix cache: it depends on the token after the block, which another request may have had otherwise.
        """
        size = self.shape.block_tokens
        return self._unmended | set(range(size - 1, self._hits.get(name, 0), size))

    def advance(self, *, late: bool = False) -> None:
        """One turn of the loop: an asynchronous engine keeps one step in flight behind the one that it schedules.

        Args:
            late: the worker runs a step only when its result is waited for, as on a busy machine.
        """
        if self.scheduler.has_requests():
            self.schedule()
            if not late:
                self.execute()
            if self.shape.asynchronous and self.in_flight == 1:
                return
        if self.in_flight:
            self.process()

    def schedule(self) -> None:
        """Schedule a step and hand it to the worker, which has not begun."""
        scheduled = self.scheduler.schedule()
        self.preemptions += len(scheduled.preempted_req_ids or ())
        self._steps.append(_Step(scheduled))

    def execute(self) -> None:
        """The worker runs every step that it has been given."""
        for step in self._steps:
            if step.output is None:
                step.output = self._run(step)

    def process(self) -> None:
        """The scheduler sees the results of the oldest step."""
        if self._steps[0].output is None:
            self._steps[0].output = self._run(self._steps[0])
        step = self._steps.popleft()
        outputs = self.scheduler.update_from_output(step.scheduled, step.output)
        for output in (each for client in outputs.values() for each in client.outputs):
            self._generated[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                made = tuple(self._generated[output.request_id])
                self.answers[output.request_id] = Answer(made, output.kv_transfer_params, str(output.finish_reason))
        if not self.shape.asynchronous and step.scheduled.total_num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(step.drafts), list(step.drafts.values())))

    def _run(self, step: _Step) -> ModelRunnerOutput:
        scheduled, shape = step.scheduled, self.shape
        self.worker.handle_preemptions(scheduled.kv_connector_metadata)
        self._update(scheduled)
        self.worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        ids = list(scheduled.num_scheduled_tokens)
        spans = {name: self._forward(name, scheduled) for name in ids}
        if shape.order.v2:
            self.worker.finish_forward()
        sampled = {name: self._sample(name, span, scheduled) for name, span in spans.items()}
        early = shape.order is not Order.V2 and shape.draft and bool(ids)
        results = KVConnectorOutput()
        if early:
            self.worker.start_load_kv(None)
            self._collect(results, scheduled)
        if shape.draft:
            for name, span in spans.items():
                step.drafts[name] = self._draft(name, span, sampled=bool(sampled[name]))
        if early:
            self.worker.wait_for_save()
            self.worker.clear_connector_metadata()
        else:
            self.worker.start_load_kv(None)
            self.worker.wait_for_save()
            self._collect(results, scheduled)
            self.worker.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[sampled[name] for name in ids],
            kv_connector_output=results,
        )

    def _collect(self, results: KVConnectorOutput, scheduled: SchedulerOutput) -> None:
        transfers = self.worker.get_transfer_results(scheduled.finished_req_ids)
        results.finished_sending = transfers.finished_sending or None
        results.finished_recving = transfers.finished_recving or None
        results.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        results.kv_connector_stats = self.worker.get_kv_connector_stats()
        results.kv_connector_worker_meta = self.worker.build_connector_worker_meta()

    def _update(self, scheduled: SchedulerOutput) -> None:
        """Block tables and tokens, as the runner keeps them. Pages that are given out afresh hold poison."""
        gone = set(scheduled.finished_req_ids)
        if self.shape.order.v2:
            gone |= scheduled.preempted_req_ids or set()
        for name in gone:
            self._known.pop(name, None)
        fresh: list[int] = []
        for new in scheduled.scheduled_new_reqs:
            prompt, (blocks,) = list(new.prompt_token_ids or ()), new.block_ids
            tokens = list(new.prefill_token_ids) if new.prefill_token_ids else prompt
            self._hits[new.req_id] = max(self._hits.get(new.req_id, 0), new.num_computed_tokens)
            self._known[new.req_id] = _Request(tokens, list(blocks), new.num_computed_tokens, len(prompt))
            fresh += blocks[new.num_computed_tokens // self.shape.block_tokens :]
        cached = scheduled.scheduled_cached_reqs
        for name, groups, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            known, blocks = self._known[name], [] if groups is None else list(groups[0])
            if name in cached.resumed_req_ids:
                self._hits[name] = max(self._hits[name], computed)
                known.blocks, known.computed, known.drafts = blocks, computed, []
                known.tokens = list(cached.all_token_ids[name])
                fresh += blocks[computed // self.shape.block_tokens :]
            else:
                known.blocks += blocks
                fresh += blocks
        if fresh:
            self.rows.poison(fresh)

    def _forward(self, name: str, scheduled: SchedulerOutput) -> range:
        """The target layers' rows of one request. Returns the tokens of this step, drafts included."""
        known, count = self._known[name], scheduled.num_scheduled_tokens[name]
        span = range(known.computed, known.computed + count)
        fed = [*known.tokens, *self._tried(name, scheduled)]
        if len(fed) < span.stop:
            raise RuntimeError(f"{name}: tokens {span} were scheduled, and only {len(fed)} are known")
        for layer in self.rows.target:
            self.rows.write(layer, known.blocks, span, self.rows.expected(layer, fed, span))
        return span

    def _tried(self, name: str, scheduled: SchedulerOutput) -> list[int]:
        """Drafts that this step verifies. The scheduler pads a request's first step of one token with no token, -1."""
        count = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
        return [*self._known[name].drafts, *[-1] * count][:count]

    def _sample(self, name: str, span: range, scheduled: SchedulerOutput) -> list[int]:
        """Tokens that this step generates: none while a prefill goes on, else accepted drafts and one more."""
        known = self._known[name]
        tried = self._tried(name, scheduled)
        if span.stop - len(tried) < len(known.tokens):
            known.computed = span.stop
            return []
        made = [sample(known.tokens)]
        for draft in tried:
            if draft != made[-1]:
                break
            made.append(sample([*known.tokens, *made]))
        known.tokens += made
        known.computed = len(known.tokens) - 1
        return made

    def _draft(self, name: str, span: range, *, sampled: bool) -> list[int]:
        """The draft layers' rows of one request. Returns its guess at the next token."""
        known = self._known[name]
        done = range(span.start, known.computed)
        seen = known.tokens[: done.stop + 1]
        if self.shape.order is Order.V1 and not sampled:
            # vLLM's V1 runner feeds the last token of the prompt where the next one belongs, and never mends the row
            seen[-1] = known.tokens[-1]
            self._unmended.add(done.stop - 1)
        for layer in self.rows.draft:
            self.rows.write(layer, known.blocks, done, self.rows.expected(layer, seen, done))
        right = sample(known.tokens)
        wrong = chain(known.tokens)[-1] % _HOLDS_BACK == 0
        known.drafts = [(right + 1) % 250 if wrong else right] if sampled else []
        return known.drafts


def _join_world_of_one(config: VllmConfig) -> None:
    """What a worker does before it makes its connector. Once per process."""
    if not parallel_state.model_parallel_is_initialized():
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(
                world_size=1,
                rank=0,
                local_rank=0,
                distributed_init_method=f"tcp://127.0.0.1:{free_port()}",
                backend="gloo",
            )
            parallel_state.initialize_model_parallel()


def _vllm_config(shape: Shape, connector: Mapping[str, Any]) -> VllmConfig:
    folder = str(cached_model("gqa" if shape.attention == "gqa" else "mla_mtp"))
    model = ModelConfig(model=folder, tokenizer=folder, dtype="bfloat16", max_model_len=1024, skip_tokenizer_init=True)
    parallel = ParallelConfig()
    speculative = None
    if shape.draft:
        speculative = SpeculativeConfig(
            method="mtp", num_speculative_tokens=1, target_model_config=model, target_parallel_config=parallel
        )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=shape.block_tokens, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=shape.batch_tokens,
            max_num_seqs=8,
            max_model_len=1024,
            is_encoder_decoder=False,
            async_scheduling=shape.asynchronous,
            enable_chunked_prefill=True,
            scheduler_reserve_full_isl=False,
        ),
        parallel_config=parallel,
        kv_transfer_config=KVTransferConfig(**connector),
        speculative_config=speculative,
        device_config=DeviceConfig("cpu"),
    )
    # what vLLM switches off on CPU, where this engine only pretends to be
    config.scheduler_config.async_scheduling = shape.asynchronous
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.max_num_batched_tokens = shape.batch_tokens
    config.cache_config.enable_prefix_caching = True
    config.cache_config.block_size = shape.block_tokens
    config.cache_config.num_gpu_blocks = shape.blocks
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def _specs(shape: Shape) -> dict[str, KVCacheSpec]:
    """What each layer keeps, target layers first."""
    common = {"block_size": shape.block_tokens, "dtype": torch.bfloat16}
    spec = (
        FullAttentionSpec(num_kv_heads=2, head_size=32, **common)
        if shape.attention == "gqa"
        else MLAAttentionSpec(num_kv_heads=1, head_size=_HEAD_ELEMENTS, **common)
    )
    return {f"model.layers.{layer}.self_attn.attn": spec for layer in range(shape.layers + shape.draft)}


def _kv_cache_config(shape: Shape, config: VllmConfig, specs: dict[str, KVCacheSpec]) -> Any:
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    layout: KVCacheLayout = config.cache_config.get_resolved_kv_cache_layout()
    page = kv_cache_utils._get_kv_cache_bytes_per_block(groups, layout)
    return kv_cache_utils.get_kv_cache_config_from_groups(config, groups, page * shape.blocks)
