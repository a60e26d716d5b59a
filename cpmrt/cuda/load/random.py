"""Random weights written by the device itself, for a model that has only a config."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.launch import CudaStream, launch
from cpmrt.cuda.load.repack import Repacker
from cpmrt.cuda.load.staging import waves
from cpmrt.cuda.ops.linear_packed.layout import PackedLayout
from cpmrt.memory.plan import Region
from cpmrt.tensor_spec import TensorSpec

FILL_NORMAL, FILL_WORDS = (
    KernelSpec(name, "load/fill.cu", reason="random weights in place of a checkpoint")
    for name in ("fill_normal", "fill_words")
)
_BLOCK = 256
_WORDS_PER_THREAD = 4
_BIAS_DEVIATION = 0.02


def fill_dummy(
    arena: int,
    specs: Sequence[TensorSpec],
    regions: Mapping[str, Region],
    modules: Modules,
    stream: CudaStream,
    *,
    seed: int,
    num_sms: int,
) -> None:
    """Launch the kernels that fill the regions of `specs` in the arena at device address `arena`; waits for nothing.

    A weight depends on `seed`, its name and its shape only. The distributions are those of `weights.dummy.dummy`.
    """
    kernel = modules.kernel(FILL_NORMAL, {})
    for spec in specs:
        if spec.quant is not None:
            continue
        mean, deviation = distribution(spec)
        grid = min(-(-spec.num_elements // (_BLOCK * _WORDS_PER_THREAD)), 8 * num_sms)
        args = (
            np.uint64(arena + regions[spec.name].offset),
            np.int64(spec.num_elements),
            np.uint64(stream_seed(spec.name, seed)),
            np.float32(mean),
            np.float32(deviation),
        )
        launch(stream, kernel, grid, _BLOCK, 0, args)


def fill_dummy_packed(
    arena: int,
    specs: Sequence[TensorSpec],
    regions: Mapping[str, Region],
    layouts: Mapping[str, PackedLayout],
    modules: Modules,
    stream: CudaStream,
    *,
    seed: int,
    num_sms: int,
) -> None:
    """The same for the specs with a `quant`, distributed as `weights.dummy.fill_dummy_quantised` has it.

    Scales come from the region "w4_staging", which must be there.
    """
    from cupy.cuda import runtime

    words, normal = (modules.kernel(spec, {}) for spec in (FILL_WORDS, FILL_NORMAL))
    grid, handle = 8 * num_sms, stream.__cuda_stream__()[1]
    for spec in specs:
        if spec.quant is None:
            continue
        region = regions[f"{spec.name}.codes"]
        random = np.uint64(stream_seed(spec.name, seed))
        launch(stream, words, grid, _BLOCK, 0, (np.uint64(arena + region.offset), np.int64(region.nbytes // 8), random))
        if spec.quant.permuted:
            order = np.random.default_rng(int(random)).permutation(spec.shape[1]).astype(np.int32)
            target = arena + regions[f"{spec.name}.perm"].offset
            runtime.memcpyAsync(target, order.ctypes.data, order.nbytes, runtime.memcpyHostToDevice, handle)
    repacker, staging = Repacker(arena, regions, layouts, modules, stream, num_sms), regions["w4_staging"]
    for wave in waves(specs, staging.nbytes):
        for piece in wave:
            assert piece.spec.quant is not None, piece.spec.name
            num_rows, num_columns = piece.end - piece.begin, piece.source.shape[1]
            count = np.int64(num_rows * (num_columns // piece.spec.quant.group_size))
            scale = np.float32(num_columns**-0.5 / _code_deviation(piece.spec.quant.bits))
            address = np.uint64(arena + staging.offset + piece.scales)
            launch(stream, normal, grid, _BLOCK, 0, (address, count, np.uint64(0), scale, np.float32(0)))
            repacker.scales(replace(piece, source=replace(piece.source, packing=None)), modules.dtype)


def distribution(spec: TensorSpec) -> tuple[float, float]:
    """Mean and deviation of the elements, such that activations keep their size over the layers."""
    if len(spec.shape) == 1:
        return (1.0, 0.0) if spec.name.endswith("norm") else (0.0, _BIAS_DEVIATION)
    return 0.0, float(spec.shape[-1] ** -0.5)


def _code_deviation(bits: int) -> float:
    """Of uniform codes of so many bits around their zero point."""
    return float((4.0**bits / 12) ** 0.5)


def stream_seed(name: str, seed: int) -> int:
    """64 bits that start the random numbers of one weight."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
