"""Pages more than 4 GiB apart: offsets are of 64 bits everywhere."""

from __future__ import annotations

import ctypes
import mmap
import random
from typing import Any

import msgspec
import pytest

from pdhandoff.layouts.descriptor import Component
from pdhandoff.native import GatherPart, Native
from pdhandoff.planner.conversions import derive_conversion
from pdhandoff.planner.pages import PageTable
from pdhandoff.planner.placement import Placement
from support.native_components import latent_rows

STRIDE = (1 << 32) + (1 << 20)
PAGE = 64 * 656
_NORESERVE = 0x4000  # Linux; the mmap module of Python 3.11 has no name for it


class Sparse:
    """Two pages of rows, `STRIDE` apart, in memory of which nothing else is ever touched."""

    def __init__(self, *, on_device: bool) -> None:
        length = STRIDE + PAGE
        self._tensor: Any = None
        self._memory: mmap.mmap | None = None
        if on_device:
            import torch

            self._tensor = torch.empty(length, dtype=torch.uint8, device="cuda")
            self.address: int = self._tensor.data_ptr()
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            self._memory = mmap.mmap(-1, length, flags=flags)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def write(self, page: int, data: bytes) -> None:
        if self._memory is None:
            import torch

            self._tensor[page * STRIDE :][: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
        else:
            ctypes.memmove(self.address + page * STRIDE, data, len(data))

    def read(self, page: int) -> bytes:
        if self._memory is None:
            return bytes(self._tensor[page * STRIDE :][:PAGE].cpu().numpy())
        return ctypes.string_at(self.address + page * STRIDE, PAGE)


@pytest.fixture
def far() -> Component:
    rows = latent_rows(layers=(0,))
    return msgspec.structs.replace(
        rows, planes=tuple(msgspec.structs.replace(plane, page_stride=STRIDE) for plane in rows.planes)
    )


def test_rows_are_gathered_converted_and_hashed_across_4_gib(native: Native, far: Component) -> None:
    on_device = native.name == "cuda"
    here, there, again = (Sparse(on_device=on_device) for _ in range(3))
    contents = [random.Random(page).randbytes(PAGE) for page in (0, 1)]
    for page in (0, 1):
        here.write(page, contents[page])
        there.write(page, bytes(PAGE))
        again.write(page, bytes(PAGE))
    part = GatherPart(
        source=far,
        source_bases={"": [here.address]},
        source_pages=PageTable([1, 0], 64),
        destination=far,
        destination_bases=[there.address],
        destination_pages=PageTable([0, 1], 64),
        layers=(0,),
        heads=range(1),
    )
    gathered = native.gather([part], range(128), digest=True)
    gathered.wait()
    assert [there.read(0), there.read(1)] == contents[::-1]
    digest = native.convert(
        derive_conversion(far, far),
        source_bases=[there.address],
        source_pages=PageTable([0, 1], 64),
        destination_at=Placement(2, {"": [again.address]}),
        destination_pages=PageTable([1, 0], 64),
        tokens=range(128),
        zero_until=0,
        digest_layers=(0,),
    )
    assert [again.read(0), again.read(1)] == contents
    whole = native.digest(far, layers=(0,), bases={"": [here.address]}, pages=PageTable([1, 0], 64), tokens=range(128))
    assert gathered.digest == digest == whole
