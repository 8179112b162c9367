from __future__ import annotations

import random

import msgspec
import pytest

from pdhandoff.errors import LocalError
from pdhandoff.layouts.descriptor import Component
from pdhandoff.native import GatherPart, Native
from pdhandoff.native.digest import DIGEST_MASK
from pdhandoff.planner.landing import landing_component
from support.caches import Cache, page_table
from support.native_components import index_planar, index_rows, key_value, latent_rows, moved


class Gather:
    """A filled cache, an empty landing form for it, and the part that joins them."""

    def __init__(
        self, source: Component, tokens: range, *, heads: range | None = None, seed: int = 1, skew: int = 0
    ) -> None:
        held = range(source.head_start, source.head_start + source.heads)
        self.tokens = tokens
        self.heads = held if heads is None else heads
        landing = landing_component(source, self.heads)
        pages = -(-tokens.stop // source.page_tokens)
        self.here = Cache(source, pages + 2, seed=seed, skew=skew)
        first = tokens.start // landing.page_tokens
        count = max(1, -(-tokens.stop // landing.page_tokens) - first)
        self.there = Cache(landing, count, skew=skew)
        self.here_pages = page_table(source, random.Random(seed).sample(range(pages + 2), pages))
        self.there_pages = page_table(landing, range(count), first_token=first * landing.page_tokens)

    def part(self) -> GatherPart:
        return GatherPart(
            source=self.here.component,
            source_bases=self.here.bases(),
            source_pages=self.here_pages,
            destination=self.there.component,
            destination_bases=self.there.bases()[""],
            destination_pages=self.there_pages,
            layers=self.here.component.layers,
            heads=self.heads,
        )

    def expected(self, native: Native, tokens: range | None = None) -> int:
        source = self.here.component
        return native.digest(
            source,
            layers=source.layers,
            bases=self.here.bases(),
            pages=self.here_pages,
            tokens=self.tokens if tokens is None else tokens,
            heads=self.heads,
        )

    def check(self, before: bytes, tokens: list[int], looked_at: list[int] | None = None) -> None:
        """Every row (or those of `looked_at`) is there, and nothing else was written."""
        source, landing = self.here.component, self.there.component
        for layer in source.layers:
            for plane in source.planes:
                for token in tokens if looked_at is None else looked_at:
                    for head in self.heads:
                        row = self.here.row(plane, layer, self.here_pages, token, head - source.head_start)
                        to = landing.plane(plane.name)
                        assert self.there.row(to, layer, self.there_pages, token, head - landing.head_start) == row
        assert self.there.changed(before) <= self.there.row_offsets(self.there_pages, tokens)


ODD = {
    "rows": latent_rows(),
    "rows in small pages": latent_rows(page_tokens=16),
    "rows with gaps": latent_rows(page_tokens=16, row=700),
    "planar": index_planar(),
    "planar, small pages": index_planar(page_tokens=8),
    "interleaved": index_rows(),
    "heads inside": key_value("nhd", page_tokens=4),
    "heads outside": key_value("hnd", page_tokens=64),
    "transposed": key_value("transposed", page_tokens=8, elements=7),
    "tensors of their own": key_value("regions", page_tokens=16, elements=5),
    "far pages": moved(index_planar(page_tokens=16), page_gap=13),
}


@pytest.mark.parametrize("tokens", [range(3, 90), range(64, 128), range(77, 78)], ids=["odd", "whole", "one"])
@pytest.mark.parametrize("name", ODD)
def test_rows_land_and_are_hashed(native: Native, name: str, tokens: range) -> None:
    case = Gather(ODD[name], tokens)
    before = bytes(case.there.memory)
    gathered = native.gather([case.part()], tokens, digest=True)
    gathered.wait()
    assert gathered.query()
    case.check(before, list(tokens))
    assert gathered.digest == case.expected(native)


@pytest.mark.parametrize("skew", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["rows", "planar", "heads inside"])
def test_any_alignment_is_served(native: Native, name: str, skew: int) -> None:
    case = Gather(ODD[name], range(5, 70), skew=skew)
    before = bytes(case.there.memory)
    gathered = native.gather([case.part()], case.tokens, digest=True)
    gathered.wait()
    case.check(before, list(case.tokens))
    assert gathered.digest == case.expected(native)


def test_many_components_go_in_one_call(native: Native) -> None:
    tokens = range(10, 75)
    cases = [Gather(component, tokens, seed=seed) for seed, component in enumerate([*ODD.values(), *ODD.values()])]
    before = [bytes(case.there.memory) for case in cases]
    gathered = native.gather([case.part() for case in cases], tokens, digest=True)
    gathered.wait()
    for case, memory in zip(cases, before, strict=True):
        case.check(memory, list(tokens), [10, 63, 64, 74])
    assert gathered.digest == sum(case.expected(native) for case in cases) & DIGEST_MASK


def test_some_heads_go(native: Native) -> None:
    case = Gather(key_value("nhd", heads=range(1, 4)), range(40), heads=range(2, 4))
    before = bytes(case.there.memory)
    gathered = native.gather([case.part()], case.tokens, digest=True)
    gathered.wait()
    case.check(before, list(case.tokens))
    assert gathered.digest == case.expected(native)


def test_without_a_digest_it_is_0(native: Native) -> None:
    case = Gather(latent_rows(), range(66))
    gathered = native.gather([case.part()], case.tokens, digest=False)
    gathered.wait()
    assert gathered.digest == 0


@pytest.mark.parametrize("page_tokens", [4, 64])
def test_null_pages_on_either_side_are_skipped(native: Native, page_tokens: int) -> None:
    tokens = range(2, 8 * page_tokens - 1)
    case = Gather(latent_rows(page_tokens=page_tokens, layers=(0,)), tokens)
    case.here_pages = case.here_pages._replace(null=case.here_pages.ids[1])
    case.there_pages = case.there_pages._replace(null=case.there_pages.ids[4])
    before = bytes(case.there.memory)
    gathered = native.gather([case.part()], tokens, digest=True)
    gathered.wait()
    real = [token for token in tokens if token // page_tokens not in {1, 4}]
    case.check(before, real, real[:: page_tokens // 4])
    skipped = range(4 * page_tokens, 5 * page_tokens)
    assert gathered.digest == (case.expected(native) - case.expected(native, skipped)) & DIGEST_MASK


def test_nothing_to_gather(native: Native) -> None:
    case = Gather(latent_rows(), range(64))
    before = bytes(case.there.memory)
    no_layers = case.part()._replace(layers=(), source_bases={"": []}, destination_bases=[])
    for parts, tokens in (([], range(64)), ([case.part()], range(5, 5)), ([no_layers], range(1))):
        gathered = native.gather(parts, tokens, digest=True)
        gathered.wait()
        assert gathered.digest == 0
    assert bytes(case.there.memory) == before


def test_what_does_not_fit_is_refused_before_anything_is_written(native: Native) -> None:
    case = Gather(latent_rows(), range(128))
    part = case.part()
    before = bytes(case.there.memory)
    twice = part.destination_pages._replace(ids=[0, 0])
    wide = msgspec.structs.replace(part.destination, planes=latent_rows().planes[:2])
    other = msgspec.structs.replace(part.destination.planes[2], elements=32)
    narrow = msgspec.structs.replace(part.destination, planes=(*part.destination.planes[:2], other))
    regions = key_value("regions")
    for bad, match in (
        (part._replace(source_bases={"": [1]}), "needs 2 bases"),
        (part._replace(destination_bases=[1]), "needs 2 bases"),
        (part._replace(heads=range(1, 2)), "local heads"),
        (part._replace(destination_pages=twice), "names a page twice"),
        (part._replace(source_pages=part.source_pages._replace(ids=[1])), "leave its page table"),
        (part._replace(destination=wide), "the same planes"),
        (part._replace(destination=narrow), r"mla_latent\.rope\.elements: the source has 64, the destination 32"),
        (part._replace(destination=regions), "no landing form"),
    ):
        with pytest.raises(LocalError, match=match):
            native.gather([bad], range(128), digest=True)
    assert bytes(case.there.memory) == before
