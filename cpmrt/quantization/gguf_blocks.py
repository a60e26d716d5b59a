"""Quantises rows of weights to block types of GGUF.

For each group a few scales are tried, and the one with the smallest squared error is taken; codes are rounded with the
scale as it is stored. Layouts: `weights.formats.blocks`, whose unpacking each packer here inverts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cpmrt.cores import computed_ahead, usable_cores
from cpmrt.dtypes import F32
from cpmrt.quantization.group_scales import best_lines, best_scales, codebook_codes, codes_of
from cpmrt.weights.formats.blocks import BLOCK_TYPES, IQ4_VALUES, U8

_BLOCK = 1 << 16
"""Weights that a thread quantises at a time: few enough for its temporaries to stay in the cache."""
_IQ4 = IQ4_VALUES.astype(np.float32)


def quantise_rows(name: str, values: F32) -> U8:
    """Quantise float32 rows [N, K] to blocks of a type of `QUANTISERS`: uint8 [N, bytes of a row].

    K is a multiple of the type's block; values are finite and within the range of float16.
    """
    kind = BLOCK_TYPES[name]
    out = np.empty((len(values), kind.row_bytes(values.shape[1])), np.uint8)
    step = max(_BLOCK // values.shape[1], 1)

    def quantise(begin: int) -> None:
        rows = values[begin : begin + step]
        out[begin : begin + step] = QUANTISERS[name](rows.reshape(-1, kind.size)).reshape(len(rows), -1)

    jobs = (partial(quantise, begin) for begin in range(0, len(values), step))
    for _ in computed_ahead(jobs, most_threads=usable_cores()):
        pass
    return out


def _q8_0(blocks: F32) -> U8:
    scales = _half(np.abs(blocks).max(axis=1) / np.float32(127))
    return _joined(scales, _signed(codes_of(blocks, _floats(scales), -127, 127)))


def _symmetric(blocks: F32, *, bits: int) -> U8:
    """Quantise to Q4_0 or Q5_0: the weight of the largest magnitude, whatever its sign, gets the lowest code.

    That code has no opposite; the scale takes the sign that this needs.
    """
    middle = 1 << bits - 1
    scales = _half(best_scales(blocks, partial(codes_of, low=-middle, high=middle - 1), -middle))
    codes = codes_of(blocks, _floats(scales), -middle, middle - 1) + middle
    return _joined(scales, *_with_high_bits(codes, bits))


def _offset(blocks: F32, *, bits: int) -> U8:
    """Quantise to Q4_1 or Q5_1: codes from 0 on, times a scale, plus an offset, the group's minimum."""
    most = (1 << bits) - 1
    scales, minimums = (_half(part) for part in best_lines(blocks, most, any_sign=True))
    codes = codes_of(blocks - _floats(minimums)[:, None], _floats(scales), 0, most)
    return _joined(scales, minimums, *_with_high_bits(codes, bits))


def _with_high_bits(codes: F32, bits: int) -> list[U8]:
    """Return the parts of a block of 32 behind its scales: the fifth bits of the codes, if any, and the lower four."""
    u = codes.astype(np.uint8)
    high = [np.packbits(u >> np.uint8(4), axis=1, bitorder="little")] if bits == 5 else []
    return [*high, _planes(u & np.uint8(15), 4, 16)]


def _iq4_nl(blocks: F32) -> U8:
    scales = _half(best_scales(blocks, partial(codebook_codes, values=_IQ4), -127))
    places = np.searchsorted(_IQ4, codebook_codes(blocks, _floats(scales), _IQ4))
    return _joined(scales, _planes(places.astype(np.uint8), 4, 16))


def _scaled_groups(
    blocks: F32, size: int, round_codes: Callable[[F32, F32], F32], end: int, bits: int
) -> tuple[U8, F32, F32]:
    """Choose the scales of groups of `size` weights: signed integers (steps) of `bits` bits times a unit of the block.

    `end` is the code of the largest magnitude. Returns the units as float16 bytes, the steps, and the codes of all
    weights.
    """
    groups, count, lowest = blocks.reshape(-1, size), blocks.shape[1] // size, -(1 << bits - 1)
    wanted = best_scales(groups, round_codes, end).reshape(-1, count)
    largest = np.take_along_axis(wanted, np.abs(wanted).argmax(axis=1)[:, None], axis=1)[:, 0]
    unit = _half(largest / np.float32(lowest))
    steps = codes_of(wanted, _floats(unit), lowest, -lowest - 1)
    held = _floats(unit)[:, None] * steps
    return unit, steps, round_codes(groups, held.reshape(-1)).reshape(blocks.shape)


def _q6_k(blocks: F32) -> U8:
    unit, steps, codes = _scaled_groups(blocks, 16, partial(codes_of, low=-32, high=31), -32, 8)
    u = (codes + 32).astype(np.uint8)
    return _joined(_planes(u & np.uint8(15), 4, 64), _planes(u >> np.uint8(4), 2, 32), _signed(steps), unit)


