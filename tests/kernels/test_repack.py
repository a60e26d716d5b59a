"""repack.cu against the NumPy packing: every file format, fused sources, permuted columns, and dequantising back to 16
bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from linear_cases import H200, layout_of
from packed_oracle import pack

from cpmrt.cuda.build.spec import macros_of
from cpmrt.cuda.ops.linear_packed.layout import PackedLayout
from cpmrt.dtypes import DType, from_float32, round_to, to_float32
from cpmrt.weights.formats import FORMATS
from cpmrt.weights.formats.gptq import to_v1
from cpmrt.weights.quantised import packed_codes

ROWS = {row.number: row for row in FORMATS.values()}
GPTQ, AWQ, COMPRESSED, MARLIN = sorted(ROWS)
V1_ADDEND = 0x11111111
BLOCK = 256

# Product, rows of the sources, columns, group size, head size.
CASES = {
    "qkv": ("qkv", (256, 128, 128), 256, 128, 64),
    "gate_up": ("gate_up", (320, 320), 384, 128, 0),
    "o": ("residual", (576,), 512, 64, 0),
    "down": ("residual", (64,), 1152, 1152, 0),
    "head": ("head", (1000,), 256, 32, 0),
}


def words_of(kind: int, codes: Any, zeros: Any) -> tuple[Any, Any]:
    """Return a source's codes and zero points as words of file format `kind`."""
    row = ROWS[kind]
    words = None if row.zeros is None else row.zeros.pack(zeros)
    return row.codes.pack(codes), to_v1(words) if kind == GPTQ else words


def scales_of(kind: int, scales: Any) -> Any:
    return ROWS[kind].scales.pack(scales)


class Repacker:
    """A packed matrix on the device, which is filled source by source."""

    def __init__(self, cuda: Any, layout: PackedLayout, dtype: DType, kind: int):
        self.cuda, self.layout, self.dtype, self.kind = cuda, layout, dtype, kind
        self.constants = macros_of(layout.repack_constants(kind))
        self.packed = cuda.array(np.zeros(layout.num_bytes, np.uint8))
        self.sizes = np.int32(layout.out_features), np.int32(layout.num_tiles)

    def kernel(self, name: str) -> Any:
        return self.cuda.kernel(name, self.dtype, **self.constants)

    def add(self, first: int, codes: Any, scales: Any, zeros: Any, permutation: Any, group_size: int) -> None:
        """Repack rows first .. first + N - 1: `codes` u [N, K], scales and zero points, which are first written as a
        file would have them."""
        code_words, zero_words = (
            None if words is None else self.cuda.array(words) for words in words_of(self.kind, codes, zeros)
        )
        order = None if permutation is None else self.cuda.array(permutation)
        count = np.int32(len(codes))
        self.kernel("repack_codes")(
            7, BLOCK, self.packed, code_words, order, np.int32(first), count, *self.sizes
        )  # fmt: skip
        self.kernel("repack_scales")(
            5, BLOCK, self.packed, self.cuda.array(scales_of(self.kind, scales)), zero_words, np.int32(first), count,
            *self.sizes, np.int32(group_size), np.int32(scales.dtype == np.float16),
            np.int32(V1_ADDEND if self.kind == GPTQ else 0),
        )  # fmt: skip

    def dequantised(self, first: int, count: int) -> Any:
        nan = np.full((count + 1, self.layout.in_features), np.nan, np.float32)
        out = self.cuda.array(nan, self.dtype)
        sizes = np.int32(first), np.int32(count), np.int32(self.layout.out_features)
        self.kernel("dequantize")(9, BLOCK, out, self.packed, *sizes)
        values = self.cuda.numpy(out, self.dtype)
        assert np.isnan(values[count:]).all()
        return values[:count]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [GPTQ, AWQ, COMPRESSED, MARLIN], ids=["gptq", "awq", "compressed", "marlin"])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", CASES)
