"""From checkpoint tensors to the weights of an executor: compared with what the model needs, then packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cpmrt.dtypes import Array, DType, from_float32, to_float32
from cpmrt.errors import CheckpointError, UnsupportedModelError
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights import names
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.safetensors import TensorEntry

_DTYPES = {dtype.safetensors_name: dtype for dtype in DType}
_BLOCK = 1 << 18
"""Elements converted at a time: the temporaries (4 bytes an element, a few of them) stay in the cache."""


def check(specs: Sequence[TensorSpec], checkpoint: Checkpoint, *, ignore: Sequence[str] = names.LEFTOVERS) -> None:
    """Compare the sources of all `specs` with the tensors of `checkpoint`.

    Missing and unexpected tensors, wrong shapes and wrong types are listed together in one CheckpointError.
    A tensor that fits a pattern of `ignore` may be there unused. Raises UnsupportedModelError where the
    unexpected tensors are those of a quantised format.
    """
    sources = {source.name: source for spec in specs for source in spec.sources}
    found = checkpoint.entries
    unexpected = [name for name in found if name not in sources and not names.matches(name, ignore)]
    quantised = names.quantised_format(unexpected)
    if quantised is not None:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: the weights are quantised ({quantised})",
            expected=f"plain {' | '.join(_DTYPES)} tensors",
            actual=names.listed([names.quoted(name) for name in unexpected], limit=3),
            fix="use the unquantised checkpoint of this model",
        )
    wrong = [
        f"{names.quoted(name)} {fault}"
        for name, source in sources.items()
        if name in found and (fault := _fault(source, found[name]))
    ]
    faults = (
        ("missing", [names.quoted(name) for name in sources if name not in found]),
        ("unexpected", [names.quoted(name) for name in unexpected]),
        ("wrong", wrong),
    )
    if any(some for _, some in faults):
        raise CheckpointError(
            f"{checkpoint.folder}: the tensors are not those that config.json promises",
            expected=f"{len(sources)} tensors",
            actual="; ".join(f"{len(some)} {kind}: {names.listed(some)}" for kind, some in faults if some),
            fix="check that config.json belongs to these weights",
        )


def pack(spec: TensorSpec, checkpoint: Checkpoint, dtype: DType) -> Array:
    """The weight `spec` in the storage words of `dtype`: the rows of its sources, one after another.

    A single source that is stored as `dtype` already comes as a read-only view of the mapped file; everything
    else as a new array. Raises CheckpointError if a source is missing, is not what the spec says, or has a
    value beyond the range of float16.
    """
    tensors = [_read(source, checkpoint) for source in spec.sources]
    if len(tensors) == 1:
        words, stored = tensors[0]
        # BLAS would copy an unaligned matrix at every call.
        if stored is dtype and words.flags.aligned:
            return words.reshape(spec.shape)
    out = np.empty(spec.num_elements, dtype.storage)
    end = 0
    for source, (words, stored) in zip(spec.sources, tensors, strict=True):
        for block in _converted(words.reshape(-1), stored, dtype):
            if dtype is DType.FLOAT16 and stored is not dtype and np.isinf(block).any():
                raise CheckpointError(
                    f"{checkpoint.folder}: tensor {names.quoted(source.name)} has values beyond float16",
                    fix="use dtype bfloat16 or float32",
                )
            out[end : end + block.size] = block
            end += block.size
    assert end == out.size, f"{spec.name}: its sources do not fill its shape"
    return out.reshape(spec.shape)


def _fault(source: Source, entry: TensorEntry) -> str | None:
    """What is wrong with `entry` as the tensor `source`, in words, or None."""
    if entry.dtype not in _DTYPES:
        return f"(expected {' | '.join(_DTYPES)}, got {entry.dtype})"
    if entry.shape != source.shape:
        return f"(expected {list(source.shape)}, got {names.quoted(list(entry.shape))})"
    return None


def _read(source: Source, checkpoint: Checkpoint) -> tuple[Array, DType]:
    words = checkpoint.view(source.name)
    entry = checkpoint.entries[source.name]
    fault = _fault(source, entry)
    if fault is not None:
        raise CheckpointError(f"{entry.path}: tensor {names.quoted(source.name)} {fault}")
    return words, _DTYPES[entry.dtype]


def _converted(words: Array, stored: DType, dtype: DType) -> Iterator[Array]:
    """Flat `words` of type `stored` as words of `dtype`, block after block."""
    if stored is dtype:
        yield words
        return
    for begin in range(0, words.size, _BLOCK):
        yield from_float32(to_float32(words[begin : begin + _BLOCK], stored), dtype)
