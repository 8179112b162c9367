from __future__ import annotations

import msgspec
import pytest

from pdhandoff.errors import LayoutError
from pdhandoff.layouts import Layout, Policy, bridge, catalogue, joint_landing, profiles
from pdhandoff.layouts.catalogue import Options
from support.layouts import TINY, gqa_layout, mla_layout, with_component, with_model

MLA = mla_layout()
PARTIAL = Policy(partial=True)


def stage(*layers: int) -> Layout:
    """What a pipeline rank with these layers holds of both components."""
    layout = with_component(MLA, "mla_latent", layers=layers)
    return with_component(layout, "index_key", layers=layers)


def test_one_source_that_brings_everything_is_its_own_landing() -> None:
    source = catalogue.build("vllm.fp8_ds_mla", profiles.GLM5_2)
    plan = bridge(source, catalogue.build("tilert.bf16", profiles.GLM5_2, Options(length=64)))
    assert joint_landing([plan]) == plan.landing


def test_pipeline_ranks_add_up() -> None:
    bridges = [bridge(stage(0, 1), MLA, PARTIAL), bridge(stage(2, 3), MLA, PARTIAL)]
    assert bridges[0].landing.component("mla_latent").layers == (0, 1)
    assert joint_landing(bridges) == MLA


def test_tensor_parallel_ranks_add_up() -> None:
    whole = gqa_layout()
    bridges = [bridge(gqa_layout(tp_rank=rank, tp_size=2), whole, PARTIAL) for rank in range(2)]
    assert joint_landing(bridges) == whole


def test_a_layer_that_no_shard_brings_is_named() -> None:
    with pytest.raises(LayoutError, match="the shards bring 3 layers of mla_latent, destination declares 4") as caught:
        joint_landing([bridge(stage(0, 1), MLA, PARTIAL), bridge(stage(3), MLA, PARTIAL)])
    assert caught.value.field == "mla_latent.layers"
    assert "nobody serves layer 2:" in caught.value.reason


def test_a_component_that_no_shard_brings_is_named() -> None:
    rows = msgspec.structs.replace(MLA, components=MLA.components[:1])
    with pytest.raises(LayoutError, match="nobody serves layer 0, 1, 2, 3") as caught:
        joint_landing([bridge(rows, MLA, PARTIAL)])
    assert caught.value.field == "index_key.layers"


def test_cold_draft_layers_are_nobodys_to_bring() -> None:
    cold = mla_layout(model=TINY.model(draft_layers=()))
    plan = bridge(cold, MLA, Policy(partial=True, cold_drafts=True))
    assert joint_landing([plan]).validate().component("index_key").layers == (0, 1, 2)


def test_shards_that_share_layers_differently_are_refused() -> None:
    layers = (0, 1, 3)
    over, under = (with_component(MLA, "index_key", layers=layers, shared_layers=((2, owner),)) for owner in (1, 0))
    with pytest.raises(LayoutError, match="layer 2 with the rows of layer 1, another with those of 0") as caught:
        joint_landing([bridge(over, MLA, PARTIAL), bridge(under, MLA, PARTIAL)])
    assert caught.value.field == "index_key.layers"


def test_shards_of_different_models_or_to_different_destinations_are_refused() -> None:
    other = with_model(MLA, revision="b")
    with pytest.raises(LayoutError, match="different destinations"):
        joint_landing([bridge(MLA, MLA), bridge(MLA, stage(0))])
    with pytest.raises(LayoutError, match="different destinations"):
        joint_landing([bridge(MLA, MLA), bridge(other, other)])
    deeper = bridge(with_model(MLA, spec_depth=2), MLA, Policy(other_spec_depth=True))
    with pytest.raises(LayoutError, match="different models"):
        joint_landing([bridge(MLA, MLA), deeper])
    with pytest.raises(LayoutError, match="no shard"):
        joint_landing([])
