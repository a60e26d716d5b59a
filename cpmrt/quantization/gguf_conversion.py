"""Converts a checkpoint of any format to a GGUF file, its matrices in 16 bits or in blocks.

One tensor at a time is in memory, as float32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cpmrt.dtypes import F32, Array, DType, from_float32, largest
from cpmrt.errors import CheckpointError, ConfigError, quoted
from cpmrt.quantization.gguf_blocks import QUANTISERS, quantise_rows
from cpmrt.quantization.gguf_file import GgufWriter, TensorPlan
from cpmrt.quantization.gguf_keys import architecture_row, factor_tensors, model_keys
from cpmrt.quantization.gguf_tokenizer_keys import tokenizer_keys
from cpmrt.quantization.outputs import new_file
from cpmrt.quantization.plain_conversion import plain_weights
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats.blocks import BLOCK_TYPES
from cpmrt.weights.gguf.names import GGUF_SUFFIX, has_gguf_suffix
from cpmrt.weights.gguf.specs import unpaired
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.pack import pack
from cpmrt.weights.ternary import is_ternary

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileType:
    """One type of GGUF files: the block type of most `matrices`, its `number` in llama.cpp, and the type of the `head`
    or of the embedding that it is tied to, where a few more bits cost little."""

    matrices: str
    number: int
    head: str


_INSTEAD = ("Q8_0", "BF16")
"""The types that are taken, the first that fits, where columns make no whole blocks of the type that was asked for."""
_NUMBERS = {
    "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16,
    "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "TQ2_0": 37,
}  # fmt: skip
"""llama.cpp's numbers for the type of most matrices of a file (`general.file_type`)."""
_TERNARY = "TQ2_0"
_NOT_TERNARY = (
    "%d matrices are not -1, 0 or 1 times one scale for each %d columns: tq2_0 rounds them to that, and a model that "
    "was not trained so forgets what it knew; q2_k is the smallest type for others"
)
_WIDE = ("BF16", "F16", "Q8_0")
FILE_TYPES = {
    name.lower(): FileType(name, _NUMBERS[name], name if name in _WIDE else "Q6_K")
    for name in ("BF16", "F16", *QUANTISERS)
}
"""The types by their names on the command line."""


def to_gguf(folder: ModelFolder, target: Path, kind: str) -> None:
    """Make the file `target`, which must not exist, from a model in any format; nothing is left of it after an error.

    `kind` is a key of FILE_TYPES. Matrices whose columns make no whole blocks of that type become Q8_0 or BF16. Raises
    CheckpointError, ConfigError, UnsupportedModelError.
    """
    if not has_gguf_suffix(target.name):
        expected = f"a name that ends with {GGUF_SUFFIX}"
        raise ConfigError("the file to make", expected=expected, actual=quoted(target.name))
    row = architecture_row(folder.config)
    keys = model_keys(folder, FILE_TYPES[kind].number) | tokenizer_keys(folder)
    with Checkpoint.open(folder.path) as checkpoint, new_file(target) as partial:
        sources = dict(plain_weights(folder, checkpoint))
        plans = {row.gguf_name(name): _plan(spec, kind, folder) for name, spec in sources.items()}
        _tell_of_others(plans, kind)
        factors = {name: np.array(values, np.float32) for name, values in factor_tensors(folder.config).items()}
        all_plans = plans | {name: TensorPlan("F32", values.shape) for name, values in factors.items()}
        with GgufWriter(partial, keys, all_plans) as writer:
            for name, values in factors.items():
                writer.write(name, values)
            num_rounded = 0
            for name, spec in sources.items():
                plan = plans[row.gguf_name(name)]
                values = _values(spec, checkpoint, plan.dtype)
                if row.pairs_rows(name):
                    values = _paired(values, folder.config.attention.head_dim)
                num_rounded += plan.dtype == _TERNARY and not is_ternary(values, BLOCK_TYPES[_TERNARY].size)
                writer.write(row.gguf_name(name), _stored(values, plan.dtype))
            if num_rounded:
                _LOG.warning(_NOT_TERNARY, num_rounded, BLOCK_TYPES[_TERNARY].size)


def _plan(spec: TensorSpec, kind: str, folder: ModelFolder) -> TensorPlan:
    """Return the type and shape that a tensor has in the file."""
    if len(spec.shape) == 1:
        return TensorPlan("F32", spec.shape)
    is_tied = spec.name.endswith("embed_tokens.weight") and folder.config.tie_word_embeddings
    wanted = FILE_TYPES[kind].head if spec.product == "head" or is_tied else FILE_TYPES[kind].matrices
    return TensorPlan(next(name for name in (wanted, *_INSTEAD) if _fits(name, spec.sources[0])), spec.shape)


def _tell_of_others(plans: Mapping[str, TensorPlan], kind: str) -> None:
    """Say in the log which matrices have another type than was asked for."""
    asked = (FILE_TYPES[kind].matrices, FILE_TYPES[kind].head)
    others = [plan for plan in plans.values() if len(plan.shape) > 1 and plan.dtype not in asked]
    if others:
        widths = ", ".join(str(width) for width in sorted({plan.shape[1] for plan in others}))
        types = ", ".join(sorted({plan.dtype for plan in others}))
        _LOG.warning(
            "%d matrices of %s columns make no blocks of %s: stored as %s", len(others), widths, asked[0], types
        )


def _fits(name: str, source: Source) -> bool:
    return name not in BLOCK_TYPES or source.shape[1] % BLOCK_TYPES[name].size == 0


def _values(spec: TensorSpec, checkpoint: Checkpoint, dtype: str) -> F32:
    """Return a weight that will be stored as `dtype`. Raises CheckpointError where a value is too large, or not finite.
    """
    values: F32 = pack(spec, checkpoint, DType.FLOAT32)
    # Scales of blocks are in float16, and a block type may have a weight itself as its scale.
    limit = largest(next((row for row in DType if row.safetensors_name == dtype), DType.FLOAT16))
    found = max(float(values.max()), -float(values.min()))
    if not found <= limit:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {quoted(spec.name)} stored as {dtype}",
            expected=f"finite values up to {limit:g}", actual=f"{found:g}",
        )  # fmt: skip
    return values


def _paired(values: F32, head_dim: int) -> F32:
    """Return the rows of heads in pairs, row i at the place `unpaired(...)[i]`."""
    made = np.empty_like(values)
    made[np.array(unpaired(len(values), head_dim))] = values
    return made


def _stored(values: F32, dtype: str) -> Array:
    if dtype in BLOCK_TYPES:
        return quantise_rows(dtype, values)
    return from_float32(values, next(row for row in DType if row.safetensors_name == dtype))
