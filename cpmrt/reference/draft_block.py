"""The definition of how a DSpark draft chooses the tokens of a block. Plain NumPy, sums in float32."""

from __future__ import annotations

import numpy as np

from cpmrt.dtypes import F32, Array
from cpmrt.models.drafts.dspark import MARKOV_CANDIDATES, MarkovWeights, markov_parts


def choose_block(
    logits: F32, states: F32, root_token: int, length: int, markov: MarkovWeights, min_confidence: float = 0.0,
    token_map: Array | None = None,
) -> list[int]:  # fmt: skip
    """Return at most `length` tokens, one after another behind the root; row k of the block drafts token k.

    logits [T, rows of the draft's head] and states [T, hidden]: what `DSpark.block` gives; `token_map`: the token of
    each row of that head, None: the row's number. Of each part of the rows (`markov_parts`) only the MARKOV_CANDIDATES
    with the highest logits can be chosen, and among equals the lower row is. The first token with a confidence below
    `min_confidence` ends the chain and is left out.
    """
    tokens, previous = list[int](), root_token
    for row in range(length):
        context = markov.first[previous]
        if confidence(states[row], context, markov) < min_confidence:
            break
        candidates = _candidates(logits[row])
        scores = logits[row, candidates] + markov.second[candidates] @ context
        best = candidates[np.argmax(scores)]
        previous = int(best if token_map is None else token_map[best])
        tokens.append(previous)
    return tokens


def confidence(state: F32, context: F32, markov: MarkovWeights) -> float:
    """Return how likely the token of a row is to be accepted if those before it are; 1 without a confidence head."""
    if markov.confidence is None or markov.bias is None:
        return 1.0
    logit = np.concatenate([state, context]) @ markov.confidence[0] + markov.bias[0]
    return float(1 / (1 + np.exp(-logit)))


def _candidates(logits: F32) -> Array:
    """Return the rows of the head that a row of the block can choose, ascending."""
    parts = logits.reshape(markov_parts(len(logits)), -1)
    best = np.argsort(-parts, axis=1, kind="stable")[:, :MARKOV_CANDIDATES]
    return np.sort((best + np.arange(len(parts))[:, None] * parts.shape[1]).reshape(-1))
