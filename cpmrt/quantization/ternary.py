"""Makes ternary checkpoints: 16-bit tensors whose values are -1, 0 or 1 times the scale of their group of columns.

The scale of a group is max(mean |w|, eps) and its codes are clip(round(w / scale), -1, 1), as in BitCPM's training.
A model that was not trained for it loses most of what it knows.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from cpmrt.dtypes import F32, Array, DType, from_float32, round_to, to_float32
from cpmrt.errors import UnsupportedModelError
from cpmrt.models.decoder import tensor_specs
from cpmrt.quantization.checkpoint_writer import check_quantisable
from cpmrt.quantization.file_writer import SafetensorsWriter, TensorPlan
from cpmrt.quantization.outputs import copy_companions, new_folder
from cpmrt.quantization.recipe import check_finite
from cpmrt.tensor_spec import Source
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import SINGLE_NAME, Checkpoint
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.safetensors import FLOATS

WRITTEN_GROUP_SIZES = (32, 64, 128, 256, -1)
"""The group sizes of the ternary checkpoints that can be made; -1: one group a row."""
_SMALLEST_SCALE = np.float32(1e-5)
_BLOCK = 1 << 22
"""Elements made ternary at a time."""


def ternary_values(values: F32, group_size: int, dtype: DType) -> F32:
    """Make float32 rows [n, K] ternary; -1 makes one group of a row. Scales are rounded to `dtype` first."""
    groups = values.reshape(len(values), -1, values.shape[1] if group_size == -1 else group_size)
    scales = round_to(np.maximum(np.abs(groups).mean(axis=2, keepdims=True), _SMALLEST_SCALE), dtype)
    made: F32 = scales * np.clip(np.rint(groups / scales), -1, 1)
    return made.reshape(values.shape)


def write_ternary(folder: ModelFolder, out: Path, group_size: int) -> None:
    """Make the folder `out`, which must not exist, with the matrices of all layers ternary; the rest stays as it is.

    Raises CheckpointError, also where weights are not finite, ConfigError, or UnsupportedModelError for experts and
    where columns do not make whole groups.
    """
    check_quantisable(folder)
    specs = tensor_specs(folder.config)
    sources = {source.name: source for spec in specs for source in spec.sources}
    layers = {source.name for spec in specs if spec.product not in (None, "head") for source in spec.sources}
    for name in layers:
        _check_columns(sources[name], group_size)
    with Checkpoint.open(folder.path) as checkpoint, new_folder(out) as partial:
        check(specs, checkpoint)
        copy_companions(folder.path, partial)
        plan = {name: TensorPlan(checkpoint.entries[name].dtype, source.shape) for name, source in sources.items()}
        with SafetensorsWriter(partial / SINGLE_NAME, plan) as writer:
            for name in sources:
                words = checkpoint.view(name)
                stored = FLOATS[checkpoint.entries[name].dtype]
                writer.write(name, _ternary_words(name, words, group_size, stored) if name in layers else words)
        (partial / "config.json").write_text(json.dumps(folder.raw_config, indent=2) + "\n")


def _ternary_words(name: str, words: Array, group_size: int, stored: DType) -> Array:
    """Make the stored words [N, K] of a matrix ternary, some rows at a time. Raises CheckpointError."""
    made, step = np.empty_like(words), max(_BLOCK // words.shape[1], 1)
    for begin in range(0, len(words), step):
        values = to_float32(np.ascontiguousarray(words[begin : begin + step]), stored)
        check_finite(name, values)
        made[begin : begin + step] = from_float32(ternary_values(values, group_size, stored), stored)
    return made


def _check_columns(source: Source, group_size: int) -> None:
    if group_size != -1 and source.shape[1] % group_size:
        raise UnsupportedModelError(
            f"{source.name}: columns", expected=f"a multiple of the group size {group_size}", actual=source.shape[1],
            fix="use a smaller --group-size, or -1",
        )  # fmt: skip
