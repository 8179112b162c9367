"""The decode engine of the demo, behind the calls of TileRT's generators (0.1.6.post3).

One request at a time. A step runs the target over the last accepted token and three drafts, accepts the longest
prefix of drafts that greedy decoding would have produced, writes the draft layer's rows for what was accepted, and
drafts three more by running the draft layer on its own output. Accepted counts include the token that the target adds
by itself, so they are 1 to 4, and the position moves on by that many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import msgspec
import torch
from torch import Tensor

from pdhandoff.demo.model.config import ModelConfig
from pdhandoff.demo.model.network import Network
from pdhandoff.demo.model.planes import PLANES, PlaneCache
from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["DecodeEngine", "DecodeLayer", "LayerRows", "SamplingParams"]

LayerRows = tuple[Tensor, Tensor, Tensor]
"one layer's rows to inject: index keys [n, 128], latents [n, 512], rotary keys [n, 64], bf16"


@final
class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. The demo's engine is greedy."""

    temperature: float
    top_p: float
    top_k: int
    use_topp: bool


@final
class DecodeLayer:
    """The part of a generator that runs steps.

    Args:
        network: the model.
        devices: 1, or 2 with divided roles.
    """

    def __init__(self, network: Network, devices: int) -> None:
        self.num_devices = devices
        self.planes = PlaneCache(network.config, devices)
        self._network = network
        self._config = network.config
        self._position = torch.zeros(1, dtype=torch.int32)
        self._predicted: list[int] = []
        self._accepted = 0
        self._drafts: list[int] = []

    @property
    def position(self) -> int:
        """Position of the token that the next `forward` begins with."""
        return int(self._position)

    def move_to(self, position: int) -> None:
        """Set the position. Raises LocalError when no row has it."""
        if not 0 <= position < self._config.max_seq_len:
            raise LocalError(
                ErrorCode.OUT_OF_RANGE,
                f"position {position} lies outside the {self._config.max_seq_len} rows of the caches",
            )
        self._position.fill_(position)

    def _get_device_result(self, device: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """Intermediates (the position first), caches (see `planes`), parameters and profile logs of one device."""
        return [self._position], self.planes.by_device[device], [], []

    def set_prefill_valid_tokens(self, count: int) -> None:
        """0: `forward` verifies drafts. The demo's engine does not prefill, so anything else raises LocalError."""
        if count:
            raise LocalError(
                ErrorCode.MISUSE, f"{count} prefill tokens: this engine decodes what another one has prefilled"
            )

    def forward(self, draft: Tensor) -> None:
        """One verify step.

        Args:
            draft: [1, 4] tokens: the one at the current position, then drafts. A pad token is no draft.

        Raises:
            LocalError: another shape.
        """
        if draft.shape != (1, self._config.mtp_seq_len):
            raise LocalError(
                ErrorCode.MISUSE, f"drafts have shape {tuple(draft.shape)}, not (1, {self._config.mtp_seq_len})"
            )
        start = self.position
        tokens = [int(token) for token in draft[0]][: self._config.max_seq_len - start]
        hidden = self._network.target(self.planes, start=start, tokens=tokens)
        self._predicted = self._network.greedy(hidden)
        self._accepted = 1
        while self._accepted < len(tokens) and tokens[self._accepted] == self._predicted[self._accepted - 1]:
            self._accepted += 1
        following = self._predicted[: self._accepted]
        self._drafts = [following[-1], *self._draft(start, hidden[: self._accepted], following)]
        self._position.add_(self._accepted)

    def get_next_draft_tokens(self, _device: int) -> Tensor:
        """Tokens [4] for the next `forward`: the last predicted one, then three drafts."""
        return torch.tensor(self._drafts, dtype=torch.int32)

    def get_num_accepted(self, _device: int) -> int:
        """How many of the predicted tokens count: accepted drafts, and one more."""
        return self._accepted

    def get_predicted_tokens(self, _device: int) -> Tensor:
        """The token that greedy decoding gives after each token of the step."""
        return torch.tensor(self._predicted, dtype=torch.int32)

    def reset_sequence(self) -> None:
        """Forget the request. Rows stay where they are, and are never read before they are written again."""
        self._position.zero_()
        self._predicted, self._drafts, self._accepted = [], [], 0

    def _draft(self, start: int, hidden: Tensor, following: Sequence[int]) -> list[int]:
        """Write the draft rows of accepted tokens, then draft on; pads where the caches end."""
        drafts: list[int] = []
        tokens = list(following)
        while len(drafts) < self._config.draft_depth and start + len(tokens) <= self._config.max_seq_len:
            out = self._network.draft(self.planes, start=start, hidden=hidden, next_tokens=tokens)
            start += len(tokens)
            hidden = out[-1:]
            tokens = self._network.greedy(hidden)
            drafts += tokens
        return drafts + [self._config.pad_token] * (self._config.draft_depth - len(drafts))


@final
class DecodeEngine:
    """A generator: owns the caches, takes rows in, and decodes one request.

    Args:
        network: the model.
        devices: 1, or 2 with divided roles (see `planes`).
    """

    def __init__(self, network: Network, *, devices: int = 1) -> None:
        self.config: ModelConfig = network.config
        self.decode_layer = DecodeLayer(network, devices)
        self.mtp_seq_len = network.config.mtp_seq_len
        self.max_seq_len = network.config.max_seq_len
        self.eos_id = network.config.end_token
        self.stop_token_ids = (network.config.end_token,)
        self.sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=1, use_topp=False)

    def inject_cache(self, layer_caches: Sequence[LayerRows], start_pos: int = 0, end_pos: int | None = None) -> None:
        """Copy rows into the caches, on every device whose tensors are long enough for them.

        Args:
            layer_caches: per layer, draft layer last: index keys [n, 128] (Hadamard-rotated), latents [n, 512] and
                rotary keys [n, 64], bf16.
            start_pos: position of the first row.
            end_pos: position after the last one to copy; None: all rows.

        Raises:
            LocalError: a layer is missing, or the rows do not fit.
        """
        layers = len(self.config.all_layers)
        if len(layer_caches) != layers:
            raise LocalError(ErrorCode.MISUSE, f"rows of {len(layer_caches)} layers, but the model has {layers}")
        count = layer_caches[0][0].shape[0] if end_pos is None else end_pos - start_pos
        if start_pos < 0 or count < 0 or start_pos + count > self.max_seq_len:
            raise LocalError(
                ErrorCode.TOO_LARGE, f"{count} rows from position {start_pos} on do not fit into {self.max_seq_len}"
            )
        for device in range(self.decode_layer.num_devices):
            _, caches, _, _ = self.decode_layer._get_device_result(device)  # noqa: SLF001
            for layer, parts in enumerate(layer_caches):
                for part, rows in enumerate(parts):
                    plane = caches[PLANES * layer + part][0]
                    if start_pos + count <= len(plane):
                        plane[start_pos : start_pos + count] = rows[:count]

    def set_cur_pos(self, position: int) -> None:
        """Position of the next token to run: after an injection of n rows, n - 1, so that the last one is replayed."""
        self.decode_layer.move_to(position)

    def update_sampling_params(self, *, temperature: float, top_p: float, top_k: int, use_topp: bool) -> None:
        """Set how tokens are chosen. Raises LocalError for anything but greedy: temperature 0, or top_k 1."""
        if temperature != 0 and top_k != 1:
            raise LocalError(
                ErrorCode.CONFIG, f"temperature {temperature} with top_k {top_k}: the demo's engine is greedy"
            )
        self.sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, use_topp=use_topp)

    def reset_sequence(self) -> None:
        """Forget the request."""
        self.decode_layer.reset_sequence()
