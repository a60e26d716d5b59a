"""The kernels of latent attention (latent_attention.cu, latent_chunk.cu and others) against the NumPy ops: trees,
chunks, invariance."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import attention_cases
import numpy as np
import pytest
from latent_cases import EPS, MINICPM3, LatentCase, Sizes, tree_of
from linear_cases import layout_of
from packed_oracle import pack
from reference.operands import make_rows
from slow_writer import SlowWriter

from cpmrt.config.layers import LatentAttention
from cpmrt.cuda.ops.latent import ATTEND_WGMMA, LatentOps, LatentPlan
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight
from cpmrt.cuda.ops.products import Products
from cpmrt.cuda.precompile import known_device
from cpmrt.dtypes import DType, from_float32, round_to, to_float32
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.caches import PAGE_SIZE, CacheLayout
from cpmrt.models.mixers import latent
from cpmrt.ops import OPS, LatentWeights, Rows
from cpmrt.reference.ops import NumpyOps
from cpmrt.tensor_spec import PLAIN_HEAD_DIM, BufferSpec

DTYPES = pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=lambda dtype: dtype.label)
ALL_HEADS = [3, 16, 20, 40, 50]
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 300, 1000, 2049]
GUARD = 256
assert_close = partial(attention_cases.assert_close, op="decode_latent_attention")


def sizes_of(heads: int) -> Sizes:
    return replace(MINICPM3, heads=heads, q_rank=128)


def mixer_of(sizes: Sizes) -> LatentAttention:
    return LatentAttention(
        sizes.heads, sizes.q_rank, sizes.kv_rank, sizes.nope, sizes.rotated, sizes.value, norm_eps=EPS
    )  # fmt: skip


def plan_of(sizes: Sizes, device: Any, max_context: int = 8192) -> LatentPlan:
    caches = CacheLayout((latent.caches(mixer_of(sizes), "auto"),), max_context, max_sequences=4)
    return LatentPlan.of(mixer_of(sizes), device, caches, max_rows=1024, step_rows=MAX_ROWS)


class LatentDevice:
    """A case on the device: it is uploaded once, its ops run on given rows, and the guards around their outputs are
    checked."""

    def __init__(self, cuda: Any, case: LatentCase, *, sms: int = 132, capability: int | None = None):
        self.cuda, self.case, self.dtype = cuda, case, case.data.dtype
        device = replace(cuda.device, num_sms=sms, capability=capability or cuda.device.capability)
        if capability is not None and capability < 90:
            device = replace(device, shared_bytes_per_block=101376)
        self.plan = plan_of(case.sizes, device)
        specs = (*self.plan.tables, *self.plan.workspace, BufferSpec("chunk", (4,), 0, 0, np.int32))
        poison = {np.float32: np.nan, None: 0x7FC1}
        arrays = {spec.name: np.full(spec.shape, poison.get(spec.dtype, 0), spec.dtype or np.uint16) for spec in specs}
        arrays["expanded_tables"][:] = np.arange(self.plan.num_pages)
        self.arrays = {name: cuda.array(values) for name, values in arrays.items()}
        words = {name: cuda.array(getattr(case.weights, name), self.dtype) for name in ("q_norm", "kv_norm", "up")}
        self.weights = LatentWeights(**words)
        self.rope = cuda.array(case.rope, self.dtype)
        self.pages = cuda.array(case.pages, self.dtype)
        self.tables = cuda.array(case.tables)

    def ops(self, *, pdl: bool = False) -> LatentOps:
        return LatentOps(self.cuda.launcher(self.dtype, pdl=pdl), self.plan, self.arrays)

    def rows(self, rows: Rows) -> Rows:
        places = (rows.positions, rows.slots, rows.locations, rows.tree_base)
        positions, slots, locations, base = (
            None if values is None else self.cuda.array(np.asarray(values, np.int32)) for values in places
        )
        masks = None if rows.tree_masks is None else self.cuda.array(rows.tree_masks)
        return Rows(None, positions, slots, self.tables, rows.is_prefill, locations, masks, base)

    def run(
        self, q: Any, rows: Rows, *, pdl: bool = False, launches: int = 1, bucket: int | None = None,
        latents: Any | None = None,
    ) -> Any:  # fmt: skip
        """Return the attention of the rows, whose own `latents` (if given) go to the pages first.

        Rows with `is_prefill` are a chunk in a bucket of `bucket` rows; the bucket's rows behind the chunk do not
        matter.
        """
        count, width = len(q), self.case.sizes.heads * self.case.sizes.value
        total = bucket or count
        out = self.cuda.array(np.full(total * width + 2 * GUARD, np.nan, np.float32), self.dtype)
        inner = out[GUARD : GUARD + total * width].reshape(total, width)
        padded = np.zeros((total, q.shape[1]), np.float32)
        padded[:count] = q
        given, operand = self.rows(rows), self.cuda.array(padded, self.dtype)
        own = None if latents is None else self.cuda.array(latents, self.dtype)
        decode = self.ops(pdl=pdl).decode_latent_attention
        attend: Any = lambda out, q, *rest: decode(out, q, own, *rest, EPS)  # noqa: E731
        if rows.is_prefill:
            slots, positions = np.full(total, -1, np.int32), np.full(total, 10**8, np.int32)
            slots[:count], positions[:count] = rows.slots, rows.positions
            given = self.rows(replace(rows, slots=slots, positions=positions))
            chunk = np.array([rows.slots[0], rows.positions[0], count, 0], np.int32)
            self.arrays["chunk"] = self.cuda.array(chunk)
            attend = self.ops(pdl=pdl).prefill_latent_attention
        for _ in range(launches):
            attend(inner, operand, self.pages, self.weights, self.rope, given, self.case.sizes.scale)
        result = self.cuda.numpy(out, self.dtype)
        assert np.isnan(result[:GUARD]).all() and np.isnan(result[GUARD + total * width :]).all(), "wrote outside out"
        return result[GUARD : GUARD + total * width].reshape(total, width)[:count]


def expected(case: LatentCase, q: Any, rows: Rows) -> Any:
    out, ops = np.empty((len(q), case.sizes.heads * case.sizes.value), np.float32), NumpyOps(case.data.dtype)
    if rows.is_prefill:
        ops.prefill_latent_attention(out, q, case.pages, case.weights, case.rope, rows, case.sizes.scale)
    else:
        ops.decode_latent_attention(out, q, None, case.pages, case.weights, case.rope, rows, case.sizes.scale, EPS)
    return out


def step_case(dtype: DType, heads: int, lengths: list[int] = LENGTHS) -> tuple[LatentCase, Any, Rows]:
    case = LatentCase(sizes_of(heads), lengths, dtype)
    rows = make_rows(np.array(lengths) - 1, np.arange(len(lengths)), case.tables)
    return case, case.queries(len(lengths)), rows


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("heads", ALL_HEADS)
def test_rows_of_a_step(cuda: Any, dtype: DType, heads: int) -> None:
    case, q, rows = step_case(dtype, heads)
    assert_close(LatentDevice(cuda, case).run(q, rows), expected(case, q, rows), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [86, None])
@pytest.mark.parametrize("sms", [1, 8, 40, 264])
def test_any_number_of_splits_and_little_shared_memory(cuda: Any, sms: int, capability: int | None) -> None:
    case, q, rows = step_case(DType.BFLOAT16, 40, [1, 700, 5000])
    device = LatentDevice(cuda, case, sms=sms, capability=capability)
    assert_close(device.run(q, rows), expected(case, q, rows), case.data.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [20, 40])
def test_a_row_does_not_depend_on_the_others(cuda: Any, heads: int) -> None:
    case, q, rows = step_case(DType.BFLOAT16, heads, [*LENGTHS, 3000])
    device = LatentDevice(cuda, case)

    def taken(which: list[int]) -> tuple[Any, Rows]:
        return q[which], make_rows(rows.positions[which], rows.slots[which], case.tables)

    alone = np.concatenate([device.run(*taken([row])) for row in range(len(q))])
    for count in (2, 5, 8, 31, 64):
        which = [(7 * i + count) % len(q) for i in range(count)]
        assert np.array_equal(device.run(*taken(which), pdl=count % 2 == 0), alone[which]), count
    assert np.array_equal(device.run(q, rows, launches=20, pdl=True), alone)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("heads", [3, 40])
def test_rows_that_append_their_latents_first(cuda: Any, dtype: DType, heads: int) -> None:
    """Rows append their latents before they attend: rows of one slot see each other, and a padding row stores nothing
    and gets zeros. Old keys are read before the new ones are there."""
    lengths = [1, 64, 65, 300, 2049]
    case = LatentCase(sizes_of(heads), lengths, dtype)
    slots, ends = np.array([0, 1, 2, 2, 2, 3, 4, 4, -1]), np.array([1, 64, 63, 64, 65, 300, 2048, 2049, 1])
    rows, latents, q = make_rows(ends - 1, slots, case.tables), case.data(9, 128 + 288), case.queries(9)
    old = case.pages.copy()
    for slot, end in zip(slots[:8], ends[:8], strict=True):
        case.pages[case.tables[slot, (end - 1) // PAGE_SIZE], 0, (end - 1) % PAGE_SIZE] = np.nan
    device, stale = LatentDevice(cuda, case), case.pages.copy()
    wanted = np.empty((9, heads * 64), np.float32)
    NumpyOps(dtype).decode_latent_attention(
        wanted, q, latents, case.pages, case.weights, case.rope, rows, case.sizes.scale, EPS
    )
    assert np.array_equal(np.isnan(case.pages), np.isnan(old))

    def attend(*, pdl: bool) -> Any:
        device.pages = cuda.array(stale, dtype)
        return device.run(q, rows, pdl=pdl, latents=latents)

    out = attend(pdl=False)
    assert_close(out[:8], wanted[:8], dtype)
    assert not out[8].any(), "of padding"
    stored = cuda.numpy(device.pages, dtype)
    assert np.array_equal(np.isnan(stored), np.isnan(old)), "all rows are stored, and nothing else"
    error = np.linalg.norm(np.nan_to_num(stored - case.pages)) / np.linalg.norm(np.nan_to_num(case.pages))
    assert error <= OPS["append_latent"].tolerance[dtype]
    for _ in range(5):
        assert np.array_equal(attend(pdl=True), out)
    device.pages, later = cuda.array(stale, dtype), cuda.array(np.zeros(300_008, np.uint16))
    decode = device.ops(pdl=True).decode_latent_attention
    again, given = cuda.array(np.full_like(out, np.nan), dtype), (cuda.array(values, dtype) for values in (q, latents))
    decode(again, *given, device.pages, device.weights, device.rope, device.rows(rows), case.sizes.scale, EPS, later)
    assert np.array_equal(cuda.numpy(again, dtype), out), "a weight that comes to the L2 meanwhile changes nothing"
    for row in range(8):  # each row alone, with the other rows' keys in the pages
        device.pages = cuda.array(stored, dtype)
        alone = make_rows(rows.positions[[row]], rows.slots[[row]], case.tables)
        assert np.array_equal(device.run(q[[row]], alone, pdl=True, latents=latents[[row]])[0], out[row]), row


@pytest.mark.gpu
@pytest.mark.parametrize("base", [0, 60, 64, 1000])
@pytest.mark.parametrize("heads", [3, 40])
def test_a_tree_that_appends_its_nodes_has_the_bits_of_plain_steps(cuda: Any, base: int, heads: int) -> None:
    masks = [1]
    for node in range(1, 40):
        masks.append(masks[node // 3] | 1 << node)
    case = LatentCase(sizes_of(heads), [1, base + 64], DType.BFLOAT16, seed=base)
    rows, paths = tree_of(case, masks, base, 1)
    rows = replace(rows, locations=base + np.arange(len(masks)))
    latents, q = case.data(len(masks), 128 + 288), case.queries(len(masks))
    device = LatentDevice(cuda, case)
    out = device.run(q, rows, pdl=True, latents=latents)
    for row in range(0, len(masks), 7):
        plain, nodes = LatentDevice(cuda, case), [place - base for place in paths[row][base:]]
        for depth, node in enumerate(nodes):
            step = make_rows([base + depth], [1], case.tables)
            alone = plain.run(q[[node]], step, pdl=True, latents=latents[[node]])
        assert np.array_equal(alone[0], out[row]), row


@pytest.mark.gpu
def test_padding_rows_become_zeros(cuda: Any) -> None:
    case, q, rows = step_case(DType.FLOAT16, 40, [100, 1000, 64, 1])
    wanted = expected(case, q, rows)
    rows.slots[1], rows.positions[1], rows.slots[3] = -1, 10**8, -1
    out = LatentDevice(cuda, case).run(q, rows)
    assert not out[[1, 3]].any()
    assert_close(out[[0, 2]], wanted[[0, 2]], case.data.dtype)


@pytest.mark.gpu
@DTYPES
def test_large_scores_do_not_overflow(cuda: Any, dtype: DType) -> None:
    """Scores in the hundreds give finite outputs, most of which match the oracle. Absorbed queries are rounded, so some
    heads' weights differ, but not where one key has all the weight."""
    case, q, rows = step_case(dtype, 20, [3, 64, 1000])
    q *= 64
    out, wanted = LatentDevice(cuda, case).run(q, rows), expected(case, q, rows)
    assert np.isfinite(out).all()
    errors = np.linalg.norm((out - wanted).reshape(-1, case.sizes.value), axis=1)
    assert np.median(errors / np.linalg.norm(wanted.reshape(-1, case.sizes.value), axis=1)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("base", [0, 1, 60, 63, 64, 65, 300])
@pytest.mark.parametrize("heads", [3, 40])
def test_rows_of_trees(cuda: Any, base: int, heads: int) -> None:
    random, masks = np.random.default_rng(base), [1]
    for node in range(1, 40):
        masks.append(masks[random.integers(node)] | 1 << node)
    masks.append(2**64 - 1)
    case = LatentCase(sizes_of(heads), [1, base + 64], DType.BFLOAT16, seed=base)
    rows, paths = tree_of(case, masks, base, 1)
    q = case.queries(len(masks))
    out = LatentDevice(cuda, case).run(q, rows)
    assert_close(out, expected(case, q, rows), case.data.dtype)
    whole = case.pages.copy()
    for row in range(0, len(masks), 5):
        case.pages = np.zeros_like(whole)
        for position, place in enumerate(paths[row]):
            to, source = (divmod(at, PAGE_SIZE) for at in (position, place))
            case.pages[case.tables[1, to[0]], 0, to[1]] = whole[case.tables[1, source[0]], 0, source[1]]
        alone = LatentDevice(cuda, case).run(q[row : row + 1], make_rows([len(paths[row]) - 1], [1], case.tables))
        assert np.array_equal(alone[0], out[row]), row


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(("heads", "start", "count"), [
    (3, 0, 1), (3, 0, 200), (20, 63, 65), (40, 1000, 300), (20, 5, 128), (3, 4900, 300),
])  # fmt: skip
def test_chunks(cuda: Any, dtype: DType, heads: int, start: int, count: int) -> None:
    case = LatentCase(sizes_of(heads), [1, start + count], dtype)
    rows = make_rows(np.arange(start, start + count), np.ones(count, int), case.tables, True)
    q = case.queries(count)
    wanted = expected(case, q, rows)
    for capability in sorted({80, cuda.device.capability}):
        out = LatentDevice(cuda, case, capability=capability).run(q, rows, bucket=512)
        assert_close(out, wanted, dtype, op="prefill_latent_attention")


@pytest.mark.gpu
def test_the_bits_of_a_chunk_do_not_depend_on_how_it_is_cut_nor_on_the_heads_at_once(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, length = LatentCase(sizes_of(20), [500], DType.BFLOAT16), 500
    q, positions, slots = case.queries(length), np.arange(length), np.zeros(length, int)
    device = LatentDevice(cuda, case)
    whole = device.run(q, make_rows(positions, slots, case.tables, True), bucket=512)
    for cuts in ([0, 1, 500], [0, 70, 200, 500], [0, 64, 499, 500]):
        for start, end in zip(cuts, cuts[1:], strict=False):
            part = make_rows(positions[start:end], slots[start:end], case.tables, True)
            out = device.run(q[start:end], part, bucket=512, pdl=start > 0)
            assert np.array_equal(out, whole[start:end]), (start, end)
    monkeypatch.setattr("cpmrt.cuda.ops.latent.EXPANDED_BYTES", 1)
    apart = LatentDevice(cuda, case)
    assert apart.plan.heads_at_once == 1 < device.plan.heads_at_once
    assert np.array_equal(apart.run(q, make_rows(positions, slots, case.tables, True), bucket=512), whole)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("count", [1, 64, 200])
def test_append_latent(cuda: Any, dtype: DType, count: int) -> None:
    sizes = replace(MINICPM3, heads=3)
    case = LatentCase(sizes, [count + 70], dtype)
    device = LatentDevice(cuda, case)
    latents = case.data(count, sizes.q_rank + sizes.kv_rank + sizes.rotated)
    positions = np.arange(count) + 60
    rows = replace(make_rows(positions, np.zeros(count, int), case.tables), locations=positions + 3)
    rows.slots[1::7] = -1
    kept = rows.slots >= 0
    q_latent = cuda.array(np.full((count, sizes.q_rank), np.nan, np.float32), dtype)
    poison = np.full(case.pages.shape, np.nan, np.float32)
    pages = cuda.array(poison, dtype)
    device.ops(pdl=True).append_latent(
        q_latent, pages, cuda.array(latents, dtype), device.weights, device.rope, device.rows(rows), EPS
    )  # fmt: skip
    wanted_q, wanted = np.empty((count, sizes.q_rank), np.float32), poison.copy()
    NumpyOps(dtype).append_latent(wanted_q, wanted, latents, case.weights, case.rope, rows, EPS)
    stored = cuda.numpy(pages, dtype)
    assert np.array_equal(np.isnan(stored), np.isnan(wanted)) and kept.any()
    limit = OPS["append_latent"].tolerance[dtype]
    for actual, right in ((cuda.numpy(q_latent, dtype), wanted_q), (stored, wanted)):
        distance = np.linalg.norm(np.nan_to_num(actual) - np.nan_to_num(right))
        assert distance <= limit * np.linalg.norm(np.nan_to_num(right))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 64, 1000, 5000])
