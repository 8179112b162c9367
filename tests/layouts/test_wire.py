from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdhandoff.errors import ErrorCode, LayoutError, PdHandoffError, RemoteError
from pdhandoff.layouts import catalogue, decode_layout, encode_layout, profiles
from pdhandoff.layouts.catalogue import Options
from pdhandoff.limits import Limits
from support.changes import CHANGES
from support.layouts import mla_layout, with_component

DATA = encode_layout(mla_layout())


@pytest.mark.parametrize("entry", ["vllm.mla", "vllm.fp8_ds_mla", "tilert.bf16", "tilert.fp8"])
def test_a_layout_survives_the_wire(entry: str) -> None:
    layout = catalogue.build(entry, profiles.GLM5_2, Options(length=131072))
    assert decode_layout(encode_layout(layout)) == layout
    assert len(encode_layout(layout)) < 4096


@pytest.mark.parametrize("name", [name for name, change in CHANGES.items() if "left out" not in name])
def test_every_field_survives_the_wire(name: str) -> None:
    layout = CHANGES[name].after
    assert decode_layout(encode_layout(layout)) == layout


def changed(path: str, value: object) -> bytes:
    """The encoded layout with one value replaced, or added."""
    tree = msgspec.msgpack.decode(DATA)
    at = tree
    *parents, last = path.split(".")
    for step in parents:
        at = at[int(step)] if step.isdigit() else at[step]
    at[last] = value
    return msgspec.msgpack.encode(tree)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("model.layers", "three", "model.layers"),
        ("model.layers", 1.5, "model.layers"),
        ("model.colour", 1, "model"),
        ("colour", 1, "layout"),
        ("components", 7, "components"),
        ("components.0.page_tokens", -1, "mla_latent.page_tokens"),
        ("components.0.page_tokens", None, "components[0].page_tokens"),
        ("components.0.layers", [0, 2**62], "mla_latent.layers"),
        ("components.1.planes.0.element", "int4", "components[1].planes[0].element"),
        ("components.1.planes.0.rotation", "fourier", "components[1].planes[0].rotation"),
        ("components.1.planes.0.quantisation", {"group": 1}, "components[1].planes[0].quantisation"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: object, field: str) -> None:
    with pytest.raises(LayoutError) as caught:
        decode_layout(changed(path, value))
    assert caught.value.field == field
    assert caught.value.code is ErrorCode.LAYOUT_MISMATCH


def test_a_missing_field_is_named_at_the_top() -> None:
    tree = msgspec.msgpack.decode(DATA)
    del tree["model"]
    with pytest.raises(LayoutError, match="missing required field `model`") as caught:
        decode_layout(msgspec.msgpack.encode(tree))
    assert caught.value.field == "layout"


@pytest.mark.parametrize("data", [b"", b"\xc1", DATA[:-1], DATA + b"\x00", DATA.replace(b"tiny", b"tin\xff", 1)])
def test_what_is_no_msgpack_is_the_peers_fault(data: bytes) -> None:
    with pytest.raises(RemoteError) as caught:
        decode_layout(data)
    assert caught.value.code is ErrorCode.MALFORMED


def test_length_is_bounded_before_decoding_and_after_encoding() -> None:
    limits = Limits(max_frame_bytes=len(DATA) - 1)
    with pytest.raises(RemoteError, match=f"takes {len(DATA)} bytes") as remote:
        decode_layout(DATA, limits)
    assert remote.value.code is ErrorCode.OVERSIZED
    with pytest.raises(LayoutError) as local:
        encode_layout(mla_layout(), limits)
    assert local.value.code is ErrorCode.OVERSIZED


def test_a_refusal_never_repeats_a_hostile_string_at_full_length() -> None:
    with pytest.raises(LayoutError) as caught:
        decode_layout(changed("components.0.kind", "k" * 100_000))
    assert len(caught.value.reason) < 2000


def test_an_inconsistent_layout_is_not_sent() -> None:
    with pytest.raises(LayoutError):
        encode_layout(with_component(mla_layout(), "index_key", page_tokens=0))


@given(st.binary(max_size=200))
def test_any_bytes_give_a_typed_error(data: bytes) -> None:
    with pytest.raises(PdHandoffError):
        decode_layout(data)


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_any_changed_byte_gives_a_layout_or_a_typed_error(position: int, flip: int) -> None:
    data = bytearray(DATA)
    data[position] ^= flip
    try:
        layout = decode_layout(bytes(data))
    except PdHandoffError:
        return
    assert layout.validate() is layout
