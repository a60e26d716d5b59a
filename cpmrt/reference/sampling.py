"""The definition of sampling: from one row of logits to one token. Every executor follows it.

The chain: a mask (`executor.Mask`: -infinity for what is not allowed), logit bias (OpenAI: added to the logits of named
tokens), repetition penalty (arXiv 1909.05858: positive logits of seen tokens are divided by it, negative ones
multiplied; prompt and generated tokens count), presence and frequency penalty (OpenAI: subtracted once, and once for
each occurrence; generated tokens only), temperature, top-k, top-p, min-p, and the arg max of logit plus Gumbel noise.
All is float32 but the sum of probabilities of top-p: 70,000 terms would drift. The noise depends on (seed, position,
token id) alone, so the token at a position is a function of its logits and the seed, however the steps are cut.
Temperature 0 takes the arg max after the penalties.

Every filter is a threshold, so tokens of equal probability stay or go together and no order among them matters.
The lowest id wins a tie of the arg max.
"""

from __future__ import annotations

import numpy as np

from cpmrt.config import Sampling
from cpmrt.dtypes import F32, Array
from cpmrt.executor import TokenLogprobs
from cpmrt.log_probabilities import log_softmax
from cpmrt.reference.philox import gumbel


def sample(logits: F32, params: Sampling, seed: int, position: int, seen: Array, counts: Array) -> int:
    """Return the token for `position`. logits [V]; seen bool [V]: the tokens that are in the prompt or were generated;
    counts int [V]: how often each token was generated."""
    logits = penalise(biased(logits, params.logit_bias), params, seen, counts)
    if params.temperature == 0.0:
        return int(np.argmax(logits))
    logits = logits / np.float32(params.temperature)
    kept = np.where(keep_mask(logits, params), logits, -np.inf)
    return int(np.argmax(kept + gumbel(seed, position, len(logits))))


def masked(logits: F32, bits: bytes | None) -> F32:
    """Give the tokens that are not allowed (`executor.Mask`) the logit -infinity; the input array is not changed."""
    if bits is None:
        return logits
    allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=len(logits)).astype(bool)
    found: F32 = np.where(allowed, logits, np.float32(-np.inf))
    return found


def is_usable(logits: F32) -> bool:
    """Tell whether a token can be sampled from a row: no logit is NaN or +infinity, and not all are -infinity."""
    return bool(np.isfinite(np.max(logits)))


def biased(logits: F32, logit_bias: tuple[tuple[int, float], ...]) -> F32:
    """Add biases to the logits of some tokens; ids that the model lacks are ignored. The input array is not changed."""
    if not logit_bias:
        return logits
    moved: F32 = logits.copy()
    for token, bias in logit_bias:
        if token < len(moved):
            moved[token] += np.float32(bias)
    return moved


def penalise(logits: F32, params: Sampling, seen: Array, counts: Array) -> F32:
    """Apply the three penalties; the input array is not changed."""
    if params.repetition_penalty != 1.0:
        factor = np.float32(params.repetition_penalty)
        logits = np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)
    if params.presence_penalty or params.frequency_penalty:
        present = (counts > 0).astype(np.float32)
        logits = logits - np.float32(params.presence_penalty) * present
        logits = logits - np.float32(params.frequency_penalty) * counts.astype(np.float32)
    return logits


def keep_mask(logits: F32, params: Sampling) -> Array:
    """Return which tokens survive top-k, then top-p among those, then min-p. logits are after temperature."""
    keep = np.ones(len(logits), bool)
    if 0 < params.top_k < len(logits):
        keep &= logits >= np.partition(logits, -params.top_k)[-params.top_k]
    if params.top_p < 1.0:
        keep &= logits >= _top_p_threshold(logits[keep], params.top_p)
    if params.min_p > 0.0:
        keep &= logits >= np.max(logits) + np.float32(np.log(params.min_p))
    return keep


def _top_p_threshold(logits: F32, top_p: float) -> float:
    """Return the logit of the token at which the sum of probabilities, best first, reaches `top_p`."""
    descending = -np.sort(-logits)
    weights = np.exp(descending - descending[0])
    mass = np.cumsum(weights, dtype=np.float64)
    reached = int(np.searchsorted(mass, top_p * mass[-1]))
    return float(descending[min(reached, len(descending) - 1)])


def token_logprobs(logits: F32, token_id: int, count: int) -> TokenLogprobs:
    """Return the log probabilities of the chosen token and of the `count` best ones, from the raw logits [V].

    Tokens with equal logits come in the order of their ids.
    """
    logprobs = log_softmax(logits)
    best = np.argsort(-logits, kind="stable")[:count]
    top = tuple((int(token), float(logprobs[token])) for token in best)
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)
