"""Cases that hurt users of similar systems, as far as conversions and the payload digest decide them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pdhandoff.errors import LayoutError
from pdhandoff.layouts.descriptor import (
    Component,
    ComponentKind,
    Element,
    Layout,
    Model,
    Plane,
    Quantisation,
    RopeOrder,
)
from pdhandoff.native import load
from pdhandoff.native.encodings import ScaleRule, dequantise_blocks, encode_ue8m0, quantise_blocks
from pdhandoff.native.strided import gather_rows, scatter_rows
from pdhandoff.planner.conversions import COPY, derive_conversion
from pdhandoff.planner.copies import plan_copies
from pdhandoff.planner.landing import landing_component
from pdhandoff.planner.pages import PageTable
from support.caches import Cache, page_table
from support.digest_oracle import digest_oracle
from support.native_components import index_planar, index_rows, key_value, latent_contiguous, latent_rows, moved

PAGES = Path(__file__).parents[1] / "data" / "vllm_pages"
NATIVE = load("reference")


def convert(
    here: Cache, here_pages: PageTable, there: Cache, there_pages: PageTable, tokens: range, *, zero_until: int = 0
) -> None:
    conversion = derive_conversion(here.component, there.component)
    NATIVE.convert(
        conversion,
        source_bases=here.bases(conversion.layers)[""],
        source_pages=here_pages,
        destination_at=there.placement,
        destination_pages=there_pages,
        tokens=tokens,
        zero_until=zero_until,
    )


def digest(cache: Cache, table: PageTable, tokens: range) -> int:
    component = cache.component
    return NATIVE.digest(component, layers=component.layers, bases=cache.bases(), pages=table, tokens=tokens)


def same_rows(here: Cache, here_pages: PageTable, there: Cache, there_pages: PageTable, tokens: range) -> bool:
    return all(
        here.row(here.component.plane(plane.name), layer, here_pages, token, head)
        == there.row(plane, layer, there_pages, token, head)
        for layer in there.component.layers
        for plane in there.component.planes
        for token in tokens
        for head in range(there.component.heads)
    )


def test_T001_129_tokens_fill_three_pages_and_the_rest_of_the_third_is_zero() -> None:
    component = latent_rows(page_tokens=64)
    here, there = Cache(component, 4, seed=1), Cache(component, 5, seed=2)
    here_pages, there_pages = page_table(component, [3, 0, 2]), page_table(component, [4, 1, 2])
    before = bytes(there.memory)
    convert(here, here_pages, there, there_pages, range(129), zero_until=192)
    assert same_rows(here, here_pages, there, there_pages, range(129))
    tail = there.row_offsets(there_pages, range(129, 192))
    assert not any(there.memory[offset] for offset in tail)
    assert there.changed(before) <= there.row_offsets(there_pages, range(192))


def test_T026_planar_pages_and_interleaved_rows_convert_there_and_back() -> None:
    planar, rows = index_planar(), index_rows()
    assert planar.planes[0].page_stride == rows.planes[0].page_stride == 64 * 132
    table, other = page_table(planar, [2, 0, 1]), page_table(rows, [0, 2, 1])
    first, middle, last = Cache(planar, 3, seed=7), Cache(rows, 3), Cache(planar, 3)
    convert(first, table, middle, other, range(192))
    convert(middle, other, last, table, range(192))
    inside = sorted(first.row_offsets(table, range(192)))
    assert [first.memory[i] for i in inside] == [last.memory[i] for i in inside]
    assert [first.memory[i] for i in inside] != [middle.memory[i] for i in inside]


def rows_of_584_bytes(row: int) -> Component:
    """A row that no nominal width gives: 448 e4m3 | 64 bf16 | 7 UE8M0 scales of 64 values each | 1 byte of padding."""
    latent = Plane(
        name="latent",
        element=Element.E4M3,
        elements=448,
        page_stride=16 * row,
        token_stride=row,
        quantisation=Quantisation(scale_plane="latent.scale", group=64),
    )
    rope = Plane(name="rope", element=Element.BF16, elements=64, offset=448, page_stride=16 * row, token_stride=row)
    scale = Plane(
        name="latent.scale", element=Element.UE8M0, elements=7, offset=576, page_stride=16 * row, token_stride=row
    )
    return Component(
        name="mla_latent",
        kind=ComponentKind.MLA_LATENT,
        layers=(0,),
        page_tokens=16,
        planes=(latent, rope, scale),
    )


def contiguous_448(length: int) -> Component:
    def plane(name: str, elements: int) -> Plane:
        size = elements * 2
        return Plane(
            name=name,
            element=Element.BF16,
            elements=elements,
            page_stride=length * size,
            token_stride=size,
            region=name,
        )

    return Component(
        name="mla_latent",
        kind=ComponentKind.MLA_LATENT,
        layers=(0,),
        page_tokens=length,
        planes=(plane("latent", 448), plane("rope", 64)),
    )


@pytest.mark.parametrize("row", [584, 640])
def test_T027_rows_of_584_bytes_are_read_as_described(row: int) -> None:
    source = rows_of_584_bytes(row)
    values = torch.randn(40, 1, 448, generator=torch.Generator().manual_seed(4))
    codes, scales = quantise_blocks(values, 64, ScaleRule.POWER_OF_TWO)
    rope = torch.randn(40, 1, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    here, there = Cache(source, 3), Cache(contiguous_448(48), 1)
    table, whole = page_table(source, [1, 2, 0]), page_table(there.component, [0])
    base = here.placement.bases[""][0]
    for plane, stored in (("latent", codes), ("latent.scale", encode_ue8m0(scales)), ("rope", rope)):
        scatter_rows(source, source.plane(plane), base, table, range(40), rows=stored)
    convert(here, table, there, whole, range(40))

    def landed(name: str) -> torch.Tensor:
        return gather_rows(there.component, there.component.plane(name), there.bases()[name][0], whole, range(40))

    assert torch.equal(landed("latent"), dequantise_blocks(codes, scales, 64).bfloat16())
    assert torch.equal(landed("rope"), rope)


def test_T027_rows_of_656_bytes_with_a_larger_stride_are_read_as_described() -> None:
    source, target = moved(latent_rows(page_tokens=16, row=720), page_gap=40), latent_rows(page_tokens=64)
    here, there = Cache(source, 7, seed=3), Cache(target, 2)
    here_pages, there_pages = page_table(source, [6, 1, 5, 0, 3]), page_table(target, [1, 0])
    convert(here, here_pages, there, there_pages, range(75))
    assert same_rows(here, here_pages, there, there_pages, range(75))


def test_T032_fp8_rows_without_their_scales_are_refused() -> None:
    component = latent_rows()
    stripped = tuple(plane for plane in component.planes if plane.name != "latent.scale")
    bare = Component(name=component.name, kind=component.kind, layers=component.layers, page_tokens=64, planes=stripped)
    layout = Layout(name="no scales", model=Model(name="tiny", layers=2), components=(bare,))
    with pytest.raises(LayoutError, match=r"'latent\.scale' is missing") as caught:
        layout.validate()
    assert caught.value.field == "mla_latent.latent.quantisation"


@pytest.mark.slow
def test_T032_fp8_rows_with_their_scales_match_the_unquantised_rows() -> None:
    """Real pages of one prompt, fp8 and bf16: converted fp8 rows are the bf16 rows within fp8's rounding."""
    quantised = load_file(PAGES / "v32_fp8_C333.safetensors")["model.layers.0.self_attn.attn"]
    plain = load_file(PAGES / "v32_bf16_C333.safetensors")["model.layers.0.self_attn.attn"].reshape(-1, 576)[:333]
    source, target = latent_rows(layers=(0,)), latent_contiguous(384, layers=(0,))
    here, there = Cache(source, 6), Cache(target, 1)
    here.memory[64 : 64 + quantised.numel()] = bytes(quantised.flatten().tolist())
    whole = page_table(target, [0])
    convert(here, page_table(source, range(6)), there, whole, range(333), zero_until=384)
    base = there.bases()
    latent = gather_rows(target, target.plane("latent"), base["latent"][0], whole, range(333)).squeeze(1)
    rope = gather_rows(target, target.plane("rope"), base["rope"][0], whole, range(333)).squeeze(1)
    exact = plain[:, :512].float()
    amax = exact.reshape(333, 4, 128).abs().amax(dim=-1).repeat_interleave(128, dim=-1)
    # half a step of a 3-bit mantissa, half the smallest step below its normal range, and bf16's own rounding
    allowed = exact.abs() / 16 + amax / 448 * 2**-10 + exact.abs() / 128
    assert ((latent.float() - exact).abs() <= allowed).all()
    assert torch.equal(rope, plain[:, 512:])


