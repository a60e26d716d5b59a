"""Loading on a device: conversion and fill kernels, mapped host memory, a checkpoint streamed into an arena."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.load.random import load_random
from cpmrt.cuda.load.repack import Destination
from cpmrt.cuda.load.upload import load_checkpoint
from cpmrt.dtypes import DType, from_float32, to_float32
from cpmrt.errors import CheckpointError
from cpmrt.memory.plan import Region
from cpmrt.models.decoder import tensor_specs
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.dummy import distribution, dummy
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.pack import pack

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
GUARD = 64
POISON = 0x7FFF
"""NaN in both 16-bit types."""


def regions_of(specs: list[TensorSpec] | tuple[TensorSpec, ...]) -> tuple[dict[str, Region], int]:
    """Return a region for each tensor, at 256-byte boundaries with at least a guard between them, and the size of
    all."""
    regions, end = {}, 2 * GUARD
    for spec in specs:
        end = -(-end // 256) * 256
        regions[spec.name] = Region(spec.name, "layers", end, spec.num_elements * 2, spec.shape, np.dtype(np.uint16))
        end += spec.num_elements * 2 + 2 * GUARD
    return regions, end


def destination(cuda: Any, arena: Any, regions: dict[str, Region], dtype: DType) -> Destination:
    launcher = Launcher(cuda.stream, Modules(cuda.arch, dtype), use_pdl=False)
    return Destination(arena.data.ptr, regions, cuda.device, launcher)


def check_regions(words: np.ndarray[Any, Any], regions: dict[str, Region], expected: dict[str, Any]) -> None:
    outside = np.ones(words.size, bool)
    for name, region in regions.items():
        span = slice(region.offset // 2, (region.offset + region.nbytes) // 2)
        outside[span] = False
        assert np.array_equal(words[span], expected[name].view(np.uint16).ravel()), name
    assert (words[outside] == POISON).all(), "stored outside the regions"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["convert_float32", "convert_16bit"])
@pytest.mark.parametrize("count", [1, 255, 70_001])
def test_conversion_rounds_as_the_host_does(cuda: Any, dtype: DType, name: str, count: int) -> None:
    other = DType.FLOAT16 if dtype is DType.BFLOAT16 else DType.BFLOAT16
    stored = DType.FLOAT32 if name == "convert_float32" else other
    random = np.random.default_rng(count)
    values = random.standard_normal(count, np.float32) * np.exp2(random.integers(-26, 13, count)).astype(np.float32)
    values[: min(count, 5)] = [-0.0, 6e-8, 65000.0, np.nan, 1.00390625][: min(count, 5)]
    source = from_float32(values, stored)
    out, flag = cuda.array(np.full(count + 2 * GUARD + 1, POISON, np.uint16)), cuda.array(np.zeros(1, np.uint32))
    # The output begins at an odd element: packed tensors need not begin at a wider boundary.
    cuda.kernel(name, dtype)(64, 256, out[GUARD + 1 :], flag, cuda.array(source), np.int32(count))
    words = cuda.numpy(out)
    assert (words[: GUARD + 1] == POISON).all() and (words[GUARD + 1 + count :] == POISON).all()
    found = to_float32(words[GUARD + 1 : GUARD + 1 + count].view(dtype.storage), dtype)
    expected = to_float32(from_float32(to_float32(source, stored), dtype), dtype)
    assert np.array_equal(found, expected, equal_nan=True) and np.array_equal(np.signbit(found[:1]), [True])
    assert cuda.numpy(flag)[0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "expected"), [(DType.FLOAT16, 1), (DType.BFLOAT16, 0)])
def test_values_beyond_float16_are_flagged(cuda: Any, dtype: DType, expected: int) -> None:
    values, flag = np.zeros(1000, np.float32), cuda.array(np.zeros(1, np.uint32))
    values[777] = 1e6
    out = cuda.array(np.zeros(1000, np.uint16))
    cuda.kernel("convert_float32", dtype)(4, 256, out, flag, cuda.array(values), np.int32(1000))
    assert cuda.numpy(flag)[0] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_dummy_weights_have_their_distribution(cuda: Any, dtype: DType) -> None:
    specs = [TensorSpec(name, shape, ()) for name, shape in {
        "layers.0.qkv": (300, 512), "layers.0.attention_norm": (515,), "layers.0.qkv_bias": (20_001,), "norm": (7,),
    }.items()]  # fmt: skip
    regions, total = regions_of(specs)
    results = []
    for seed in (1, 1, 2):
        arena = cuda.array(np.full(total // 2, POISON, np.uint16))
        load_random(specs, destination(cuda, arena, regions, dtype), seed)
        results.append(cuda.numpy(arena))
    assert np.array_equal(results[0], results[1]) and not np.array_equal(results[0], results[2])
    found = {
        name: results[0][region.offset // 2 : (region.offset + region.nbytes) // 2] for name, region in regions.items()
    }
    check_regions(results[0], regions, found)
    values = {name: to_float32(words.view(dtype.storage), dtype) for name, words in found.items()}
    assert (values["norm"] == 1).all() and (values["layers.0.attention_norm"] == 1).all()
    for name, deviation in (("layers.0.qkv", 512**-0.5), ("layers.0.qkv_bias", 0.02)):
        standard = values[name] / deviation
        assert abs(standard.mean()) < 0.03 and abs(standard.std() - 1) < 0.03 and 3.3 < abs(standard).max() < 4.9
        assert abs((abs(standard) < 1).mean() - 0.6827) < 0.02, "not normal"
        assert abs(np.corrcoef(standard[:-1], standard[1:])[0, 1]) < 0.03


@pytest.mark.gpu
def test_random_words_are_uniform_and_repeatable(cuda: Any) -> None:
    fill, count, results = cuda.kernel("fill_words", DType.FLOAT16), 100_003, []
    for seed in (5, 5, 6):
        out = cuda.array(np.zeros(count + 1, np.uint64))
        fill(7, 256, out, np.int64(count), np.uint64(seed))
        results.append(cuda.numpy(out))
    assert np.array_equal(results[0], results[1]) and results[0][-1] == 0
    codes = results[0][:-1].view(np.uint8) & 15
    assert abs(np.bincount(codes) / codes.size - 1 / 16).max() < 1e-3
    assert (results[0] != results[2])[:-1].all()


@pytest.mark.parametrize(
    ("name", "shape"), [("layers.0.qkv", (64, 400)), ("layers.0.mlp_norm", (64,)), ("layers.0.qkv_bias", (9000,))]
)
def test_host_and_device_agree_on_the_distribution(name: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec(name, shape, (Source(name, shape),))
    mean, deviation = distribution(spec)
    values = dummy(spec, DType.FLOAT32, 3)
    assert abs(values.mean() - mean) < 0.05 * deviation + 1e-6
    assert abs(values.std() - deviation) < 0.05 * deviation + 1e-6


@pytest.mark.gpu
def test_the_device_writes_mapped_host_memory(cuda: Any) -> None:
    from cpmrt.cuda.driver.host_memory import HostBuffer

    with HostBuffer(4096) as buffer:
        words = buffer.array(np.uint16)[128:228]
        assert not words.any()
        fill = cuda.kernel("fill_normal", DType.FLOAT16)
        address = np.uint64(buffer.device_address + 256)
        fill(1, 256, address, np.int64(100), np.uint64(5), np.float32(1), np.float32(0))
        cuda.sync()
        assert (words.view(np.float16) == 1).all()
        assert not buffer.array(np.uint8)[:256].any() and not buffer.array(np.uint8)[456:].any()
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        buffer.array(np.uint8)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A float32 checkpoint, of which every tensor has to be converted."""
    return write_checkpoint(tmp_path / "model")


