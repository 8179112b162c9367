"""Weights that are made, not trained: `circuits` says what for, this module puts it into matrices.

Latents are a Hadamard mixture of the hidden state, so that fp8 blocks look alike. Two processes on one machine build
the same bits; `fingerprint` tells where they do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from pdhandoff.demo.model.circuits import (
    ANCHOR,
    BEFORE,
    CIRCUITS,
    CONTEXT,
    DRAFT_CIRCUIT,
    FADE,
    HANDED_ON,
    NEXT,
    NOW,
    Circuit,
    Head,
)
from pdhandoff.demo.model.config import ModelConfig
from pdhandoff.demo.model.layers import Attention, Dense, Indexer, Layer, Mixture
from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["Draft", "Weights", "build_weights", "fingerprint"]

_OFFSET_GAIN: Final = 12.0
"attention score of one rotary pair, where a head looks for a position"
_OFFSET_PAIRS: Final = 8
"rotary pairs that it looks at, the fastest ones"
_SMEAR: Final = 0.0002
"deviation of the random parts' output weights into all slots; the opinions of `circuits` come on top, in NEXT"
_LOGIT_GAIN: Final = 4.0


class Draft(NamedTuple):
    """The draft (MTP) layer."""

    token_norm: Tensor
    "[hidden]"
    hidden_norm: Tensor
    "[hidden]"
    project: Tensor
    "[hidden, 2 * hidden]: of the next token's embedding, then the hidden state"
    layer: Layer


class Weights(NamedTuple):
    """All weights, float32."""

    embedding: Tensor
    "[vocabulary, hidden]"
    layers: tuple[Layer, ...]
    draft: Draft
    norm: Tensor
    "[hidden]"
    head: Tensor
    "[outputs, hidden], shared by target and draft"


def build_weights(config: ModelConfig) -> Weights:
    """The weights of `config`: the same bits for the same config.

    Raises:
        LocalError: there are more or fewer circuits than layers, or four slots and the constant do not fit.
    """
    if (
        config.layers != len(CIRCUITS)
        or config.hidden <= 4 * config.code
        or config.code > min(config.nope, config.value)
    ):
        raise LocalError(
            ErrorCode.CONFIG,
            f"layers={config.layers}, hidden={config.hidden}, code={config.code}: the circuits need {len(CIRCUITS)} "
            "layers, more than four codes in the hidden state, and a code in every head",
        )
    return _Builder(config).weights()


def fingerprint(weights: Weights) -> str:
    """Sixteen hexadecimal digits over every weight, to compare two processes' models."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in _tensors(weights):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for inner in part:
            yield from _tensors(inner)