def _q3_k(blocks: F32) -> U8:
    unit, steps, codes = _scaled_groups(blocks, 16, partial(codes_of, low=-4, high=3), -4, 6)
    u, scales = (codes + 4).astype(np.uint8), (steps + 32).astype(np.uint8)
    packed = _joined(_planes(scales & np.uint8(15), 4, 8), _planes(scales >> np.uint8(4), 2, 4))
    return _joined(_planes(u >> np.uint8(2), 1, 32), _planes(u & np.uint8(3), 2, 32), packed, unit)


def _iq4_xs(blocks: F32) -> U8:
    unit, steps, values = _scaled_groups(blocks, 32, partial(codebook_codes, values=_IQ4), -127, 6)
    scales, places = (steps + 32).astype(np.uint8), np.searchsorted(_IQ4, values).astype(np.uint8)
    high = (scales >> np.uint8(4)).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    high_bytes = np.bitwise_or.reduce(high, axis=1).astype("<u2").reshape(-1, 1).view(np.uint8)
    return _joined(unit, high_bytes, _planes(scales & np.uint8(15), 4, 1), _planes(places, 4, 16))


def _lined_groups(blocks: F32, size: int, bits: int, scale_bits: int) -> tuple[list[U8], list[U8], U8]:
    """Choose the scales and minimums of groups of `size` weights: steps of `scale_bits` bits times a unit of the block.

    Returns the two units as float16 bytes, the two kinds of steps (unsigned), and codes of `bits` bits.
    """
    groups, count, units, steps, held = blocks.reshape(-1, size), blocks.shape[1] // size, [], [], []
    most = (1 << scale_bits) - 1
    scales, lowest = best_lines(groups, (1 << bits) - 1)
    for wanted in (scales, -lowest):
        rows = wanted.reshape(-1, count)
        units.append(_half(rows.max(axis=1) / np.float32(most)))
        step = codes_of(rows, _floats(units[-1]), 0, most)
        held.append((_floats(units[-1])[:, None] * step).reshape(-1))
        steps.append(step.astype(np.uint8))
    codes = codes_of(groups + held[1][:, None], held[0], 0, (1 << bits) - 1)
    return units, steps, codes.reshape(blocks.shape).astype(np.uint8)


def _q4_k(blocks: F32) -> U8:
    units, steps, codes = _lined_groups(blocks, 32, 4, 6)
    return _joined(*units, _six_bits(*steps), _planes(codes, 4, 32))


def _q5_k(blocks: F32) -> U8:
    units, steps, codes = _lined_groups(blocks, 32, 5, 6)
    high, low = _planes(codes >> np.uint8(4), 1, 32), _planes(codes & np.uint8(15), 4, 32)
    return _joined(*units, _six_bits(*steps), high, low)


def _q2_k(blocks: F32) -> U8:
    units, (scales, minimums), codes = _lined_groups(blocks, 16, 2, 4)
    return _joined(scales | minimums << np.uint8(4), _planes(codes, 2, 32), *units)


def _tq2_0(blocks: F32) -> U8:
    """Quantise to TQ2_0: -1, 0 or 1 times the largest magnitude of the block."""
    unit = _half(np.abs(blocks).max(axis=1))
    return _joined(_planes((codes_of(blocks, _floats(unit), -1, 1) + 1).astype(np.uint8), 2, 32), unit)


QUANTISERS: dict[str, Callable[[F32], U8]] = {
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
    "Q5_K": _q5_k,
    "Q5_1": partial(_offset, bits=5),
    "Q5_0": partial(_symmetric, bits=5),
    "Q4_K": _q4_k,
    "Q4_1": partial(_offset, bits=4),
    "Q4_0": partial(_symmetric, bits=4),
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q3_K": _q3_k,
    "Q2_K": _q2_k,
    "TQ2_0": _tq2_0,
}
"""Name of a block type -> the function that quantises blocks float32 [n, weights] to uint8 [n, bytes]."""


def _half(values: F32) -> U8:
    """Return float32 [n] as the bytes [n, 2] of float16."""
    return values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _floats(stored: U8) -> F32:
    """Return the bytes that `_half` made as float32 [n]."""
    return np.ascontiguousarray(stored).view("<f2")[:, 0].astype(np.float32)


def _signed(codes: F32) -> U8:
    return codes.astype(np.int8).view(np.uint8)


def _planes(codes: U8, bits: int, width: int) -> U8:
    """Pack codes [n, m] of `bits` bits: each run of 8 / bits times `width` codes becomes `width` bytes.

    The first `width` codes of a run lie in the lowest bits of the bytes.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = codes.reshape(len(codes), -1, 8 // bits, width) << shifts
    packed: U8 = np.bitwise_or.reduce(runs, axis=2)
    return packed.reshape(len(codes), -1)


def _six_bits(scales: U8, minimums: U8) -> U8:
    """Pack eight scales and eight minimums of 6 bits to 12 bytes.

    The upper two bits of the last four of each lie above the 6 bits of the first four.
    """
    first = [part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (scales, minimums)]
    last = scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4
    return np.concatenate([*first, last], axis=1)


def _joined(*parts: NDArray[np.uint8]) -> U8:
    return np.concatenate(parts, axis=1)
