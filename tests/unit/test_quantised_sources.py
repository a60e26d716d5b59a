"""Quantised sources one by one: those that are held together though they differ, and those that are read in blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.quantised_models import write_safetensors

from cpmrt.dtypes import DType, from_float32
from cpmrt.errors import CheckpointError
from cpmrt.ops import QuantizedWeight
from cpmrt.tensor_spec import Packing, Quantization, Source, TensorSpec
from cpmrt.weights import quantised
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats.awq import AWQ
from cpmrt.weights.formats.format import Format, unpack_nibbles
from cpmrt.weights.formats.gptq import GPTQ
from cpmrt.weights.formats.marlin import MARLIN
from cpmrt.weights.quantised import check_values, dequantised_blocks, load_quantised, round_to_nearest

N, K, GROUP = 192, 256, 128


def made(row: Format, seed: int, zero: int | None = None) -> tuple[dict[str, tuple[str, Any]], Any, Any, Any]:
    """Return the tensors of a matrix without their module's name, its codes, scales and zero points (all `zero`)."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (N, K), np.uint8)
    scales = random.uniform(0.5, 1.5, (N, K // GROUP)).astype(np.float16)
    zeros = random.integers(0, 16, (N, K // GROUP), np.uint8)
    if zero is not None:
        zeros[:] = zero
    tensors = {row.codes.suffix: ("I32", row.codes.pack(codes)), row.scales.suffix: ("F16", row.scales.pack(scales))}
    if row.zeros is not None:
        tensors[row.zeros.suffix] = ("I32", row.zeros.pack(zeros))
    return tensors, codes, scales.astype(np.float32), zeros.astype(np.float32)


def write(folder: Path, **modules: dict[str, tuple[str, Any]]) -> Checkpoint:
    tensors = {f"{module}.{suffix}": each for module, of in modules.items() for suffix, each in of.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    return Checkpoint.open(folder)


def test_a_symmetric_source_beside_one_with_zero_points_has_those_of_symmetric_codes(tmp_path: Path) -> None:
    """The two are rows of one weight. Its columns could be in another order; here they are in the model's."""
    (first, codes, _, _), (second, *_, zeros) = made(GPTQ, 1, zero=8), made(GPTQ, 2)
    packings = {"a": Packing("gptq", GROUP, symmetric=True), "b": Packing("gptq", GROUP, symmetric=False)}
    sources = tuple(Source(name, (N, K), packing) for name, packing in packings.items())
    spec = TensorSpec("layers.0.qkv", (2 * N, K), sources, Quantization(4, GROUP, False, True))
    groups = (2 * N, K // GROUP)
    out = QuantizedWeight(
        np.zeros((2 * N, K // 2), np.uint8), np.zeros(groups, np.float32), np.zeros(groups, np.uint8),
        np.zeros(K, np.int32), (2 * N, K), GROUP,
    )  # fmt: skip
    with write(tmp_path, a=first, b=second) as checkpoint:
        load_quantised(spec, checkpoint, DType.FLOAT16, out)
    assert (out.zeros[:N] == 8).all() and np.array_equal(out.zeros[N:], zeros)
    assert np.array_equal(out.perm, np.arange(K)) and np.array_equal(unpack_nibbles(out.codes.view("i4"))[:N], codes)


@pytest.mark.parametrize("row", [GPTQ, AWQ, MARLIN], ids=lambda row: row.name)
def test_a_matrix_is_the_same_in_blocks_of_rows(row: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, codes, scales, zeros = made(row, 3, zero=None if row.zeros else 8)
    source = Source("a", (N, K), Packing(row.name, GROUP, row.zeros is None))
    expected = (codes - np.repeat(zeros, GROUP, axis=1)) * np.repeat(scales, GROUP, axis=1)
    with write(tmp_path, a=tensors) as checkpoint:
        for block, count in ((1, 3), (128 * K, 2), (1 << 20, 1)):
            monkeypatch.setattr(quantised, "_BLOCK", block)
            blocks = list(dequantised_blocks(source, checkpoint))
            assert len(blocks) == count and np.array_equal(np.concatenate(blocks), expected)


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_scale_that_is_not_finite_is_found_among_scales_of_either_sign(
    wrong: float, sign: int, tmp_path: Path
) -> None:
    tensors, *_ = made(MARLIN, 4)
    scales = np.full_like(tensors["scales"][1], sign)
    scales[0, 7] = wrong
    source, tensors = Source("a", (N, K), Packing("marlin", GROUP, True)), tensors | {"scales": ("F16", scales)}
    with write(tmp_path, a=tensors) as checkpoint, pytest.raises(CheckpointError, match="not finite"):
        check_values(source, checkpoint, DType.FLOAT16)


@pytest.mark.parametrize(("dtype", "is_right"), [(DType.FLOAT16, False), (DType.BFLOAT16, True)])
def test_a_matrix_that_is_rounded_at_load_has_values_of_the_models_type(
    dtype: DType, is_right: bool, tmp_path: Path
) -> None:
    """As in a weight that is not quantised: a value beyond float16 is refused in a model in float16."""
    values = np.full((4, 64), 1e6, np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"a": ("BF16", from_float32(values, DType.BFLOAT16))})
    out = QuantizedWeight(np.zeros((4, 64), np.int8), np.zeros((4, 1), np.float32), None, None, (4, 64), 64, 8)
    spec = TensorSpec("lm_head", (4, 64), (Source("a", (4, 64)),), Quantization(8, 64), "head")
    with Checkpoint.open(tmp_path) as checkpoint:
        if is_right:
            load_quantised(spec, checkpoint, dtype, out)
            assert (out.codes == 127).all()
        else:
            with pytest.raises(CheckpointError, match="not finite"):
                load_quantised(spec, checkpoint, dtype, out)


def test_a_group_of_zeros_divides_nothing_by_zero() -> None:
    with np.errstate(all="raise"):
        codes, scales = round_to_nearest(np.zeros((2, 64), np.float32), Quantization(4, 32), DType.FLOAT16)
    assert (codes == 0x88).all() and not scales.any()
