"""Makes random weights for a model that has only a config: a forward is as fast with them as with real ones."""

from __future__ import annotations

import hashlib

import numpy as np

from cpmrt.dtypes import Array, DType, from_float32, round_to
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.quantised import PlainArrays

_TABLE = 1 << 16
_BLOCK = 1 << 18
_BIAS_DEVIATION = 0.02


def distribution(spec: TensorSpec) -> tuple[float, float]:
    """Return mean and deviation of a weight's elements.

    Matrices have the deviation 1/sqrt(columns), so that activations keep their size over the layers. 1-D weights named
    "...norm" are ones, other 1-D weights (biases) small.
    """
    if len(spec.shape) == 1:
        return (1.0, 0.0) if spec.name.endswith("norm") else (0.0, _BIAS_DEVIATION)
    return 0.0, float(spec.shape[-1] ** -0.5)


def code_scale(spec: TensorSpec) -> float:
    """Return the scale that gives uniform codes around their zero point the deviation of `distribution`."""
    assert spec.quant is not None, spec.name
    deviation = (4.0**spec.quant.bits / 12) ** 0.5
    return float(spec.shape[1] ** -0.5 / deviation)


def weight_seed(name: str, seed: int) -> int:
    """Return 256 bits that start the random numbers of one weight."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest(), "little")


def dummy(spec: TensorSpec, dtype: DType, seed: int) -> Array:
    """Make the weight `spec` in the storage words of `dtype`; it depends on `seed`, the name and the shape only."""
    mean, deviation = distribution(spec)
    if not deviation:
        return from_float32(np.full(spec.shape, mean, np.float32), dtype)
    random = _random(spec, seed)
    # 16 random bits looked up in a table of rounded normal values: ten times faster than to draw and round.
    table = from_float32(random.standard_normal(_TABLE, np.float32) * np.float32(deviation), dtype)
    out = np.empty(spec.num_elements, dtype.storage)
    for begin in range(0, out.size, _BLOCK):
        block = out[begin : begin + _BLOCK]
        table.take(random.integers(0, _TABLE, block.size, np.uint16), out=block, mode="wrap")
    return out.reshape(spec.shape)


def fill_dummy_quantised(spec: TensorSpec, dtype: DType, seed: int, out: PlainArrays) -> None:
    """Fill the arrays of a spec with a `quant`: uniform codes, zero points of 8, columns in a random order."""
    random = _random(spec, seed)
    out.codes.view(np.uint8)[:] = random.integers(0, 256, out.codes.shape, np.uint8)
    out.scales[:] = round_to(np.full(1, code_scale(spec), np.float32), dtype)
    if out.zeros is not None:
        out.zeros[:] = 8
    if out.perm is not None:
        out.perm[:] = random.permutation(len(out.perm))


def _random(spec: TensorSpec, seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(weight_seed(spec.name, seed)))
