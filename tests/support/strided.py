"""Reads planes by address arithmetic from their strides and decodes stored elements. Nothing is inferred."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdhandoff.layouts.descriptor import Component, Element, Plane

__all__ = [
    "Bytes",
    "PageFile",
    "Values",
    "decode_part",
    "decode_plane",
    "e4m3_table",
    "load_pages",
    "plane_bytes",
    "row_bytes",
]

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]


class PageFile(NamedTuple):
    """A safetensors file: the bytes of each tensor, its shape, and the file's metadata."""

    tensors: dict[str, Bytes]
    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]


def load_pages(path: Path) -> PageFile:
    """Tensors as flat bytes: an 8-byte little-endian length, a JSON header of that length, then the data."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    tensors, shapes = {}, {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data, np.uint8, end - begin, start + begin)
        shapes[name] = tuple(entry["shape"])
    return PageFile(tensors, shapes, metadata)


def plane_bytes(component: Component, plane: Plane, memory: Bytes, pages: Sequence[int], tokens: range) -> Bytes:
    """Stored bytes `[token, head, element, byte]`; `memory` starts at the plane's base, `pages` is the block table."""
    token = np.asarray(tokens, np.int64)
    page = np.asarray(pages, np.int64)[token // component.page_tokens]
    address = page * plane.page_stride + plane.offset + token % component.page_tokens * plane.token_stride
    head = np.arange(component.heads, dtype=np.int64) * plane.head_stride
    element = np.arange(plane.elements, dtype=np.int64) * plane.element_step
    byte = np.arange(plane.element.nbytes, dtype=np.int64)
    found: Bytes = memory[address[:, None, None, None] + head[:, None, None] + element[:, None] + byte]
    return found


def row_bytes(component: Component, memory: Bytes, pages: Sequence[int], tokens: range) -> Bytes:
    """All planes' stored bytes of each token, `[token, row_bytes]`, in plane order."""
    rows = [plane_bytes(component, plane, memory, pages, tokens) for plane in component.planes]
    return np.concatenate([row.reshape(len(tokens), -1) for row in rows], axis=1)


def e4m3_table() -> Values:
    """The value of each of the 256 codes of float8_e4m3fn: bias 7, no infinity, 0x7f and 0xff are NaN."""
    table = np.empty(256, np.float32)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            table[code] = np.nan
        elif exponent == 0:
            table[code] = sign * mantissa / 8 * 2.0**-6
        else:
            table[code] = sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return table


def decode_plane(component: Component, plane: Plane, memory: Bytes, pages: Sequence[int], tokens: range) -> Values:
    """Stored elements as numbers `[token, head, element]`, scales not applied."""
    raw = np.ascontiguousarray(plane_bytes(component, plane, memory, pages, tokens))
    match plane.element:
        case Element.F32:
            return raw.view("<f4")[..., 0]
        case Element.F16:
            return raw.view("<f2")[..., 0].astype(np.float32)
        case Element.BF16:
            return (raw.view("<u2")[..., 0].astype(np.uint32) << 16).view(np.float32)
        case Element.E4M3:
            return e4m3_table()[raw[..., 0]]
        case Element.UE8M0 | Element.UE8M0X4:
            return np.exp2(raw[..., 0].astype(np.float32) - 127)


def decode_part(component: Component, name: str, memory: Bytes, pages: Sequence[int], tokens: range) -> Values:
    """Values of a logical part `[token, head, element]`, scales applied."""
    plane = component.plane(name)
    stored = decode_plane(component, plane, memory, pages, tokens)
    if plane.quantisation is None:
        return stored
    scale = decode_plane(component, component.plane(plane.quantisation.scale_plane), memory, pages, tokens)
    return stored * np.repeat(scale, plane.quantisation.group, axis=-1)
