"""What a worker's registered caches hold, described for a handoff: classified by name and spec, measured by strides.

Nothing here changes, views or copies a tensor: under some of vLLM's layouts that would copy a whole cache. Sources:
vLLM 0.33, vllm/v1/kv_cache_interface.py (groups, specs, blocks and kernel pages), vllm/v1/worker/utils.py (one
allocation), vllm/models/deepseek_v32 (names); names and shapes checked by running vLLM 0.32 on CPU and 0.26 on an H200.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import msgspec

from pdhandoff.engines.base import Memory, MemoryKind
from pdhandoff.errors import ErrorCode, LayoutError, LocalError
from pdhandoff.layouts import Component, ComponentKind, Element, Layout, Model, RopeOrder
from pdhandoff.planner import Placement, Shard
from pdhandoff_vllm.components import describe
from pdhandoff_vllm.config import Config

__all__ = ["CacheSpec", "Caches", "ModelFacts", "describe_caches", "layer_number", "piece_tokens"]

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_RING_PARTS: Final = 8
"pieces that the ring has room for: some are copied in while others are sent"
_INDEX: Final = re.compile(r"\.indexer\.k_cache$")


@final
class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM says of one layer's cache."""

    group: int
    "cache group: layers that share a block table"
    block_tokens: int
    "tokens in a block of the manager"
    kind: str
    "class of vLLM's spec"
    heads: int = 1
    head_size: int = 0
    element: str = ""
    "vLLM's cache type where it names one (`fp8_ds_mla`)"
    backend: str = ""
    "name of the attention backend; empty: not known"


@final
class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker knows of its model, its place and its engine."""

    name: str
    revision: str = ""
    layers: int
    "target layers of the whole model"
    draft_layers: tuple[int, ...] | None = None
    "global ids of the draft layers; None: those that have a cache here"
    draft_tokens: int = 0
    kv_heads: int = 1
    "key/value heads of the whole model"
    latent: int = 512
    rope: int = 64
    "rotary elements of a latent row"
    index_rope_order: RopeOrder = RopeOrder.HALF_SPLIT
    index_scales: Element = Element.F32
    key_rope_order: RopeOrder = RopeOrder.HALF_SPLIT
    key_rope_share: float = 1.0
    "share of a key's elements that is rotary"
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def shard(self) -> Shard:
        """This worker among all of a handoff."""
        return Shard(self.pp_rank * self.tp_size + self.tp_rank, self.pp_size * self.tp_size)


@final
class Caches(NamedTuple):
    """A worker's caches as a producer takes them."""

    layout: Layout
    placements: dict[str, Placement]
    memory: tuple[Memory, ...]
    "each allocation once"
    groups: dict[str, tuple[int, int]]
    "component -> its cache group, and kernel pages per block"
    replicas: Shard
    "this worker among those that hold the same rows"
    block_bytes: tuple[int, ...]
    "for each cache group, bytes of one block in all of its layers"

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(piece.length for piece in self.memory)

    @property
    def on_cuda(self) -> bool:
        """Whether they are in GPU memory."""
        return any(piece.kind is MemoryKind.CUDA for piece in self.memory)


class _Layer(NamedTuple):
    number: int
    name: str
    tensor: Any
    spec: CacheSpec


def layer_number(name: str) -> int:
    """The global layer id in a layer's name, whatever prefix a wrapper has given it. Raises LayoutError."""
    found = _LAYER.search(name)
    if found is None:
        raise _bad(name, "its name has no layers.N in it, so nobody knows which layer's rows it holds")
    return int(found[1])


def describe_caches(
    tensors: Mapping[str, Any], specs: Mapping[str, CacheSpec], facts: ModelFacts, *, num_blocks: int
) -> Caches:
    """Describe registered caches.

    Args:
        tensors: layer name -> cache, as vLLM registers them.
        specs: layer name -> what vLLM says of it.
        facts: the model.
        num_blocks: blocks of the manager.

    Raises:
        LayoutError: a cache that cannot be described; the sentence names it and says what to change.
    """
    if not tensors:
        raise _bad("kv_caches", "vLLM has registered none: there is nothing to hand off")
    layers = [_Layer(layer_number(name), name, tensor, _spec_of(name, specs)) for name, tensor in tensors.items()]
    sorts: dict[bool, list[_Layer]] = {}
    for layer in sorted(layers, key=lambda layer: layer.number):
        sorts.setdefault(_INDEX.search(layer.name) is not None, []).append(layer)
    components: list[Component] = []
    placements: dict[str, Placement] = {}
    groups: dict[str, tuple[int, int]] = {}
    block_bytes: dict[int, int] = {}
    for index, held in sorted(sorts.items()):
        component = _component(held, facts, index=index)
        factor = _pages_per_block(held, component, num_blocks)
        bases = [layer.tensor.data_ptr() for layer in held]
        components.append(component)
        placements[component.name] = Placement(num_blocks * factor, {"": bases})
        groups[component.name] = (held[0].spec.group, factor)
        page = component.row_bytes * component.page_tokens
        block_bytes[held[0].spec.group] = block_bytes.get(held[0].spec.group, 0) + page * factor * len(held)
    drafts = _draft_layers(layers, facts)
    model = Model(
        name=facts.name,
        revision=facts.revision,
        layers=facts.layers,
        draft_layers=drafts,
        spec_depth=facts.draft_tokens if drafts else 0,
    )
    return Caches(
        layout=Layout(name=f"vllm/{facts.name}", model=model, components=tuple(components)).validate(),
        placements=placements,
        memory=_allocations(tensors.values()),
        groups=groups,
        replicas=_replicas(components, facts),
        block_bytes=tuple(block_bytes.get(group, 0) for group in range(max(block_bytes) + 1)),
    )


