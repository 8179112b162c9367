from __future__ import annotations

import msgspec
import pytest

from pdhandoff.errors import LayoutError
from pdhandoff.layouts import (
    Component,
    ComponentKind,
    Element,
    Layout,
    Model,
    Plane,
    Policy,
    Quantisation,
    RopeOrder,
    bridge,
    catalogue,
    profiles,
)
from pdhandoff.layouts.catalogue import DeviceRole, Options
from support.changes import CHANGES
from support.layouts import TINY, TINY_GQA, gqa_layout, mla_layout, with_component, with_model, with_plane

MLA = mla_layout()
GQA = gqa_layout()


def test_every_field_is_changed_in_the_table() -> None:
    structs: tuple[type[msgspec.Struct], ...] = (Layout, Model, Component, Plane, Quantisation)
    fields = {f"{struct.__name__}.{name}" for struct in structs for name in struct.__struct_fields__}
    assert fields == {name.split(" ")[0] for name in CHANGES}


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_is_bridged_or_refused_by_name(name: str) -> None:
    change = CHANGES[name]
    if change.refused is None:
        assert bridge(change.before, change.after).destination is change.after
        return
    with pytest.raises(LayoutError) as caught:
        bridge(change.before, change.after)
    assert caught.value.field == change.refused


def test_a_refusal_names_both_values_and_what_would_have_gone_wrong() -> None:
    with pytest.raises(LayoutError) as caught:
        bridge(MLA, with_model(MLA, revision="b"))
    assert caught.value.reason == (
        "model.revision: source has '', destination has 'b': state of other weights decodes to fluent nonsense; "
        "load one revision on both sides"
    )


def test_the_same_layout_is_copied_as_it_is() -> None:
    plan = bridge(MLA, MLA)
    assert [component.raw for component in plan.components] == [True, True]
    assert [component.source_layers for component in plan.components] == [(0, 1, 2, 3), (0, 1, 2, 3)]
    assert not plan.mtp_cold
    assert plan.unused == ()
    assert plan.landing == MLA


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("Component.page_tokens", True),
        ("Plane.element_stride", True),
        ("Plane.rotation", False),
        ("Plane.rope_order", False),
        ("Plane.quantisation", False),
        ("Quantisation.group", False),
        ("Quantisation.scale_plane", True),
    ],
)
def test_only_what_changes_stored_bytes_is_converted(name: str, raw: bool) -> None:
    change = CHANGES[name]
    assert all(component.raw for component in bridge(change.before, change.after).components) is raw


@pytest.mark.parametrize("source", ["vllm.mla", "vllm.fp8_ds_mla"])
@pytest.mark.parametrize("destination", ["tilert.bf16", "tilert.fp8"])
def test_vllm_becomes_tilert(source: str, destination: str) -> None:
    plan = bridge(
        catalogue.build(source, profiles.GLM5), catalogue.build(destination, profiles.GLM5, Options(length=4096))
    )
    rows, keys = plan.components
    assert len(rows.layers) == len(keys.layers) == 79
    parts = {part.name: part.raw for part in rows.parts}
    assert parts == {"latent": (source, destination) in RAW_LATENT, "rope": True}
    assert not keys.raw


RAW_LATENT = {("vllm.mla", "tilert.bf16"), ("vllm.fp8_ds_mla", "tilert.fp8")}


def test_a_device_that_needs_less_leaves_components_unused() -> None:
    options = Options(length=4096)
    keys = catalogue.tilert_layout(profiles.GLM5, options, role=DeviceRole.INDEX)
    plan = bridge(catalogue.build("vllm.fp8_ds_mla", profiles.GLM5), keys)
    assert plan.unused == ("mla_latent",)
    assert [component.destination.name for component in plan.components] == ["index_key"]


def test_missing_layers_are_counted_and_named() -> None:
    with pytest.raises(LayoutError, match="nobody serves layer 2, 3") as caught:
        bridge(with_component(MLA, "index_key", layers=(0, 1)), MLA)
    assert "source registers 2 layers of index_key, destination declares 4" in caught.value.reason