def test_T040_any_flipped_byte_changes_the_digest() -> None:
    component = latent_rows(page_tokens=4, layers=(0, 7))
    cache, table = Cache(component, 3, seed=40), page_table(component, [2, 1])
    sent = digest(cache, table, range(6))
    rows = sorted(cache.row_offsets(table, range(6)))
    for offset in random.Random(40).sample(rows, 200):
        cache.memory[offset] ^= 0x10
        assert digest(cache, table, range(6)) != sent
        cache.memory[offset] ^= 0x10
    assert digest(cache, table, range(6)) == sent


def test_T040_bytes_that_belong_to_no_row_do_not_change_it() -> None:
    component = latent_rows(page_tokens=4, row=660)
    cache, table = Cache(component, 3, seed=41), page_table(component, [2, 1])
    sent = digest(cache, table, range(6))
    rows = cache.row_offsets(table, range(6))
    for offset in set(range(len(cache.memory))) - rows:
        cache.memory[offset] ^= 0xFF
    assert digest(cache, table, range(6)) == sent


@pytest.mark.parametrize("target", [index_planar(), index_rows(page_tokens=16), index_planar(page_tokens=1)])
def test_T041_pages_permuted_between_sides_give_the_same_digest(target: Component) -> None:
    source = index_planar()
    here, there = Cache(source, 5, seed=9), Cache(target, 140)
    rng = random.Random(41)
    here_pages = page_table(source, rng.sample(range(5), 3))
    there_pages = page_table(target, rng.sample(range(140), -(-130 // target.page_tokens)))
    plan = plan_copies(
        source=source,
        source_at=here.placement,
        source_pages=here_pages,
        destination=target,
        destination_at=there.placement,
        destination_pages=there_pages,
        tokens=range(130),
    )
    NATIVE.copy(plan)
    sent = digest(here, here_pages, range(130))
    landed = digest(there, there_pages, range(130))
    assert sent == landed
    swapped = there_pages._replace(ids=[there_pages.ids[1], there_pages.ids[0], *there_pages.ids[2:]])
    assert digest(there, swapped, range(130)) != sent


def test_T041_heads_sent_by_two_ranks_add_up_to_the_digest_of_all() -> None:
    whole = key_value("hnd", heads=range(4))
    target, table = Cache(whole, 2), page_table(whole, [1, 0])
    sent = 0
    for heads in (range(2), range(2, 4)):
        part = key_value("transposed", page_tokens=8, heads=heads)
        rank, pages = Cache(part, 4, seed=heads.start), page_table(part, [3, 0, 2])
        sent += digest(rank, pages, range(20))
        landing = landing_component(part)
        landed = Cache(landing, 4)
        packed = page_table(landing, range(3))
        copies = plan_copies(
            source=part,
            source_at=rank.placement,
            source_pages=pages,
            destination=landing,
            destination_at=landed.placement,
            destination_pages=packed,
            tokens=range(20),
        )
        NATIVE.copy(copies)
        convert(landed, packed, target, table, range(20))
    received = digest(target, table, range(20))
    assert received == sent % 2**64


def test_T042_rows_on_null_pages_are_in_neither_sides_digest() -> None:
    source, target = index_planar(page_tokens=4), index_rows(page_tokens=4)
    here, there = Cache(source, 8, seed=6), Cache(target, 8, seed=60)
    here_pages, there_pages = page_table(source, [3, 0, 5, 0, 2], null=0), page_table(target, [7, 0, 1, 0, 4], null=0)
    convert(here, here_pages, there, there_pages, range(18))
    sent = digest(here, here_pages, range(18))
    landed = digest(there, there_pages, range(18))
    real = [*range(4), *range(8, 12), *range(16, 18)]
    assert sent == landed == digest_oracle(here, here_pages, real)
    for page in (0, 1, 4, 6, 7):  # the null page itself, and pages of other requests
        start = 64 + page * source.planes[0].page_stride
        here.memory[start : start + 4 * 132] = bytes(4 * 132)
    assert digest(here, here_pages, range(18)) == sent


def test_T026_and_T027_conversions_of_equal_encodings_are_copies() -> None:
    for source, target in ((index_planar(), index_rows()), (latent_rows(row=720), latent_rows())):
        assert {part.kernel for part in derive_conversion(source, target).parts} == {COPY}
    turned = derive_conversion(latent_rows(), latent_contiguous(8, rope_order=RopeOrder.HALF_SPLIT))
    assert [part.kernel for part in turned.parts] == ["e4m3.f32x128>bf16", "bf16>bf16+half_split64"]
