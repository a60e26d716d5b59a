"""repack_blocks.cu against the NumPy unpacking and packing: every block type, in every layout that can hold it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from linear_cases import H200, layout_of
from packed_oracle import pack

from cpmrt.cuda.build.spec import macros_of
from cpmrt.cuda.ops.linear_packed.layout import MINIMUMS, PackedLayout, width_of
from cpmrt.dtypes import DType, from_float32, round_to
from cpmrt.tensor_spec import Quantization
from cpmrt.weights.formats.blocks import BLOCK_TYPES, BlockType
from cpmrt.weights.gguf.specs import unpaired

TYPES = BLOCK_TYPES.values()
BLOCK = 256


def random_rows(kind: BlockType, num_rows: int, columns: int, seed: int) -> Any:
    """Return rows of random blocks, uint8 [N, row bytes], whose float16 numbers are small and finite."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_rows, columns // kind.size, kind.nbytes), dtype=np.uint8)
    if kind.name == "TQ2_0":  # 3 is not a valid code
        blocks &= blocks ^ (blocks << 1 & 0xAA) | 0x55
    for place in kind.halves:
        halves = (random.standard_normal((*blocks.shape[:2], 1)) * 0.01).astype(np.float16)
        blocks[:, :, place : place + 2] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def expected(kind: BlockType, layout: PackedLayout, rows: Any, dtype: DType) -> tuple[Any, Any]:
    """Return the packed bytes that the layout must hold, and the float32 weights that its codes stand for with scales
    of `dtype`."""
    parts = kind.parts(rows)
    offsets = np.zeros_like(parts.scales) if parts.offsets is None else parts.offsets
    repeat = kind.group // layout.scale_group
    scales, offsets = (np.repeat(array, repeat, axis=1) for array in (parts.scales, offsets))
    signed = parts.codes.astype(np.int32)
    # Codes of files are unsigned: `parts` has made those of some types signed, by subtracting the type's own offset.
    smallest = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q3_K": 4, "Q6_K": 32, "IQ4_NL": 128, "IQ4_XS": 128}
    middle = smallest.get(kind.name, 1 if kind.name.startswith("TQ") else 0)
    if layout.zeros:
        kept = round_to(scales, dtype), round_to(scales * np.float32(middle) - offsets, dtype)
        u = signed + middle
    else:
        kept = round_to(scales, dtype), None
        u = signed + 2 ** (layout.bits - 1)
    words = [None if values is None else from_float32(values, dtype) for values in kept]
    factors = np.repeat(kept[0], layout.scale_group, axis=1)
    below = np.float32(0) if kept[1] is None else np.repeat(kept[1], layout.scale_group, axis=1)
    weight = (signed if kept[1] is None else u) * factors - below
    return pack(layout, u.astype(np.uint8), words[0], words[1]), weight.astype(np.float32)


