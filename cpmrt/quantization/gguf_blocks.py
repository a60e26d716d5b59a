"""Quantises rows of weights to block types of GGUF: Q8_0, Q4_0, Q4_K and Q6_K.

Of a few scales that are tried for each group the one with the smallest squared error counts, and codes are rounded by
the scale as it is stored. Layouts: `weights.formats.blocks`, of which each packer here is the inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from cpmrt.dtypes import F32
from cpmrt.weights.formats.blocks import BLOCK_TYPES, U8

_SUPER = 256
_SHRINKS = np.linspace(1.0, 0.8, 9, dtype=np.float32)
"""Of the scale that spans a group: cutting off its ends a little mostly pays."""
_BLOCK = 1 << 20
"""Weights quantised at a time; temporaries are a few times as many float32."""


def quantise_rows(name: str, values: F32) -> U8:
    """Quantise float32 rows [N, K] to blocks of a type of `QUANTISERS`: uint8 [N, bytes of a row].

    K is a multiple of the type's block; values are finite and within the range of float16.
    """
    kind = BLOCK_TYPES[name]
    out = np.empty((len(values), kind.row_bytes(values.shape[1])), np.uint8)
    step = max(_BLOCK // values.shape[1], 1)
    for begin in range(0, len(values), step):
        rows = values[begin : begin + step]
        out[begin : begin + step] = QUANTISERS[name](rows.reshape(-1, kind.size)).reshape(len(rows), -1)
    return out


def _q8_0(blocks: F32) -> U8:
    scales = _half(np.abs(blocks).max(axis=1) / np.float32(127))
    codes = _codes(blocks, _floats(scales), -127, 127)
    return _joined(scales, codes.astype(np.int8).view(np.uint8))


def _q4_0(blocks: F32) -> U8:
    """The largest magnitude becomes -8, whatever its sign."""
    ends = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)[:, 0]
    scales = _half(_best_scales(blocks, ends / np.float32(-8), -8, 7))
    return _joined(scales, _nibbles(_codes(blocks, _floats(scales), -8, 7) + 8, 16))


def _q6_k(blocks: F32) -> U8:
    """Sixteen groups of 16, their scales 8-bit integers times a float16."""
    groups = blocks.reshape(-1, 16)
    ends = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)[:, 0]
    wanted = _best_scales(groups, ends / np.float32(-32), -32, 31).reshape(len(blocks), 16)
    largest = np.take_along_axis(wanted, np.abs(wanted).argmax(axis=1)[:, None], axis=1)[:, 0]
    unit = _half(largest / np.float32(-128))
    steps = _codes(wanted, _floats(unit), -128, 127)
    scales = _floats(unit)[:, None] * steps
    codes = (_codes(groups, scales.reshape(-1), -32, 31) + 32).reshape(len(blocks), _SUPER).astype(np.uint8)
    low = _nibbles((codes & 15).astype(np.float32), 64)
    return _joined(low, _crumbs(codes >> np.uint8(4)), steps.astype(np.int8).view(np.uint8), unit)


def _q4_k(blocks: F32) -> U8:
    """Eight groups of 32: codes 0..15 times a scale minus a minimum, both 6-bit integers times a float16."""
    groups = blocks.reshape(-1, 32)
    scales, minimums = _best_lines(groups)
    units, steps = [], []
    for wanted in (scales, minimums):
        rows = wanted.reshape(len(blocks), 8)
        unit = _half(rows.max(axis=1) / np.float32(63))
        units.append(unit)
        steps.append(_codes(rows, _floats(unit), 0, 63))
    held, lowest = (_floats(unit)[:, None] * step for unit, step in zip(units, steps, strict=True))
    codes = _codes(groups + lowest.reshape(-1, 1), held.reshape(-1), 0, 15).reshape(len(blocks), _SUPER)
    return _joined(*units, _six_bits(steps[0].astype(np.uint8), steps[1].astype(np.uint8)), _nibbles(codes, 32))


QUANTISERS: dict[str, Callable[[F32], U8]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q6_K": _q6_k}
"""By type: from blocks of float32 [n, weights] to uint8 [n, bytes]."""


def _best_scales(groups: F32, spans: F32, low: int, high: int) -> F32:
    """Return for each group the scale, out of `spans` shrunk, that leaves the smallest squared error."""

    def rounded(scales: F32) -> F32:
        return scales[:, None] * _codes(groups, scales, low, high)

    return _best(groups, ((spans * shrink,) for shrink in _SHRINKS), rounded)[0]


def _best_lines(groups: F32) -> tuple[F32, F32]:
    """Return for each group a scale and a minimum >= 0: w = scale * code - minimum, codes 0..15.

    Each line that spans a group, shrunk, is fitted once more to the codes that it gives, by least squares.
    """
    low = np.minimum(groups.min(axis=1), 0)
    spans = (np.maximum(groups.max(axis=1), 0) - low) / np.float32(15)
    lines = list[tuple[F32, F32]]()
    for shrink in _SHRINKS:
        line = (spans * shrink, -low * shrink)
        lines += [line, _fitted(groups, *line)]

    def rounded(scales: F32, minimums: F32) -> F32:
        return _line_codes(groups, scales, minimums) * scales[:, None] - minimums[:, None]

    scales, minimums = _best(groups, lines, rounded)
    return scales, minimums


def _fitted(groups: F32, scales: F32, minimums: F32) -> tuple[F32, F32]:
    """Fit scale and minimum to the codes of a line; where that gives none that can be stored, the line stays."""
    codes = _line_codes(groups, scales, minimums)
    mean_code, mean = codes.mean(axis=1), groups.mean(axis=1)
    spread = codes.var(axis=1)
    product = (codes * groups).mean(axis=1) - mean_code * mean
    slope = product / np.where(spread > 0, spread, np.float32(1))
    lowest = slope * mean_code - mean
    is_good = (spread > 0) & (slope > 0) & (lowest >= 0)
    return np.where(is_good, slope, scales), np.where(is_good, lowest, minimums)


def _line_codes(groups: F32, scales: F32, minimums: F32) -> F32:
    return _codes(groups + minimums[:, None], scales, 0, 15)


def _best(groups: F32, candidates: Iterable[tuple[F32, ...]], rounded: Callable[..., F32]) -> tuple[F32, ...]:
    """Return for each group the candidate by which it is rounded with the smallest squared error."""
    best: tuple[F32, ...] = ()
    smallest = np.empty(0, np.float32)
    for candidate in candidates:
        error = np.square(rounded(*candidate) - groups).sum(axis=1)
        if not best:
            best, smallest = tuple(part.copy() for part in candidate), error
            continue
        better = error < smallest
        smallest[better] = error[better]
        for kept, part in zip(best, candidate, strict=True):
            kept[better] = part[better]
    return best


def _codes(groups: F32, scales: F32, low: int, high: int) -> F32:
    """Divide each row by its scale and round to integers in [low, high], 0 where the scale is 0."""
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    codes: F32 = np.clip(np.rint(groups * inverse[:, None]), low, high)
    return codes


def _half(values: F32) -> U8:
    """Store float32 [n] as float16: the bytes [n, 2]."""
    return values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _floats(stored: U8) -> F32:
    """Read what `_half` stored, float32 [n]."""
    return np.ascontiguousarray(stored).view("<f2")[:, 0].astype(np.float32)


def _nibbles(codes: F32, width: int) -> U8:
    """Pack codes 0..15 [n, m]: of each run of 2 `width` codes the first half in the low bits of `width` bytes."""
    runs = codes.astype(np.uint8).reshape(len(codes), -1, 2, width)
    packed: U8 = runs[:, :, 0] | runs[:, :, 1] << np.uint8(4)
    return packed.reshape(len(codes), -1)


def _crumbs(codes: U8) -> U8:
    """Pack codes 0..3 [n, 256]: of each run of 128 the first 32 in the lowest bits of 32 bytes."""
    runs = codes.reshape(len(codes), 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    packed: U8 = np.bitwise_or.reduce(runs, axis=2)
    return packed.reshape(len(codes), -1)


def _six_bits(scales: U8, minimums: U8) -> U8:
    """Pack eight scales and eight minimums of 6 bits to 12 bytes: the upper two bits of the last four lie in the first.
    """
    first = [part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (scales, minimums)]
    last = scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4
    return np.concatenate([*first, last], axis=1)


def _joined(*parts: NDArray[np.uint8]) -> U8:
    return np.concatenate(parts, axis=1)
