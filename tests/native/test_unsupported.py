"""What has no compiled kernel, and what a compiled library refuses."""

from __future__ import annotations

import sys

import pytest
import torch

from pdhandoff.errors import LocalError
from pdhandoff.layouts.descriptor import Component, ComponentKind, Element, Plane
from pdhandoff.native import GatherPart, Native
from pdhandoff.planner.conversions import Conversion, derive_conversion
from support.caches import Cache, page_table
from support.native_components import latent_rows


def exponents(element: Element) -> Component:
    """Values that are exponent bytes: nobody stores them, and only the reference decodes them."""
    plane = Plane(
        name="index_key",
        element=element,
        elements=8,
        page_stride=64 * 8 * element.nbytes,
        token_stride=8 * element.nbytes,
    )
    return Component(name="index_key", kind=ComponentKind.INDEX_KEY, layers=(0,), page_tokens=64, planes=(plane,))


def convert(native: Native, conversion: Conversion, here: Cache, there: Cache) -> int:
    return native.convert(
        conversion,
        source_bases=here.bases()[""],
        source_pages=page_table(here.component, [0]),
        destination_at=there.placement,
        destination_pages=page_table(there.component, [0]),
        tokens=range(60),
        zero_until=0,
        digest_layers=(0,),
    )


def test_what_has_no_kernel_is_left_to_the_reference(native: Native) -> None:
    if native.name == "cuda":
        pytest.skip("the reference works on CPU memory only")
    source, target = exponents(Element.UE8M0), exponents(Element.F32)
    here, there = Cache(source, 1, seed=4), Cache(target, 1)
    digest = convert(native, derive_conversion(source, target), here, there)
    assert digest == native.digest(
        source, layers=(0,), bases=here.bases(), pages=page_table(source, [0]), tokens=range(60)
    )
    for token in (0, 59):
        row = bytearray(there.row(target.planes[0], 0, page_table(target, [0]), token))
        stored = here.row(source.planes[0], 0, page_table(source, [0]), token)
        assert torch.frombuffer(row, dtype=torch.float32).tolist() == list(stored)


def test_without_torch_the_missing_kernel_is_named(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.name == "reference":
        pytest.skip("the reference needs torch")
    monkeypatch.setitem(sys.modules, "pdhandoff.native.reference", None)
    source, target = exponents(Element.UE8M0), exponents(Element.F32)
    with pytest.raises(LocalError, match="no compiled kernel ue8m0>f32 for plane index_key"):
        convert(native, derive_conversion(source, target), Cache(source, 1, seed=4), Cache(target, 1))


def test_null_and_impossible_bases_are_refused(native: Native) -> None:
    if native.name == "reference":
        pytest.skip("the reference trusts its addresses")
    rows = latent_rows(layers=(0,))
    part = GatherPart(
        source=rows,
        source_bases={"": [0]},
        source_pages=page_table(rows, [0]),
        destination=rows,
        destination_bases=[4096],
        destination_pages=page_table(rows, [0]),
        layers=(0,),
        heads=range(1),
    )
    with pytest.raises(LocalError, match="a base address of the source is null"):
        native.gather([part], range(4), digest=False)
    for base in (-1, 1 << 64):
        with pytest.raises(LocalError, match="no address of 64 bits"):
            native.gather([part._replace(source_bases={"": [base]})], range(4), digest=False)


@pytest.mark.gpu
def test_memory_that_no_device_reaches_is_named(native: Native) -> None:
    if native.name != "cuda":
        pytest.skip("only devices cannot reach memory")
    rows = latent_rows(layers=(0,))
    memory = bytearray(64 * 656)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    with pytest.raises(LocalError, match="is CPU memory that no device reaches"):
        native.digest(
            rows, layers=(0,), bases={"": [address]}, pages=page_table(rows, [0]), tokens=range(4), heads=range(1)
        )


def test_a_row_that_is_not_128_wide_is_not_rotated(native: Native) -> None:
    short = exponents(Element.F32)
    conversion = derive_conversion(short, exponents(Element.BF16))
    part = conversion.parts[0]._replace(kernel="f32>bf16+hadamard128")
    with pytest.raises(LocalError, match="the last axis has 8 elements"):
        convert(
            native,
            conversion._replace(parts=(part,)),
            Cache(short, 1, seed=2),
            Cache(exponents(Element.BF16), 1),
        )
