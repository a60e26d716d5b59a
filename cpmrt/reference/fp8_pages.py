"""e4m3 in NumPy, and keys and values that are stored in it (`ops.Fp8Pages`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cpmrt.dtypes import F32, Array
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import Fp8Pages, Rows
from cpmrt.ops.operands import FP8_HEADROOM, FP8_LARGEST, FP8_SCALE_EXPONENTS

_NAN = 0x7F


def e4m3_codes(values: F32) -> NDArray[np.uint8]:
    """Return the nearest codes, ties to even. Values beyond 448, infinity too, become 448; NaN stays NaN.

    OCP 8-bit Floating Point Specification: sign, four bits of exponent with bias 7, three of mantissa.
    """
    magnitudes = np.minimum(np.abs(values), np.float32(FP8_LARGEST))
    # Up to 2^-6 values are 2^-9 apart (subnormal); from there on three bits of mantissa follow the leading one.
    exponents = np.where(magnitudes < 2.0**-6, -6, np.frexp(magnitudes)[1] - 1)
    with np.errstate(invalid="ignore"):
        codes = (exponents + 6) * 8 + np.rint(np.ldexp(magnitudes, 3 - exponents)).astype(np.int32)
    codes = np.where(np.isnan(values), _NAN, codes)
    signed: NDArray[np.uint8] = np.asarray(codes | np.signbit(values) * 0x80, np.uint8)
    return signed


def e4m3_values(codes: Array) -> F32:
    """Return the numbers that codes stand for."""
    values: F32 = _VALUES[codes]
    return values


def _value(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.ldexp(mantissa + 8.0 * (exponent > 0), max(exponent, 1) - 10)
    return float("nan") if code & _NAN == _NAN else float(-magnitude if code & 0x80 else magnitude)


_VALUES: F32 = np.array([_value(code) for code in range(256)], np.float32)


def page_scales(largest: F32) -> F32:
    """Return the scales of pages by the largest magnitudes of their first tokens: the least power of two that leaves
    the headroom, within FP8_SCALE_EXPONENTS."""
    bound_fraction, bound_exponent = np.frexp(FP8_LARGEST / FP8_HEADROOM)
    fractions, exponents = np.frexp(largest)
    powers = exponents - bound_exponent + (fractions > bound_fraction)
    low, high = FP8_SCALE_EXPONENTS
    powers = np.where(largest == 0, low, np.where(np.isfinite(largest), powers, high))
    scales: F32 = np.ldexp(np.float32(1.0), np.clip(powers, low, high))
    return scales


def store(pages: F32 | Fp8Pages, page_ids: Array, offsets: Array, heads: F32) -> None:
    """Store heads [T, K, D], those of token t at place `offsets[t]` of page `page_ids[t]`.

    In 8 bits the first tokens of pages decide the scales before any token is stored.
    """
    if not isinstance(pages, Fp8Pages):
        pages[page_ids, :, offsets] = heads
        return
    first = offsets % PAGE_SIZE == 0
    pages.scales[page_ids[first]] = page_scales(np.abs(heads[first]).max(axis=-1))
    pages.codes[page_ids, :, offsets] = e4m3_codes(heads / pages.scales[page_ids][..., None])


def store_nodes(pages: Fp8Pages, rows: Rows, heads: F32) -> None:
    """Keep heads [T, K, D] of the rows of a draft tree with the scales that pages of each row's own path would have.

    A page that begins before the tree has its scale already. Else the scale is decided by the page's first token, which
    is an ancestor of the row or the row itself, never one of another branch: row i is node i, and ancestors go before.
    """
    assert rows.tree_masks is not None
    for node in map(int, np.flatnonzero(rows.slots >= 0)):
        position, base = int(rows.positions[node]), int(rows.tree_base[node])
        first = position - position % PAGE_SIZE
        if first == position:
            scales = page_scales(np.abs(heads[node]).max(axis=-1))
        elif first >= base:
            scales = pages.node_scales[path_of(int(rows.tree_masks[node]))[first - base]]
        else:
            scales = pages.scales[rows.block_tables[rows.slots[node], first // PAGE_SIZE]]
        pages.node_scales[node] = scales
        pages.nodes[node] = e4m3_codes(heads[node] / scales[:, None])


def accept_nodes(pages: Fp8Pages, block_table: Array, base: int, path: Sequence[int]) -> None:
    """Store the path's nodes at positions `base` and on: their codes, and the scales of pages that begin with one."""
    for position, node in enumerate(path, base):
        page, offset = block_table[position // PAGE_SIZE], position % PAGE_SIZE
        if offset == 0:
            pages.scales[page] = pages.node_scales[node]
        pages.codes[page, :, offset] = pages.nodes[node]


def values_of_nodes(pages: Fp8Pages, path: Sequence[int]) -> F32:
    """Return the keys or values of the nodes of `path` as float32: [number of nodes, K, D]."""
    scales: F32 = pages.node_scales[path]
    return e4m3_values(pages.nodes[path]) * scales[..., None]


def path_of(mask: int) -> list[int]:
    """Return the nodes of a tree mask, from the root on."""
    return [node for node in range(mask.bit_length()) if mask >> node & 1]


def values_of(pages: F32 | Fp8Pages, page_ids: Array) -> F32:
    """Return whole pages as float32: [number of ids, K, 64, D]."""
    if not isinstance(pages, Fp8Pages):
        chosen: F32 = pages[page_ids]
        return chosen
    scales: F32 = pages.scales[page_ids]
    return e4m3_values(pages.codes[page_ids]) * scales[..., None, None]
