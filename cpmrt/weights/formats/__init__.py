"""The file formats of quantised matrices. A new one needs a module here, its row below and its case in `repack.cu`."""

from __future__ import annotations

from collections.abc import Iterator

from cpmrt.tensor_spec import Source
from cpmrt.weights.formats.awq import AWQ
from cpmrt.weights.formats.compressed import COMPRESSED
from cpmrt.weights.formats.format import Entries, Format, Shape, StoredTensor
from cpmrt.weights.formats.gptq import GPTQ, GPTQ_HEAD
from cpmrt.weights.formats.marlin import MARLIN
from cpmrt.weights.safetensors import FLOATS

FORMATS = {row.name: row for row in (MARLIN, GPTQ_HEAD, GPTQ, AWQ, COMPRESSED)}
"""The formats by their names. Where several have the same settings, `detect` takes the first that the tensors fit."""


def format_of(source: Source) -> Format:
    """Return the format of a quantised source."""
    assert source.packing is not None, source.name
    return FORMATS[source.packing.format]


def codes_of(module: str, entries: Entries) -> str | None:
    """Find the tensor with a module's codes, in whatever format; None where it is not quantised."""
    return next((name for row in FORMATS.values() if (name := row.codes.of(module)) in entries), None)


def detect(module: str, shape: Shape, packing: str, entries: Entries) -> Format:
    """Find the format of a module [N, K] among those that `WeightQuantization.packing` may stand for."""
    rows = (row for row in FORMATS.values() if (row.settings or row.name) == packing)
    return next(row for row in rows if row.is_meant(module, shape, entries))


def stored_tensors(source: Source) -> Iterator[StoredTensor]:
    """Yield the tensors that a checkpoint must or may have for a source."""
    if source.packing is None:
        yield StoredTensor(source.name, tuple(FLOATS), source.shape)
    elif source.packing.row_bytes:
        yield StoredTensor(source.name, (source.packing.format,), source.shape)
    else:
        yield from format_of(source).tensors(source.name, source.shape, source.packing)
