"""Both prefill_attention kernels against the NumPy op: chunk starts and sizes around tiles and pages, groups, heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.ops.attention import Operands
from cpmrt.cuda.ops.attention.prefill import PrefillPlan, attend_chunk
from cpmrt.dtypes import DType, round_to
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import OPS, KVPages, Rows
from cpmrt.reference.ops import NumpyOps

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
SLOT = 1
GUARD = 256
ARCHITECTURES = {"prefill_attention": 80, "prefill_attention_wgmma": 90}


@pytest.fixture(params=ARCHITECTURES)
def arch(cuda: Any, request: Any) -> int:
    """The compute capability to plan for, one for each of the two kernels."""
    capability = ARCHITECTURES[request.param]
    if capability == 90 and cuda.arch != "sm_90":
        pytest.skip("wgmma is an instruction of sm_90 alone")
    return capability


@dataclass
class Case:
    """A chunk's rows from position `start` on, in slot 1 of 3; cache that was never written is NaN."""

    dtype: DType
    start: int
    q: Any
    k_pages: Any
    v_pages: Any
    block_tables: Any

    @property
    def scale(self) -> float:
        return float(self.k_pages.shape[3] ** -0.5)


def make_case(
    dtype: DType, group: int, kv_heads: int, head_dim: int, start: int, count: int, spread: float = 1.0
) -> Case:
    rng = np.random.default_rng((start + 1) * 7919 + count)
    length = start + count
    pages_per_sequence = -(-length // PAGE_SIZE) + 1
    block_tables = rng.permutation(3 * pages_per_sequence + 2)[: 3 * pages_per_sequence].reshape(3, -1)
    pages = np.full((2, 3 * pages_per_sequence + 2, kv_heads, PAGE_SIZE, head_dim), np.nan, np.float32)
    for page in range(-(-length // PAGE_SIZE)):
        used = min(PAGE_SIZE, length - page * PAGE_SIZE)
        values = rng.standard_normal((2, kv_heads, used, head_dim), np.float32)
        pages[:, block_tables[SLOT, page], :, :used] = round_to(values, dtype)
    q = rng.standard_normal((count, group * kv_heads * head_dim), np.float32) * np.float32(spread)
    return Case(dtype, start, round_to(q, dtype), pages[0], pages[1], block_tables.astype(np.int32))


def run(
    cuda: Any, arch: int, case: Case, bucket: int, *, slot: int = SLOT, pdl: bool = False, window: int = 0
) -> np.ndarray[Any, Any]:
    """Return all rows of the bucket; callers check that rows past the chunk are still NaN, the poison they were filled
    with."""
    count, width = case.q.shape
    num_kv_heads, head_dim = case.k_pages.shape[1], case.k_pages.shape[3]
    plan = PrefillPlan.of(GroupedAttention(width // head_dim, num_kv_heads, head_dim), arch)
    q = np.full((bucket, width), np.nan, np.float32)
    q[:count] = case.q
    out = cuda.array(np.full(bucket * width + 2 * GUARD, np.nan, np.float32), case.dtype)
    inner = out[GUARD : GUARD + bucket * width].reshape(bucket, width)
    queries, *pages = (cuda.array(values, case.dtype) for values in (q, case.k_pages, case.v_pages))
    rows, chunk = Rows(None, None, None, cuda.array(case.block_tables), True), np.array([slot, case.start, count])
    given = Operands(inner, queries, KVPages(*pages), rows, case.scale)
    attend_chunk(cuda.launcher(case.dtype, pdl=pdl), plan, given, cuda.array(chunk.astype(np.int32)), window)
    result = cuda.numpy(out, case.dtype)
    assert np.isnan(result[:GUARD]).all() and np.isnan(result[GUARD + bucket * width :]).all(), "wrote outside out"
    return result[GUARD : GUARD + bucket * width].reshape(bucket, width)


def assert_matches_oracle(out: np.ndarray[Any, Any], case: Case, window: int = 0) -> None:
    count = len(case.q)
    expected = np.empty_like(case.q)
    positions = np.arange(case.start, case.start + count, dtype=np.int32)
    rows = Rows(np.zeros(count, np.int32), positions, np.full(count, SLOT), case.block_tables, True)
    kv = KVPages(case.k_pages, case.v_pages)
    NumpyOps(case.dtype).prefill_attention(expected, case.q, kv, rows, case.scale, window)
    seeing = slice(int(case.start < 0), count)
    assert np.isfinite(out[seeing]).all()
    errors = np.linalg.norm(out[seeing] - expected[seeing], axis=1) / np.linalg.norm(expected[seeing], axis=1)
    limit = OPS["prefill_attention"].tolerance[case.dtype]
    assert errors.max() <= limit, f"row {errors.argmax()}: {errors.max():.2e}"
    assert np.isnan(out[count:]).all(), "stored rows past the chunk"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (2, 1), (5, 1), (8, 2), (16, 1)])
def test_matches_the_numpy_op(cuda: Any, arch: int, dtype: DType, group: int, kv_heads: int, head_dim: int) -> None:
    case = make_case(dtype, group, kv_heads, head_dim, start=100, count=193)
    assert_matches_oracle(run(cuda, arch, case, 256), case)


@pytest.mark.parametrize("group", [3, 4])
@pytest.mark.parametrize("start", [0, 1, 63, 64, 1000])
@pytest.mark.parametrize("count", [1, 65, 127, 128, 129, 500])
def test_chunk_starts_and_sizes(cuda: Any, arch: int, group: int, start: int, count: int) -> None:
    case = make_case(DType.BFLOAT16, group, 1, 128, start, count)
    assert_matches_oracle(run(cuda, arch, case, 512), case)


@pytest.mark.parametrize("count", [2, 64, 200])
@pytest.mark.parametrize("window", [0, 40])
def test_the_first_row_may_stand_before_the_sequence(cuda: Any, arch: int, count: int, window: int) -> None:
    case = make_case(DType.BFLOAT16, 4, 1, 64, start=-1, count=count)
    assert_matches_oracle(run(cuda, arch, case, 256, window=window), case, window)


def test_a_chunk_of_nothing_but_the_row_before_the_sequence(cuda: Any, arch: int) -> None:
    case = make_case(DType.BFLOAT16, 4, 1, 64, start=-1, count=1)
    assert np.isnan(run(cuda, arch, case, 128)[1:]).all(), "stored rows past the chunk"


@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (16, 128), (5, 96), (3, 64)])
@pytest.mark.parametrize("window", [1, 64, 100, 1000])
def test_windows(cuda: Any, arch: int, group: int, head_dim: int, window: int) -> None:
    """Whole tiles of 128 keys before the first row's window are not read; other keys before a row's window do not
    count."""
    for start, count in ((0, 70), (100, 193), (1000, 300), (2047, 65)):
        case = make_case(DType.BFLOAT16, group, 1, head_dim, start, count)
        first, table = max(start + 1 - window, 0), case.block_tables[SLOT]
        hidden = np.arange(first)
        for pages, value in ((case.k_pages, 9.0), (case.v_pages, 1e4)):
            pages[table[hidden // PAGE_SIZE], :, hidden % PAGE_SIZE] = value
        out = run(cuda, arch, case, 512, window=window)
        assert_matches_oracle(out, case, window)
        for pages in (case.k_pages, case.v_pages):
            pages[table[: first // 128 * 2]] = np.nan
        assert np.array_equal(run(cuda, arch, case, 512, window=window, pdl=True)[:count], out[:count])


def test_a_window_that_reaches_everything_changes_nothing(cuda: Any, arch: int) -> None:
    case = make_case(DType.FLOAT16, 4, 2, 128, start=500, count=400)
    assert np.array_equal(run(cuda, arch, case, 512, window=900)[:400], run(cuda, arch, case, 512)[:400])


def test_a_long_context(cuda: Any, arch: int) -> None:
    case = make_case(DType.BFLOAT16, 4, 2, 128, start=4900, count=300)
    assert_matches_oracle(run(cuda, arch, case, 512), case)


def test_a_bucket_that_is_no_multiple_of_the_tile(cuda: Any, arch: int) -> None:
    case = make_case(DType.FLOAT16, 2, 2, 64, start=7, count=90)
    assert_matches_oracle(run(cuda, arch, case, 90), case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(cuda: Any, arch: int, dtype: DType) -> None:
    case = make_case(dtype, 2, 1, 128, start=30, count=200, spread=300.0)
    assert_matches_oracle(run(cuda, arch, case, 256), case)


def test_repeated_and_dependent_launches_give_the_same_bits(cuda: Any, arch: int) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, 128, start=500, count=400)
    once = run(cuda, arch, case, 512)[:400]
    assert np.array_equal(run(cuda, arch, case, 512, pdl=True)[:400], once)
    assert np.array_equal(run(cuda, arch, case, 1024)[:400], once)


def test_an_empty_slot_stores_nothing(cuda: Any, arch: int) -> None:
    case = make_case(DType.BFLOAT16, 2, 1, 64, start=0, count=70)
    assert np.isnan(run(cuda, arch, case, 128, slot=-1)).all()
