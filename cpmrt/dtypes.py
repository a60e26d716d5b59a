"""Storage types of weights, KV and activations, and the rounding between them.

NumPy has no bfloat16: it is held as uint16 words and widened to float32 for arithmetic, which is exact.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpmrt.errors import ConfigError, quoted

F32 = NDArray[np.float32]
Array = NDArray[Any]
ElementType = type[np.generic] | np.dtype[Any]
"""The type of a buffer's elements, as NumPy takes it."""


class DType(Enum):
    """A storage type: its config.json name, safetensors name, and the NumPy type that holds its words."""

    FLOAT32 = ("float32", "F32", np.dtype(np.float32))
    FLOAT16 = ("float16", "F16", np.dtype(np.float16))
    BFLOAT16 = ("bfloat16", "BF16", np.dtype(np.uint16))

    def __init__(self, label: str, safetensors_name: str, storage: np.dtype[Any]):
        self.label, self.safetensors_name, self.storage = label, safetensors_name, storage

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.storage.itemsize

    @classmethod
    def parse(cls, name: str) -> DType:
        """Read a name in a config, such as "bfloat16", "torch.float16", "fp32" or "bf16". Raises ConfigError."""
        plain = str(name).removeprefix("torch.")
        for dtype in cls:
            if plain in (dtype.label, _SHORT_NAMES[dtype.label]):
                return dtype
        raise ConfigError("unknown dtype", expected=" | ".join(d.label for d in cls), actual=quoted(name))


_BFLOAT16_INFINITY = 0x7F80
_SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def to_float32(words: Array, dtype: DType) -> F32:
    """Widen stored words to float32 (exact for all three types). float32 input is returned as it is."""
    if dtype is DType.BFLOAT16:
        widened = words.astype(np.uint32)
        widened <<= 16
        return widened.view(np.float32)
    return words.astype(np.float32, copy=False)


def from_float32(values: F32, dtype: DType) -> Array:
    """Round float32 to nearest even and store as `dtype`. NaN stays NaN; a value beyond 16 bits becomes infinity."""
    if dtype is DType.BFLOAT16:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        nan = np.isnan(values)
        if nan.any():
            rounded[nan] = (bits[nan] >> 16) | 0x40
        words: Array = rounded.astype(np.uint16)
        return words
    with np.errstate(over="ignore"):
        stored: Array = values.astype(dtype.storage)
    return stored


def has_infinity(words: Array, dtype: DType) -> bool:
    """Tell whether one of the stored words is plus or minus infinity."""
    return bool((words & 0x7FFF == _BFLOAT16_INFINITY).any() if dtype is DType.BFLOAT16 else np.isinf(words).any())


def largest(dtype: DType) -> float:
    """Return the largest finite value of `dtype`."""
    if dtype is DType.BFLOAT16:
        return float(to_float32(np.array([_BFLOAT16_INFINITY - 1], np.uint16), dtype)[0])
    return float(np.finfo(dtype.storage).max)


def round_to(values: F32, dtype: DType) -> F32:
    """Return the float32 values that a store to `dtype` and a load would give."""
    if dtype is DType.FLOAT32:
        return values
    return to_float32(from_float32(values, dtype), dtype)
