"""lightning_decode and lightning_accept against a recurrence in float64: rows of several slots, and chains, bit for bit
as plain decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lightning_cases import DTYPES, GUARD, LightningCase

from cpmrt.dtypes import DType
from cpmrt.ops import OPS

pytestmark = pytest.mark.gpu

SHAPES = [(3, 128, False), (2, 64, True), (1, 128, True), (32, 128, False)]
THREADS = 256


def decode(cuda: Any, case: LightningCase, states: Any, rows: Any, *, chain: Any = None, pdl: bool = False) -> Any:
    """Run lightning_decode on these rows of the case and return their outputs; `states`, on the device, changes unless
    there is a `chain`."""
    kernel = cuda.kernel("lightning_decode", case.dtype, HEAD_DIM=case.head_dim, CHAIN=int(chain is not None))
    count, out = len(rows), cuda.array(np.full(len(rows) * case.width + 2 * GUARD, np.nan, np.float32), case.dtype)
    grid = (case.head_dim // 32, case.num_heads, 1 if chain is not None else count)
    kernel(
        grid, THREADS, out[GUARD:], states, chain, cuda.array(case.qkv[rows], case.dtype), *case.heads(cuda),
        cuda.array(case.positions[rows]), cuda.array(case.slots[rows]), np.int32(count), np.int32(case.num_heads),
        np.int32(case.context), np.float32(case.eps), pdl=pdl,
    )  # fmt: skip
    found = cuda.numpy(out, case.dtype)
    assert np.isnan(found[:GUARD]).all() and np.isnan(found[GUARD + count * case.width :]).all(), "wrote outside out"
    return found[GUARD : GUARD + count * case.width].reshape(count, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "is_plain"), SHAPES)
def test_tokens_of_one_slot_in_turn(cuda: Any, dtype: DType, heads: int, head_dim: int, is_plain: bool) -> None:
    case = LightningCase(dtype, heads, head_dim, 70, is_plain=is_plain)
    states, expected = cuda.array(case.states), case.expected()
    found = np.concatenate([decode(cuda, case, states, [row]) for row in range(70)])
    assert case.distance(found, expected.out) < OPS["lightning_decode"].tolerance[dtype]
    case.check_states(cuda.numpy(states), expected.state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pdl", [False, True])
def test_rows_of_other_slots_and_padding_change_no_bit(cuda: Any, dtype: DType, pdl: bool) -> None:
    case = LightningCase(dtype, 3, 128, 5)
    case.slots[:] = 2, -1, 0, 1, -1
    case.positions[:] = 7, 10**6, 0, 400, -1
    together, alone = cuda.array(case.states), cuda.array(case.states)
    found = decode(cuda, case, together, np.arange(5), pdl=pdl)
    for row in (0, 2, 3):
        np.testing.assert_array_equal(decode(cuda, case, alone, [row])[0], found[row])
    assert np.isnan(found[[1, 4]]).all(), "padding has an output"
    np.testing.assert_array_equal(cuda.numpy(together), cuda.numpy(alone))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "is_plain"), SHAPES[:3])
@pytest.mark.parametrize("count", [1, 6, 16, 17, 40])
def test_a_chain_has_the_bits_of_plain_decoding(
    cuda: Any, dtype: DType, heads: int, head_dim: int, is_plain: bool, count: int
) -> None:
    """The rows of a chain, of which the last two are padding, have the bits of plain decoding, and so have the states
    after the accepted rows, in both layers."""
    case = LightningCase(dtype, heads, head_dim, count + 2, is_plain=is_plain)
    case.slots[count:] = -1
    plain, verified = cuda.array(case.states), cuda.array(np.stack([case.states, case.states + 1]))
    chain = cuda.array(np.full((2, 64, 2 * case.width), np.nan, np.float32), dtype)
    found = decode(cuda, case, verified[0], np.arange(count + 2), chain=chain[0])
    np.testing.assert_array_equal(cuda.numpy(verified[0]), case.states)
    with cuda.stream:
        chain[1] = chain[0]
    accepted = (count + 1) // 2
    for row in range(count):
        np.testing.assert_array_equal(decode(cuda, case, plain, [row])[0], found[row])
        if row + 1 == accepted:
            behind = cuda.numpy(plain)
    accept = cuda.kernel("lightning_accept", dtype, HEAD_DIM=head_dim, CHAIN=1)
    sizes = map(np.int32, (len(case.states), heads, 64))
    tree = case.tree(cuda, accepted)
    accept((head_dim // 32, heads, 2), THREADS, verified, chain, cuda.array(case.decay), tree, *sizes)
    np.testing.assert_array_equal(cuda.numpy(verified)[0], behind)
    other = case.expected(case.states[case.slot] + 1, accepted).state
    case.check_states(cuda.numpy(verified)[1], other, case.states + 1)


def test_a_sequence_that_has_ended_takes_nothing_up(cuda: Any) -> None:
    case = LightningCase(DType.BFLOAT16, 2, 64, 3)
    case.slots[:] = -1
    states, chain = cuda.array(case.states), cuda.array(np.zeros((64, 2 * case.width), np.float32), case.dtype)
    decode(cuda, case, states, np.arange(3), chain=chain)
    accept, tree = cuda.kernel("lightning_accept", case.dtype, HEAD_DIM=64, CHAIN=1), case.tree(cuda, 2, slot=-1)
    accept((2, 2, 1), THREADS, states, chain, cuda.array(case.decay), tree, *map(np.int32, (3, 2, 64)))
    np.testing.assert_array_equal(cuda.numpy(states), case.states)
