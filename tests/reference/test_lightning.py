"""The ops of lightning attention against its recurrence in float64, one token after another; their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import brute_force
from reference.operands import EPS, Data, Poisoned, check, make_rows, rope_of

from cpmrt.config.layers import LIGHTNING_BLOCK, LightningAttention
from cpmrt.dtypes import DType
from cpmrt.ops import LightningHeads, LightningState, Rows
from cpmrt.reference.ops import NumpyOps

DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
DIM, CONTEXT = 32, 512


class Case:
    """A layer of `heads` heads, with `count` rows of projections and the states of three slots."""

    def __init__(self, dtype: DType, heads: int, count: int, *, is_plain: bool = False):
        data = Data(dtype, seed=heads + count)
        self.dtype, self.mixer = dtype, LightningAttention(heads, DIM)
        self.qkv = data(count, 3 * self.mixer.width)
        norms = (None, None) if is_plain else (data.norm(DIM), data.norm(DIM))
        slopes = np.array(self.mixer.slopes)
        decay = np.exp(-np.outer(slopes, np.arange(LIGHTNING_BLOCK + 1))).astype(np.float32)
        self.heads = LightningHeads(*norms, None if is_plain else rope_of(CONTEXT, DIM), decay)
        self.states = Data(seed=1)(3, heads, DIM, DIM)

    def run(self, first: int, rows: Rows, states: Any, chain: Any = None) -> Any:
        """Return what the op gives for the rows from `first` on; the `states` of their slots change."""
        qkv, ops = self.qkv[first : first + len(rows.positions)].copy(), NumpyOps(self.dtype)
        out = Poisoned(len(qkv), self.mixer.width)
        attend = ops.lightning_prefill if rows.is_prefill else ops.lightning_decode
        attend(out.view, qkv, self.heads, LightningState(states, chain), rows, EPS)
        return out.written().copy()

    def prefill(self, states: Any, borders: tuple[int, ...], slot: int = 1) -> Any:
        """Return the outputs of all rows from the first border to the last, computed in chunks between borders."""
        found = []
        for start, end in zip(borders[:-1], borders[1:], strict=True):
            rows = make_rows(np.arange(start, end), np.full(end - start, slot), np.zeros((3, 8), np.int32), True)
            found.append(self.run(start, rows, states))
        return np.concatenate(found)

    def decode(self, states: Any, first: int, last: int, slot: int = 1) -> Any:
        tables = np.zeros((3, 8), np.int32)
        return np.concatenate([self.run(row, make_rows([row], [slot], tables), states) for row in range(first, last)])

    def expected(self, state: Any) -> tuple[Any, Any]:
        """Return the outputs of all rows in turn, and the state after them, in float64."""
        heads, out = self.qkv.reshape(len(self.qkv), 3, -1, DIM).astype(np.float64), []
        for position, parts in enumerate(heads):
            q, k, v = parts
            if self.heads.rope is not None:
                q, k = (brute_force.rms_norm(part, norm, EPS) for part, norm in zip((q, k), self.norms, strict=True))
                cos, sin = self.heads.rope[:, position]
                q, k = (np.stack([brute_force.rotate(head, cos, sin) for head in part]) for part in (q, k))
            for head, slope in enumerate(self.mixer.slopes):
                state[head] = np.exp(-slope) * state[head] + np.outer(k[head], v[head])
            out.append(np.concatenate([DIM**-0.5 * q[head] @ state[head] for head in range(len(q))]))
        return np.stack(out), state

    @property
    def norms(self) -> tuple[Any, Any]:
        return self.heads.q_norm, self.heads.k_norm


@DTYPES
@pytest.mark.parametrize(("heads", "count", "is_plain"), [(3, 150, False), (1, 64, True), (4, 1, False), (5, 65, True)])
def test_prefill_and_decode_are_the_recurrence(dtype, heads, count, is_plain):
    case = Case(dtype, heads, count, is_plain=is_plain)
    for attend in (lambda states: case.prefill(states, (0, count)), lambda states: case.decode(states, 0, count)):
        states = case.states.copy()
        expected, behind = case.expected(case.states[1].astype(np.float64))
        check("lightning_decode", dtype, attend(states), expected)
        check_state(dtype, states[1], behind)
        np.testing.assert_array_equal(states[[0, 2]], case.states[[0, 2]])


def check_state(dtype: DType, state: Any, expected: Any) -> None:
    error = np.linalg.norm(state - expected) / np.linalg.norm(expected)
    assert error < {DType.FLOAT32: 1e-5, DType.FLOAT16: 1e-3, DType.BFLOAT16: 8e-3}[dtype]


@pytest.mark.parametrize("borders", [(0, 64, 150), (0, 128, 150), (0, 64, 128, 150)], ids=str)
def test_where_a_prompt_is_cut_changes_no_bit(borders):
    case = Case(DType.BFLOAT16, 3, 150)
    whole, cut = case.states.copy(), case.states.copy()
    np.testing.assert_array_equal(case.prefill(cut, borders), case.prefill(whole, (0, 150)))
    np.testing.assert_array_equal(cut, whole)


def test_a_cut_within_a_block_is_a_mistake_of_the_caller():
    with pytest.raises(AssertionError, match="between blocks"):
        case = Case(DType.FLOAT32, 1, 70)
        case.prefill(case.states, (0, 40, 70))


def test_padding_changes_nothing():
    case = Case(DType.FLOAT16, 2, 80)
    alone, padded = case.states.copy(), case.states.copy()
    expected = case.prefill(alone, (0, 70))
    rows = make_rows(np.arange(80), np.where(np.arange(80) < 70, 1, -1), np.zeros((3, 8), np.int32), True)
    found = case.run(0, rows, padded)
    np.testing.assert_array_equal(found[:70], expected)
    np.testing.assert_array_equal(padded, alone)


def test_rows_of_other_slots_change_no_bit():
    case, tables = Case(DType.BFLOAT16, 3, 3), np.zeros((3, 8), np.int32)
    together, alone = case.states.copy(), case.states.copy()
    found = case.run(0, make_rows([7, 90, 0], [2, 0, -1], tables), together)
    for row, (position, slot) in enumerate([(7, 2), (90, 0)]):
        np.testing.assert_array_equal(case.run(row, make_rows([position], [slot], tables), alone)[0], found[row])
    np.testing.assert_array_equal(together, alone)
    assert not np.array_equal(together[[0, 2]], case.states[[0, 2]])


@pytest.mark.parametrize("accepted", [0, 1, 4, 6])
def test_a_chain_has_the_bits_of_plain_decoding(accepted):
    """Rows of a chain, whose last one is padding, and the state after the accepted ones have plain decoding's bits."""
    case, count = Case(DType.BFLOAT16, 3, 7), 6
    plain, verified = case.states.copy(), case.states.copy()
    chain = np.full((8, 2 * case.mixer.width), np.nan, np.float32)
    slots = np.where(np.arange(7) < count, 1, -1)
    masks, base = (np.uint64(2) << np.arange(7, dtype=np.uint64)) - np.uint64(1), np.zeros(7, np.int32)
    tables = np.zeros((3, 8), np.int32)
    rows = Rows(np.zeros(7, np.int64), np.arange(7), slots, tables, False, np.arange(7), masks, base)
    found = case.run(0, rows, verified, chain)
    np.testing.assert_array_equal(verified, case.states)
    np.testing.assert_array_equal(found[:count], case.decode(case.states.copy(), 0, count))
    if accepted:
        case.decode(plain, 0, accepted)
    state = LightningState(verified[None], chain[None])
    NumpyOps(DType.BFLOAT16).lightning_accept(state, case.heads.decay, (1, accepted))
    np.testing.assert_array_equal(verified, plain)


@DTYPES
@pytest.mark.parametrize(("has_norm", "has_gate"), [(True, True), (True, False), (False, True)])
def test_gate_rows(dtype, has_norm, has_gate):
    data = Data(dtype)
    rows, gate, norm = data(5, 96, scale=3.0), data(5, 96, scale=30.0), data.norm(96)
    out = Poisoned(5, 96, content=rows)
    NumpyOps(dtype).gate_rows(out.view, norm if has_norm else None, gate if has_gate else None, EPS)
    expected = brute_force.rms_norm(rows, norm, EPS) if has_norm else rows.astype(np.float64)
    if has_gate:
        expected = expected / (1 + np.exp(-gate.astype(np.float64)))
    check("gate_rows", dtype, out.written(), expected)


@DTYPES
@pytest.mark.parametrize("is_prefill", [False, True])
def test_project(dtype, is_prefill):
    data, out = Data(dtype), Poisoned(70, 64)
    x, norm, weight = data(70, 96, scale=2.0), data.norm(96), data.weight(64, 96)
    NumpyOps(dtype).project(out.view, x, norm, weight, EPS, is_prefill=is_prefill)
    check("project", dtype, out.written(), brute_force.linear(brute_force.rms_norm(x, norm, EPS), weight))
