"""Finds ternary weights among 16-bit ones: checkpoints whose every value is -1, 0 or 1 times the scale of its group.

Quantisation-aware training leaves such "fake-quantised" files (BitCPM). A group is 32, 64 or 128 neighbouring columns;
where a larger one shares a scale (256, a whole row), its parts of 128 do too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cpmrt.config import WeightQuantization
from cpmrt.dtypes import F32, to_float32
from cpmrt.errors import CheckpointError, UnsupportedModelError, quoted
from cpmrt.tensor_spec import Quantization, Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.safetensors import FLOATS

TERNARY_BITS = 2
_HELD_GROUP_SIZES = (128, 64, 32)
"""The group sizes in which 2-bit weights are held, the largest first: those that kernels take."""
NOT_TERNARY = "values that are not -1, 0 or 1 times the scale of their group, as others are"
KEEP_16_BITS = 'keep it in 16 bits: load_format="safetensors" (--load-format safetensors)'
_SAMPLED_ROWS = 8


def is_ternary(values: F32, group_size: int) -> bool:
    """Whether every group of float32 rows [n, K] has at most one magnitude other than zero."""
    magnitudes = np.abs(values).reshape(-1, group_size)
    largest = magnitudes.max(axis=1, keepdims=True)
    return bool(((magnitudes == 0) | (magnitudes == largest)).all())


def ternary_specs(specs: Sequence[TensorSpec], checkpoint: Checkpoint) -> tuple[TensorSpec, ...]:
    """Return `specs` with 2-bit codes for the 16-bit matrices that are ternary by a few of their rows.

    If the matrix in the middle of the list is not ternary, no other one is looked at. The rows that are not read here
    are checked when they are loaded.
    """
    plain = [spec for spec in specs if _has_ternary_kernels(spec) and spec.quant is None]
    if not plain or _group_size(plain[len(plain) // 2], checkpoint) is None:
        return tuple(specs)
    sizes = {spec.name: _group_size(spec, checkpoint) for spec in plain}
    return tuple(
        replace(spec, quant=Quantization(TERNARY_BITS, size)) if (size := sizes.get(spec.name)) else spec
        for spec in specs
    )


def declared_ternary(spec: TensorSpec, settings: WeightQuantization) -> TensorSpec:
    """Return a spec with the 2-bit codes that `settings` declare if it is a matrix of a layer; any other as it is."""
    if not _has_ternary_kernels(spec) or spec.product == "head":
        return spec
    size = min(settings.group_of(spec.shape[1]), max(_HELD_GROUP_SIZES))
    if spec.shape[1] % size:
        raise UnsupportedModelError(
            f"{quoted(spec.name)}: columns of a ternary weight", expected=f"a multiple of {size}", actual=spec.shape[1]
        )
    return replace(spec, quant=Quantization(TERNARY_BITS, size))


def not_ternary(tensor: str, checkpoint: Checkpoint) -> CheckpointError:
    """Return the error for a tensor that is not ternary although its sampled rows, or config.json, say so."""
    return CheckpointError(
        f"{checkpoint.folder}: tensor {quoted(tensor)} has {NOT_TERNARY}", fix=KEEP_16_BITS
    )


def _has_ternary_kernels(spec: TensorSpec) -> bool:
    """Whether a weight is a matrix of a product that takes 2-bit codes; experts and `per_head` matrices are not."""
    return spec.product not in (None, "per_head") and not spec.num_experts


def _group_size(spec: TensorSpec, checkpoint: Checkpoint) -> int | None:
    """Return the largest group size with which the sampled rows of all sources are ternary, or None."""
    samples = [_sample(source, checkpoint) for source in spec.sources]
    for size in _HELD_GROUP_SIZES:
        if spec.shape[1] % size == 0 and all(rows is not None and is_ternary(rows, size) for rows in samples):
            return size
    return None


def _sample(source: Source, checkpoint: Checkpoint) -> F32 | None:
    """Read a few rows of a 16-bit source; None if the tensor is not in 16 bits, has no rows, or they are all zeros."""
    entry = checkpoint.entries.get(source.name)
    if source.packing or entry is None or entry.dtype not in FLOATS or entry.shape[1:] != source.shape[1:]:
        return None
    if not entry.shape[0]:
        return None
    rows = np.linspace(0, entry.shape[0] - 1, _SAMPLED_ROWS).astype(int)  # np.unique would import numpy.ma
    values = to_float32(np.ascontiguousarray(checkpoint.view(source.name)[rows]), FLOATS[entry.dtype])
    return values if values.any() else None
