"""The calls of TileRT's generators that decoding needs: which there are, and what they return.

Source: TileRT 0.1.6.post3, `GLM5Generator` and `DSAv32Generator` (tilert/models/*/generator.py) and their
`decode_layer` (tilert/models/*/modules/end2end.py). GLM-5 runs several steps in one call and leaves tokens and counts
in flat buffers; DeepSeek-V3.2 runs one step and leaves them in its intermediates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, final

import torch
from torch import Tensor

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["TOKEN_OUT", "Calls", "Stepper", "Verified", "end_tokens", "examine"]

TOKEN_OUT: Final = 25
"place of the sampled token among a device's intermediates (`Idx.TOKEN_OUT`, tilert/models/*/temp_var_indices.py)"


class Verified(NamedTuple):
    """What one call decoded."""

    tokens: tuple[int, ...]
    "output tokens, in order"
    counts: tuple[int, ...]
    "per step, how many of them: accepted drafts, and one more"


class Stepper(Protocol):
    """One way of running steps."""

    width: int
    "tokens of one step: the one at the current position, then drafts; 1: no drafts"
    several: bool
    "one call can run several steps"

    def prepare(self) -> None:
        """Decode from now on: a generator that has prefilled before would go on prefilling."""

    def run(self, row: Sequence[int], steps: int) -> Verified:
        """Run steps from the current position.

        Args:
            row: `width` tokens.
            steps: at least 1; 1 unless `several`.
        """

    def next_row(self) -> list[int]:
        """The last output token, then the drafts that follow it."""


@final
class Calls(NamedTuple):
    """A generator that has every call that is needed."""

    generator: Any
    layer: Any
    "`generator.decode_layer`"
    stepper: Stepper
    with_mtp: bool
    can_seed: bool


def examine(generator: Any) -> Calls:
    """What the generator can do.

    Raises:
        LocalError: calls are missing; the sentence names them.
    """
    _need(generator, "", ("decode_layer", "set_cur_pos", "update_sampling_params"))
    layer = generator.decode_layer
    _need(layer, "decode_layer.", ("num_devices", "_get_device_result", "reset_sequence"))
    with_mtp = bool(getattr(generator, "with_mtp", False))
    stepper = _draft_stepper(generator, layer) if with_mtp else _plain_stepper(layer)
    return Calls(generator, layer, stepper, with_mtp, callable(getattr(layer, "set_sampling_seed", None)))


def end_tokens(generator: Any) -> frozenset[int]:
    """The model's own end tokens: `stop_token_ids` where the generator has them, else `eos_id`."""
    several = getattr(generator, "stop_token_ids", None)
    if several:
        return frozenset(map(int, several))
    one = getattr(generator, "eos_id", None)
    return frozenset() if one is None else frozenset({int(one)})


_SEVERAL_DRAFTS: Final = ("show_hands", "ar_accepted_tokens", "ar_num_accepted")
_ONE_DRAFT: Final = ("forward", "get_num_accepted", "get_predicted_tokens")
_SEVERAL_PLAIN: Final = ("show_hands_no_mtp", "ar_accepted_tokens_no_mtp", "set_prefill_valid_tokens")


def _draft_stepper(generator: Any, layer: Any) -> Stepper:
    _need(generator, "", ("mtp_seq_len",))
    _need(layer, "decode_layer.", ("get_next_draft_tokens", "set_prefill_valid_tokens"))
    width = int(generator.mtp_seq_len)
    if width < 2:
        raise LocalError(
            ErrorCode.CONFIG, f"the generator has with_mtp and mtp_seq_len {width}: a step with drafts has 2 or more"
        )
    if not _missing(layer, _SEVERAL_DRAFTS):
        return _DraftsInCalls(layer, width)
    if _missing(layer, _ONE_DRAFT):
        _need(layer, "decode_layer.", _SEVERAL_DRAFTS)
    return _DraftsByForward(layer, width)


def _plain_stepper(layer: Any) -> Stepper:
    if not _missing(layer, _SEVERAL_PLAIN):
        return _PlainInCalls(layer)
    if _missing(layer, ("forward",)):
        _need(layer, "decode_layer.", _SEVERAL_PLAIN)
    return _PlainByForward(layer)


def _missing(owner: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not hasattr(owner, name)]


def _need(owner: Any, prefix: str, names: Sequence[str]) -> None:
    missing = _missing(owner, names)
    if missing:
        raise LocalError(
            ErrorCode.CONFIG,
            f"{type(owner).__name__} has no {', '.join(prefix + name for name in missing)}: this adapter drives the "
            "generators of TileRT 0.1.6; install that version",
        )


