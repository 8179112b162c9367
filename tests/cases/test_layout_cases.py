"""Small inputs that users of similar systems were hurt by: layouts and model state."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pdhandoff.errors import ErrorCode, LayoutError
from pdhandoff.layouts import (
    Component,
    ComponentKind,
    Element,
    Layout,
    Plane,
    Policy,
    Quantisation,
    RopeOrder,
    bridge,
    catalogue,
    decode_layout,
    encode_layout,
    layout_digest,
    profiles,
    require_same,
)
from pdhandoff.layouts.catalogue import Options
from support.layouts import TINY, gqa_layout, mla_layout, with_component, with_plane
from support.strided import Bytes, Values, decode_part, e4m3_table, row_bytes

GLM5 = catalogue.build("vllm.fp8_ds_mla", profiles.GLM5)
DECODE = catalogue.build("tilert.bf16", profiles.GLM5, Options(length=4096))


def fp8_key_value() -> Layout:
    """Key/value pages in fp8 with block scales, as some engine might keep them."""
    rows = {"page_stride": 16 * 4 * 24, "token_stride": 4 * 24, "head_stride": 24}
    planes = []
    for index, name in enumerate(("key", "value")):
        scaled = Quantisation(scale_plane=f"{name}.scale", group=8)
        rope = {"rope_order": RopeOrder.HALF_SPLIT, "rope_elements": 8} if name == "key" else {}
        planes += [
            Plane(name=name, element=Element.E4M3, elements=8, offset=12 * index, quantisation=scaled, **rows, **rope),  # type: ignore[arg-type]
            Plane(name=f"{name}.scale", element=Element.F32, elements=1, offset=12 * index + 8, **rows),  # type: ignore[arg-type]
        ]
    return with_component(gqa_layout(), "key_value", planes=tuple(planes)).validate()


def index_rows() -> Component:
    """Index keys as interleaved rows of 132 bytes: as many bytes as planar pages have, in another order."""
    planar = catalogue.index_pages(layers=range(4), rope_order=RopeOrder.HALF_SPLIT)
    values, scales = planar.planes
    planes = (
        msgspec.structs.replace(values, token_stride=132),
        msgspec.structs.replace(scales, token_stride=132, offset=128),
    )
    return msgspec.structs.replace(planar, planes=planes)


def test_T018_kv_dtype_differs_is_refused_with_both_item_sizes() -> None:
    for source, destination in ((gqa_layout(), fp8_key_value()), (fp8_key_value(), gqa_layout())):
        with pytest.raises(LayoutError) as caught:
            bridge(source, destination)
        assert caught.value.field == "key_value.key.element"
        assert "bf16 (2 bytes an element)" in caught.value.reason
        assert "e4m3 with one f32 scale per 8 (1 byte an element)" in caught.value.reason


def test_T026_planar_index_pages_and_interleaved_rows_convert_there_and_back() -> None:
    planar, rows = catalogue.index_pages(layers=range(4), rope_order=RopeOrder.HALF_SPLIT), index_rows()
    assert planar.region_page_bytes("") == rows.region_page_bytes("") == 8448
    pages = np.random.default_rng(1).integers(0, 256, 2 * 8448, dtype=np.uint8)
    of_planar, of_rows = byte_addresses(planar), byte_addresses(rows)
    as_rows = np.zeros_like(pages)
    as_rows[of_rows] = pages[of_planar]
    assert (row_bytes(rows, as_rows, (0, 1), range(128)) == row_bytes(planar, pages, (0, 1), range(128))).all()
    assert (as_rows != pages).any()
    back = np.zeros_like(pages)
    back[of_planar] = as_rows[of_rows]
    assert (back == pages).all()


def byte_addresses(component: Component) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Where each byte of the rows of two pages lies, `[token, row_bytes]`: read from memory that holds addresses."""
    address = np.arange(2 * 8448)
    low, high = (row_bytes(component, part.astype(np.uint8), (0, 1), range(128)) for part in (address, address >> 8))
    return low.astype(np.int64) + (high.astype(np.int64) << 8)


