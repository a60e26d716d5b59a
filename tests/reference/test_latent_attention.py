"""Latent attention in the NumPy ops: against formulas in float64, row invariance, rows of trees, borders of chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from latent_cases import EPS, MINICPM3, LatentCase, Sizes, tree_of
from reference.operands import Poisoned, check, make_rows

from cpmrt.config.engine import EngineConfig
from cpmrt.config.layers import LatentAttention
from cpmrt.dtypes import DType, round_to
from cpmrt.errors import ConfigError
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.models.mixers import latent
from cpmrt.reference.ops import NumpyOps

DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
SIZES = pytest.mark.parametrize("sizes", [Sizes(), MINICPM3], ids=["odd", "minicpm3"])


def decode(case, q, rows, dtype=DType.FLOAT32, latents=None):
    out = Poisoned(len(q), case.sizes.heads * case.sizes.value)
    NumpyOps(dtype).decode_latent_attention(
        out.view, q, latents, case.pages, case.weights, case.rope, rows, case.sizes.scale, EPS
    )  # fmt: skip
    return out.written()


def prefill(case, q, rows, dtype=DType.FLOAT32):
    out = Poisoned(len(q), case.sizes.heads * case.sizes.value)
    NumpyOps(dtype).prefill_latent_attention(
        out.view, q, case.pages, case.weights, case.rope, rows, case.sizes.scale
    )  # fmt: skip
    return out.written()


@DTYPES
@SIZES
def test_append_latent(sizes, dtype):
    case, positions = LatentCase(sizes, [1, 1], dtype), [0, 3, 63, 64, 7]
    latents = case.data(5, sizes.q_rank + sizes.kv_rank + sizes.rotated)
    rows = make_rows(positions, [0, 1, 0, 1, -1], case.tables)
    rows = replace(rows, locations=np.array([0, 5, 63, 64, 9]))
    pages, q_latent = np.full_like(case.pages, np.nan), Poisoned(5, sizes.q_rank)
    NumpyOps(dtype).append_latent(q_latent.view, pages, latents, case.weights, case.rope, rows, EPS)
    expected_q, expected = case.appended(latents, positions)
    check("append_latent", dtype, q_latent.written(), expected_q)
    places = case.tables[rows.slots[:4], rows.locations[:4] // PAGE_SIZE], 0, rows.locations[:4] % PAGE_SIZE
    check("append_latent", dtype, pages[places], expected[:4])
    assert np.isfinite(pages).sum() == 4 * pages.shape[-1], "a row of padding was stored"


@DTYPES
@SIZES
def test_decode(sizes, dtype):
    lengths = [1, 64, 65, 130]
    case = LatentCase(sizes, lengths, dtype)
    rows = make_rows([0, 63, 64, 129, 100], [0, 1, 2, 3, 3], case.tables)
    q = case.queries(5)
    check("decode_latent_attention", dtype, decode(case, q, rows, dtype), case.attention(q, rows))
    padded = decode(case, q, replace(rows, slots=np.where(np.arange(5) == 2, -1, rows.slots)), dtype)
    assert np.array_equal(padded[[0, 1, 3, 4]], decode(case, q, rows, dtype)[[0, 1, 3, 4]])


@DTYPES
@SIZES
def test_decode_appends_first(sizes, dtype):
    """Latents are appended before attention: three rows of one slot see each other; a padding row is not stored."""
    case, positions = LatentCase(sizes, [64, 130], dtype), [63, 128, 129, 130, 9]
    rows = make_rows(positions, [0, 1, 1, 1, -1], case.tables)
    latents, q = case.data(5, sizes.q_rank + sizes.kv_rank + sizes.rotated), case.queries(5)
    before, wanted = case.pages.copy(), case.appended(latents, positions)[1]
    out = decode(case, q, rows, dtype, latents)
    places = case.tables[rows.slots[:4], rows.positions[:4] // PAGE_SIZE], 0, rows.positions[:4] % PAGE_SIZE
    check("append_latent", dtype, case.pages[places], wanted[:4])
    assert np.array_equal(out, decode(case, q, rows, dtype)), "they are there already"
    before[places] = wanted[:4]
    case.pages, kept = before, make_rows(positions[:4], [0, 1, 1, 1], case.tables)
    check("decode_latent_attention", dtype, out[:4], case.attention(q[:4], kept))


@DTYPES
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 70), (60, 8), (190, 70)])
def test_prefill(start, count, dtype):
    case = LatentCase(Sizes(), [1, start + count], dtype)
    rows = make_rows(np.arange(start, start + count), np.ones(count, int), case.tables, True)
    q = case.queries(count)
    check("prefill_latent_attention", dtype, prefill(case, q, rows, dtype), case.attention(q, rows))


@SIZES
def test_rows_of_a_step_do_not_depend_on_each_other(sizes):
    lengths = [1, 64, 65, 190]
    case, slots = LatentCase(sizes, lengths), np.random.default_rng(1).integers(0, 4, 64)
    positions, q = np.array(lengths)[slots] - 1, case.queries(64)
    whole = decode(case, q, make_rows(positions, slots, case.tables))
    for count in (1, 2, 5, 8, 31, 64):
        some = decode(case, q[:count], make_rows(positions[:count], slots[:count], case.tables))
        assert np.array_equal(some, whole[:count]), count


@pytest.mark.parametrize("base", [0, 1, 63, 64, 65, 127])
def test_a_tree_against_formulas_and_bitwise_against_its_paths(base):
    random, masks = np.random.default_rng(base), [1]
    for node in range(1, 20):
        masks.append(masks[random.integers(node)] | 1 << node)
    masks.append(2**64 - 1)
    case = LatentCase(Sizes(), [1, base + 64], DType.BFLOAT16, seed=base)
    rows, paths = tree_of(case, masks, base, 1)
    q = case.queries(len(masks))
    out = decode(case, q, rows, DType.BFLOAT16)
    check("decode_latent_attention", DType.BFLOAT16, out, case.attention(q, rows, paths))
    whole = case.pages.copy()
    for row, path in enumerate(paths):
        case.pages = np.full_like(whole, np.nan)
        for position, place in enumerate(path):
            to, source = (divmod(at, PAGE_SIZE) for at in (position, place))
            case.pages[case.tables[1, to[0]], 0, to[1]] = whole[case.tables[1, source[0]], 0, source[1]]
        alone = decode(case, q[row : row + 1], make_rows([len(path) - 1], [1], case.tables), DType.BFLOAT16)
        assert np.array_equal(alone[0], out[row]), row


@examples(20)
@given(st.data())
def test_the_bits_of_a_prefill_do_not_depend_on_how_it_is_cut(drawn):
    length = drawn.draw(st.integers(2, 300))
    cuts = sorted({0, *drawn.draw(st.lists(st.integers(1, length - 1), max_size=4)), length})
    case = LatentCase(Sizes(), [length], seed=drawn.draw(st.integers(0, 99)))
    q, positions = case.queries(length), np.arange(length)
    whole = prefill(case, q, make_rows(positions, np.zeros(length, int), case.tables, True))
    for start, end in zip(cuts, cuts[1:], strict=False):
        rows = make_rows(positions[start:end], np.zeros(end - start, int), case.tables, True)
        assert np.array_equal(prefill(case, q[start:end], rows), whole[start:end])


@DTYPES
def test_project(dtype):
    data = LatentCase(Sizes(), [1], dtype).data
    x, norm, weight = data(9, 56), data.norm(56), data.weight(34, 56)
    for is_prefill in (False, True):
        out, plain = Poisoned(9, 34), Poisoned(9, 34)
        NumpyOps(dtype).project(out.view, x, norm, weight, EPS, is_prefill=is_prefill)
        NumpyOps(dtype).project(plain.view, x, None, weight, EPS, is_prefill=is_prefill)
        mean_square = np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True)
        normed = round_to((x / np.sqrt(mean_square + EPS) * norm).astype(np.float32), dtype)
        check("project", dtype, out.written(), normed.astype(np.float64) @ weight.T.astype(np.float64))
        check("project", dtype, plain.written(), x.astype(np.float64) @ weight.T.astype(np.float64))


def test_a_token_takes_its_latent_and_the_shared_part_of_its_key():
    mixer = LatentAttention(40, 768, 256, 64, 32, 64)
    (spec,) = latent.caches(mixer, EngineConfig().kv_dtype)
    assert spec.bytes_per_token(2) == 288 * 2 and spec.on_accept == "move"
    with pytest.raises(ConfigError, match=r"kv_dtype .* latent attention: expected auto, got fp8"):
        latent.caches(mixer, "fp8")
