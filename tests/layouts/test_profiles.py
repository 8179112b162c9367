from __future__ import annotations

import pytest

from pdhandoff.errors import LayoutError
from pdhandoff.layouts import RopeOrder, profiles


def test_glm5_has_78_layers_and_one_draft_layer() -> None:
    assert profiles.GLM5.all_layers == tuple(range(79))
    assert profiles.GLM5.draft_layers == (78,)
    assert profiles.GLM5.indexer is not None
    assert profiles.GLM5.indexer.owners == tuple(range(79))
    assert profiles.GLM5.indexer.rope_order is RopeOrder.INTERLEAVED
    assert profiles.GLM5.indexer_sharing == ()


def test_dsv32_has_61_layers_and_one_draft_layer() -> None:
    assert profiles.DSV32.all_layers == tuple(range(62))
    assert profiles.DSV32.indexer is not None
    assert profiles.DSV32.indexer.rope_order is RopeOrder.HALF_SPLIT


def test_glm5_2_owns_indexers_on_some_layers_only() -> None:
    assert profiles.GLM5_2.indexer is not None
    owners = profiles.GLM5_2.indexer.owners
    assert owners[:5] == (0, 1, 2, 6, 10)
    assert owners[-2:] == (74, 78)
    assert len([layer for layer in owners if layer < 78]) == 21
    assert [profiles.GLM5_2.indexer_owner(layer) for layer in (0, 1, 2, 3, 5, 6, 7, 73, 77, 78)] == [
        *(0, 1, 2, 2, 2, 6, 6, 70, 74, 78)
    ]
    assert len(profiles.GLM5_2.indexer_sharing) == 78 - 21


@pytest.mark.parametrize("layer", [-1, 79])
def test_a_layer_that_the_model_has_not_reads_no_index_keys(layer: int) -> None:
    with pytest.raises(LayoutError, match=f"layer {layer} reads no index keys"):
        profiles.GLM5.indexer_owner(layer)


def test_a_draft_layer_never_shares_a_target_layers_index_keys() -> None:
    model = profiles.mla("m", layers=4, draft_layers=1, index_rope_order=RopeOrder.HALF_SPLIT, index_owners=(0, 2))
    assert model.indexer_sharing == ((1, 0), (3, 2))
    with pytest.raises(LayoutError, match="layer 4 reads no index keys"):
        model.indexer_owner(4)


def test_a_model_without_an_indexer() -> None:
    model = profiles.mla("dense", layers=4)
    assert model.indexer is None
    assert model.indexer_sharing == ()
    with pytest.raises(LayoutError, match="layer 0 reads no index keys"):
        model.indexer_owner(0)


def test_generic_grouped_query_attention() -> None:
    model = profiles.gqa("g", layers=4, heads=8, head_elements=128, draft_layers=2)
    assert model.all_layers == (0, 1, 2, 3, 4, 5)
    assert model.gqa == profiles.GqaShape(heads=8, head_elements=128, rope=128)
    partly = profiles.gqa("g", layers=4, heads=8, head_elements=128, rope_order=RopeOrder.INTERLEAVED, rope=64)
    assert partly.gqa is not None
    assert partly.gqa.rope == 64
    none = profiles.gqa("g", layers=4, heads=8, head_elements=128, rope_order=RopeOrder.NONE)
    assert none.gqa is not None
    assert none.gqa.rope == 0


def test_a_model_carries_the_operators_identity() -> None:
    model = profiles.GLM5.model(revision="r1", weight_epoch=3, spec_depth=1)
    assert (model.name, model.revision, model.weight_epoch, model.layers) == ("glm5", "r1", 3, 78)
    assert (model.draft_layers, model.spec_depth) == ((78,), 1)
    assert profiles.GLM5.model(draft_layers=()).draft_layers == ()


def test_profiles_by_name() -> None:
    for name in ("glm5", "glm5_2", "dsv32"):
        assert profiles.profile(name).name == name
    with pytest.raises(LayoutError, match="'llama' is not known here") as caught:
        profiles.profile("llama")
    assert caught.value.field == "model.name"