@final
class _Builder:
    """Draws and places the weights, in one fixed order."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._generator = torch.Generator().manual_seed(config.seed)
        codes = self._normal(config.vocabulary, config.code)
        self._codes = codes / codes.square().sum(-1, keepdim=True).sqrt()
        "[vocabulary, code], of length 1"
        signs = torch.randint(0, 2, (config.latent,), generator=self._generator) * 2.0 - 1.0
        self._mix = signs[:, None] * _hadamard(config.latent)[:, : config.hidden] * config.latent**-0.5
        "[latent, hidden], orthonormal columns"
        content = config.index_key - config.index_rope
        self._index_mix = self._normal(content, config.code) * content**-0.5
        "[index content, code]: nearly keeps inner products"
        order = torch.randperm(config.code, generator=self._generator)
        flips = torch.randint(0, 2, (config.code, 1), generator=self._generator) * 2.0 - 1.0
        self._turn = torch.eye(config.code)[order] * flips
        "[code, code], orthogonal"
        alternating = torch.tensor([1.0, -1.0]).repeat(config.index_rope // 4)
        self._index_signs = alternating
        "[index pairs]: sums to zero, so that the key's layer norm does not turn the rotary pairs"

    def weights(self) -> Weights:
        config = self._config
        codes = self._codes
        embedding = torch.zeros(config.vocabulary, config.hidden)
        embedding[:, self._slot(NOW)] = codes
        embedding[:, self._slot(CONTEXT)] = codes @ self._turn.T
        embedding[:, self._constant] = ANCHOR
        head = self._normal(config.outputs, config.hidden) * 0.01
        head[:, self._slot(NEXT)] += _LOGIT_GAIN * codes[: config.outputs]
        layers = tuple(
            self._layer(circuit, dense=number < config.dense_layers) for number, circuit in enumerate(CIRCUITS)
        )
        return Weights(
            embedding=embedding, layers=layers, draft=self._draft(), norm=torch.ones(config.hidden), head=head
        )

    @property
    def _constant(self) -> int:
        """Element of the hidden state that holds ANCHOR."""
        return 4 * self._config.code

    def _slot(self, number: int) -> slice:
        return slice(number * self._config.code, (number + 1) * self._config.code)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _opinions(self, inputs: int, deviation: float) -> Tensor:
        """Random output weights [hidden, inputs]: printable ASCII into NEXT, a little of all into the other slots."""
        weights = self._normal(self._config.hidden, inputs) * _SMEAR
        printable = self._codes[32:127]
        weights[self._slot(NEXT)] += printable.T @ self._normal(len(printable), inputs) * deviation
        weights[self._constant] = 0.0
        return weights

    def _listening(self, *shape: int) -> Tensor:
        """Random input weights [..., hidden] that do not hear the constant: it would say the same everywhere."""
        weights: Tensor = self._normal(*shape, self._config.hidden) * self._config.hidden**-0.5
        weights[..., self._constant] = 0.0
        return weights

    def _layer(self, circuit: Circuit, *, dense: bool) -> Layer:
        attention = self._attention(circuit)
        indexer = self._indexer(circuit)
        return Layer(
            attention=attention,
            indexer=indexer,
            mlp_norm=torch.ones(self._config.hidden),
            mlp=self._dense(circuit.opinion) if dense else self._mixture(circuit.opinion),
        )

    def _draft(self) -> Draft:
        """The shift register, and the draft layer."""
        config = self._config
        project = self._normal(config.hidden, 2 * config.hidden) * 1e-4
        project[self._constant] = 0.0
        from_token = ((ANCHOR**2 + 2.0) / config.hidden) ** 0.5
        from_hidden = (HANDED_ON / config.hidden) ** 0.5
        identity = torch.eye(config.code)
        project[self._slot(NOW), self._slot(NOW)] += identity * from_token
        project[self._slot(CONTEXT), self._slot(NOW)] += self._turn * from_token
        project[self._constant, self._constant] = from_token
        context = slice(config.hidden + self._slot(CONTEXT).start, config.hidden + self._slot(CONTEXT).stop)
        project[self._slot(CONTEXT), context] += self._turn * (FADE * from_hidden)
        project[self._slot(BEFORE), context] += identity * from_hidden
        ones = torch.ones(config.hidden)
        return Draft(
            token_norm=ones, hidden_norm=ones.clone(), project=project, layer=self._layer(DRAFT_CIRCUIT, dense=False)
        )

    def _attention(self, circuit: Circuit) -> Attention:
        config = self._config
        magnitude = (config.hidden / circuit.squared) ** 0.5  # of a unit slot after the norm
        in_latent = magnitude * (config.latent / config.hidden) ** 0.5  # the same, in the normed latent
        query = self._normal(config.heads, config.nope + config.rope, config.hidden) * config.hidden**-0.5
        up_key = self._normal(config.heads, config.nope, config.latent) * 0.05
        up_value = self._mix @ self._listening(config.heads, config.value).transpose(1, 2)
        output = self._opinions(config.heads * config.value, circuit.opinion).reshape(
            config.hidden, config.heads, config.value
        )
        rope_key = torch.zeros(config.rope, config.hidden)
        rope_key[0::2, self._constant] = 1.0 / (ANCHOR * magnitude)  # every pair is (1, 0) before it is turned
        for number, head in enumerate(circuit.heads):
            query[number] = self._head_query(head, magnitude, in_latent)
            up_key[number] = 0.0
            up_key[number, : config.code] = self._mix[:, self._slot(BEFORE)].T
            up_value[number] = 0.0
            up_value[number, :, : config.code] = self._mix[:, self._slot(head.copy[0])] / in_latent
            output[:, number] = 0.0
            output[self._slot(head.copy[1]), number, : config.code] = self._turned(head.turns) * head.weight
        return Attention(
            norm=torch.ones(config.hidden),
            query=query.reshape(-1, config.hidden).contiguous(),
            latent=self._mix.clone(),
            latent_norm=torch.ones(config.latent),
            rope_key=rope_key,
            up_key=up_key,
            up_value=up_value,
            output=output.reshape(config.hidden, -1).contiguous(),
        )

    def _head_query(self, head: Head, magnitude: float, in_latent: float) -> Tensor:
        """Query weights [nope + rope, hidden] of one head that is not random."""
        config = self._config
        temperature = (config.nope + config.rope) ** 0.5
        query = torch.zeros(config.nope + config.rope, config.hidden)
        gain = head.likeness * temperature / (magnitude * in_latent)
        query[: config.code, self._slot(CONTEXT)] = torch.eye(config.code) * gain
        pairs = torch.arange(config.rope // 2, dtype=torch.float64)
        frequencies = config.rope_theta ** (-2.0 * pairs / config.rope)
        if head.offset is not None:
            angles = head.offset * frequencies
            turned_back = _OFFSET_GAIN * temperature / (ANCHOR * magnitude) * (pairs < _OFFSET_PAIRS)
            query[config.nope :: 2, self._constant] = (angles.cos() * turned_back).float()
            query[config.nope + 1 :: 2, self._constant] = (-angles.sin() * turned_back).float()
        return query

    def _turned(self, turns: int) -> Tensor:
        """`turn` to that power."""
        turned: Tensor = torch.linalg.matrix_power(self._turn, turns)
        return turned

    def _indexer(self, circuit: Circuit) -> Indexer:
        """Index head 0 goes by all of CONTEXT, 1 by its last byte, 2 by nearness, 3 is random."""
        config = self._config
        magnitude = (config.hidden / circuit.squared) ** 0.5
        rotary, pairs = config.index_rope, config.index_rope // 2
        key = self._normal(config.index_key, config.hidden) * 0.02 / magnitude
        key[:pairs, self._constant] += 0.3 * self._index_signs / (ANCHOR * magnitude)
        key[rotary:, self._slot(BEFORE)] += self._index_mix / magnitude
        query = self._normal(config.index_heads, config.index_key, config.hidden) * 0.02 / magnitude
        query[0, rotary:, self._slot(CONTEXT)] += self._index_mix / magnitude
        query[1, rotary:, self._slot(NOW)] += self._index_mix @ self._turn / magnitude
        frequencies = config.rope_theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        query[2, :pairs, self._constant] += 0.2 * self._index_signs * frequencies.cos().float() / (ANCHOR * magnitude)
        query[2, pairs:rotary, self._constant] -= (
            0.2 * self._index_signs * frequencies.sin().float() / (ANCHOR * magnitude)
        )
        query[3] *= 10.0
        head = torch.zeros(config.index_heads, config.hidden)
        shares = torch.tensor([circuit.content, 0.5 * circuit.content, 1.1 - circuit.content, 0.02])
        head[:, self._constant] = shares / (ANCHOR * magnitude)
        return Indexer(
            query=query.reshape(-1, config.hidden).contiguous(),
            key=key,
            key_norm=torch.ones(config.index_key),
            key_bias=torch.zeros(config.index_key),
            head=head,
        )

    def _dense(self, opinion: float) -> Dense:
        config = self._config
        return Dense(
            gate=self._listening(config.dense_width),
            up=self._listening(config.dense_width),
            down=self._opinions(config.dense_width, opinion),
        )

    def _mixture(self, opinion: float) -> Mixture:
        config = self._config
        return Mixture(
            router=self._listening(config.experts),
            gate=self._listening(config.experts, config.expert_width),
            up=self._listening(config.experts, config.expert_width),
            down=torch.stack([self._opinions(config.expert_width, opinion) for _ in range(config.experts)]),
        )


def _hadamard(order: int) -> Tensor:
    """The Hadamard matrix of that order, a power of two, in Sylvester order: [order, order] of +-1."""
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix
