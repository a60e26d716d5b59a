"""The block types of GGUF unpack to the same bits as in the package that defines them for Python."""

from pathlib import Path

import numpy as np
import pytest

from cpmrt.weights.formats.blocks import BLOCK_TYPES
from cpmrt.weights.gguf.header import FLOAT_NUMBERS

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "gguf_blocks.npz"
ALL = pytest.mark.parametrize("name", BLOCK_TYPES)


def same_bits(found, expected):
    nan = np.isnan(expected)
    assert found.dtype == np.float32 and found.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@ALL
def test_stored_blocks(name):
    with np.load(GOLDEN) as golden:
        rows, values = golden[f"{name}.rows"], golden[f"{name}.values"]
    same_bits(BLOCK_TYPES[name].values(rows), values)


@ALL
def test_any_bytes_against_the_package(name):
    gguf = pytest.importorskip("gguf")
    row, kind = BLOCK_TYPES[name], gguf.GGMLQuantizationType[name]
    assert row.number == kind.value and (row.size, row.nbytes) == gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(row.number).integers(0, 256, (97, 5 * row.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        same_bits(row.values(rows), gguf.dequantize(rows, kind))


def test_types_without_blocks_have_the_numbers_of_the_package():
    gguf = pytest.importorskip("gguf")
    for number, dtype in FLOAT_NUMBERS.items():
        assert gguf.GGMLQuantizationType(number).name == dtype.safetensors_name


@ALL
def test_parts_are_the_codes_and_scales_of_groups(name):
    """A value equals code x scale + offset of its group, and codes have no more values than the type's bits allow."""
    row = BLOCK_TYPES[name]
    with np.load(GOLDEN) as golden:
        rows, values = golden[f"{name}.rows"], golden[f"{name}.values"]
    parts = row.parts(rows)
    for n, k in ((0, 0), (1, 37), (1, values.shape[1] - 1)):
        group = k // row.group
        offset = np.float32(0) if parts.offsets is None else parts.offsets[n, group]
        assert np.float32(parts.codes[n, k]) * parts.scales[n, group] + offset == values[n, k]
    assert parts.codes.dtype.itemsize == 1 and parts.scales.dtype == np.float32
    assert row.row_bytes(values.shape[1]) == rows.shape[1]
    assert len(np.unique(parts.codes)) <= 2**row.bits and row.bits <= np.ceil(8 * row.nbytes / row.size)
    assert row.is_symmetric == (parts.offsets is None)


@ALL
def test_rows_may_be_any_view(name):
    """Rows that are a strided, reversed view unpack like a contiguous copy."""
    row = BLOCK_TYPES[name]
    rows = np.random.default_rng(1).integers(0, 120, (9, 2 * row.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        same_bits(row.values(rows[::-2]), row.values(rows[::-2].copy()))


@ALL
def test_a_scale_that_is_not_finite_is_found_wherever_it_lies(name):
    row = BLOCK_TYPES[name]
    with np.load(GOLDEN) as golden:
        rows = golden[f"{name}.rows"].copy()
    assert row.all_finite(rows)
    for place in row.halves:
        for word in (b"\x00\x7c", b"\x01\xfe"):
            damaged = rows.copy()
            damaged[1, -row.nbytes + place : -row.nbytes + place + 2 or None] = np.frombuffer(word, np.uint8)
            with np.errstate(all="ignore"):
                assert not np.isfinite(row.values(damaged)).all()
            assert not row.all_finite(damaged)