def piece_tokens(config: Config, caches: Caches) -> int:
    """Tokens that are handed to the library at once: whole pages that are a small part of the ring.

    Raises:
        LocalError: CONFIG, when not even one page is.
    """
    page = max(component.page_tokens for component in caches.layout.components)
    row = sum(len(component.layers) * component.row_bytes for component in caches.layout.components)
    pages = config.staging_bytes // _RING_PARTS // (page * row)
    if not pages:
        raise LocalError(
            ErrorCode.CONFIG,
            f"kv_connector_extra_config: staging_bytes: {config.staging_bytes} is too small for pages of {page} "
            f"tokens; set it to {_RING_PARTS * page * row} or more",
        )
    return pages * page


def _bad(name: str, reason: str) -> LayoutError:
    return LayoutError(ErrorCode.LAYOUT_MISMATCH, f"cache {name}: {reason}", field=name)


def _spec_of(name: str, specs: Mapping[str, CacheSpec]) -> CacheSpec:
    spec = specs.get(name)
    if spec is None:
        raise _bad(name, "vLLM registered it, and its cache configuration does not have it")
    return spec


def _component(held: Sequence[_Layer], facts: ModelFacts, *, index: bool) -> Component:
    """The component of these layers, which must all be alike."""
    numbers = [layer.number for layer in held]
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        names = ", ".join(layer.name for layer in held if layer.number == twice)
        raise _bad(names, f"layer {twice} has several caches of one kind; hand-off of such models is not supported")
    first = held[0]
    component = describe(first.name, first.tensor, first.spec, facts, layers=numbers, index=index)
    for layer in held[1:]:
        other = describe(layer.name, layer.tensor, layer.spec, facts, layers=numbers, index=index)
        if other != component or layer.spec.group != first.spec.group:
            raise _bad(
                layer.name,
                f"its geometry or cache group differs from that of {first.name}: models that mix kinds of attention "
                "are not handed off",
            )
    if index:
        return msgspec.structs.replace(component, shared_layers=_shared(numbers, facts))
    return component


def _shared(owners: Sequence[int], facts: ModelFacts) -> tuple[tuple[int, int], ...]:
    """`(layer, owner)` of the target layers that reuse an earlier layer's indexer."""
    if facts.pp_size > 1:  # a stage does not see whose its first layers read
        return ()
    pairs = []
    for layer in range(facts.layers):
        before = [owner for owner in owners if owner <= layer]
        if before and before[-1] != layer:
            pairs.append((layer, before[-1]))
    return tuple(pairs)


def _pages_per_block(held: Sequence[_Layer], component: Component, num_blocks: int) -> int:
    """Kernel pages in a block of the manager."""
    first = held[0]
    factor, rest = divmod(first.spec.block_tokens, component.page_tokens)
    if rest:
        raise _bad(
            first.name,
            f"a block of {first.spec.block_tokens} tokens is no whole number of {component.page_tokens}-token pages; "
            "choose another --block-size",
        )
    for layer in held:
        have = int(layer.tensor.shape[0])
        if have < num_blocks * factor:
            raise _bad(layer.name, f"it has {have} pages where {num_blocks} blocks need {num_blocks * factor}")
    return factor


def _draft_layers(layers: Sequence[_Layer], facts: ModelFacts) -> tuple[int, ...]:
    here = sorted({layer.number for layer in layers if layer.number >= facts.layers})
    if facts.draft_layers is None:
        return tuple(here)
    unknown = [number for number in here if number not in facts.draft_layers]
    if unknown:
        raise _bad(
            "speculative_config", f"layers {unknown} have caches, and the model's draft layers are {facts.draft_layers}"
        )
    return facts.draft_layers


def _replicas(components: Sequence[Component], facts: ModelFacts) -> Shard:
    """State without heads is the same on all tensor-parallel ranks, a head on as many as there are more ranks."""
    if all(component.kind is not ComponentKind.KEY_VALUE for component in components):
        return Shard(facts.tp_rank, facts.tp_size)
    copies = max(1, facts.tp_size // facts.kv_heads)
    return Shard(facts.tp_rank % copies, copies)


def _allocations(tensors: Any) -> tuple[Memory, ...]:
    found: dict[int, Memory] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address, length = storage.data_ptr(), storage.nbytes()
        cuda = tensor.device.type == "cuda"
        kind, device = (MemoryKind.CUDA, tensor.device.index or 0) if cuda else (MemoryKind.CPU, 0)
        found[address] = Memory(address, length, kind, device, owner=storage)
    return tuple(found.values())