def stream(cuda: Any, folder: Path, dtype: DType) -> tuple[np.ndarray[Any, Any], dict[str, Region], dict[str, Any]]:
    specs = tensor_specs(ModelFolder.open(str(folder)).config)
    regions, total = regions_of(specs)
    arena = cuda.array(np.full(total // 2, POISON, np.uint16))
    with Checkpoint.open(folder) as checkpoint:
        load_checkpoint(specs, checkpoint, destination(cuda, arena, regions, dtype))
        expected = {spec.name: pack(spec, checkpoint, dtype) for spec in specs}
    return cuda.numpy(arena), regions, expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_streamed_checkpoint_equals_the_packed_one(cuda: Any, model: Path, dtype: DType) -> None:
    check_regions(*stream(cuda, model, dtype))


def write_flat(folder: Path, shape: tuple[int, int], fill: float | None = None) -> TensorSpec:
    """Write a bf16 checkpoint of one tensor, with random words or all `fill`, and return the tensor's spec."""
    folder.mkdir()
    words = np.random.default_rng(1).integers(0, 0x7F00, shape, np.uint16)
    if fill is not None:
        words[:] = from_float32(np.float32([fill]), DType.BFLOAT16)
    header = f'{{"t":{{"dtype":"BF16","shape":{list(shape)},"data_offsets":[0,{words.nbytes}]}}}} '.encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + words.tobytes())
    return TensorSpec("w", shape, (Source("t", shape),))


@pytest.mark.gpu
def test_a_tensor_larger_than_the_ring_arrives_whole(cuda: Any, tmp_path: Path) -> None:
    from cpmrt.cuda.load.read import NUM_SLOTS, SLOT_BYTES

    columns = 4096
    spec = write_flat(tmp_path / "large", (3 * NUM_SLOTS * SLOT_BYTES // (2 * columns) + 5, columns))
    regions, total = regions_of([spec])
    arena = cuda.array(np.full(total // 2, POISON, np.uint16))
    with Checkpoint.open(tmp_path / "large") as checkpoint:
        load_checkpoint([spec], checkpoint, destination(cuda, arena, regions, DType.BFLOAT16))
        check_regions(cuda.numpy(arena), regions, {"w": checkpoint.view("t")})


@pytest.mark.gpu
def test_a_checkpoint_beyond_float16_is_refused(cuda: Any, tmp_path: Path) -> None:
    spec = write_flat(tmp_path / "model", (64, 64), fill=1e20)
    regions, total = regions_of([spec])
    arena = cuda.array(np.zeros(total // 2, np.uint16))
    refused = pytest.raises(CheckpointError, match=r"tensor 't' has values beyond float16; use dtype bfloat16")
    with Checkpoint.open(tmp_path / "model") as checkpoint, refused:
        load_checkpoint([spec], checkpoint, destination(cuda, arena, regions, DType.FLOAT16))


@pytest.mark.gpu
def test_a_cut_file_is_an_error_and_the_device_works_on(cuda: Any, model: Path) -> None:
    specs = tensor_specs(ModelFolder.open(str(model)).config)
    regions, total = regions_of(specs)
    arena = cuda.array(np.zeros(total // 2, np.uint16))
    with Checkpoint.open(model) as checkpoint:
        os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size // 2)
        with pytest.raises(CheckpointError, match="became shorter while it was read"):
            load_checkpoint(specs, checkpoint, destination(cuda, arena, regions, DType.BFLOAT16))
    assert cuda.numpy(cuda.array(np.arange(4)))[3] == 3
