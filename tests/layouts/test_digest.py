from __future__ import annotations

import subprocess
import sys

import pytest

from pdhandoff.errors import LayoutError
from pdhandoff.layouts import Layout, catalogue, layout_digest, profiles, require_same
from pdhandoff.layouts.catalogue import Options
from pdhandoff.layouts.differences import first_difference
from support.changes import CHANGES
from support.layouts import mla_layout, with_plane

PINNED = {
    "vllm.fp8_ds_mla": "d494fbf78d4cc4d2ac3d44b0283e8908",
    "vllm.mla": "0eaf3cee7350152b3fffc55d62889473",
    "tilert.bf16": "ff6fac906f6e6484818d30b02f1fff11",
    "tilert.fp8": "63dd3862c1aa00b1b89b2f77e44ee2d0",
}


@pytest.mark.parametrize("entry", PINNED)
def test_digests_are_the_same_in_every_version(entry: str) -> None:
    layout = catalogue.build(entry, profiles.GLM5, Options(length=4096))
    assert layout_digest(layout).hex() == PINNED[entry]


@pytest.mark.slow
def test_digests_are_the_same_in_every_process() -> None:
    code = (
        "from pdhandoff.layouts import Layout, catalogue, layout_digest, profiles;"
        "print(layout_digest(catalogue.build('vllm.fp8_ds_mla', profiles.GLM5)).hex())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == PINNED["vllm.fp8_ds_mla"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_digest_stands_for_what_changes_bytes_and_nothing_else(name: str) -> None:
    change = CHANGES[name]
    assert (layout_digest(change.before) != layout_digest(change.after)) is change.other_bytes


def test_no_two_changes_have_one_digest() -> None:
    by_digest: dict[bytes, Layout] = {}
    for change in CHANGES.values():
        if change.other_bytes:
            known = by_digest.setdefault(layout_digest(change.after), change.after)
            assert known == change.after
    assert len(by_digest) > 35


@pytest.mark.parametrize("name", CHANGES)
def test_the_first_difference_is_named(name: str) -> None:
    change = CHANGES[name]
    found = first_difference(change.before, change.after)
    assert (found is not None) is change.other_bytes
    if found is None:
        require_same(change.before, change.after)
        return
    assert found.expected != found.announced
    with pytest.raises(LayoutError) as caught:
        require_same(change.before, change.after)
    assert caught.value.field == found.field
    assert found.expected in caught.value.reason
    assert found.announced in caught.value.reason


def test_a_difference_shows_both_values() -> None:
    found = first_difference(
        mla_layout(), with_plane(mla_layout(), "mla_latent", "rope", offset=544, page_stride=42000)
    )
    assert found == ("'mla_latent'[2].page_stride", "41984", "42000")
