"""The layouts say what the engines hold: the library's conversion by them equals the hand-written one."""

from __future__ import annotations

import pytest
import torch

from pdhandoff.demo.model import (
    DecodeEngine,
    PrefillEngine,
    decode_layout,
    decode_placements,
    fingerprint,
    prefill_layout,
    prefill_placements,
)
from pdhandoff.layouts import bridge
from pdhandoff.native.reference import Reference
from pdhandoff.planner import PageTable, derive_conversion
from support.demo_model import network, prefilled, run


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_conversion_by_layouts_equals_conversion_by_hand(devices: int) -> None:
    source = prefilled(1, 150)
    engine = PrefillEngine(network(), seed=5)
    request = engine.add(source.prompt)
    run(engine, request, 70)
    config = network().config
    decoder = DecodeEngine(network(), devices=devices)
    held = prefill_layout(config)
    at = prefill_placements(engine)
    pages = PageTable(engine.block_table(request), config.page_tokens, null=0)
    for device in range(devices):
        layout = decode_layout(config, devices=devices, device=device)
        placements = decode_placements(decoder, device=device)
        assert set(placements) == {component.name for component in layout.components}
        for component in layout.components:
            Reference().convert(
                derive_conversion(held.component(component.name), component),
                source_bases=at[component.name].bases[""],
                source_pages=pages,
                destination_at=placements[component.name],
                destination_pages=PageTable([0], config.max_seq_len),
                tokens=range(150),
                zero_until=192,
            )
    by_hand = DecodeEngine(network(), devices=devices)
    by_hand.inject_cache(source.rows)
    for device in range(devices):
        one, other = (each.decode_layer.planes.by_device[device] for each in (by_hand, decoder))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_two_layouts_can_be_bridged_and_name_their_weights() -> None:
    config = network().config
    revision = fingerprint(network().weights)
    held, wanted = prefill_layout(config, revision=revision), decode_layout(config, revision=revision)
    assert not bridge(held, wanted).mtp_cold
    assert held.model.revision == revision
    assert held.model.draft_layers == (4,)
    assert held.component("mla_latent").row_bytes == 656
    assert held.component("index_key").row_bytes == 132


def test_a_device_that_does_not_exist_has_no_layout() -> None:
    with pytest.raises(KeyError):
        decode_layout(network().config, devices=1, device=1)
