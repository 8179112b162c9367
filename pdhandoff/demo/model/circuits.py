"""What each layer of the demo's model is made to do: look for where the last bytes stood before, and go on from there.

Random weights would give tokens that hardly depend on the attention state, and a draft layer that guesses nothing. So
the hidden state is four slots and a constant:

    NOW      the code of the token at this position
    CONTEXT  this token and those before it: the sum of fade ** k * turn ** (k + 1) @ code(token k positions back)
    BEFORE   the CONTEXT of one position before
    NEXT     what the model expects to come

- Layer 0 gathers CONTEXT from the seven positions before. Layer 1 adds the CONTEXT of eight positions before, and
  copies BEFORE. Their heads find positions by the rotary part alone.
- Layers 2 and 3 look for past positions whose BEFORE is like this position's CONTEXT, and copy their NOW into NEXT:
  what followed the same bytes earlier. Their indexers rank the past by the same likeness.
- The draft layer's input projection is a shift register: (token p + 1, hidden state p) becomes the slots that the
  target would have at p + 1. Then it does what layers 2 and 3 do. So its output is also good input for its own next
  step.
- All other heads, the MLPs and the experts are random. They add opinions to NEXT that depend on every attended row. So
  greedy text sometimes leaves the copied path, and drafts are sometimes wrong, as in a trained model.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = [
    "ANCHOR",
    "BEFORE",
    "CIRCUITS",
    "CONTEXT",
    "DRAFT_CIRCUIT",
    "FADE",
    "HANDED_ON",
    "NEXT",
    "NOW",
    "Circuit",
    "Head",
]

NOW, CONTEXT, BEFORE, NEXT = range(4)
FADE: Final = 0.85
"what one more position back takes from a token's share in CONTEXT"
_NEAR: Final = 8
"positions that layer 0 gathers, this one included"

ANCHOR: Final = 4.0
"the constant: large, so that all hidden states have nearly the same norm and the norms change no score much"
_OPINION: Final = 0.01
"deviation of the random heads' and MLPs' output weights, per printable byte, into NEXT"
_DRAFT_OPINION: Final = 0.03
"the same in the draft layer: more than the target's, so that some drafts are wrong and the text stays readable"


class Head(NamedTuple):
    """What one attention head does, where it is not random."""

    copy: tuple[int, int]
    "slot to read where it attends to, slot to write"
    weight: float = 1.0
    turns: int = 0
    "how often what it copies is turned"
    offset: int | None = None
    "how many positions back it attends; None: by likeness"
    likeness: float = 0.0
    "attention score of equal codes, CONTEXT here and BEFORE there"


class Circuit(NamedTuple):
    """What one layer does."""

    heads: tuple[Head, ...]
    squared: float
    "expected squared norm of the layer's input"
    content: float
    "how much its indexer goes by likeness; the rest is nearness"
    opinion: float = _OPINION
    "how loud its random parts are"


def _gathered(positions: int) -> float:
    """Squared norm of a CONTEXT of that many positions."""
    return (1.0 - FADE ** (2 * positions)) / (1.0 - FADE**2)


_FULL: Final = ANCHOR**2 + 1.0 + 2.0 * _gathered(2 * _NEAR)
"expected squared norm of NOW, the constant, CONTEXT and BEFORE"
_FAR: Final = FADE**_NEAR
_SHARP: Final = Head((NOW, NEXT), likeness=14.0)
_SOFT: Final = Head((NOW, NEXT), weight=0.5, likeness=5.0)
CIRCUITS: Final = (
    Circuit(
        tuple(Head((NOW, CONTEXT), weight=FADE**k, turns=k + 1, offset=k) for k in range(1, _NEAR)),
        squared=ANCHOR**2 + 2.0,
        content=0.1,
    ),
    Circuit(
        (
            Head((CONTEXT, CONTEXT), weight=_FAR, turns=_NEAR, offset=_NEAR),
            Head((CONTEXT, BEFORE), offset=1),
            Head((CONTEXT, BEFORE), weight=_FAR, turns=_NEAR, offset=_NEAR + 1),
        ),
        squared=ANCHOR**2 + 1.0 + _gathered(_NEAR),
        content=0.1,
    ),
    Circuit((_SHARP,), squared=_FULL, content=1.0),
    Circuit((_SOFT,), squared=_FULL + 1.0, content=1.0),
)
DRAFT_CIRCUIT: Final = Circuit((_SHARP, _SOFT), squared=_FULL, content=1.0, opinion=_DRAFT_OPINION)
HANDED_ON: Final = _FULL + 2.25
"expected squared norm of the hidden state that the draft layer takes"
