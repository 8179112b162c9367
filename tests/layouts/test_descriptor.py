from __future__ import annotations

import msgspec
import pytest

from pdhandoff.errors import ErrorCode, LayoutError
from pdhandoff.layouts import Element, Layout, Quantisation, RopeOrder, Rotation
from pdhandoff.limits import Limits
from support.layouts import gqa_layout, mla_layout, with_component, with_model, with_plane

MLA = mla_layout()
GQA = gqa_layout()
INDEX = "index_key"

BROKEN = {
    "no components": (msgspec.structs.replace(MLA, components=()), "components"),
    "two components of one name": (msgspec.structs.replace(MLA, components=MLA.components * 2), "components"),
    "model without a name": (with_model(MLA, name=""), "model.name"),
    "long revision": (with_model(MLA, revision="x" * 1025), "model.revision"),
    "no layers": (with_model(MLA, layers=0), "model.layers"),
    "negative epoch": (with_model(MLA, weight_epoch=-1), "model.weight_epoch"),
    "absurd depth": (with_model(MLA, spec_depth=1 << 20), "model.spec_depth"),
    "too many drafts": (with_model(MLA, draft_layers=tuple(range(3, 2000))), "model.draft_layers"),
    "draft among targets": (with_model(MLA, draft_layers=(2,)), "model.draft_layers"),
    "drafts out of order": (with_model(MLA, draft_layers=(4, 3)), "model.draft_layers"),
    "component without a name": (with_component(MLA, INDEX, name=""), "component.name"),
    "no tokens": (with_component(MLA, INDEX, page_tokens=0), "index_key.page_tokens"),
    "too many layers": (with_component(MLA, INDEX, layers=tuple(range(1025))), "index_key.layers"),
    "layers out of order": (with_component(MLA, INDEX, layers=(1, 0)), "index_key.layers"),
    "layer twice": (with_component(MLA, INDEX, layers=(1, 1)), "index_key.layers"),
    "unknown layer": (with_component(MLA, INDEX, layers=(0, 9)), "index_key.layers"),
    "sharing by too many": (
        with_component(MLA, INDEX, shared_layers=tuple((i, 0) for i in range(1025))),
        "index_key.shared_layers",
    ),
    "sharing out of order": (
        with_component(MLA, INDEX, layers=(0, 3), shared_layers=((2, 0), (1, 0))),
        "index_key.shared_layers",
    ),
    "sharing by an unknown layer": (
        with_component(MLA, INDEX, layers=(0,), shared_layers=((9, 0),)),
        "index_key.shared_layers",
    ),
    "sharing beside own rows": (with_component(MLA, INDEX, shared_layers=((1, 0),)), "index_key.shared_layers"),
    "sharing with nobody": (
        with_component(MLA, INDEX, layers=(0,), shared_layers=((2, 1),)),
        "index_key.shared_layers",
    ),
    "no heads": (with_component(GQA, "key_value", heads=0), "key_value.heads"),
    "heads beyond the model's": (with_component(GQA, "key_value", head_start=1), "key_value.heads"),
    "negative head": (with_component(GQA, "key_value", head_start=-1), "key_value.heads"),
    "no planes": (with_component(MLA, INDEX, planes=()), "index_key.planes"),
    "plane twice": (
        with_component(MLA, INDEX, planes=MLA.component(INDEX).planes[:1] * 2),
        "index_key.planes",
    ),
    "plane without a name": (with_plane(MLA, "mla_latent", "rope", name=""), "mla_latent..name"),
    "no elements": (with_plane(MLA, "mla_latent", "rope", elements=0), "mla_latent.rope.elements"),
    "huge row": (with_plane(MLA, "mla_latent", "rope", elements=1 << 24), "mla_latent.rope.elements"),
    "negative offset": (with_plane(MLA, "mla_latent", "rope", offset=-1), "mla_latent.rope.offset"),
    "absurd stride": (with_plane(MLA, "mla_latent", "rope", page_stride=1 << 48), "mla_latent.rope.page_stride"),
    "elements overlap": (
        with_plane(MLA, "mla_latent", "rope", element_stride=1),
        "mla_latent.rope.element_stride",
    ),
    "tokens overlap": (with_plane(MLA, "mla_latent", "rope", token_stride=127), "mla_latent.rope.token_stride"),
    "tokens in one place": (with_plane(MLA, "mla_latent", "rope", token_stride=0), "mla_latent.rope.token_stride"),
    "heads overlap": (with_plane(GQA, "key_value", "key", head_stride=15), "key_value.key.head_stride"),
    "heads in one place": (with_plane(GQA, "key_value", "key", head_stride=0), "key_value.key.head_stride"),
    "head across tokens": (with_plane(GQA, "key_value", "key", head_stride=120), "key_value.key.token_stride"),
    "pages overlap": (
        with_plane(MLA, "mla_latent", "rope", page_stride=41984 - 600),
        "mla_latent.rope.page_stride",
    ),
    "pages in one place": (with_plane(MLA, "mla_latent", "rope", page_stride=0), "mla_latent.rope.page_stride"),
    "next page is the next token": (
        with_plane(MLA, "mla_latent", "rope", page_stride=656),
        "mla_latent.rope.token_stride",
    ),
    "odd rope": (with_plane(MLA, "mla_latent", "rope", rope_elements=63), "mla_latent.rope.rope_elements"),
    "rope wider than the row": (
        with_plane(MLA, "mla_latent", "rope", rope_elements=66),
        "mla_latent.rope.rope_elements",
    ),
    "rope without an order": (
        with_plane(MLA, "mla_latent", "rope", rope_order=RopeOrder.NONE),
        "mla_latent.rope.rope_elements",
    ),
    "order without rope": (with_plane(MLA, "mla_latent", "rope", rope_elements=0), "mla_latent.rope.rope_elements"),
    "rotation of 64": (
        with_plane(MLA, "mla_latent", "rope", rotation=Rotation.HADAMARD128),
        "mla_latent.rope.rotation",
    ),
    "fp8 without scales": (with_plane(MLA, INDEX, "index_key", quantisation=None), "index_key.index_key.quantisation"),
    "empty group": (
        with_plane(MLA, INDEX, "index_key", quantisation=Quantisation(scale_plane="index_key.scale", group=0)),
        "index_key.index_key.quantisation",
    ),
    "scales elsewhere": (
        with_plane(MLA, INDEX, "index_key", quantisation=Quantisation(scale_plane="latent.scale", group=128)),
        "index_key.index_key.quantisation",
    ),
    "scales too few": (
        with_plane(MLA, INDEX, "index_key", quantisation=Quantisation(scale_plane="index_key.scale", group=64)),
        "index_key.index_key.quantisation",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_inconsistent_layout_is_refused_naming_the_field(case: str) -> None:
    layout, field = BROKEN[case]
    with pytest.raises(LayoutError) as caught:
        layout.validate()
    assert caught.value.field == field
    assert caught.value.reason.startswith(f"{field}: ")
    assert caught.value.code is ErrorCode.LAYOUT_MISMATCH


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        (Limits(max_components=1), "components"),
        (Limits(max_string=8), "component.name"),
        (Limits(max_layers=3), "mla_latent.layers"),
        (Limits(max_planes=2), "mla_latent.planes"),
        (Limits(max_page_tokens=63), "mla_latent.page_tokens"),
        (Limits(max_row_bytes=511), "mla_latent.latent.elements"),
    ],
)
def test_every_count_is_bounded_by_the_limits(limits: Limits, field: str) -> None:
    with pytest.raises(LayoutError) as caught:
        MLA.validate(limits)
    assert caught.value.field == field


