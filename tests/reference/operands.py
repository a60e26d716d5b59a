"""Seeded operands for calls of one op, poisoned outputs, and the check of a result."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpmrt.dtypes import DType, round_to
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import OPS, Rows

EPS = 1e-5


class Data:
    """A source of seeded random operands whose values `dtype` can hold."""

    def __init__(self, dtype: DType = DType.FLOAT32, seed: int = 0):
        self.dtype, self.random = dtype, np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 1.0, around: float = 0.0) -> Any:
        values = self.random.standard_normal(shape) * scale + around
        return round_to(values.astype(np.float32), self.dtype)

    def weight(self, rows: int, columns: int) -> Any:
        return self(rows, columns, scale=columns**-0.5)

    def norm(self, size: int) -> Any:
        return self(size, scale=0.2, around=1.0)

    def tables(self, num_slots: int, pages: int) -> Any:
        return self.random.permutation(num_slots * pages).reshape(num_slots, pages).astype(np.int32)


def make_rows(positions: Any, slots: Any, tables: Any, is_prefill: bool = False) -> Rows:
    positions, slots = np.asarray(positions), np.asarray(slots)
    return Rows(np.zeros(len(positions), np.int64), positions, slots, tables, is_prefill)


def rope_of(num_positions: int, head_dim: int) -> Any:
    angles = np.arange(num_positions)[:, None] / 10000.0 ** (np.arange(head_dim // 2) * 2 / head_dim)
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)


def filled_pages(data: Data, tables: Any, lengths: Any, kv_heads: int, head_dim: int) -> tuple[Any, Any]:
    """Return pages with random keys and values of the first `lengths[slot]` tokens of each slot, NaN elsewhere."""
    k_pages, v_pages = (np.full((tables.size, kv_heads, PAGE_SIZE, head_dim), np.nan, np.float32) for _ in "kv")
    for slot, length in enumerate(lengths):
        for position in range(length):
            page, offset = tables[slot, position // PAGE_SIZE], position % PAGE_SIZE
            k_pages[page, :, offset], v_pages[page, :, offset] = data(kv_heads, head_dim), data(kv_heads, head_dim)
    return k_pages, v_pages


class Poisoned:
    """An output view inside a larger array of NaN: everything in it must be written, nothing around it."""

    def __init__(self, *shape: int, content: Any = None):
        self._whole = np.full((shape[0] + 2, *shape[1:]), np.nan, np.float32)
        self.view = self._whole[1:-1]
        if content is not None:
            self.view[:] = content

    def written(self) -> Any:
        assert np.isfinite(self.view).all()
        assert np.isnan(self._whole[0]).all()
        assert np.isnan(self._whole[-1]).all()
        return self.view


def check(op: str, dtype: DType, actual: Any, expected: Any) -> None:
    """Check that a result is within the op's tolerance and, but for logits, has only values of the storage type."""
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error <= OPS[op].tolerance[dtype]
    if op != "lm_head":
        assert np.array_equal(round_to(np.ascontiguousarray(actual), dtype), actual)
