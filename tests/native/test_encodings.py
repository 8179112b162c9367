from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdhandoff.errors import LocalError
from pdhandoff.layouts.descriptor import RopeOrder
from pdhandoff.native.encodings import (
    ScaleRule,
    decode_ue8m0,
    decode_ue8m0x4,
    dequantise_blocks,
    encode_ue8m0,
    encode_ue8m0x4,
    quantise_blocks,
    reorder_rope,
)

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
ALL_CODES = ALL_BYTES.view(torch.float8_e4m3fn)


def e4m3(byte: int) -> float:
    """An fp8 code by the format's definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    return sign * math.ldexp(mantissa, -9) if exponent == 0 else sign * math.ldexp(8 + mantissa, exponent - 10)


def bits(x: torch.Tensor) -> list[int]:
    narrow = {1: torch.uint8, 4: torch.int32}[x.element_size()]
    result: list[int] = x.contiguous().view(narrow).flatten().tolist()
    return result


@pytest.mark.parametrize("scale", [1.0, 448.0, 0.1, 2.0**-22, 3.4e38 / 448, 2.0**-140])
def test_decoding_is_the_float64_product_rounded_once(scale: float) -> None:
    scales = torch.tensor([scale], dtype=torch.float32)
    decoded = dequantise_blocks(ALL_CODES, scales, 256)
    exact = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64) * scales.double()
    finite = ~exact.isnan()
    assert bits(decoded[finite]) == bits(exact[finite].float())
    assert decoded.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_negative_zero_keeps_its_sign() -> None:
    codes, scales = quantise_blocks(torch.tensor([-0.0, 0.0, 1.0, -1.0]), 4, ScaleRule.AMAX)
    assert bits(codes)[:2] == [0x80, 0x00]
    assert math.copysign(1.0, dequantise_blocks(codes, scales, 4)[0].item()) == -1.0


def test_amax_scale_puts_the_largest_value_on_448() -> None:
    values = torch.tensor([[0.3, -7.0, 1.0, 2.0], [0.0, 0.0, -0.0, 0.0]])
    codes, scales = quantise_blocks(values, 4, ScaleRule.AMAX)
    assert scales.flatten().tolist() == [torch.tensor(7.0).div(448.0).item(), 1.0]
    assert codes.float()[0].abs().max() == 448.0
    assert codes.float()[1].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (448.0, 1.0),
        (math.nextafter(448.0, 449.0), 1.0),  # not a float32 of its own
        (448.0001, 2.0),
        (447.9, 1.0),
        (224.0, 0.5),
        (224.1, 1.0),
        (1.0, 2.0**-8),
        (0.0, 2.0**-22),
        (1e-5, 2.0**-22),
        (3.0e38, 2.0**120),
    ],
)
def test_power_of_two_scale_is_the_smallest_that_fits(amax: float, scale: float) -> None:
    _, scales = quantise_blocks(torch.tensor([amax, 0.0], dtype=torch.float32), 2, ScaleRule.POWER_OF_TWO)
    assert scales.tolist() == [scale]


def test_what_is_not_finite_takes_no_part_in_the_scale() -> None:
    for rule in ScaleRule:
        codes, scales = quantise_blocks(torch.tensor([math.nan, math.inf, -math.inf, 2.0]), 4, rule)
        _, plain = quantise_blocks(torch.tensor([0.0, 0.0, 0.0, 2.0]), 4, rule)
        assert scales.tolist() == plain.tolist()
        assert bits(codes)[:3] == [0x7F, 0x7E, 0xFE]


@pytest.mark.parametrize("rule", ScaleRule)
@given(values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=8))
def test_every_code_is_a_nearest_one(rule: ScaleRule, values: list[float]) -> None:
    codes, scales = quantise_blocks(torch.tensor(values, dtype=torch.float32), 8, rule)
    table = [e4m3(byte) for byte in range(256) if byte & 0x7F != 0x7F]
    for value, code in zip(values, bits(codes), strict=True):
        wanted = (torch.tensor(value, dtype=torch.float32) / scales[0]).item()
        wanted = max(-448.0, min(448.0, wanted))
        assert abs(e4m3(code) - wanted) == min(abs(entry - wanted) for entry in table)


def test_ties_round_to_even() -> None:
    # with a scale of 1, between 1.0 (0x38), 1.125 (0x39) and 1.25 (0x3a); and half of the smallest subnormal
    values = torch.tensor([448.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10])
    codes, scales = quantise_blocks(values, 5, ScaleRule.AMAX)
    assert scales.tolist() == [1.0]
    assert bits(codes)[1:] == [0x38, 0x3A, 0x00, 0x02]


@given(
    codes=st.lists(st.sampled_from([c for c in range(256) if c & 0x7F != 0x7F]), min_size=128, max_size=128),
    exponent=st.integers(-22, 100),
)
def test_values_that_have_power_of_two_scales_survive_requantisation(codes: list[int], exponent: int) -> None:
    stored = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = dequantise_blocks(stored, torch.tensor([2.0**exponent]), 128)
    again, scales = quantise_blocks(values, 128, ScaleRule.POWER_OF_TWO)
    assert bits(dequantise_blocks(again, scales, 128)) == bits(values)


@pytest.mark.parametrize("rule", ScaleRule)
def test_shapes_and_types(rule: ScaleRule) -> None:
    codes, scales = quantise_blocks(torch.randn(3, 5, 384, dtype=torch.bfloat16), 128, rule)
    assert (codes.shape, codes.dtype) == ((3, 5, 384), torch.float8_e4m3fn)
    assert (scales.shape, scales.dtype) == ((3, 5, 3), torch.float32)
    assert dequantise_blocks(codes, scales, 128).dtype is torch.float32
    empty, none = quantise_blocks(torch.zeros(0, 384), 128, rule)
    assert (empty.shape, none.shape) == ((0, 384), (0, 3))


@pytest.mark.parametrize("group", [0, -128, 100, 256])
def test_a_group_that_does_not_divide_is_refused(group: int) -> None:
    with pytest.raises(LocalError, match="blocks of"):
        quantise_blocks(torch.zeros(128), group, ScaleRule.AMAX)


def test_scales_of_another_shape_are_refused() -> None:
    with pytest.raises(LocalError, match="other blocks' scales"):
        dequantise_blocks(torch.zeros(2, 256), torch.ones(2, 1), 128)


def test_every_ue8m0_byte() -> None:
    decoded = decode_ue8m0(ALL_BYTES)
    assert decoded[:255].tolist() == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    assert decoded[255].isnan()
    assert encode_ue8m0(decoded).tolist() == ALL_BYTES.tolist()


@pytest.mark.parametrize(
    ("scale", "byte"),
    [
        (0.0, 0),
        (-0.0, 0),
        (2.0**-149, 0),
        (2.0**-127, 0),
        (1.5 * 2.0**-127, 1),
        (2.0**-126, 1),
        (0.75, 127),
        (1.0, 127),
        (1.0000001, 128),
        (2.0**127, 254),
        (3.0e38, 255),
        (math.inf, 255),
        (-math.inf, 255),
        (-1.0, 255),
        (math.nan, 255),
    ],
)
def test_ue8m0_rounds_up_and_marks_what_it_cannot_hold(scale: float, byte: int) -> None:
    assert encode_ue8m0(torch.tensor([scale])).tolist() == [byte]


def test_packed_words_hold_four_equal_bytes() -> None:
    words = encode_ue8m0x4(torch.tensor([[1.0, 2.0], [0.5, 2.0**-127]]))
    assert words.tolist() == [[[127] * 4, [128] * 4], [[126] * 4, [0] * 4]]
    assert decode_ue8m0x4(words).tolist() == [[1.0, 2.0], [0.5, 2.0**-127]]


def test_a_word_of_unequal_bytes_is_no_scale() -> None:
    float_in_disguise = torch.tensor([0.5]).view(torch.uint8).reshape(1, 4)
    assert decode_ue8m0x4(float_in_disguise).isnan().all()


def test_rope_orders_name_the_same_pairs() -> None:
    x = torch.arange(12.0)
    split = reorder_rope(x, RopeOrder.INTERLEAVED, RopeOrder.HALF_SPLIT, 8)
    assert split.tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11]
    assert reorder_rope(split, RopeOrder.HALF_SPLIT, RopeOrder.INTERLEAVED, 8).tolist() == x.tolist()


@pytest.mark.parametrize("shape", [(128,), (0, 128), (3, 2, 64)])
def test_reordering_keeps_shape_type_and_bits(shape: tuple[int, ...]) -> None:
    x = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)
    there = reorder_rope(x, RopeOrder.INTERLEAVED, RopeOrder.HALF_SPLIT, 64)
    back = reorder_rope(there, RopeOrder.HALF_SPLIT, RopeOrder.INTERLEAVED, 64)
    assert back.dtype is x.dtype
    assert torch.equal(back.view(torch.int16), x.view(torch.int16))


def test_reordering_leaves_what_has_no_rope_and_refuses_what_has_no_order() -> None:
    x = torch.arange(4.0)
    assert reorder_rope(x, RopeOrder.NONE, RopeOrder.NONE, 0) is x
    assert reorder_rope(x, RopeOrder.HALF_SPLIT, RopeOrder.HALF_SPLIT, 4) is x
    with pytest.raises(LocalError, match="which elements form a pair"):
        reorder_rope(x, RopeOrder.NONE, RopeOrder.HALF_SPLIT, 4)