def test_keys_and_values_are_never_converted_unless_the_policy_says_so() -> None:
    half = with_plane(GQA, "key_value", "key", element=Element.F16)
    with pytest.raises(LayoutError, match=r"bf16 \(2 bytes an element\), destination has f16 \(2 bytes an element\)"):
        bridge(GQA, half)
    allowed = Policy(conversions=frozenset({(ComponentKind.KEY_VALUE, Element.BF16, Element.F16)}))
    (component,) = bridge(GQA, half, allowed).components
    assert [part.raw for part in component.parts] == [False, True]


def test_a_policy_may_forbid_all_conversions() -> None:
    with pytest.raises(LayoutError) as caught:
        bridge(MLA, catalogue.build("vllm.mla", TINY), Policy(conversions=frozenset()))
    assert caught.value.field == "mla_latent.latent.element"
    assert "e4m3 with one f32 scale per 128 (1 byte an element)" in caught.value.reason
    assert bridge(MLA, MLA, Policy(conversions=frozenset())).components[0].raw


def test_ranks_of_other_tensor_parallel_sizes_meet_in_part() -> None:
    whole = gqa_layout()
    first, second = (gqa_layout(tp_rank=rank, tp_size=2) for rank in range(2))
    assert bridge(whole, second).components[0].raw
    with pytest.raises(LayoutError, match=r"source has 0\.\.1, destination has 0\.\.3") as caught:
        bridge(first, whole)
    assert caught.value.field == "key_value.heads"
    assert bridge(first, whole, Policy(partial=True)).components[0].destination.heads == 4


def test_a_pipeline_stage_brings_its_layers_and_leaves_the_rest_to_others() -> None:
    stage = with_component(MLA, "mla_latent", layers=(0, 1))
    stage = msgspec.structs.replace(stage, components=stage.components[:1])
    plan = bridge(stage, MLA, Policy(partial=True))
    assert [component.source_layers for component in plan.components] == [(0, 1)]
    assert plan.landing.component("mla_latent").layers == (0, 1)
    with pytest.raises(LayoutError):
        bridge(stage, MLA)


def test_another_depth_of_speculation_needs_the_policy() -> None:
    deeper = with_model(MLA, spec_depth=3)
    with pytest.raises(LayoutError, match="source has 0, destination has 3"):
        bridge(MLA, deeper)
    assert not bridge(MLA, deeper, Policy(other_spec_depth=True)).mtp_cold


def test_draft_layers_that_both_sides_keep_still_move_after_a_cold_start() -> None:
    one = profiles.mla("m", layers=2, draft_layers=1, index_rope_order=RopeOrder.HALF_SPLIT)
    two = profiles.mla("m", layers=2, draft_layers=2, index_rope_order=RopeOrder.HALF_SPLIT)
    plan = bridge(mla_layout(one), mla_layout(two), Policy(cold_drafts=True))
    assert plan.mtp_cold
    assert plan.components[0].source_layers == (0, 1, 2)
    assert plan.landing.validate().model.draft_layers == (2,)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_an_inconsistent_side_is_refused_before_anything_is_compared(side: str) -> None:
    broken = with_component(MLA, "index_key", page_tokens=0)
    with pytest.raises(LayoutError) as caught:
        bridge(broken, MLA) if side == "source" else bridge(MLA, broken)
    assert caught.value.field == "index_key.page_tokens"


def test_other_engines_of_one_model_are_bridged_by_strides_alone() -> None:
    entries = ("vllm.flash_attn", "vllm.flashinfer", "vllm.cpu_attn", "huggingface.dynamic")
    layouts = [catalogue.build(entry, TINY_GQA, Options(length=100)) for entry in entries]
    for source in layouts:
        for destination in layouts:
            assert bridge(source, destination).components[0].raw