def repacked(cuda: Any, kind: BlockType, layout: PackedLayout, parts: list[Any], dtype: DType, paired: bool) -> Any:
    """Repack the sources `parts` one after another and return the packed bytes and the fault word."""
    constants = macros_of(layout.repack_constants(kind.number))
    packed, fault = cuda.array(np.zeros(layout.num_bytes, np.uint8)), cuda.array(np.zeros(1, np.uint32))
    first = 0
    for rows in parts:
        stored = cuda.array(np.ascontiguousarray(rows))
        counts = map(np.int32, (first, len(rows), layout.out_features, layout.num_tiles, paired))
        sizes = tuple(counts)
        cuda.kernel("repack_block_codes", dtype, **constants)(7, BLOCK, packed, stored, *sizes)
        cuda.kernel("repack_block_scales", dtype, **constants)(5, BLOCK, packed, fault, stored, *sizes)
        first += len(rows)
    return packed, int(cuda.numpy(fault)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("is_mixed", [False, True], ids=["", "mixed"])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_block_type(cuda: Any, kind: BlockType, is_mixed: bool, dtype: DType) -> None:
    """Every block type is packed exactly: alone, and in a weight whose other sources need 8 bits, groups of 16 and
    minimums."""
    quant = Quantization(kind.factor_bits, kind.group, kind.is_symmetric, in_blocks=True)
    if is_mixed:
        quant = Quantization(8, 16, symmetric=False, in_blocks=True)
    counts, columns = (320, 320), 768
    layout = layout_of("gate_up", (sum(counts), columns), min(quant.group_size, 128), H200, bits=width_of(quant)[0])
    layout = replace(layout, zeros=width_of(quant)[1])
    assert layout.zeros in (0, MINIMUMS)
    parts = [random_rows(kind, count, columns, count + i) for i, count in enumerate(counts)]
    packed, fault = repacked(cuda, kind, layout, parts, dtype, paired=False)
    wanted, weight = expected(kind, layout, np.concatenate(parts), dtype)
    np.testing.assert_array_equal(cuda.numpy(packed), wanted)
    assert fault == 0
    out = cuda.array(np.full((len(weight), columns), np.nan, np.float32), dtype)
    sizes = np.int32(0), np.int32(len(weight)), np.int32(len(weight))
    cuda.kernel("dequantize", dtype, **macros_of(layout.repack_constants()))(9, BLOCK, out, packed, *sizes)
    found, exact = cuda.numpy(out, dtype), round_to(weight, dtype)
    if layout.zeros:  # product and difference are rounded only once, as an FMA: by half of the last place at most
        half = 2.0**-8 if dtype is DType.BFLOAT16 else 2.0**-11
        assert (np.abs(found - weight) <= np.abs(found) * half + 1e-6).all()
    else:
        assert np.array_equal(found, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_block_type_in_16_bits(cuda: Any, kind: BlockType, dtype: DType) -> None:
    rows, columns = random_rows(kind, 9, 1024, 1), 1024
    found, flag = unpacked(cuda, kind, rows, columns, dtype)
    np.testing.assert_array_equal(found, from_float32(kind.values(rows), dtype))
    assert flag == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [BLOCK_TYPES[name] for name in ("Q8_0", "Q4_K")], ids=lambda kind: kind.name)
def test_a_weight_beyond_float16_is_flagged(cuda: Any, kind: BlockType) -> None:
    rows = random_rows(kind, 9, 1024, 1)
    rows[8, -kind.nbytes + kind.halves[0] :][:2] = np.float16([60000]).view(np.uint8)
    assert unpacked(cuda, kind, rows, 1024, DType.FLOAT16)[1] == 1
    assert unpacked(cuda, kind, rows, 1024, DType.BFLOAT16)[1] == 0


def unpacked(cuda: Any, kind: BlockType, rows: Any, columns: int, dtype: DType) -> tuple[Any, int]:
    """Return the 16-bit words that the device unpacks rows of blocks to, and the fault word."""
    out = cuda.array(np.full((len(rows), columns), np.nan, np.float32), dtype)
    fault, count = cuda.array(np.zeros(1, np.uint32)), np.int64(len(rows) * columns // 8)
    cuda.kernel("unpack_blocks", dtype, FORMAT=kind.number)(3, BLOCK, out, fault, cuda.array(rows), count)
    return cuda.numpy(out), int(cuda.numpy(fault)[0])


@pytest.mark.gpu
def test_rows_of_heads_that_lie_in_pairs(cuda: Any) -> None:
    kind, counts, columns, head_dim = BLOCK_TYPES["Q4_K"], (256, 128, 128), 512, 64
    layout = replace(layout_of("qkv", (sum(counts), columns), 32, H200, head_dim=head_dim), zeros=MINIMUMS)
    parts = [random_rows(kind, count, columns, count + i) for i, count in enumerate(counts)]
    packed, _ = repacked(cuda, kind, layout, parts, DType.FLOAT16, paired=True)
    rows = np.concatenate([part[list(unpaired(len(part), head_dim))] for part in parts])
    np.testing.assert_array_equal(cuda.numpy(packed), expected(kind, layout, rows, DType.FLOAT16)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "TQ2_0"])
def test_a_scale_that_is_not_finite_is_flagged(cuda: Any, name: str, value: float) -> None:
    kind = BLOCK_TYPES[name]
    quant = Quantization(kind.bits, kind.group, kind.is_symmetric, in_blocks=True)
    bits, zeros = width_of(quant)
    layout = replace(layout_of("residual", (64, 512), min(kind.group, 128), H200, bits=bits), zeros=zeros)
    rows = random_rows(kind, 64, 512, 1)
    for place in kind.halves[-1:]:
        rows[63, -kind.nbytes + place :][:2] = np.float16([value]).view(np.uint8)
    assert repacked(cuda, kind, layout, [rows], DType.BFLOAT16, paired=False)[1] == 1
