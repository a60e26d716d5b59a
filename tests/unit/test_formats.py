"""Packed words of every quantised file format: round trips, and the place of a code as the format's definition has
it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.quantised_models import write_safetensors

from cpmrt.config import WeightQuantization
from cpmrt.dtypes import Array, DType
from cpmrt.tensor_spec import Quantization, Source, TensorSpec
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats import AWQ, COMPRESSED, FORMATS, GPTQ, GPTQ_HEAD, MARLIN
from cpmrt.weights.formats.awq import AWQ_ORDER
from cpmrt.weights.formats.format import SCALES, Format, Part
from cpmrt.weights.formats.gptq import from_v1, to_v1
from cpmrt.weights.pack import pack
from cpmrt.weights.quantised_specs import quantised_specs

SHAPES = {
    "gptq": lambda n, k: (k // 8, n),
    "awq": lambda n, k: (k, n // 8),
    "compressed": lambda n, k: (n, k // 8),
    "marlin": lambda n, k: (k // 16, 2 * n),
    "gptq 8-bit head": lambda n, k: (k // 4, n),
}
ZEROS = {row.name: (row.zeros.pack, row.zeros.unpack) for row in FORMATS.values() if row.zeros} | {
    "gptq v1": (lambda z: to_v1(GPTQ.zeros.pack(z)), lambda words: GPTQ.zeros.unpack(from_v1(words)))
}


def nibbles(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).integers(0, 16, shape, np.uint8)


@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**32))
def test_codes_come_back(name: str, rows: int, columns: int, seed: int) -> None:
    codes, u = FORMATS[name].codes, nibbles(seed, 64 * rows, 16 * columns)
    words = codes.pack(u)
    assert words.dtype == np.int32 and words.shape == SHAPES[name](*u.shape) == codes.shape(*u.shape, 1)
    assert words.flags.c_contiguous
    np.testing.assert_array_equal(codes.unpack(words), u)


@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 3), st.integers(0, 2**32))
def test_any_words_are_codes(name: str, tiles: int, seed: int) -> None:
    codes = FORMATS[name].codes
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, SHAPES[name](128, 16 * tiles), np.int32)
    u = codes.unpack(words)
    assert u.shape == (128, 16 * tiles) and u.max() < 2 ** FORMATS[name].bits
    np.testing.assert_array_equal(codes.pack(u), words)


@given(st.sampled_from(sorted(ZEROS)), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32))
def test_zero_points_come_back(name: str, rows: int, groups: int, seed: int) -> None:
    pack, unpack = ZEROS[name]
    z = nibbles(seed, 8 * rows, groups)
    np.testing.assert_array_equal(unpack(pack(z)), z)


@given(st.sampled_from([1, 3]), st.integers(1, 3), st.integers(0, 2**32))
def test_marlin_scales_come_back(groups: int, rows: int, seed: int) -> None:
    scales = np.random.default_rng(seed).random((64 * rows, groups), np.float32).astype(np.float16)
    stored = MARLIN.scales.pack(scales)
    assert stored.shape == (groups, 64 * rows) and stored.dtype == np.float16
    np.testing.assert_array_equal(MARLIN.scales.unpack(stored), scales)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_are_taken_out_of_the_middle(name: str) -> None:
    u, row = nibbles(0, 256, 48), FORMATS[name]
    words = row.codes.pack(u)
    np.testing.assert_array_equal(row.codes.unpack(row.rows(words, 64, 192)), u[64:192])


def one(n: int, k: int, size: tuple[int, int] = (128, 64)) -> Array:
    u = np.zeros(size, np.uint8)
    u[n, k] = 15
    return u


def place(words: Array) -> tuple[int, int, int]:
    """Return the row, column and nibble of the only non-zero code."""
    ((row, column),) = np.argwhere(words)
    return int(row), int(column), int(words.view(np.uint32)[row, column]).bit_length() // 4 - 1


@pytest.mark.parametrize(("pack", "expected"), [
    (GPTQ.codes.pack, (3, 77, 5)),  # qweight[k / 8, n], nibble k % 8
    (COMPRESSED.codes.pack, (77, 3, 5)),  # weight_packed[n, k / 8], nibble k % 8
    (AWQ.codes.pack, (29, 9, 6)),  # qweight[k, n / 8]; column 5 of eight is nibble 6 (0 2 4 6 1 3 5 7)
])  # fmt: skip
def test_where_a_code_lies(pack: Callable[[Array], Array], expected: tuple[int, int, int]) -> None:
    assert place(pack(one(77, 29))) == expected


def test_where_marlin_puts_a_code() -> None:
    """Marlin puts a code in lane (n % 8) * 4 + (k % 8) / 2 of the MMA fragment: four words per lane, one for each
    tile."""
    for n, k in ((0, 0), (77, 29), (127, 63), (8, 1), (64, 8)):
        row, column, nibble = place(MARLIN.codes.pack(one(n, k)))
        lane, tile = n % 8 * 4 + k % 8 // 2, n % 64 // 16
        assert row == k // 16 and column == n // 64 * 128 + lane * 4 + tile
        assert nibble == AWQ_ORDER.index(n % 16 // 8 * 4 + k % 16 // 8 * 2 + k % 2)


def test_codes_of_8_bits() -> None:
    """A word holds 8-bit codes of four neighbouring input features, or zero points of four outputs, in version 1 minus
    one."""
    u = np.random.default_rng(0).integers(0, 256, (12, 16), np.uint8)
    words, zeros = GPTQ_HEAD.codes.pack(u).view(np.uint32), GPTQ_HEAD.zeros
    assert [words[7 // 4, 5] >> 8 * (7 % 4) & 255, words[3, 11] & 255] == [u[5, 7], u[11, 12]]
    np.testing.assert_array_equal(GPTQ_HEAD.codes.unpack(GPTQ_HEAD.codes.pack(u)), u)
    assert zeros is not None
    stored = np.full((2, 3), 0x7F7F7F7F, np.int32)
    assert (zeros.unpack(from_v1(stored, 8)) == 128).all() and zeros.unpack(stored).shape == (12, 2)


def test_stored_zero_points() -> None:
    eights = np.full((8, 1), 8, np.uint8)
    assert to_v1(GPTQ.zeros.pack(eights)).view(np.uint32)[0, 0] == 0x77777777
    assert GPTQ.zeros.pack(eights).view(np.uint32)[0, 0] == 0x88888888
    # A zero point of 0 borrows from its neighbour, and gives it back.
    borrowing = np.array([[0, 5, 8, 8, 8, 8, 8, 8]], np.uint8).T
    assert to_v1(GPTQ.zeros.pack(borrowing)).view(np.uint32)[0, 0] == 0x7777773F
    places = np.arange(8, dtype=np.uint8)[:, None]
    assert COMPRESSED.zeros.pack(places).view(np.uint32)[0, 0] == 0x76543210
    assert AWQ.zeros.pack(places).view(np.uint32)[0, 0] == 0x75316420


def test_marlin_scale_orders() -> None:
    grouped: Any = MARLIN.scales.pack(np.stack([np.arange(64), np.arange(64)], axis=1))
    assert grouped[0, :10].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1, 9]
    whole: Any = MARLIN.scales.pack(np.arange(64)[:, None])
    assert whole[0, :10].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]


def test_a_format_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new format, here one byte per code, is found, checked and read once declared, without a change elsewhere."""
    toy = Format(
        "toy",
        number=9,
        codes=Part("bytes", lambda n, k, groups: (n, k), np.asarray, np.asarray, ("U8",)),
        rows=lambda words, begin, end: words[begin:end],
        scales=Part("steps", lambda n, k, groups: (n, groups), np.asarray, np.asarray, SCALES),
    )
    monkeypatch.setitem(FORMATS, toy.name, toy)
    u, scales = nibbles(0, 64, 256), np.random.default_rng(0).random((64, 8), np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"w.bytes": ("U8", u), "w.steps": ("F32", scales)})
    plain = TensorSpec("layers.0.down", u.shape, (Source("w.weight", u.shape),), product="residual")
    with Checkpoint.open(tmp_path) as checkpoint:
        (spec,) = quantised_specs([plain], WeightQuantization("toy", "toy", 32, symmetric=True), checkpoint)
        check([spec], checkpoint)
        expected = (u.astype(np.float32) - 8) * np.repeat(scales, 32, axis=1)
        np.testing.assert_array_equal(pack(spec, checkpoint, DType.FLOAT32), expected)
    assert spec.quant == Quantization(4, 32)
