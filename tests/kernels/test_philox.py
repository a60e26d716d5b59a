"""philox.cuh gives the bits of reference/philox.py, and its estimate of the noise is near the noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmrt.cuda.build import modules as compiler
from cpmrt.cuda.build import nvrtc
from cpmrt.cuda.build.source import with_headers
from cpmrt.dtypes import DType
from cpmrt.reference.philox import philox

UNIFORMS = b"""#include "philox.cuh"
extern "C" __global__ void KERNEL(uniforms)(float* out, int count, int position, uint64_t seed) {
  const int group = blockIdx.x * blockDim.x + threadIdx.x;
  const uint4 words = philox(group, position, seed);
  const uint32_t parts[4] = {words.x, words.y, words.z, words.w};
  for (int i = 0; i < 4; i++) if (group * 4 + i < count) out[group * 4 + i] = uniform(parts[i]);
}"""

ESTIMATES = b"""#include "philox.cuh"
extern "C" __global__ void KERNEL(errors)(uint32_t* largest) {
  const uint32_t threads = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
  float error = 0.0f;
  for (uint64_t word = first; word < 1ull << 32; word += threads) {
    const uint32_t bits = static_cast<uint32_t>(word);
    const float off = fabsf(gumbel_estimate(bits) - gumbel(bits));
    error = off <= error ? error : off;
  }
  atomicMax(largest, __float_as_uint(error));
}"""


def compiled(cuda: Any, folder: Path, name: str, text: bytes) -> Any:
    cubin, _ = nvrtc.compile_cubin(
        with_headers(f"sampling/{name}.cu", text), compiler.options(cuda.arch, DType.BFLOAT16, {})
    )
    (folder / f"{name}.cubin").write_bytes(cubin)
    return cuda.cupy.RawModule(path=str(folder / f"{name}.cubin")).get_function(f"{name}_bf16")


@pytest.mark.gpu
def test_the_estimate_of_every_words_noise(cuda: Any, tmp_path: Path) -> None:
    largest = cuda.cupy.zeros(1, np.uint32)
    compiled(cuda, tmp_path, "errors", ESTIMATES)((4096,), (256,), (largest,))
    error = cuda.cupy.asnumpy(largest).view(np.float32)[0]
    assert error <= 2e-5  # fails for NaN too


@pytest.mark.gpu
@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 2**31 - 1), (2**64 - 1, 77), (0x0123456789ABCDEF, 4096)])
def test_uniforms_have_the_oracles_bits(cuda: Any, tmp_path: Path, seed: int, position: int) -> None:
    raw = compiled(cuda, tmp_path, "uniforms", UNIFORMS)
    count = 4001
    out = cuda.cupy.zeros(count, np.float32)
    raw((8,), (128,), (out, np.int32(count), np.int32(position), np.uint64(seed)))
    counters = np.zeros((-(-count // 4), 4), np.uint32)
    counters[:, 0], counters[:, 1] = np.arange(len(counters)), position
    words = philox(counters, seed).reshape(-1)[:count]
    expected = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    expected = np.minimum(expected, np.float32(1 - 2.0**-24))
    assert cuda.cupy.asnumpy(out).tobytes() == expected.tobytes()
