"""Finds the scales, and perhaps offsets, of groups of weights with the smallest squared error.

All functions take groups float32 [n, size], a row for each group, and return an entry for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from cpmrt.dtypes import F32

_SHRINKS = np.linspace(1.0, 0.8, 9, dtype=np.float32)
"""Factors that are tried on the scale that spans a whole group: clipping its ends a little mostly pays."""


def codes_of(groups: F32, scales: F32, low: int, high: int) -> F32:
    """Divide each row by its scale and round to integers in [low, high], 0 where the scale is 0."""
    codes: F32 = np.clip(np.rint(groups * _inverse(scales)[:, None]), low, high)
    return codes


def codebook_codes(groups: F32, scales: F32, values: F32) -> F32:
    """Divide each row by its scale and take the nearest of the sorted `values`."""
    borders = (values[1:] + values[:-1]) / 2
    found: F32 = values[np.searchsorted(borders, groups * _inverse(scales)[:, None])]
    return found


def best_scales(groups: F32, round_codes: Callable[[F32, F32], F32], end: int) -> F32:
    """Choose scales where `round_codes(groups, scales)` makes the codes; `end` is the code of the largest magnitude."""
    ends = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)[:, 0] / np.float32(end)

    def rounded(scales: F32) -> F32:
        return scales[:, None] * round_codes(groups, scales)

    return _best(groups, ((ends * shrink,) for shrink in _SHRINKS), rounded)[0]


def best_lines(groups: F32, most: int, *, any_sign: bool = False) -> tuple[F32, F32]:
    """Choose scales and offsets for codes 0 to `most`: w = scale * code + offset; without `any_sign` offsets are <= 0.

    The candidates are the line that spans the group, shrunk by each of `_SHRINKS`, and each of these lines fitted once
    more, by least squares, to the codes that it gives.
    """
    low, high = groups.min(axis=1), groups.max(axis=1)
    if not any_sign:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    middle, half = (low + high) / 2, (high - low) / 2
    lines = list[tuple[F32, F32]]()
    for shrink in _SHRINKS:
        offsets = middle - half * shrink if any_sign else low * shrink
        line = (2 * half * shrink / np.float32(most), offsets)
        lines += [line, _fitted(groups, *line, most, any_sign=any_sign)]

    def rounded(scales: F32, offsets: F32) -> F32:
        return codes_of(groups - offsets[:, None], scales, 0, most) * scales[:, None] + offsets[:, None]

    scales, offsets = _best(groups, lines, rounded)
    return scales, offsets


def _fitted(groups: F32, scales: F32, offsets: F32, most: int, *, any_sign: bool) -> tuple[F32, F32]:
    """Fit a line by least squares to the codes that it gives; a line whose fit cannot be stored stays as it is."""
    codes = codes_of(groups - offsets[:, None], scales, 0, most)
    mean_code, mean = codes.mean(axis=1), groups.mean(axis=1)
    spread = codes.var(axis=1)
    product = (codes * groups).mean(axis=1) - mean_code * mean
    slope = product / np.where(spread > 0, spread, np.float32(1))
    lowest = mean - slope * mean_code
    is_good = (spread > 0) & (slope > 0) & (any_sign | (lowest <= 0))
    return np.where(is_good, slope, scales), np.where(is_good, lowest, offsets)


def _best(groups: F32, candidates: Iterable[tuple[F32, ...]], rounded: Callable[..., F32]) -> tuple[F32, ...]:
    """Return for each group the candidate that rounds it with the smallest squared error."""
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


def _inverse(scales: F32) -> F32:
    inverse: F32 = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    return inverse
