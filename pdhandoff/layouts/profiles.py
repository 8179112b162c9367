"""Models as data: how many layers, which draft layers, which kinds of state and how wide.

A profile says what a model has; a catalogue entry (`layouts.catalogue`) says how one engine keeps it in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import msgspec

from pdhandoff.errors import ErrorCode, LayoutError
from pdhandoff.layouts.descriptor import Model, RopeOrder

__all__ = [
    "DSV32",
    "GLM5",
    "GLM5_2",
    "PROFILES",
    "GqaShape",
    "IndexerShape",
    "MlaShape",
    "Profile",
    "gqa",
    "mla",
    "profile",
]


@final
class MlaShape(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: one latent and one rotary row per token, for all heads."""

    latent: int = 512
    "elements of the normalised latent"
    rope: int = 64
    "elements of the shared rotary key"


@final
class IndexerShape(msgspec.Struct, frozen=True, kw_only=True):
    """A sparse-attention indexer: one index key per token, on the layers that own an indexer."""

    rope_order: RopeOrder
    "of its leading rotary elements"
    owners: tuple[int, ...]
    "global ids of the layers that keep index keys, ascending, draft layers included"
    elements: int = 128
    rope: int = 64
    "how many leading elements are rotary"


@final
class GqaShape(msgspec.Struct, frozen=True, kw_only=True):
    """Grouped-query attention: a key and a value row per token and key/value head."""

    heads: int
    "key/value heads of the whole model"
    head_elements: int
    rope_order: RopeOrder = RopeOrder.HALF_SPLIT
    rope: int
    "how many leading elements of a key are rotary; 0 with RopeOrder.NONE"


@final
class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One model's attention state, independent of any engine. It has `mla` (perhaps with an `indexer`) or `gqa`."""

    name: str
    layers: int
    "target layers, ids 0..layers-1"
    draft_layers: tuple[int, ...] = ()
    "global ids of the draft (MTP) layers"
    mla: MlaShape | None = None
    indexer: IndexerShape | None = None
    gqa: GqaShape | None = None

    @property
    def all_layers(self) -> tuple[int, ...]:
        """Target layers, then draft layers."""
        return (*range(self.layers), *self.draft_layers)

    def model(
        self,
        *,
        revision: str = "",
        weight_epoch: int = 0,
        spec_depth: int = 0,
        draft_layers: Sequence[int] | None = None,
    ) -> Model:
        """The identity that goes into a layout. `draft_layers=()` describes an engine that keeps no draft state."""
        drafts = self.draft_layers if draft_layers is None else tuple(draft_layers)
        return Model(
            name=self.name,
            revision=revision,
            weight_epoch=weight_epoch,
            layers=self.layers,
            draft_layers=drafts,
            spec_depth=spec_depth,
        )

    def indexer_owner(self, layer: int) -> int:
        """The layer whose index keys this layer reads: itself, or the nearest owner before it.

        Raises LayoutError when the model has no indexer or no owner precedes the layer.
        """
        owners = () if self.indexer is None else self.indexer.owners
        if layer in self.draft_layers:
            owners = tuple(owner for owner in owners if owner == layer)
        before = [owner for owner in owners if owner <= layer]
        if not before or layer not in self.all_layers:
            raise LayoutError(
                ErrorCode.LAYOUT_MISMATCH,
                f"{self.name}: layer {layer} reads no index keys of any layer",
                field="indexer.owners",
            )
        return before[-1]

    @property
    def indexer_sharing(self) -> tuple[tuple[int, int], ...]:
        """`(layer, owner)` for every target layer that reads the index keys of an earlier layer."""
        if self.indexer is None:
            return ()
        pairs = ((layer, self.indexer_owner(layer)) for layer in range(self.layers))
        return tuple((layer, owner) for layer, owner in pairs if layer != owner)


def mla(
    name: str,
    *,
    layers: int,
    draft_layers: int = 0,
    latent: int = 512,
    rope: int = 64,
    index_rope_order: RopeOrder | None = None,
    index_owners: Sequence[int] | None = None,
    index_elements: int = 128,
    index_rope: int = 64,
) -> Profile:
    """A model with latent attention.

    Args:
        name: family and shape, as both sides call it.
        layers: target layers.
        draft_layers: how many MTP layers follow them.
        latent: elements of the latent row.
        rope: elements of the rotary row.
        index_rope_order: order of an index key's rotary elements. None: the model has no sparse indexer.
        index_owners: global ids of the layers that keep index keys. None: all of them.
        index_elements: elements of an index key.
        index_rope: how many of them, from the first on, are rotary.
    """
    drafts = tuple(range(layers, layers + draft_layers))
    indexer = None
    if index_rope_order is not None:
        owners = (*range(layers), *drafts) if index_owners is None else tuple(index_owners)
        indexer = IndexerShape(rope_order=index_rope_order, owners=owners, elements=index_elements, rope=index_rope)
    return Profile(
        name=name, layers=layers, draft_layers=drafts, mla=MlaShape(latent=latent, rope=rope), indexer=indexer
    )


def gqa(
    name: str,
    *,
    layers: int,
    heads: int,
    head_elements: int,
    draft_layers: int = 0,
    rope_order: RopeOrder = RopeOrder.HALF_SPLIT,
    rope: int | None = None,
) -> Profile:
    """A model with grouped-query attention.

    Args:
        name: family and shape, as both sides call it.
        layers: target layers.
        heads: key/value heads of the whole model.
        head_elements: elements of one key (and one value) of one head.
        draft_layers: how many draft layers follow the target's.
        rope_order: order of a key's rotary elements.
        rope: how many of them, from the first on, are rotary. None: all, or none with RopeOrder.NONE.
    """
    if rope is None:
        rope = 0 if rope_order is RopeOrder.NONE else head_elements
    shape = GqaShape(heads=heads, head_elements=head_elements, rope_order=rope_order, rope=rope)
    return Profile(name=name, layers=layers, draft_layers=tuple(range(layers, layers + draft_layers)), gqa=shape)


GLM5: Final = mla("glm5", layers=78, draft_layers=1, index_rope_order=RopeOrder.INTERLEAVED)
"GLM-5: 78 layers and one MTP layer, an indexer on each"

DSV32: Final = mla("dsv32", layers=61, draft_layers=1, index_rope_order=RopeOrder.HALF_SPLIT)
"DeepSeek-V3.2: 61 layers and one MTP layer, an indexer on each"

GLM5_2: Final = mla(
    "glm5_2",
    layers=78,
    draft_layers=1,
    index_rope_order=RopeOrder.INTERLEAVED,
    index_owners=(0, 1, *range(2, 78, 4), 78),
)
"GLM-5.2: indexers on layers 0, 1, 2, then on every fourth, and on the MTP layer; the others reuse the leader's choice"

PROFILES: Final = {entry.name: entry for entry in (GLM5, DSV32, GLM5_2)}
"the models known by name; `mla` and `gqa` describe any other"


def profile(name: str) -> Profile:
    """The profile of that name. Raises LayoutError that lists the known ones otherwise."""
    found = PROFILES.get(name)
    if found is None:
        raise LayoutError(
            ErrorCode.LAYOUT_MISMATCH,
            f"model {name!r} is not known here ({', '.join(PROFILES)} are); describe it with mla() or gqa()",
            field="model.name",
        )
    return found
