"""The ops' formulas in float64, one element or one head at a time: the oracle of the NumPy ops."""

from __future__ import annotations

from typing import Any

import numpy as np

PAGE = 64


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    out = np.zeros(x.shape, np.float64)
    for index in np.ndindex(x.shape[:-1]):
        total = 0.0
        for value in x[index]:
            total += float(value) ** 2
        scale = (total / x.shape[-1] + eps) ** -0.5
        for column in range(x.shape[-1]):
            out[(*index, column)] = float(x[index][column]) * scale * float(weight[column])
    return out


def linear(x: Any, weight: Any) -> Any:
    return np.einsum("tk,nk->tn", x.astype(np.float64), weight.astype(np.float64))


def rotate(head: Any, cos: Any, sin: Any) -> Any:
    """Rotate one head [D]: elements i and i + D/2 are the real and imaginary part of a number times cos + i sin."""
    half, out = len(head) // 2, np.zeros(len(head), np.float64)
    for i in range(half):
        turned = complex(head[i], head[i + half]) * complex(cos[i], sin[i])
        out[i], out[i + half] = turned.real, turned.imag
    return out


def silu(x: Any) -> Any:
    x = x.astype(np.float64)
    return x / (1.0 + np.exp(-x))


def token(pages: Any, block_table: Any, position: int) -> Any:
    """Return what the pages hold for one position, [K, D]."""
    return pages[block_table[position // PAGE], :, position % PAGE].astype(np.float64)


def attention(
    q: Any, k_pages: Any, v_pages: Any, positions: Any, slots: Any, tables: Any, scale: float, seen: Any = None
) -> Any:
    """Return attention of every row; `seen` has each row's visible locations (None: all up to its position)."""
    num_rows, num_kv_heads, head_dim = len(q), k_pages.shape[1], k_pages.shape[3]
    num_heads = q.shape[1] // head_dim
    heads = q.astype(np.float64).reshape(num_rows, num_heads, head_dim)
    out = np.zeros(heads.shape, np.float64)
    for row in range(num_rows):
        table, places = tables[slots[row]], range(int(positions[row]) + 1) if seen is None else seen[row]
        keys = np.stack([token(k_pages, table, place) for place in places])
        values = np.stack([token(v_pages, table, place) for place in places])
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = np.einsum("d,td->t", heads[row, head], keys[:, kv_head]) * scale
            weights = np.exp(scores - scores.max())
            out[row, head] = np.einsum("t,td->d", weights / weights.sum(), values[:, kv_head])
    return out.reshape(num_rows, -1)
