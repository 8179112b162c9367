"""Stand-ins for TileRT's generators: the call surface of 0.1.6.post3, the arithmetic of the demo's model, on CPU.

`Glm5StandIn` runs several steps a call and has device roles, `Dsv32StandIn` runs one step and keeps everything
everywhere, as their models do there. Drafts are verified whatever they are: there is no token that means "no draft".
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pdhandoff.demo.model import Network
from support.tilert_caches import DEVICES, PAD, DeviceTensors

__all__ = ["Dsv32Layer", "Dsv32StandIn", "Glm5Layer", "Glm5StandIn", "Rows"]

Rows = tuple[Tensor, Tensor, Tensor]
"one layer's rows for inject_cache: index keys, latents, rotary keys, bf16 [n, elements]"
WIDTH = 4
TOKEN_OUT, CUR_POS, PREDICTED_TOKENS, ACCEPTED_TOKENS, NEXT_DRAFT_TOKENS = 25, 31, 35, 37, 38
AR_STEPS = 1024


class Dsv32Layer:
    """`ShowHandsDSALayer` of DeepSeek-V3.2: one step a call."""

    roles = False

    def __init__(self, network: Network, *, with_mtp: bool, fp8: bool) -> None:
        self.num_devices = DEVICES
        self.with_mtp = with_mtp
        self._network = network
        layers = network.config.layers + (1 if with_mtp else 0)
        self.caches = DeviceTensors(network.config, layers=layers, roles=self.roles, fp8=fp8)
        self._temporaries = [self._temporary() for _ in range(DEVICES)]
        self._prefilling = 1
        "tokens of a prefill step; 0: decoding"
        self.config = (1.0, 0.9, 256, True)
        self.seeds: list[int] = []
        self.resets = 0
        self.steps = 0

    @staticmethod
    def _temporary() -> list[Tensor]:
        tensors = [torch.zeros(0, dtype=torch.int32) for _ in range(60)]
        tensors[TOKEN_OUT] = torch.zeros(1, WIDTH, 1, dtype=torch.int32)
        tensors[CUR_POS] = torch.zeros(1, dtype=torch.int32)
        tensors[PREDICTED_TOKENS] = torch.zeros(1, WIDTH, 1, dtype=torch.int32)
        tensors[ACCEPTED_TOKENS] = torch.zeros(1, dtype=torch.int32)
        tensors[NEXT_DRAFT_TOKENS] = torch.zeros(1, WIDTH, dtype=torch.int32)
        return tensors

    def _get_device_result(self, device_id: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
        return self._temporaries[device_id], self.caches.by_device[device_id], [], torch.zeros(0)

    def forward(self, token_id: Tensor, with_mtp: bool | None = None) -> list[Any]:
        drafts = self.with_mtp if with_mtp is None else with_mtp
        if drafts:
            self._verify([int(token) for token in token_id.flatten()])
        else:
            self._set(TOKEN_OUT, [self._plain(int(token_id))])
        return [self._get_device_result(device) for device in range(DEVICES)]

    def set_prefill_valid_tokens(self, num_valid_tokens: int) -> None:
        self._prefilling = num_valid_tokens

    def get_next_draft_tokens(self, device_id: int = 0) -> Tensor:
        return self._temporaries[device_id][NEXT_DRAFT_TOKENS]

    def get_num_accepted(self, device_id: int = 0) -> int:
        return int(self._temporaries[device_id][ACCEPTED_TOKENS][0])

    def get_predicted_tokens(self, device_id: int = 0) -> Tensor:
        return self._temporaries[device_id][PREDICTED_TOKENS]

    def update_sampling_config(self, temperature: float, top_p: float, top_k: int, use_topp: bool = True) -> None:
        self.config = (temperature, top_p, top_k, use_topp)

    def set_sampling_seed(self, seed: int, with_mtp: bool | None = None) -> None:
        assert with_mtp in {None, self.with_mtp}
        self.seeds.append(seed)

    def reset_sequence(self) -> None:
        self.resets += 1
        self._prefilling = 1
        self._move(-self.position())

    # ---- the arithmetic

    def position(self) -> int:
        """The one that all devices agree on."""
        (position,) = {int(tensors[CUR_POS][0]) for tensors in self._temporaries}
        return position

    def _move(self, by: int) -> None:
        for tensors in self._temporaries:
            tensors[CUR_POS] += by

    def _set(self, place: int, values: Sequence[int]) -> None:
        for tensors in self._temporaries:
            tensors[place].view(-1)[: len(values)] = torch.tensor(list(values), dtype=torch.int32)

    def _plain(self, token: int) -> int:
        self.steps += 1
        hidden = self._network.target(self.caches, start=self.position(), tokens=[token])
        (following,) = self._network.greedy(hidden)
        self._move(1)
        return following

    def _verify(self, tokens: list[int]) -> list[int]:
        """One step with drafts: the tokens that it decodes."""
        assert self._prefilling == 0, "this generator prefills until it is told to decode"
        assert len(tokens) == WIDTH
        self.steps += 1
        start = self.position()
        hidden = self._network.target(self.caches, start=start, tokens=tokens)
        predicted = self._network.greedy(hidden)
        accepted = 1
        while accepted < WIDTH and tokens[accepted] == predicted[accepted - 1]:
            accepted += 1
        following = predicted[:accepted]
        self._set(PREDICTED_TOKENS, predicted)
        self._set(ACCEPTED_TOKENS, [accepted])
        self._set(NEXT_DRAFT_TOKENS, [following[-1], *self._draft(start, hidden[:accepted], following)])
        self._move(accepted)
        return following

    def _draft(self, start: int, hidden: Tensor, tokens: list[int]) -> list[int]:
        drafts: list[int] = []
        while len(drafts) < WIDTH - 1:
            out = self._network.draft(self.caches, start=start, hidden=hidden, next_tokens=tokens)
            start += len(tokens)
            hidden = out[-1:]
            tokens = self._network.greedy(hidden)
            drafts += tokens
        return drafts


class Glm5Layer(Dsv32Layer):
    """`ShowHandsDSALayer` of GLM-5: several steps a call, flat buffers."""

    roles = True

    def __init__(self, network: Network, *, with_mtp: bool, fp8: bool) -> None:
        super().__init__(network, with_mtp=with_mtp, fp8=fp8)
        self._tokens = torch.zeros(1 + AR_STEPS * WIDTH, dtype=torch.int32)
        self._counts = torch.zeros(1 + AR_STEPS, dtype=torch.int32)
        self.calls: list[tuple[list[int], int]] = []

    def set_prefill_valid_tokens(self, num_valid_tokens: int, with_mtp: bool | None = None) -> None:
        assert with_mtp in {None, self.with_mtp}
        self._prefilling = num_valid_tokens

    def show_hands(self, prev_draft_tokens: Tensor, ar_steps: int = 1) -> None:
        row = [int(token) for token in prev_draft_tokens.flatten()]
        self.calls.append((row, ar_steps))
        tokens, counts = [], []
        for _ in range(ar_steps):
            tokens += self._verify(row)
            counts.append(self.get_num_accepted())
            row = self.get_next_draft_tokens().flatten().tolist()
        self._fill(tokens, counts)

    def ar_accepted_tokens(self, dev: int = 0) -> Tensor:
        assert dev == 0
        return self._tokens

    def ar_num_accepted(self, dev: int = 0) -> Tensor:
        assert dev == 0
        return self._counts

    def show_hands_no_mtp(self, prev_token: Tensor, ar_steps: int = 1) -> None:
        assert self._prefilling == 0, "this generator prefills until it is told to decode"
        token = int(prev_token[0])
        self.calls.append(([token], ar_steps))
        tokens = []
        for _ in range(ar_steps):
            token = self._plain(token)
            tokens.append(token)
        self._fill(tokens, [1] * ar_steps)

    def ar_accepted_tokens_no_mtp(self, dev: int = 0) -> Tensor:
        assert dev == 0
        return self._tokens

    def _fill(self, tokens: list[int], counts: list[int]) -> None:
        for buffer, values in ((self._tokens, tokens), (self._counts, counts)):
            buffer[0] = len(values)
            buffer[1 : 1 + len(values)] = torch.tensor(values, dtype=torch.int32)


class Dsv32StandIn:
    """`DSAv32Generator`, loaded.

    Args:
        network: the model; its config's max_seq_len is the length of the tensors, padding included.
        with_mtp: with drafts.
        fp8: fp8 latents.
    """

    layer = Dsv32Layer
    stop_token_ids: set[int]

    def __init__(self, network: Network, *, with_mtp: bool = True, fp8: bool = False) -> None:
        self.with_mtp = with_mtp
        self.mtp_seq_len = WIDTH if with_mtp else 1
        self.eos_id = network.config.end_token
        self.config = SimpleNamespace(max_seq_len=network.config.max_seq_len - PAD)
        self.decode_layer = self.layer(network, with_mtp=with_mtp, fp8=fp8)
        self.cleanups = 0

    def update_sampling_params(
        self, temperature: float = 1.0, top_p: float = 0.95, top_k: int = 256, use_topp: bool = True
    ) -> None:
        self.decode_layer.update_sampling_config(temperature, top_p, top_k, use_topp)

    def inject_cache(self, layer_caches: list[Rows], start_pos: int = 0, end_pos: int | None = None) -> None:
        end = start_pos + len(layer_caches[0][0]) if end_pos is None else end_pos
        for device in range(DEVICES):
            caches = self.decode_layer._get_device_result(device)[1]
            for layer, parts in enumerate(layer_caches):
                for part, rows in enumerate(parts):
                    target = caches[3 * layer + part]
                    if target.size(1) >= end:
                        target[0, start_pos:end, :].copy_(rows[: end - start_pos])

    def set_cur_pos(self, cur_pos: int) -> None:
        for device in range(DEVICES):
            self.decode_layer._get_device_result(device)[0][CUR_POS].fill_(cur_pos)

    def cleanup(self) -> None:
        self.cleanups += 1


class Glm5StandIn(Dsv32StandIn):
    """`GLM5Generator`, loaded."""

    layer = Glm5Layer
    decode_layer: Glm5Layer

    def __init__(self, network: Network, *, with_mtp: bool = True, fp8: bool = False) -> None:
        super().__init__(network, with_mtp=with_mtp, fp8=fp8)
        self.mtp_seq_len = WIDTH
        self.stop_token_ids = {network.config.end_token}
