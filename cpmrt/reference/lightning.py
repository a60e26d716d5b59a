"""Lightning attention in NumPy: the recurrence of decode steps, the blocks of a prefill, chains of drafts.

Heads of queries, keys and values are [T, H, D], normalised, rotated and rounded already; `decay` is that of
`ops.LightningHeads`. Every product has one shape, so a row's bits depend on its own sequence alone.
"""

from __future__ import annotations

import numpy as np

from cpmrt.config.layers import LIGHTNING_BLOCK
from cpmrt.dtypes import F32, Array, DType, round_to
from cpmrt.ops import LightningState, Rows


def decode(
    out: F32, heads: tuple[F32, F32, F32], decay: F32, state: LightningState, rows: Rows, dtype: DType
) -> None:
    """Carry out `lightning_decode` on the heads of q, k and v."""
    q, k, v = heads
    scale, behind = np.float32(q.shape[2] ** -0.5), dict[int, F32]()
    out[rows.slots < 0] = 0.0
    for row in map(int, np.flatnonzero(rows.slots >= 0)):
        slot = int(rows.slots[row])
        behind[slot] = _taken_up(behind.get(slot, state.states[slot]), k[row], v[row], decay)
        out[row] = round_to(scale * (q[row, :, None] @ behind[slot]).reshape(-1), dtype)
    if rows.tree_masks is None:
        for slot, matrices in behind.items():
            state.states[slot] = matrices
    else:
        assert state.chain is not None, "planned without drafts"
        state.chain[: len(k)] = np.concatenate([k, v], axis=1).reshape(len(k), -1)


def accept_chain(state: LightningState, decay: F32, slot: int, count: int) -> None:
    """Take the first `count` rows of a chain into the states of one slot, in all layers, as plain decoding would have,
    to the bit. The chain has the keys and values that `decode` kept of the rows."""
    assert state.chain is not None, "planned without drafts"
    for layer, rows in zip(state.states[:, slot], state.chain, strict=True):
        for row in rows[:count]:
            k, v = row.reshape(2, *layer.shape[:2])
            layer[:] = _taken_up(layer, k, v, decay)


def prefill(
    out: F32, heads: tuple[F32, F32, F32], decay: F32, state: LightningState, rows: Rows, dtype: DType
) -> None:
    """Carry out `lightning_prefill` on the heads of q, k and v, block by block, each filled up with zeros."""
    assert rows.positions[0] % LIGHTNING_BLOCK == 0, "a prompt is cut between blocks"
    parts = [part.transpose(1, 0, 2) for part in heads]
    kept, slot = int((rows.slots >= 0).sum()), int(rows.slots[0])
    out[kept:] = 0.0
    for first in range(0, kept, LIGHTNING_BLOCK):
        count = min(LIGHTNING_BLOCK, kept - first)
        q, k, v = (np.zeros((len(part), LIGHTNING_BLOCK, part.shape[2]), np.float32) for part in parts)
        for block, part in zip((q, k, v), parts, strict=True):
            block[:, :count] = part[:, first : first + count]
        attended = _attended(q, k, v, state.states[slot], decay)[:, :count]
        out[first : first + count] = round_to(attended.transpose(1, 0, 2).reshape(count, -1), dtype)
        state.states[slot] = _behind(k, v, state.states[slot], decay, count)


def _taken_up(matrices: F32, k: F32, v: F32, decay: F32) -> F32:
    """Return the state behind one more token: matrices [H, D, D], k and v [H, D]."""
    taken: F32 = decay[:, 1, None, None] * matrices + k[:, :, None] * v[:, None, :]
    return taken


def _attended(q: F32, k: F32, v: F32, matrices: F32, decay: F32) -> F32:
    """Return the outputs of a block of q, k and v [H, block, D] behind the state `matrices`."""
    ages = np.subtract.outer(np.arange(LIGHTNING_BLOCK), np.arange(LIGHTNING_BLOCK))
    weights = np.where(ages >= 0, decay[:, np.maximum(ages, 0)], np.float32(0)) * (q @ k.transpose(0, 2, 1))
    attended: F32 = weights @ v + decay[:, 1:, None] * (q @ matrices)
    attended *= np.float32(q.shape[2] ** -0.5)
    return attended


def _behind(k: F32, v: F32, matrices: F32, decay: F32, count: int) -> F32:
    """Return the state behind the first `count` tokens of a block; the others of k are zeros."""
    ages: Array = np.maximum(count - 1 - np.arange(LIGHTNING_BLOCK), 0)
    behind: F32 = decay[:, count, None, None] * matrices + (decay[:, ages, None] * k).transpose(0, 2, 1) @ v
    return behind