def test_a_consistent_layout_validates_to_itself() -> None:
    assert MLA.validate() is MLA
    assert GQA.validate() is GQA


def test_rows_and_regions() -> None:
    rows = MLA.component("mla_latent")
    assert rows.row_bytes == 656
    assert rows.regions == ("",)
    assert rows.region_page_bytes("") == 41984
    assert [plane.row_bytes for plane in rows.planes] == [512, 16, 128]
    assert all(plane.row_is_dense for plane in rows.planes)
    assert GQA.component("key_value").row_bytes == 4 * 2 * 8 * 2


def test_asking_for_what_is_not_there_names_what_is() -> None:
    with pytest.raises(LayoutError, match=r"it has latent, latent\.scale, rope"):
        MLA.component("mla_latent").plane("key")
    with pytest.raises(LayoutError, match="it has mla_latent, index_key") as caught:
        MLA.component("key_value")
    assert caught.value.code is ErrorCode.UNKNOWN_COMPONENT


@pytest.mark.parametrize(
    ("element", "nbytes"),
    [
        (Element.BF16, 2),
        (Element.F16, 2),
        (Element.F32, 4),
        (Element.E4M3, 1),
        (Element.UE8M0, 1),
        (Element.UE8M0X4, 4),
    ],
)
def test_element_sizes(element: Element, nbytes: int) -> None:
    assert element.nbytes == nbytes


def test_heads_outside_pages_are_described() -> None:
    # [head][page][token][key | value]: vLLM's LHBNC with 10 pages
    row, page, head = 32, 16 * 32, 10 * 16 * 32
    layout: Layout = GQA
    for plane in ("key", "value"):
        layout = with_plane(layout, "key_value", plane, token_stride=row, page_stride=page, head_stride=head)
    assert layout.validate() is layout