def _row(tokens: Sequence[int]) -> Tensor:
    """int32 [1, width]; the calls take CPU tensors."""
    return torch.tensor([list(tokens)], dtype=torch.int32)


def _flat(buffer: Tensor) -> list[int]:
    """A flat buffer: how many entries count, then the entries. A leading axis of one request changes nothing."""
    values = buffer.detach().cpu().flatten().tolist()
    count = int(values[0]) if values else -1
    if not 0 <= count < len(values):
        raise LocalError(
            ErrorCode.INTERNAL, f"the engine's buffer of {len(values)} says that {count} entries count: it is broken"
        )
    return [int(value) for value in values[1 : 1 + count]]


def _checked(tokens: Sequence[int], counts: Sequence[int], *, steps: int, width: int) -> Verified:
    """Refuses what no run of steps can return, before a token of it is served."""
    wrong = not 0 < len(counts) <= steps or sum(counts) != len(tokens) or min(tokens, default=-1) < 0
    if wrong or not all(1 <= count <= width for count in counts):
        raise LocalError(
            ErrorCode.INTERNAL,
            f"the engine ran up to {steps} steps of {width} tokens, and returned tokens {list(tokens)[:16]} with "
            f"counts {list(counts)[:16]}: it is broken",
        )
    return Verified(tuple(tokens), tuple(counts))


@final
class _DraftsInCalls:
    """`show_hands`, several steps a call."""

    several = True

    def __init__(self, layer: Any, width: int) -> None:
        self.width = width
        self._layer = layer

    def prepare(self) -> None:
        self._layer.set_prefill_valid_tokens(0)

    def run(self, row: Sequence[int], steps: int) -> Verified:
        self._layer.show_hands(_row(row), steps)
        tokens, counts = _flat(self._layer.ar_accepted_tokens(0)), _flat(self._layer.ar_num_accepted(0))
        return _checked(tokens, counts, steps=steps, width=self.width)

    def next_row(self) -> list[int]:
        return _drafts(self._layer, self.width)


@final
class _DraftsByForward:
    """`forward`, one step a call."""

    several = False

    def __init__(self, layer: Any, width: int) -> None:
        self.width = width
        self._layer = layer

    def prepare(self) -> None:
        self._layer.set_prefill_valid_tokens(0)

    def run(self, row: Sequence[int], steps: int) -> Verified:
        self._layer.forward(_row(row))
        count = int(self._layer.get_num_accepted(0))
        predicted = self._layer.get_predicted_tokens(0).detach().cpu().flatten().tolist()
        return _checked([int(token) for token in predicted[: max(count, 0)]], [count], steps=steps, width=self.width)

    def next_row(self) -> list[int]:
        return _drafts(self._layer, self.width)


@final
class _PlainInCalls:
    """`show_hands_no_mtp`, several steps of one token a call."""

    width = 1
    several = True

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._last = -1

    def prepare(self) -> None:
        self._layer.set_prefill_valid_tokens(0, with_mtp=False)

    def run(self, row: Sequence[int], steps: int) -> Verified:
        self._layer.show_hands_no_mtp(torch.tensor(list(row), dtype=torch.int32), steps)
        tokens = _flat(self._layer.ar_accepted_tokens_no_mtp(0))
        verified = _checked(tokens, [1] * len(tokens), steps=steps, width=1)
        self._last = tokens[-1]
        return verified

    def next_row(self) -> list[int]:
        return [self._last]


@final
class _PlainByForward:
    """`forward` of one token; the sampled one is an intermediate of device 0."""

    width = 1
    several = False

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._last = -1

    def prepare(self) -> None:
        """This `forward` has one mode."""

    def run(self, row: Sequence[int], steps: int) -> Verified:
        results = self._layer.forward(torch.tensor(row[0], dtype=torch.int64))
        intermediates: Sequence[Tensor] = results[0][0]
        self._last = int(intermediates[TOKEN_OUT].flatten()[0])
        return _checked([self._last], [1], steps=steps, width=1)

    def next_row(self) -> list[int]:
        return [self._last]


def _drafts(layer: Any, width: int) -> list[int]:
    row = [int(token) for token in layer.get_next_draft_tokens(0).detach().cpu().flatten().tolist()]
    if len(row) < width:
        raise LocalError(ErrorCode.INTERNAL, f"the engine drafts {len(row)} tokens, and a step takes {width}")
    return row[:width]