def test_a_step_waits_for_the_queries_and_its_latents(cuda: Any, length: int) -> None:
    """A step reads its queries and latents after its wait: until the writer is done they are NaN, and so are the keys
    at the rows' own positions."""
    count = min(length, 3)
    case = LatentCase(sizes_of(20), [length], DType.BFLOAT16)
    device, q, latents = LatentDevice(cuda, case), case.queries(count), case.data(count, 128 + 288)
    positions, stale = np.arange(length - count, length), case.pages.copy()
    stale[case.tables[0, positions // PAGE_SIZE], 0, positions % PAGE_SIZE] = np.nan
    before = [cuda.array(values, DType.BFLOAT16) for values in (np.full_like(q, np.nan), np.full_like(latents, np.nan))]
    after = [cuda.array(values, DType.BFLOAT16) for values in (q, latents)]
    given = [array.copy() for array in before]
    writer = SlowWriter(cuda, given, before, after)
    held = device.rows(make_rows(positions, np.zeros(count, int), case.tables))
    out = cuda.array(np.zeros((count, 20 * 64), np.float32), DType.BFLOAT16)

    def attend(*, pdl: bool) -> Any:
        pages = cuda.array(stale, DType.BFLOAT16)
        writer.launch()
        device.ops(pdl=pdl).decode_latent_attention(
            out, given[0], given[1], pages, device.weights, device.rope, held, case.sizes.scale, EPS
        )
        return cuda.numpy(out)

    wanted = attend(pdl=False)
    assert np.isfinite(cuda.numpy(out, DType.BFLOAT16)).all()
    for _ in range(3):
        assert np.array_equal(attend(pdl=True), wanted)


def packed_queries(cuda: Any, sizes: Sizes, dtype: DType) -> tuple[PackedWeight, Any]:
    """Return the weight that makes queries of latents, packed in 4 bits and as float32."""
    shape, rng = (sizes.heads * (sizes.nope + sizes.rotated), sizes.q_rank), np.random.default_rng(5)
    layout = layout_of("qkv", shape, 128, cuda.device, head_dim=PLAIN_HEAD_DIM)
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    scales = round_to(rng.uniform(0.1, 0.3, (shape[0], shape[1] // 128)).astype(np.float32) * shape[1] ** -0.5, dtype)
    weight = (codes - np.float32(8)) * np.repeat(scales, 128, axis=1)
    return PackedWeight(cuda.array(pack(layout, codes, from_float32(scales, dtype), None)), None, layout), weight


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(("heads", "q_rank"), [(40, 768), (3, 128), (17, 1024)])
def test_queries_of_one_row_are_made_where_they_are_absorbed(
    cuda: Any, dtype: DType, heads: int, q_rank: int
) -> None:
    """One row's queries are made and absorbed in one kernel, with the bits of the product and `absorb_queries` that
    other numbers of rows take."""
    sizes = replace(sizes_of(heads), q_rank=q_rank)
    case = LatentCase(sizes, [1, 65, 700, 300], dtype)
    device, (packed, weight) = LatentDevice(cuda, case), packed_queries(cuda, sizes, dtype)
    slots, ends = np.array([0, 1, 2, -1]), np.array([1, 65, 700, 1])
    latents, stale = case.data(4, q_rank + 288), cuda.array(case.pages, dtype)
    wanted, of_product = np.empty((4, heads * 64), np.float32), np.empty((4, heads * 96), np.float32)
    rows = make_rows(ends - 1, slots, case.tables)
    rest = case.weights, case.rope, rows, sizes.scale, EPS
    NumpyOps(dtype).decode_latent_attention(wanted, of_product, latents, case.pages, *rest, None, weight)

    def attend(which: list[int], *, q_up: Any = packed, pdl: bool = False) -> list[Any]:
        launcher = cuda.launcher(dtype, pdl=pdl)
        project = Products(cuda.device, launcher, None, {"normed": None}).project  # type: ignore[arg-type, dict-item]
        ops = LatentOps(launcher, device.plan, device.arrays, project)
        out, q = (cuda.array(np.full((len(which), heads * size), np.nan, np.float32), dtype) for size in (64, 96))
        with cuda.stream:
            device.arrays["latent_queries"][:] = 0x7FC1
            device.pages = stale.copy()
        given = cuda.array(latents[which], dtype)
        if q_up is None:
            project(q, given, device.weights.q_norm, packed, EPS)
        held = device.rows(make_rows(ends[which] - 1, slots[which], case.tables))
        rest = device.weights, device.rope, held, sizes.scale, EPS, None, q_up
        ops.decode_latent_attention(out, q, given, device.pages, *rest)
        queries = device.arrays["latent_queries"][: len(which)]
        assert np.isnan(cuda.numpy(q, dtype)).all() == (len(which) == 1 and q_up is not None), "made in one kernel"
        return [cuda.numpy(array).view(np.uint16) for array in (queries, out, device.pages)]  # NaN differs from itself

    together = attend([0, 1, 2, 3])
    assert_close(to_float32(together[1].view(dtype.storage), dtype)[:3], wanted[:3], dtype)
    for row in range(4):
        alone = attend([row])
        for made, held in zip(alone, attend([row], q_up=None), strict=True):
            assert np.array_equal(made, held), row
        assert np.array_equal(alone[1][0], together[1][row]), row
        for _ in range(3):
            for made, held in zip(attend([row], pdl=True), alone, strict=True):
                assert np.array_equal(made, held), row


class Recording:
    """A launcher that only records the kernels, their grids and their arguments."""

    is_recording = True

    def __init__(self) -> None:
        self.launched: list[tuple[str, Any]] = []
        self.given: list[tuple[Any, ...]] = []

    def __call__(self, spec: Any, constants: Any, grid: Any, block: Any, *given: Any, **options: Any) -> None:
        self.launched.append((spec.name, grid))
        self.given.append(given)


def recorded(
    op: str, num_rows: int, arch: str = "sm_90", upcoming: Any | None = None, **plan: int
) -> Recording:
    sizes, launcher = MINICPM3, Recording()
    made = plan_of(sizes, known_device(arch), **plan)
    specs = (*made.tables, *made.workspace, BufferSpec("chunk", (4,), 0, 0, np.int32))
    arrays = {spec.name: np.broadcast_to(np.uint16(0), spec.shape) for spec in specs}
    case = LatentCase(sizes, [1])
    rows = make_rows(np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32), case.tables, op.startswith("prefill"))
    width = sizes.nope + sizes.rotated
    out, q = (np.zeros((num_rows, sizes.heads * size), np.float32) for size in (sizes.value, width))
    ops: Any = LatentOps(launcher, made, arrays)  # type: ignore[arg-type]
    rest = case.pages, case.weights, case.rope, rows, sizes.scale
    if op.startswith("prefill"):
        ops.prefill_latent_attention(out, q, *rest)
    else:
        ops.decode_latent_attention(out, q, np.zeros((num_rows, 1056), np.float32), *rest, EPS, upcoming)
    return launcher


def test_a_step_takes_three_launches_and_a_chunk_four_for_the_heads_that_have_room() -> None:
    newer, other = ("sm_90", "latent_attention_wgmma", 1, 132, 1), ("sm_100", "latent_attention", 3, 148, 3)
    for arch, name, units, sms, per_sm in (newer, other):
        for rows in (1, 8, 64):
            launched = recorded("decode_latent_attention", rows, arch, max_context=32768).launched
            assert [kernel for kernel, _ in launched] == ["absorb_queries", name, "merge_latents"]
            blocks, runs = min(rows, 2 * sms // 40), min(sms, per_sm * sms // (rows * units))
            assert [grid for _, grid in launched] == [(41, blocks), (runs, rows, units), (40, blocks)]
    chunk = ["expand_latents", "rotate_heads", "prefill_attention_wgmma", "gather_heads"]
    assert [name for name, _ in recorded("prefill_latent_attention", 512, max_context=32768).launched] == chunk
    assert [name for name, _ in recorded("prefill_latent_attention", 512, max_context=131072).launched] == chunk * 4
    older = recorded("prefill_latent_attention", 512, arch="sm_86").launched
    assert [name for name, _ in older] == [name.removesuffix("_wgmma") for name in chunk]


@pytest.mark.parametrize(("arch", "brought"), [("sm_80", 0), ("sm_90", 8 << 20), ("sm_120", 8 << 20)])
def test_a_step_brings_a_part_of_a_later_weight_to_the_l2(arch: str, brought: int) -> None:
    for nbytes in (0, 16, 1000, 128 << 10, (128 << 10) + 16, 8 << 20, 17 << 20):
        weight = np.zeros(nbytes, np.uint8)
        _, given, _ = recorded("decode_latent_attention", 8, arch, weight, max_context=8192).given
        assert any(array is weight for array in given)
        assert given[-2] == min(nbytes, brought) // 16 * 16, nbytes


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_87", "sm_90", "sm_120"])
@pytest.mark.parametrize("heads", ALL_HEADS)
def test_a_block_has_room_for_its_pages_on_every_device(arch: str, heads: int) -> None:
    device = known_device(arch)
    plan = plan_of(sizes_of(heads), device)
    assert plan.shared_bytes <= device.shared_bytes_per_block
    assert plan.heads_at_once == heads and plan.units * (64 if plan.attend is ATTEND_WGMMA else 16) >= heads
    assert (plan.attend is ATTEND_WGMMA) == (arch == "sm_90" and heads > 16)
    means = next(spec for spec in plan.workspace if spec.name == "latent_means")
    assert means.shape == (64, plan.num_splits, heads, 256)