def test_formats(cuda: Any, name: str, dtype: DType, kind: int) -> None:
    product, counts, columns, group_size, head_dim = CASES[name]
    if kind == MARLIN:
        counts = tuple(-(-count // 64) * 64 for count in counts)
        group_size = columns if group_size == columns else 128
    rng = np.random.default_rng(kind)
    rows, groups = sum(counts), columns // group_size
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    zeros = rng.integers(0, 16, (rows, groups)).astype(np.uint8)
    scales = (0.01 + 0.02 * rng.random((rows, groups))).astype(np.float16)
    permutation = rng.permutation(columns).astype(np.int32) if kind == GPTQ else None
    layout = layout_of(product, (rows, columns), group_size, H200, zeros=kind != MARLIN, head_dim=head_dim)
    repacker = Repacker(cuda, layout, dtype, kind)
    starts = np.cumsum((0, *counts))
    for start, stop in zip(starts, starts[1:], strict=False):
        part = slice(start, stop)
        repacker.add(int(start), codes[part], scales[part], zeros[part], permutation, group_size)

    stored = codes if permutation is None else codes[:, permutation]
    repeat = group_size // layout.scale_group
    kept = round_to(scales.astype(np.float32), dtype)
    words = [np.repeat(from_float32(values, dtype), repeat, axis=1) for values in (kept, zeros.astype(np.float32))]
    expected = pack(layout, stored, words[0], words[1] if layout.zeros else None)
    np.testing.assert_array_equal(cuda.numpy(repacker.packed), expected)

    centre = np.repeat(zeros, group_size, axis=1).astype(np.float32) if layout.zeros else np.float32(8)
    weight = round_to((stored - centre) * np.repeat(kept, group_size, axis=1), dtype)
    np.testing.assert_array_equal(repacker.dequantised(0, rows), weight)
    np.testing.assert_array_equal(repacker.dequantised(16, 40), weight[16:56])


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_codes_of_eight_bits(cuda: Any, group_size: int) -> None:
    rng = np.random.default_rng(group_size)
    rows, columns, dtype = 1003, 384, DType.BFLOAT16
    codes = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    scales = from_float32(rng.random((rows, columns // group_size), np.float32), dtype)
    layout = layout_of("head", (rows, columns), group_size, H200, bits=8)
    constants = macros_of(layout.repack_constants(GPTQ))
    # Filled with 0xA5, not zeros: all that belongs to a row must be written, and nothing else.
    packed = cuda.array(np.full(layout.num_bytes, 0xA5, np.uint8))
    for first, stop in ((0, 400), (400, 1003)):
        part, sizes = slice(first, stop), (np.int32(first), np.int32(stop - first), np.int32(rows))
        # Byte i of a word is column 4 w + i.
        words = np.ascontiguousarray(np.ascontiguousarray(codes[part]).view(np.uint32).T)
        sources = cuda.array(words), cuda.array(np.ascontiguousarray(scales[part].T))
        for name, args, more in (
            ("repack_codes", (sources[0], None), ()),
            ("repack_scales", (sources[1], None), (np.int32(group_size), np.int32(0), np.int32(0))),
        ):
            kernel = cuda.kernel(name, dtype, **constants)
            kernel(5, BLOCK, packed, *args, *sizes, np.int32(layout.num_tiles), *more)
    expected, ones = pack(layout, codes, scales, None), np.ones_like(scales)
    written = pack(layout, np.full_like(codes, 255), ones * np.uint16(0xFFFF), None) == 255
    found = cuda.numpy(packed)
    np.testing.assert_array_equal(found[written], expected[written])
    assert (found[~written] == 0xA5).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", CASES)
def test_codes_of_two_bits(cuda: Any, name: str, dtype: DType) -> None:
    product, counts, columns, group_size, head_dim = CASES[name]
    rng = np.random.default_rng(columns)
    rows = sum(counts)
    codes = rng.integers(0, 4, (rows, columns)).astype(np.uint8)
    scales = from_float32(rng.random((rows, columns // group_size), np.float32), dtype)
    layout = layout_of(product, (rows, columns), group_size, H200, head_dim=head_dim, bits=2)
    repacker = Repacker(cuda, layout, dtype, GPTQ)
    starts, sizes = np.cumsum((0, *counts)), (np.int32(rows), np.int32(layout.num_tiles))
    for start, stop in zip(starts, starts[1:], strict=False):
        # Code i of a word is column 16 w + i.
        words = np.ascontiguousarray(packed_codes(codes[start:stop], 2).view(np.uint32).T)
        place = np.int32(start), np.int32(stop - start), *sizes
        repacker.kernel("repack_codes")(5, BLOCK, repacker.packed, cuda.array(words), None, *place)
        of_rows = cuda.array(np.ascontiguousarray(scales[start:stop].T))
        more = np.int32(group_size), np.int32(dtype is DType.FLOAT16), np.int32(0)
        repacker.kernel("repack_scales")(5, BLOCK, repacker.packed, of_rows, None, *place, *more)
    expected = pack(layout, codes, np.repeat(scales, group_size // layout.scale_group, axis=1), None)
    np.testing.assert_array_equal(cuda.numpy(repacker.packed), expected)
    factors = np.repeat(to_float32(scales, dtype), group_size, axis=1)
    weight = round_to((codes - np.float32(2)) * factors, dtype)
    np.testing.assert_array_equal(repacker.dequantised(0, rows), weight)
    np.testing.assert_array_equal(repacker.dequantised(16, 40), weight[16:56])


@pytest.mark.gpu
def test_bfloat16_scales_and_no_zero_points_of_a_source(cuda: Any) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (64, 256)).astype(np.uint8)
    scales = from_float32(rng.random((64, 2), np.float32), DType.BFLOAT16)
    layout = layout_of("residual", (64, 256), 128, H200, zeros=True)
    repacker = Repacker(cuda, layout, DType.FLOAT16, MARLIN)
    repacker.add(0, codes, scales, None, None, 128)
    kept = from_float32(to_float32(scales, DType.BFLOAT16), DType.FLOAT16)
    expected = pack(layout, codes, kept, np.full((64, 2), 8, np.float16))
    np.testing.assert_array_equal(cuda.numpy(repacker.packed), expected)
