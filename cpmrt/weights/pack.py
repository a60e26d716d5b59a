"""From checkpoint tensors to the weights of an executor: compared with what the model needs, then packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cpmrt.dtypes import Array, DType, from_float32, to_float32
from cpmrt.errors import CheckpointError, UnsupportedModelError
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights import names
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.packed_formats import FLOATS, PackedTensor, check_shape_tensor, packed_tensors
from cpmrt.weights.quantised import dequantised_blocks
from cpmrt.weights.safetensors import TensorEntry

_BLOCK = 1 << 18
"""Elements converted at a time: the temporaries (4 bytes an element, a few of them) stay in the cache."""


def check(specs: Sequence[TensorSpec], checkpoint: Checkpoint, *, ignore: Sequence[str] = names.LEFTOVERS) -> None:
    """Compare the sources of all `specs` with the tensors of `checkpoint`.

    Missing and unexpected tensors, wrong shapes and wrong types are listed together in one CheckpointError.
    A tensor that fits a pattern of `ignore` may be there unused. Raises UnsupportedModelError where the
    unexpected tensors are those of a quantised format.
    """
    sources = {source.name: source for spec in specs for source in spec.sources}
    wanted = {tensor.name: tensor for source in sources.values() for tensor in _tensors(source)}
    found, is_packed = checkpoint.entries, any(source.packing for source in sources.values())
    unexpected = [name for name in found if name not in wanted and not names.matches(name, ignore)]
    if is_packed:
        unexpected = [name for name in unexpected if not _is_empty_bias(name, checkpoint)]
    quantised = None if is_packed else names.quantised_format(unexpected)
    if quantised is not None:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: the weights are quantised ({quantised}), and config.json does not say how",
            expected=f"plain {' | '.join(FLOATS)} tensors, or a quantization_config",
            actual=names.listed([names.quoted(name) for name in unexpected], limit=3),
            fix="download config.json again, or use the unquantised checkpoint of this model",
        )
    wrong = [
        f"{names.quoted(name)} {fault}"
        for name, tensor in wanted.items()
        if name in found and (fault := _fault(tensor, found[name]))
    ]
    required = [name for name, tensor in wanted.items() if tensor.required]
    faults = (
        ("missing", [names.quoted(name) for name in required if name not in found]),
        ("unexpected", [names.quoted(name) for name in unexpected]),
        ("wrong", wrong),
    )
    if any(some for _, some in faults):
        raise CheckpointError(
            f"{checkpoint.folder}: the tensors are not those that config.json promises",
            expected=f"{len(required)} tensors",
            actual="; ".join(f"{len(some)} {kind}: {names.listed(some)}" for kind, some in faults if some),
            fix="check that config.json belongs to these weights",
        )
    for source in sources.values():
        if source.packing is not None:
            check_shape_tensor(source, checkpoint)


def pack(spec: TensorSpec, checkpoint: Checkpoint, dtype: DType) -> Array:
    """The weight `spec` in the storage words of `dtype`: the rows of its sources, one after another, dequantised.

    A single source that is stored as `dtype` already comes as a read-only view of the mapped file; everything
    else as a new array. Raises CheckpointError if a source is missing, is not what the spec says, or has a
    value beyond the range of float16.
    """
    if len(spec.sources) == 1 and spec.sources[0].packing is None:
        words, stored = _read(spec.sources[0], checkpoint)
        # BLAS would copy an unaligned matrix at every call.
        if stored is dtype and words.flags.aligned:
            return words.reshape(spec.shape)
    out = np.empty(spec.num_elements, dtype.storage)
    end = 0
    for block in pack_blocks(spec, checkpoint, dtype):
        out[end : end + block.size] = block
        end += block.size
    assert end == out.size, f"{spec.name}: its sources do not fill its shape"
    return out.reshape(spec.shape)


def pack_blocks(spec: TensorSpec, checkpoint: Checkpoint, dtype: DType) -> Iterator[Array]:
    """The words of `pack`, flat, block after block: the largest temporaries are a few MiB. Raises as `pack` does."""
    for source in spec.sources:
        yield from _blocks(source, checkpoint, dtype)


def _tensors(source: Source) -> Iterator[PackedTensor]:
    """The tensors that hold a source."""
    if source.packing is None:
        yield PackedTensor(source.name, tuple(FLOATS), source.shape)
    else:
        yield from packed_tensors(source)


def _fault(tensor: PackedTensor, entry: TensorEntry) -> str | None:
    """What is wrong with `entry` as `tensor`, in words, or None."""
    if entry.dtype not in tensor.dtypes:
        return f"(expected {' | '.join(tensor.dtypes)}, got {entry.dtype})"
    if entry.shape != tensor.shape:
        return f"(expected {list(tensor.shape)}, got {names.quoted(list(entry.shape))})"
    return None


def _is_empty_bias(name: str, checkpoint: Checkpoint) -> bool:
    """Whether the tensor is a bias of zeros, which old GPTQ tools gave to layers that have none."""
    return name.endswith(".bias") and checkpoint.entries[name].dtype in FLOATS and not checkpoint.view(name).any()


def _read(source: Source, checkpoint: Checkpoint) -> tuple[Array, DType]:
    words = checkpoint.view(source.name)
    entry = checkpoint.entries[source.name]
    shape = source.shape if source.rows is None else (*entry.shape[:1], *source.shape[1:])
    fault = _fault(PackedTensor(source.name, tuple(FLOATS), shape), entry)
    if fault is not None:
        raise CheckpointError(f"{entry.path}: tensor {names.quoted(source.name)} {fault}")
    return words if source.rows is None else words[np.array(source.rows)], FLOATS[entry.dtype]


def _blocks(source: Source, checkpoint: Checkpoint, dtype: DType) -> Iterator[Array]:
    """The elements of a source as words of `dtype`, block after block. Raises CheckpointError beyond float16."""
    if source.packing is not None:
        for rows in dequantised_blocks(source, checkpoint):
            yield _within_range(from_float32(rows.reshape(-1), dtype), source, checkpoint, dtype)
        return
    words, stored = _read(source, checkpoint)
    words = words.reshape(-1)
    if stored is dtype:
        yield words
        return
    for begin in range(0, words.size, _BLOCK):
        block = from_float32(to_float32(words[begin : begin + _BLOCK], stored), dtype)
        yield _within_range(block, source, checkpoint, dtype)


def _within_range(block: Array, source: Source, checkpoint: Checkpoint, dtype: DType) -> Array:
    if dtype is DType.FLOAT16 and np.isinf(block).any():
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {names.quoted(source.name)} has values beyond float16",
            fix="use dtype bfloat16 or float32",
        )
    return block
