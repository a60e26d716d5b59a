"""Rotary embedding tables: float64 angles, stored as float32.

Sources of the formulas: RoFormer (arXiv 2104.09864); linear and NTK-aware scaling; YaRN (arXiv 2309.00071);
LongRoPE (arXiv 2402.13753); Llama 3.1's frequency bands; with the defaults of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import ceil, floor, log, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from cpmrt.config import ModelConfig, RopeConfig
from cpmrt.cores import computed_ahead
from cpmrt.dtypes import F32

F64 = NDArray[np.float64]
PIECE = 1024
"""Positions that are computed at a time: their float64 angles take half a MiB for heads of 128. One thread needs 0.25 s
for 128K positions of such heads."""


def rope_table(config: ModelConfig, head_dim: int, num_positions: int, limit: int) -> F32:
    """Return cos and sin of the first `num_positions` positions: float32 [2, num_positions, head_dim / 2].

    `limit` is the context that was asked for: it picks LongRoPE's list (`RopeConfig.list_by`) and dynamic NTK's base,
    so that the same wish always gives the same rotation whatever memory there is.
    """
    return np.concatenate(list(rope_pieces(config, head_dim, num_positions, limit))).reshape(2, num_positions, -1)


def rope_pieces(config: ModelConfig, head_dim: int, num_positions: int, limit: int) -> Iterator[F32]:
    """Yield the values of `rope_table` in the order of memory: float32 [at most PIECE, head_dim / 2] at a time."""
    yield from computed_ahead(
        partial(_piece, function, range(start, min(start + PIECE, positions.stop)), inv_freq, attention_factor)
        for function in (np.cos, np.sin)
        for positions, inv_freq, attention_factor in _stretches(config, head_dim, num_positions, limit)
        for start in range(positions.start, positions.stop, PIECE)
    )


def _piece(function: Callable[[F64], F64], positions: range, inv_freq: F64, attention_factor: float) -> F32:
    """Return cos or sin of some positions, float32 [positions, head_dim / 2]."""
    angles = np.arange(positions.start, positions.stop, dtype=np.float64)[:, None] * inv_freq[None, :]
    piece: F32 = function(angles).astype(np.float32)
    piece *= np.float32(attention_factor)
    return piece


def _stretches(
    config: ModelConfig, head_dim: int, num_positions: int, limit: int
) -> Iterator[tuple[range, F64, float]]:
    """Yield the runs of positions that share their frequencies, with these (`inverse_frequencies`).

    There are two where LongRoPE's list is chosen by the length of the text so far: a position of the original range
    never turns by the long list. transformers rotates the tokens that it generates, and prompts within that range, in
    the same way; prompts that are longer it rotates by the long list alone.
    """
    original = config.rope.original_max_positions
    border = min(original, num_positions) if config.rope.list_by == "length" else 0
    yield range(border), *inverse_frequencies(config, head_dim, original)
    yield range(border, num_positions), *inverse_frequencies(config, head_dim, limit)


def inverse_frequencies(config: ModelConfig, head_dim: int, limit: int) -> tuple[F64, float]:
    """Return the radians a position of each of the head_dim / 2 pairs, and the factor on cos and sin."""
    rope = config.rope
    if rope.kind == "dynamic":
        return _dynamic(rope, head_dim, config.max_position_embeddings, limit), 1.0
    inv_freq = _plain(rope.theta, head_dim)
    if rope.kind == "linear":
        return inv_freq / (rope.factor or 1.0), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, config.max_position_embeddings)
    if rope.kind == "longrope":
        return _longrope(rope, inv_freq, config.max_position_embeddings, limit)
    return inv_freq, 1.0


def _plain(theta: float, head_dim: int) -> F64:
    return 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _dynamic(rope: RopeConfig, head_dim: int, max_positions: int, limit: int) -> F64:
    """Return NTK-aware frequencies: the base grows so that the longest wavelength spans `limit` positions.

    Up to `max_positions`, the model's own, it is unchanged.
    """
    factor = rope.factor or 1.0
    stretch = factor * max(limit, max_positions) / max_positions - (factor - 1.0)
    return _plain(rope.theta * stretch ** (head_dim / (head_dim - 2)), head_dim)


def _llama3(rope: RopeConfig, inv_freq: F64) -> F64:
    """Return the frequencies with long wavelengths interpolated, short ones kept, and those between blended."""
    factor, low, high = rope.factor or 1.0, rope.low_freq_factor, rope.high_freq_factor
    turns = rope.original_max_positions * inv_freq / (2 * pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 - blend) * inv_freq / factor + blend * inv_freq


def _yarn(rope: RopeConfig, inv_freq: F64, max_positions: int) -> tuple[F64, float]:
    """Return YaRN's frequencies and factor. Pairs that turn more than beta_fast times over the original positions keep
    their frequency; those that turn less than beta_slow times are interpolated, those between blended."""
    head_dim, original = 2 * len(inv_freq), rope.original_max_positions
    factor = rope.factor or max_positions / original

    def pair_with(turns: float) -> float:
        return head_dim * log(original / (turns * 2 * pi)) / (2 * log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(len(inv_freq)) - low) / (high - low or 0.001), 0.0, 1.0)
    blended = inv_freq / factor * ramp + inv_freq * (1.0 - ramp)
    return blended, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(rope: RopeConfig, inv_freq: F64, max_positions: int, limit: int) -> tuple[F64, float]:
    """Return LongRoPE's frequencies and factor. A list has a divisor for each frequency: the long list if `limit`
    exceeds the original range, else the short one."""
    original = rope.original_max_positions
    divisors = rope.long_factor if limit > original else rope.short_factor
    factor = rope.factor or max_positions / original
    attention = rope.attention_factor
    if attention is None:
        attention = sqrt(1.0 + log(factor) / log(original)) if factor > 1.0 else 1.0
    return inv_freq / np.array(divisors, dtype=np.float64), attention
