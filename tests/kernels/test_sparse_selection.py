"""The choice of blocks (select_blocks.cu, pick_blocks.cu): against brute force, with ties, and independent of the other
rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reference import sparse_brute_force as brute
from sparse_cases import SLACK, SMALL, UNWRITTEN, Slots, SparseDevice, check_choices

from cpmrt.config import SparseConfig
from cpmrt.cuda.ops.selection import PICK_BLOCKS
from cpmrt.dtypes import DType, round_to
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.reference.kv_rows import gather
from cpmrt.reference.sparse_attention import choose_blocks

pytestmark = pytest.mark.gpu

KERNELS = ("coarse_log_sums", "score_blocks", "pick_blocks")
DTYPES = [DType.BFLOAT16, DType.FLOAT16]
SHAPES = [
    (DType.BFLOAT16, 16, 2, 128), (DType.FLOAT16, 8, 2, 64), (DType.BFLOAT16, 4, 1, 96), (DType.FLOAT16, 1, 3, 128),
    (DType.BFLOAT16, 20, 1, 64), (DType.FLOAT16, 16, 2, 128),
]  # fmt: skip
@pytest.mark.parametrize(("dtype", "group", "kv_heads", "head_dim"), SHAPES, ids=str)
@pytest.mark.parametrize(
    "sparse", [SMALL, SparseConfig(2, 128, 6, 300), SparseConfig(0, 64, 1, 0), SparseConfig(0, 64, 4, -1)], ids=str
)
def test_every_offset_within_a_block(
    cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int, sparse: SparseConfig
) -> None:
    slots = Slots(dtype, [1024], group=group, kv_heads=kv_heads, head_dim=head_dim)
    device = SparseDevice(cuda, slots, sparse)
    positions = np.concatenate([np.arange(100, 320, 7), np.arange(577, 641), np.arange(960, 1024, 9)])
    num_chosen = 0
    for first in range(0, len(positions), 50):
        part = positions[first : first + 50]
        q, rows = slots.queries(len(part), 2.0), slots.rows(part, np.zeros(len(part)))
        num_chosen += check_choices(slots, q, rows, device.select(q, rows), sparse)
    assert num_chosen > 70


def test_brute_force(cuda: Any) -> None:
    """Choices match brute-force scores in float64, computed from the tokens' own keys."""
    slots = Slots(DType.BFLOAT16, [700], group=8, kv_heads=2, head_dim=64)
    positions = np.array([300, 447, 448, 575, 640, 699])
    q, rows = slots.queries(6, 2.0), slots.rows(positions, np.zeros(6))
    blocks = SparseDevice(cuda, slots, SMALL).select(q, rows)
    for row, position in enumerate(map(int, positions)):
        keys = gather(slots.k_pages, slots.tables[0], position + 1)
        for head in range(2):
            k1, k2 = (
                [round_to(mean.astype(np.float32), slots.dtype) for mean in brute.windows(keys[head], size, stride)]
                for size, stride in ((32, 16), (128, 64))
            )
            heads = q[row].reshape(2, 8, 64)[head]
            scores = brute.scores(heads, k1, k2, slots.scale, position // PAGE_SIZE)
            brute.check_choice(blocks[row, head], scores, position, SMALL, SLACK)


@pytest.mark.parametrize("num_tokens", [319, 320, 321, 384, 385, 448, 449])
@pytest.mark.parametrize("dense_len", [-1, 0, 385, 386])
def test_the_switch_is_at_dense_len_and_at_more_blocks_than_may_be_chosen(
    cuda: Any, dense_len: int, num_tokens: int
) -> None:
    sparse, slots = SparseConfig(1, 128, 3, dense_len), Slots(DType.BFLOAT16, [num_tokens], group=4)
    q, rows = slots.queries(1), slots.rows([num_tokens - 1], [0])
    blocks = SparseDevice(cuda, slots, sparse).select(q, rows)
    assert check_choices(slots, q, rows, blocks, sparse) == (num_tokens >= max(dense_len, 321))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_take_the_lower_blocks(cuda: Any, dtype: DType) -> None:
    slots, sparse = Slots(dtype, [4096], group=8, kv_heads=1), SparseConfig(2, 128, 6, -1)
    keys = np.tile(np.arange(64) % 3, (4096, 1, 1)).astype(np.float32)
    slots.set_tokens(0, keys, keys)
    slots.compress([4096])
    positions = [768, 831, 1000, 4095]
    blocks = SparseDevice(cuda, slots, sparse).select(slots.queries(4), slots.rows(positions, np.zeros(4)))
    owns = [position // PAGE_SIZE for position in positions]
    assert blocks.tolist() == [[[0, 1, 2, 3, 4, own - 2, own - 1, own]] for own in owns]


def test_planted_ties(cuda: Any) -> None:
    """Ties are broken as by the oracle: small integers make every product exact, so that equal windows score exactly
    alike."""
    rng = np.random.default_rng(3)
    for trial in range(60):
        num_blocks = int(rng.integers(7, 40))
        length = 64 * num_blocks - int(rng.integers(0, 64))
        slots = Slots(DType.FLOAT16, [length], group=1, kv_heads=1)
        levels = np.repeat(rng.integers(0, 3, num_blocks), 64)[:length]
        keys = np.tile(levels[:, None, None], (1, 1, 64)).astype(np.float32) / 16
        slots.set_tokens(0, keys, keys)
        slots.compress([length])
        sparse = SparseConfig(trial % 2, 64, int(rng.integers(2, 6)), -1)
        q = np.full((1, 64), rng.choice([-1.0, 0.0, 1.0]), np.float32)
        rows = slots.rows([length - 1], [0])
        blocks = SparseDevice(cuda, slots, sparse).select(q, rows)
        assert np.array_equal(blocks, slots.select(q, rows, sparse)), trial


PLANTED = {
    "of any size": lambda rng, shape: np.float32(2) ** rng.uniform(-148, 127, shape).astype(np.float32),
    "as they are": lambda rng, shape: np.float32(2) ** rng.normal(18, 3, shape).astype(np.float32),
    "alike in ten bits": lambda rng, shape: np.float32(2**18) + rng.integers(0, 2**12, shape).astype(np.float32) / 32,
    "alike in twenty bits": lambda rng, shape: np.float32(2**18) + rng.integers(0, 16, shape).astype(np.float32) / 32,
    "below one": lambda rng, shape: rng.random(shape, np.float32) / 4,
    "large": lambda rng, shape: np.float32(2**30) * (1 + rng.random(shape, np.float32)),
    "few": lambda rng, shape: rng.choice(np.array([0, 1, 3, 2**20], np.float32), shape),
    "zero": lambda rng, shape: np.zeros(shape, np.float32),
    "infinite": lambda rng, shape: rng.choice(np.array([1, 3e38, np.inf], np.float32), shape),
}  # fmt: skip


@pytest.mark.parametrize("threads", [128, 512])
@pytest.mark.parametrize("scores", PLANTED)
def test_the_best_of_any_scores(cuda: Any, scores: str, threads: int) -> None:
    """pick_blocks, run alone, picks the best of any scores: from 95 blocks, of which 62 are chosen, to thousands."""
    sparse, kv_heads, pages, unused = SparseConfig(), 2, 5000, 3
    positions = np.array([64 * count - 1 for count in (128, 160, 161, 700, 2048, 2049, pages)], np.int32)
    rng = np.random.default_rng(threads)
    pooled = PLANTED[scores](rng, (len(positions), kv_heads, pages, 2))
    blocks = cuda.array(np.full((len(positions), kv_heads, sparse.num_selected + unused), UNWRITTEN, np.int32))
    counts = pages, sparse.num_selected, sparse.init_blocks, sparse.local_blocks, sparse.dense_context
    out = blocks.reshape(-1)[: len(positions) * kv_heads * sparse.num_selected]
    cuda.launcher(DType.BFLOAT16)(
        PICK_BLOCKS, {"THREADS": threads}, (len(positions), kv_heads), threads,
        out, cuda.array(pooled), cuda.array(positions), cuda.array(np.zeros_like(positions)), *map(np.int32, counts),
        smem=4 * pages,
    )  # fmt: skip
    found = cuda.numpy(out).reshape(len(positions), kv_heads, -1)
    for row, position in enumerate(map(int, positions)):
        of_blocks = np.maximum(pooled[row, :, :-1, 1], pooled[row, :, 1:, 0])[:, : position // PAGE_SIZE]
        assert np.array_equal(found[row], choose_blocks(of_blocks, position, sparse)), row
    assert (cuda.numpy(blocks).reshape(-1)[out.size :] == UNWRITTEN).all()


def test_scores_that_overflow_and_vanish(cuda: Any) -> None:
    """Lists stay ascending and hold the first and the last blocks if scores overflow or vanish: K1 and K2 differ, so
    exp of their difference can be anything; infinite scores are equal."""
    slots = Slots(DType.BFLOAT16, [2048], group=2, kv_heads=2, head_dim=64)
    device = SparseDevice(cuda, slots, SMALL)
    for spread in (30.0, 300.0, 3000.0):
        blocks = device.select(slots.queries(8, spread), slots.rows(np.arange(2040, 2048), np.zeros(8)))
        for lists in blocks.reshape(-1, SMALL.num_selected):
            assert (np.diff(lists) > 0).all() and lists[0] == 0 and lists[-2:].tolist() == [30, 31]


def test_a_choice_is_the_same_bits_in_any_company(cuda: Any) -> None:
    slots = Slots(DType.BFLOAT16, [1500, 900, 3000], group=16, kv_heads=2, head_dim=128)
    positions = np.array([1499, 899, 2999, 1000, 300, 2000, 640, 899, 2048, 191, 1400])
    rows = slots.rows(positions, [0, 1, 2, 0, 1, 2, 1, 1, 2, 0, 0])
    q = slots.queries(len(positions), 3.0)
    whole = SparseDevice(cuda, slots, SMALL).select(q, rows)
    for settings in ({"sms": 1}, {"sms": 5000, "pdl": True}, {"rows_per_pass": 3}, {"rows_per_pass": 8, "pdl": True}):
        assert np.array_equal(SparseDevice(cuda, slots, SMALL, **settings).select(q, rows), whole), settings
    device = SparseDevice(cuda, slots, SMALL)
    for size in (1, 2, 3, 5, 8):
        for first in range(0, len(q), size):
            part = slice(first, first + size)
            few = replace(rows, positions=rows.positions[part], slots=rows.slots[part])
            assert np.array_equal(device.select(q[part], few), whole[part]), (size, first)


def test_a_chunk_chooses_as_its_tokens_one_by_one(cuda: Any) -> None:
    """Each row of a chunk, with windows that end within the chunk and padding behind it, chooses as if its token were
    the newest one."""
    slots = Slots(DType.FLOAT16, [700], group=4, kv_heads=2, head_dim=64)
    positions = np.arange(150, 700)
    q = slots.queries(len(positions) + 26, 2.0)
    rows = slots.rows([*positions, *[0] * 26], [0] * len(positions) + [-1] * 26, is_prefill=True)
    whole = SparseDevice(cuda, slots, SMALL, max_rows=576, rows_per_pass=200).select(q, rows)
    assert check_choices(slots, q, rows, whole, SMALL) == 444
    for position in (255, 256, 257, 400, 511, 512, 699):
        slots.compress([position + 1])
        alone = SparseDevice(cuda, slots, SMALL).select(q[position - 150 :][:1], slots.rows([position], [0]))
        assert np.array_equal(alone[0], whole[position - 150]), position


def test_long_contexts(cuda: Any) -> None:
    """Rows of contexts up to 320K tokens, with many partial log sums and many tiles a warp, choose as the oracle; there
    are compressed keys only, no tokens."""
    slots = Slots(DType.BFLOAT16, [64], group=16, kv_heads=2, head_dim=64)
    num_pages = 5000
    slots.tables = slots.rng.permutation(num_pages).astype(np.int32)[None]
    slots.k1, slots.k2 = slots.normal(num_pages, 2, 4, 64), slots.normal(num_pages, 2, 64)
    slots.k_pages = np.zeros((num_pages, 2, 64, 64), np.float32)
    slots.v_pages = slots.k_pages
    sparse = SparseConfig()
    positions = np.array([num_pages * 64 - 1, 131072, 131071, 200000])
    rows, q = slots.rows(positions, np.zeros(4)), slots.queries(4, 2.0)
    for settings in ({}, {"sms": 8}):
        blocks = SparseDevice(cuda, slots, sparse, **settings).select(q, rows)
        assert check_choices(slots, q, rows, blocks, sparse) == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", [383, 384, 420, 440, 447, 448, 511])
def test_a_row_of_a_tree_chooses_as_the_plain_row_of_its_path(cuda: Any, dtype: DType, base: int) -> None:
    """A node's row chooses exactly as the plain row of its path, also where a window of 128 tokens ends within the
    path."""
    rng, count = np.random.default_rng(base), 40
    paths = [[0]]
    for node in range(1, count):
        parent = int(rng.integers(node * 3 // 4, node))
        paths.append([*paths[parent], node])
    slots = Slots(dtype, [base + count], group=16, kv_heads=2, head_dim=64)
    slots.compress([base])
    positions = np.array([base + len(path) - 1 for path in paths])
    masks = np.array([sum(1 << node for node in path) for path in paths], np.uint64)
    q = slots.queries(count, 3.0)
    tree = {"tree_masks": masks, "tree_base": np.full(count, base, np.int32)}
    places = np.arange(base, base + count, dtype=np.int32)
    rows = slots.rows(positions, np.zeros(count), locations=places, **tree)
    device = SparseDevice(cuda, slots, SMALL)
    found = device.select(q, rows)
    assert check_choices(slots, q, rows, found, SMALL) == count
    for node in (0, 7, 20, count - 1):
        alone = slots.rows(positions[node : node + 1], [0])
        plain = Slots(dtype, [base + count], group=16, kv_heads=2, head_dim=64)
        at = base + np.array(paths[node])
        path = plain.k_pages[plain.tables[0, at // PAGE_SIZE], :, at % PAGE_SIZE]
        to = np.arange(base, base + len(at))
        plain.k_pages[plain.tables[0, to // PAGE_SIZE], :, to % PAGE_SIZE] = path
        plain.compress([base + len(at)])
        expected = SparseDevice(cuda, plain, SMALL).select(q[node : node + 1], alone)
        assert np.array_equal(found[node], expected[0]), node
