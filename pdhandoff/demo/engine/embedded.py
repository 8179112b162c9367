"""The demo's own model behind the calls of a decode node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import msgspec

from pdhandoff.demo.engine.seam import Engine
from pdhandoff.demo.model.config import DEFAULT_CONFIG, ModelConfig
from pdhandoff.demo.model.layouts import MODEL_NAME, decode_layout, plane_placements
from pdhandoff.demo.model.network import Network
from pdhandoff.demo.model.planes import PLANES, PlaneCache
from pdhandoff.demo.model.weights import fingerprint
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.planner import Placement

__all__ = ["create"]


def create(*, max_seq_len: int = DEFAULT_CONFIG.max_seq_len, drafts: int = 3, parked: int = 1) -> Engine:
    """A decode engine with the demo's model: what `pdhandoff.demo` prefills can be decoded with it.

    Args:
        max_seq_len: tokens of one request, prompt and output; a multiple of 64.
        drafts: draft tokens per verify step; 0: no speculation.
        parked: requests whose rows may wait, converted, while another one decodes.

    Raises:
        LocalError: a number is out of range.
    """
    if max_seq_len < 64 or drafts < 0 or parked < 0:
        raise LocalError(
            ErrorCode.CONFIG,
            f"max_seq_len={max_seq_len}, drafts={drafts}, parked={parked}: at least 64, 0 and 0 are needed",
        )
    config = msgspec.structs.replace(DEFAULT_CONFIG, max_seq_len=max_seq_len)
    network = Network(config)
    return Engine(
        network=network,
        layout=decode_layout(config, revision=fingerprint(network.weights)),
        model=MODEL_NAME,
        max_seq_len=max_seq_len,
        vocabulary=config.vocabulary,
        new_memory=lambda: _Planes(config),
        parked=parked,
        drafts=drafts,
        end_tokens=(config.end_token,),
    )


@final
class _Planes:
    """TileRT's planes for one request."""

    def __init__(self, config: ModelConfig) -> None:
        self.cache = PlaneCache(config)
        self._draft_planes = slice(PLANES * config.draft_layer, PLANES * (config.draft_layer + 1))

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Component -> where its planes are."""
        return plane_placements(self.cache, devices=1, device=0)

    def begin(self, tokens: int, *, cold: bool) -> None:
        """Without draft rows, those of a former request must not be read."""
        if cold:
            for plane in self.cache.by_device[0][self._draft_planes]:
                plane[0, :tokens] = 0
