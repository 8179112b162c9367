from __future__ import annotations

import random

import msgspec
import pytest
import torch

from pdhandoff.errors import LocalError
from pdhandoff.layouts.descriptor import Component, Element, Plane, Quantisation, RopeOrder, Rotation
from pdhandoff.native import Native
from pdhandoff.native.encodings import ScaleRule, dequantise_blocks, encode_ue8m0, quantise_blocks, reorder_rope
from pdhandoff.native.rotation import hadamard128
from pdhandoff.native.strided import gather_rows, scatter_rows
from pdhandoff.planner.conversions import derive_conversion
from pdhandoff.planner.landing import landing_component
from pdhandoff.planner.pages import PageTable
from support.caches import Cache, page_table
from support.native_components import (
    index_contiguous,
    index_planar,
    index_rows,
    key_value,
    latent_contiguous,
    latent_rows,
    moved,
)


class Case:
    """A filled source cache, an empty destination cache, and their page tables."""

    def __init__(self, source: Component, destination: Component, tokens: int, *, seed: int = 1) -> None:
        rng = random.Random(seed)
        self.conversion = derive_conversion(source, destination)
        self.source = Cache(source, -(-tokens // source.page_tokens) + 2)
        self.destination = Cache(destination, -(-tokens // destination.page_tokens) + 3, skew=2)
        self.source_pages = self._shuffled(source, tokens, self.source.placement.pages, rng)
        self.destination_pages = self._shuffled(destination, tokens, self.destination.placement.pages, rng)

    @staticmethod
    def _shuffled(component: Component, tokens: int, pages: int, rng: random.Random) -> PageTable:
        return page_table(component, rng.sample(range(pages), -(-tokens // component.page_tokens)))

    def store(self, plane: str, layer: int, rows: torch.Tensor) -> None:
        """Fill a plane of the source from token 0 on."""
        at = self.source.component.plane(plane)
        base = self.source.bases([layer])[at.region][0]
        tokens = range(len(rows))
        scatter_rows(self.source.component, at, base, self.source_pages, tokens, rows=rows)

    def load(self, plane: str, layer: int, tokens: range, heads: range | None = None) -> torch.Tensor:
        """Rows of a plane of the destination."""
        at = self.destination.component.plane(plane)
        base = self.destination.bases([layer])[at.region][0]
        return gather_rows(self.destination.component, at, base, self.destination_pages, tokens, heads=heads)

    def run(self, native: Native, tokens: range, zero_until: int = 0) -> set[int]:
        """Convert, and tell which bytes of the destination changed."""
        before = bytes(self.destination.memory)
        native.convert(
            self.conversion,
            source_bases=self.source.bases(self.conversion.layers)[self.conversion.source.regions[0]],
            source_pages=self.source_pages,
            destination_at=self.destination.placement,
            destination_pages=self.destination_pages,
            tokens=tokens,
            zero_until=zero_until,
        )
        return self.destination.changed(before)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled_latent(case: Case, tokens: int) -> dict[tuple[str, int], torch.Tensor]:
    """Quantised rows in every layer; returns what they mean, per part and layer."""
    meaning = {}
    for layer in case.source.component.layers:
        codes, scales = quantise_blocks(randn(tokens, 1, 512, seed=layer), 128, ScaleRule.AMAX)
        rope = randn(tokens, 1, 64, seed=100 + layer).bfloat16()
        case.store("latent", layer, codes)
        case.store("latent.scale", layer, scales)
        case.store("rope", layer, rope)
        meaning["latent", layer] = dequantise_blocks(codes, scales, 128)
        meaning["rope", layer] = rope.float()
    return meaning


def filled_index(case: Case, tokens: int, rule: ScaleRule = ScaleRule.POWER_OF_TWO) -> dict[int, torch.Tensor]:
    meaning = {}
    for layer in case.source.component.layers:
        codes, scales = quantise_blocks(randn(tokens, 1, 128, seed=layer), 128, rule)
        case.store("index_key", layer, codes)
        case.store("index_key.scale", layer, scales)
        meaning[layer] = dequantise_blocks(codes, scales, 128)
    return meaning


@pytest.mark.parametrize(("page_tokens", "row"), [(64, 656), (16, 700), (1, 656)])
def test_fp8_rows_become_bf16_tensors(native: Native, page_tokens: int, row: int) -> None:
    case = Case(latent_rows(page_tokens=page_tokens, row=row), latent_contiguous(100), 70)
    meaning = filled_latent(case, 70)
    changed = case.run(native, range(5, 70))
    for (part, layer), rows in meaning.items():
        assert torch.equal(case.load(part, layer, range(5, 70)), rows[5:70].bfloat16())
    assert changed <= case.destination.row_offsets(case.destination_pages, range(5, 70))


def test_index_keys_are_rotated_after_decoding(native: Native) -> None:
    case = Case(index_planar(), index_contiguous(140), 130)
    meaning = filled_index(case, 130)
    case.run(native, range(130))
    for layer, keys in meaning.items():
        assert torch.equal(case.load("index_key", layer, range(130)), hadamard128(keys).bfloat16())


def test_rope_is_reordered_before_rotation_and_after_unrotation(native: Native) -> None:
    interleaved = RopeOrder.INTERLEAVED
    there = Case(index_planar(), index_contiguous(70, rope_order=interleaved, element=Element.F32), 66)
    meaning = filled_index(there, 66)
    there.run(native, range(66))
    for layer, keys in meaning.items():
        expected = hadamard128(reorder_rope(keys, RopeOrder.HALF_SPLIT, interleaved, 64))
        assert torch.equal(there.load("index_key", layer, range(66)), expected)

    back = Case(
        index_contiguous(70, rope_order=interleaved, element=Element.F32),
        index_contiguous(70, rotation=Rotation.NONE, element=Element.F32),
        66,
    )
    for layer in meaning:
        back.store("index_key", layer, there.load("index_key", layer, range(66)))
    back.run(native, range(66))
    for layer, keys in meaning.items():
        assert torch.allclose(back.load("index_key", layer, range(66)), keys, rtol=1e-5, atol=1e-6)


def test_a_copy_keeps_every_bit(native: Native) -> None:
    """Payloads of NaN, negative zero, and scales that no writer would store."""
    source = latent_rows(page_tokens=16)
    case = Case(source, moved(latent_rows(page_tokens=24, row=657), page_gap=11), 50)
    case.source.memory[:] = random.Random(9).randbytes(len(case.source.memory))
    changed = case.run(native, range(1, 50))
    for layer in source.layers:
        for plane in source.planes:
            for token in (1, 15, 16, 23, 24, 49):
                target = case.destination.component.plane(plane.name)
                assert case.destination.row(target, layer, case.destination_pages, token) == case.source.row(
                    plane, layer, case.source_pages, token
                )
    assert changed <= case.destination.row_offsets(case.destination_pages, range(1, 50))


@pytest.mark.parametrize("source_scales", [Element.UE8M0, Element.UE8M0X4])
@pytest.mark.parametrize("target_scales", [Element.F32, Element.UE8M0, Element.UE8M0X4])
def test_exponent_scales_change_their_type_and_codes_stay(
    native: Native, source_scales: Element, target_scales: Element
) -> None:
    case = Case(index_planar(scales=source_scales), index_rows(page_tokens=16, scales=target_scales), 65)
    exponents = torch.randint(0, 255, (65, 1, 1), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    codes = torch.randint(0, 256, (65, 1, 128), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    words = exponents if source_scales is Element.UE8M0 else exponents.unsqueeze(-1).expand(65, 1, 1, 4).contiguous()
    case.store("index_key", 0, codes.view(torch.float8_e4m3fn))
    case.store("index_key.scale", 0, words)
    case.run(native, range(65))
    assert torch.equal(case.load("index_key", 0, range(65)).view(torch.uint8), codes)
    scales = case.load("index_key.scale", 0, range(65))
    if target_scales is Element.F32:
        assert torch.equal(scales.double(), torch.exp2(exponents.double() - 127))
    else:
        assert torch.equal(scales.reshape(65, -1)[:, 0], exponents.flatten())


def test_float_scales_become_exponents_by_requantisation(native: Native) -> None:
    case = Case(index_planar(), index_rows(scales=Element.UE8M0X4), 40)
    exact = filled_index(case, 40)
    case.run(native, range(40))
    back = Case(case.destination.component, index_contiguous(64, rotation=Rotation.NONE, element=Element.F32), 40)
    for layer, keys in exact.items():
        for plane in ("index_key", "index_key.scale"):
            back.store(plane, layer, case.load(plane, layer, range(40)))
        back.run(native, range(40))
        assert torch.equal(back.load("index_key", layer, range(40)), keys)


def test_blocks_of_another_size_are_requantised(native: Native) -> None:
    narrow = index_planar(scales=Element.UE8M0)
    values, scale = narrow.planes
    half = Quantisation(scale_plane="index_key.scale", group=64)
    source = msgspec.structs.replace(
        narrow,
        planes=(
            msgspec.structs.replace(values, quantisation=half, page_stride=64 * 130),
            msgspec.structs.replace(scale, elements=2, token_stride=2, page_stride=64 * 130),
        ),
    )
    case = Case(source, index_planar(), 50)
    codes, scales = quantise_blocks(randn(50, 1, 128), 64, ScaleRule.POWER_OF_TWO)
    case.store("index_key", 0, codes)
    case.store("index_key.scale", 0, encode_ue8m0(scales))
    case.run(native, range(50))
    expected, wide = quantise_blocks(dequantise_blocks(codes, scales, 64), 128, ScaleRule.AMAX)
    assert torch.equal(case.load("index_key", 0, range(50)).view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(case.load("index_key.scale", 0, range(50)), wide)


def test_bf16_becomes_fp8_with_amax_scales(native: Native) -> None:
    target = latent_rows(page_tokens=32)
    case = Case(landing_component(latent_contiguous(80)), target, 77)
    values = randn(77, 1, 512).bfloat16()
    rope = randn(77, 1, 64, seed=3).bfloat16()
    case.store("latent", 1, values)
    case.store("rope", 1, rope)
    case.run(native, range(77))
    codes, scales = quantise_blocks(values, 128, ScaleRule.AMAX)
    assert torch.equal(case.load("latent", 1, range(77)).view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(case.load("latent.scale", 1, range(77)), scales)
    assert torch.equal(case.load("rope", 1, range(77)), rope)


@pytest.mark.parametrize("order", ["nhd", "hnd", "transposed", "regions"])
def test_heads_meet_by_their_number_in_the_model(native: Native, order: str) -> None:
    """A producer rank with heads 1..3 fills its part of a consumer that holds heads 2..5."""
    source = landing_component(key_value("transposed", page_tokens=8, heads=range(1, 4), heads_total=6))
    target = key_value(order, page_tokens=5, heads=range(2, 6), heads_total=6)
    case = Case(source, target, 23)
    rows = {plane: randn(23, 3, 24, seed=len(plane)).bfloat16() for plane in ("key", "value")}
    for plane, values in rows.items():
        case.store(plane, 0, values)
        case.store(plane, 1, -values)
    changed = case.run(native, range(20), zero_until=23)
    for plane, values in rows.items():
        assert torch.equal(case.load(plane, 0, range(20), range(2)), values[:20, 1:])
        assert torch.equal(case.load(plane, 1, range(20), range(2)), -values[:20, 1:])
        assert not case.load(plane, 1, range(20, 23), range(2)).any()
    assert changed <= case.destination.row_offsets(case.destination_pages, range(23), range(2))


@pytest.mark.parametrize("source", ["nhd", "hnd", "regions"])
def test_element_types_of_plain_rows_change(native: Native, source: str) -> None:
    wide = key_value("transposed", page_tokens=4, element=Element.F32)
    case = Case(landing_component(key_value(source)), wide, 17)
    values = randn(17, 2, 24).bfloat16()
    for layer in (0, 1):
        for plane in ("key", "value"):
            case.store(plane, layer, values)
    case.run(native, range(17))
    assert torch.equal(case.load("key", 1, range(17)), values.float())


def test_the_tail_is_zero_and_the_rest_is_untouched(native: Native) -> None:
    case = Case(landing_component(index_planar()), index_planar(page_tokens=32), 128)
    filled_index(case, 70)
    changed = case.run(native, range(64, 70), zero_until=96)
    for layer in (0, 1):
        for plane in case.destination.component.planes:
            for token in range(70, 96):
                row = case.destination.row(plane, layer, case.destination_pages, token)
                assert not any(row)
    assert changed == case.destination.row_offsets(case.destination_pages, range(64, 96)) - unchanged(
        case, range(64, 70)
    )


def unchanged(case: Case, tokens: range) -> set[int]:
    """Bytes of these rows that happen to equal the fill pattern."""
    return {
        i for i in case.destination.row_offsets(case.destination_pages, tokens) if case.destination.memory[i] == 0xA5
    }


def test_no_tokens_still_zero_the_tail(native: Native) -> None:
    case = Case(landing_component(index_planar()), index_planar(), 64)
    changed = case.run(native, range(10, 10), zero_until=12)
    assert changed == case.destination.row_offsets(case.destination_pages, range(10, 12))
    assert not case.run(native, range(10, 10), zero_until=3)


def test_null_pages_on_either_side_are_skipped(native: Native) -> None:
    case = Case(landing_component(index_planar(page_tokens=4)), index_contiguous(40), 32)
    filled_index(case, 32)
    case.source_pages = case.source_pages._replace(null=case.source_pages.ids[2])
    target = index_planar(page_tokens=4)
    case.conversion = derive_conversion(case.source.component, target)
    case.destination = Cache(target, 9)
    case.destination_pages = page_table(target, [8, 0, 7, 1, 6, 2, 5, 3], null=6)
    changed = case.run(native, range(30), zero_until=32)
    real = [token for token in range(32) if token // 4 not in {2, 4}]
    assert changed <= case.destination.row_offsets(case.destination_pages, real)
    assert case.destination.row(target.planes[0], 0, case.destination_pages, 12) == case.source.row(
        case.source.component.planes[0], 0, case.source_pages, 12
    )


def test_a_range_longer_than_one_part(native: Native) -> None:
    tokens = 4096 + 70
    case = Case(landing_component(index_planar(layers=(0,))), index_contiguous(tokens, layers=(0,)), tokens)
    meaning = filled_index(case, tokens)
    case.run(native, range(tokens))
    assert torch.equal(case.load("index_key", 0, range(tokens)), hadamard128(meaning[0]).bfloat16())


def test_what_does_not_fit_is_refused_before_anything_is_written(native: Native) -> None:
    case = Case(landing_component(index_planar()), index_planar(), 128)
    good = case.destination_pages

    def refused(match: str, tokens: range = range(128), zero_until: int = 0) -> None:
        before = bytes(case.destination.memory)
        with pytest.raises(LocalError, match=match):
            case.run(native, tokens, zero_until)
        assert bytes(case.destination.memory) == before

    case.destination_pages = good._replace(ids=[0, 99])
    refused("page 99")
    case.destination_pages = good._replace(ids=[1, 1])
    refused("names a page twice")
    case.destination_pages = good._replace(ids=[1])
    refused("leave its page table")
    case.destination_pages = good
    refused("leave its page table", zero_until=129)
    case.destination.placement = case.destination.placement._replace(bases={"other": [0, 0]})
    refused("region")


@pytest.mark.parametrize("tokens", [range(70), range(5, 70), range(64, 65)])
@pytest.mark.parametrize("target", ["planes", "rows", "keys", "fp8 keys", "heads"])
def test_the_digest_of_what_was_converted(native: Native, target: str, tokens: range) -> None:
    source, destination = {
        "planes": (latent_rows(), latent_contiguous(90)),
        "rows": (latent_rows(), latent_rows(page_tokens=16, row=700)),
        "keys": (index_planar(), index_contiguous(90)),
        "fp8 keys": (index_planar(), index_rows(scales=Element.UE8M0X4)),
        "heads": (key_value("nhd", heads=range(1, 4)), key_value("transposed", heads=range(2, 4), elements=24)),
    }[target]
    case = Case(landing_component(source), destination, 70)
    for plane in case.source.component.planes:
        for layer in (0, 1):
            data = random.Random(f"{plane.name} {layer}").randbytes(plane.row_bytes)
            for token in range(70):
                for head in range(case.source.component.heads):
                    case.source.put(plane, layer, case.source_pages, token, data=data, head=head)
    digest = native.convert(
        case.conversion,
        source_bases=case.source.bases()[""],
        source_pages=case.source_pages,
        destination_at=case.destination.placement,
        destination_pages=case.destination_pages,
        tokens=tokens,
        zero_until=72,
        digest_layers=(5, 3),
    )
    assert digest == native.digest(
        case.source.component,
        layers=(5, 3),
        bases=case.source.bases(),
        pages=case.source_pages,
        tokens=tokens,
        heads=case.conversion.heads,
    )


def test_a_digest_needs_the_layer_of_every_base(native: Native) -> None:
    case = Case(landing_component(index_planar()), index_planar(), 64)
    with pytest.raises(LocalError, match="the layer of each of 2 bases; got 1"):
        native.convert(
            case.conversion,
            source_bases=case.source.bases()[""],
            source_pages=case.source_pages,
            destination_at=case.destination.placement,
            destination_pages=case.destination_pages,
            tokens=range(64),
            zero_until=0,
            digest_layers=(0,),
        )


def test_bases_must_match_layers(native: Native) -> None:
    case = Case(landing_component(index_planar()), index_planar(), 64)
    with pytest.raises(LocalError, match="one base for each of 2 layers"):
        native.convert(
            case.conversion,
            source_bases=[1],
            source_pages=case.source_pages,
            destination_at=case.destination.placement,
            destination_pages=case.destination_pages,
            tokens=range(64),
            zero_until=0,
        )


def test_a_step_that_is_not_known_is_refused(native: Native) -> None:
    case = Case(landing_component(index_planar()), index_contiguous(64), 64)
    part = case.conversion.parts[0]
    for kernel in ("e4m3.f32x128>bf16+whirl", "e4m3.f32x128>bf16+half_split", "e4m3.f32x128>bf16+half_splitx"):
        case.conversion = case.conversion._replace(parts=(part._replace(kernel=kernel),))
        with pytest.raises(LocalError, match="no conversion step is called"):
            case.run(native, range(64))


def test_an_element_that_cannot_hold_values_or_scales_is_refused(native: Native) -> None:
    case = Case(landing_component(index_planar()), index_contiguous(64), 64)
    part = case.conversion.parts[0]
    bare = msgspec.structs.replace(part.destination, element=Element.E4M3)
    case.conversion = case.conversion._replace(parts=(part._replace(destination=bare),))
    with pytest.raises(LocalError, match="without scales"):
        case.run(native, range(64))
    scale = Plane(name="odd.scale", element=Element.BF16, elements=1, page_stride=1, token_stride=1)
    bare = msgspec.structs.replace(bare, quantisation=Quantisation(scale_plane="odd.scale", group=128))
    case.conversion = case.conversion._replace(
        parts=(part._replace(destination=bare, destination_scale=scale, kernel="x>y+hadamard128"),)
    )
    with pytest.raises(LocalError, match="bf16 is no type of scale"):
        case.run(native, range(64))