def test_T026_the_other_order_is_refused_where_bytes_are_not_converted() -> None:
    planar = mla_layout()
    rows = msgspec.structs.replace(planar, components=(planar.component("mla_latent"), index_rows())).validate()
    assert layout_digest(planar) != layout_digest(rows)
    with pytest.raises(LayoutError, match="128 expected, 132 announced") as caught:
        require_same(planar, rows)
    assert caught.value.field == "'index_key'[0].token_stride"


@pytest.mark.parametrize(("row", "latent", "group"), [(656, 512, 128), (584, 448, 64)])
@pytest.mark.parametrize("gap", [0, 56])
def test_T027_row_size_and_stride_come_from_the_descriptor(row: int, latent: int, group: int, gap: int) -> None:
    # 584 bytes: 448 e4m3, 64 bf16 and 7 one-byte scales with a byte to spare; neither is the nominal 512 or 576
    stride, tokens = row + gap, 4
    scale = Element.F32 if row == 656 else Element.UE8M0
    shared = {"page_stride": tokens * stride, "token_stride": stride}
    rope = {"rope_order": RopeOrder.INTERLEAVED, "rope_elements": 64}
    scaled = Quantisation(scale_plane="latent.scale", group=group)
    component = Component(
        name="mla_latent",
        kind=ComponentKind.MLA_LATENT,
        layers=(0,),
        page_tokens=tokens,
        planes=(
            Plane(name="latent", element=Element.E4M3, elements=latent, quantisation=scaled, **shared),  # type: ignore[arg-type]
            Plane(name="rope", element=Element.BF16, elements=64, offset=latent, **shared, **rope),  # type: ignore[arg-type]
            Plane(name="latent.scale", element=scale, elements=latent // group, offset=latent + 128, **shared),  # type: ignore[arg-type]
        ),
    )
    model = profiles.mla("m", layers=1, latent=latent).model()
    layout = Layout(name="rows", model=model, components=(component,)).validate()
    memory = np.arange(2 * tokens * stride, dtype=np.uint32).astype(np.uint8)
    rows = row_bytes(layout.components[0], memory, (1, 0), range(2 * tokens))
    used = latent + 128 + latent // group * scale.nbytes
    expected = memory.reshape(2, tokens, stride)[::-1, :, :used].reshape(2 * tokens, used)
    assert (rows == expected).all()
    assert component.row_bytes == used


@pytest.mark.parametrize("missing", ["latent", "rope"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_T028_two_buffer_mla_needs_both(missing: str, side: str) -> None:
    rows = DECODE.component("mla_latent")
    half = with_component(DECODE, "mla_latent", planes=tuple(p for p in rows.planes if p.name != missing))
    with pytest.raises(LayoutError, match="mla_latent needs latent, rope") as caught:
        bridge(half, DECODE) if side == "source" else bridge(GLM5, half)
    assert caught.value.field == "mla_latent.planes"
    assert f"{side} has" in caught.value.reason


def test_T029_a_missing_indexer_is_refused_with_both_counts() -> None:
    rows_only = msgspec.structs.replace(GLM5, components=(GLM5.component("mla_latent"),))
    with pytest.raises(LayoutError) as caught:
        bridge(rows_only, DECODE)
    assert caught.value.field == "components.index_key"
    assert "source registers 79 layers of state (mla_latent 79)" in caught.value.reason
    assert "destination declares 158 layers of state (mla_latent 79, index_key 79)" in caught.value.reason


def test_T029_a_missing_indexer_layer_is_refused_with_both_counts() -> None:
    short = with_component(GLM5, "index_key", layers=tuple(range(78)))
    with pytest.raises(LayoutError) as caught:
        bridge(short, DECODE)
    assert caught.value.field == "index_key.layers"
    assert (
        "source registers 78 layers of index_key, destination declares 79; nobody serves layer 78"
        in caught.value.reason
    )


def test_T031_an_unknown_kind_is_a_hard_error() -> None:
    tree = msgspec.msgpack.decode(encode_layout(mla_layout()))
    tree["components"][1]["kind"] = "foo"
    with pytest.raises(LayoutError, match="'foo'") as caught:
        decode_layout(msgspec.msgpack.encode(tree))
    assert caught.value.code is ErrorCode.UNKNOWN_COMPONENT
    assert caught.value.field.endswith(".kind")


@pytest.mark.parametrize(("component", "plane"), [("mla_latent", "latent"), ("index_key", "index_key")])
def test_T032_fp8_without_scales_is_refused(component: str, plane: str) -> None:
    bare = with_plane(mla_layout(), component, plane, quantisation=None)
    with pytest.raises(LayoutError, match="fp8 values without scales") as caught:
        bridge(bare, mla_layout())
    assert caught.value.field == f"{component}.{plane}.quantisation"
    planes = tuple(p for p in mla_layout().component(component).planes if not p.name.endswith(".scale"))
    with pytest.raises(LayoutError, match="could not be decoded"):
        with_component(mla_layout(), component, planes=planes).validate()


def test_T032_fp8_with_scales_decodes_within_tolerance() -> None:
    component = catalogue.fp8_ds_mla_rows(layers=(0,))
    values = np.random.default_rng(2).normal(size=(64, 4, 128)).astype(np.float32)
    scales = np.abs(values).max(-1, keepdims=True) / np.float32(448)
    memory = np.zeros((64, 656), np.uint8)
    memory[:, 512:528] = scales.reshape(64, 4).view(np.uint8)
    memory[:, :512] = nearest_e4m3(values / scales).reshape(64, 512)
    decoded = decode_part(component, "latent", memory.reshape(-1), (0,), range(64))[:, 0].reshape(64, 4, 128)
    # three mantissa bits: half a step is 1/16 of a value, and a quarter of the smallest step near zero
    assert (np.abs(decoded - values) <= np.abs(values) / 16 + scales * 2.0**-10).all()


def nearest_e4m3(values: Values) -> Bytes:
    """The code nearest to each value, by looking at all of them."""
    table = e4m3_table()
    finite = np.flatnonzero(~np.isnan(table)).astype(np.uint8)
    nearest = np.abs(values[..., None] - table[finite]).argmin(-1)
    codes: Bytes = finite[nearest]
    return codes


@pytest.mark.parametrize("lacking", ["source", "destination"])
def test_T033_draft_layers_on_one_side_only_are_refused_or_flagged_cold(lacking: str) -> None:
    bare = TINY.model(draft_layers=())
    full, cold = mla_layout(), mla_layout(model=bare)
    source, destination = (cold, full) if lacking == "source" else (full, cold)
    with pytest.raises(LayoutError, match="accept few drafts without saying why") as caught:
        bridge(source, destination)
    assert caught.value.field == "model.draft_layers"
    plan = bridge(source, destination, Policy(cold_drafts=True))
    assert plan.mtp_cold
    assert all(component.source_layers == (0, 1, 2) for component in plan.components)
    assert plan.landing.validate().component("mla_latent").layers == (0, 1, 2)


def test_T038_shared_index_keys_serve_78_layers_and_move_once() -> None:
    source = catalogue.build("vllm.fp8_ds_mla", profiles.GLM5_2)
    destination = catalogue.build("tilert.bf16", profiles.GLM5_2, Options(length=4096))
    plan = bridge(source, destination)
    keys = plan.components[1]
    target = [pair for pair in keys.layers if pair.destination < 78]
    assert len(target) == 78
    assert len({pair.source for pair in target}) == 21
    assert keys.source_layers == (0, 1, *range(2, 78, 4), 78)
    assert all(pair.source == profiles.GLM5_2.indexer_owner(pair.destination) for pair in keys.layers)
    assert plan.landing.component("index_key").layers == keys.source_layers
    moved = sum(len(component.source_layers) * component.source.row_bytes for component in plan.components)
    assert moved == 79 * 656 + 22 * 132


def test_T038_sharing_that_nobody_described_is_not_guessed() -> None:
    source = with_component(catalogue.build("vllm.fp8_ds_mla", profiles.GLM5_2), "index_key", shared_layers=())
    with pytest.raises(LayoutError, match="source registers 22 layers of index_key, destination declares 79"):
        bridge(source, catalogue.build("tilert.bf16", profiles.GLM5_2, Options(length=4096)))
