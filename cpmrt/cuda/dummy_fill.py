"""Random weights written by the device itself, for a model that has only a config."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from cpmrt.cuda.compiler import Modules
from cpmrt.cuda.launch import CudaStream, launch
from cpmrt.memory.plan import Region
from cpmrt.tensor_spec import TensorSpec

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
    kernel = modules.kernel("fill.cu", "fill_normal", {})
    for spec in specs:
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


def distribution(spec: TensorSpec) -> tuple[float, float]:
    """Mean and deviation of the elements, such that activations keep their size over the layers."""
    if len(spec.shape) == 1:
        return (1.0, 0.0) if spec.name.endswith("norm") else (0.0, _BIAS_DEVIATION)
    return 0.0, float(spec.shape[-1] ** -0.5)


def stream_seed(name: str, seed: int) -> int:
    """64 bits that start the random numbers of one weight."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
