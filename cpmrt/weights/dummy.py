"""Random weights for a model that has only a config: a forward is as fast with them as with real ones."""

from __future__ import annotations

import hashlib

import numpy as np

from cpmrt.dtypes import Array, DType, from_float32, round_to
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.quantised import PlainArrays

_TABLE = 1 << 16
_BLOCK = 1 << 18
_BIAS_SCALE = 0.02


def dummy(spec: TensorSpec, dtype: DType, seed: int) -> Array:
    """The weight `spec` in the storage words of `dtype`; depends on `seed`, the name and the shape only.

    Matrices are normal with deviation 1/sqrt(columns), so that activations keep their size over the layers.
    1-D weights named "...norm" are ones, other 1-D weights (biases) normal with deviation 0.02.
    """
    if len(spec.shape) == 1 and spec.name.endswith("norm"):
        return from_float32(np.ones(spec.shape, np.float32), dtype)
    scale = _BIAS_SCALE if len(spec.shape) == 1 else spec.shape[-1] ** -0.5
    random = _random(spec, seed)
    # 16 random bits looked up in a table of rounded normal values: ten times faster than to draw and round.
    table = from_float32(random.standard_normal(_TABLE, np.float32) * np.float32(scale), dtype)
    out = np.empty(spec.num_elements, dtype.storage)
    for begin in range(0, out.size, _BLOCK):
        block = out[begin : begin + _BLOCK]
        table.take(random.integers(0, _TABLE, block.size, np.uint16), out=block, mode="wrap")
    return out.reshape(spec.shape)


def fill_dummy_quantised(spec: TensorSpec, dtype: DType, seed: int, out: PlainArrays) -> None:
    """Fill the arrays of a spec with a `quant`: uniform codes around zero points of 8, scales such that the deviation
    is 1/sqrt(columns), groups of columns in any order."""
    assert spec.quant is not None, spec.name
    random = _random(spec, seed)
    out.codes.view(np.uint8)[:] = random.integers(0, 256, out.codes.shape, np.uint8)
    deviation = (4.0**spec.quant.bits / 12) ** 0.5
    out.scales[:] = round_to(np.full(1, spec.shape[1] ** -0.5 / deviation, np.float32), dtype)
    if out.zeros is not None:
        out.zeros[:] = 8
    if out.perm is not None:
        out.perm[:] = random.permutation(len(out.perm))


def _random(spec: TensorSpec, seed: int) -> np.random.Generator:
    key = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
