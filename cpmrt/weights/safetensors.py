"""Reads safetensors files through a memory map: no tensor byte is touched before it is asked for.

A file is the length of its header (8 bytes, little-endian), a JSON header with dtype, shape and place of each
tensor, then the tensors back to back (format: https://github.com/huggingface/safetensors#format). The whole
header is validated at once, so every view lies inside the file and no two views share a byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from cpmrt.dtypes import Array, DType
from cpmrt.errors import CheckpointError, quoted
from cpmrt.weights.files import DOWNLOAD_AGAIN, LFS_POINTER, lfs_pointer, open_file, parse_object, reading
from cpmrt.weights.mapped_file import MappedFile, TensorEntry, map_file

FLOATS = {dtype.safetensors_name: dtype for dtype in DType}
"""The types in which weights that are not quantised are stored, by the format's names."""
MAX_HEADER_BYTES = 1 << 24
"""The longest header that is read: that of some hundred thousand tensors. The format allows 100 MB, of which JSON that
describes no tensors makes gigabytes of objects."""
_LENGTH_BYTES = 8
_MAX_DIMS = 32
"""The most dimensions that an array of NumPy 1 can have."""
_MAX_BYTES = 2**63 - 1

_WORDS = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "C64": "<c8", "F8_E4M3": "u1",
    "F8_E5M2": "u1", "F8_E8M0": "u1", "F8_E4M3FNUZ": "u1", "F8_E5M2FNUZ": "u1",
}  # fmt: skip
# dtype -> bits an element, and the type that holds its words (unsigned where NumPy lacks the type).
_DTYPES: dict[str, tuple[int, np.dtype[Any]]] = {
    **{name: (8 * np.dtype(words).itemsize, np.dtype(words)) for name, words in _WORDS.items()},
    **{name: (int(name[1]), np.dtype("u1")) for name in ("F6_E2M3", "F6_E3M2", "F4")},
}


def encoded_header(fields: Mapping[str, object]) -> bytes:
    """Return the bytes of a file before its first tensor, for a header with these fields: a multiple of 8 bytes."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


@dataclass(frozen=True, eq=False, slots=True)
class SafetensorsFile(MappedFile):
    """An open, mapped and validated file. Closes at the end of a `with` block."""

    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Map `path` and validate its header (milliseconds, whatever the size). Raises CheckpointError."""
        with open_file(path) as file, reading(path):
            size = os.fstat(file.fileno()).st_size
            header = _read_header(file, path, size)
            start = _LENGTH_BYTES + len(header)
            fields = parse_object(header, f"{path}: header", unique_keys=True)
            metadata = _metadata(path, fields.pop("__metadata__", {}))
            entries = {name: _entry(path, name, value, start, size) for name, value in fields.items()}
            _check_layout(path, entries.values(), start, size)
            mapped = map_file(file, path, size)
        return cls(path, MappingProxyType(entries), mapped, MappingProxyType(metadata))

    def view(self, name: str) -> Array:
        """Return the tensor as a read-only array over the mapped file: no copy.

        bfloat16 comes as uint16 words, 8-bit floats and booleans as uint8; types of 4 and 6 bits as the flat
        bytes they are packed in. Raises CheckpointError if there is no such tensor or the file is closed.
        """
        entry, raw = self.bytes_of(name)
        bits, storage = _DTYPES[entry.dtype]
        return raw if bits % 8 else raw.view(storage).reshape(entry.shape)


def _read_header(file: BinaryIO, path: Path, size: int) -> bytes:
    if size < _LENGTH_BYTES:
        raise CheckpointError(
            f"{path} is too short", expected="at least 8 bytes", actual=f"{size} bytes", fix=DOWNLOAD_AGAIN
        )
    head = file.read(_LENGTH_BYTES)
    if LFS_POINTER.startswith(head):
        raise lfs_pointer(path)
    length = int.from_bytes(head, "little")
    limit = min(MAX_HEADER_BYTES, size - _LENGTH_BYTES)
    if not 0 < length <= limit:
        raise CheckpointError(
            f"{path}: header length", expected=f"1 to {limit} bytes", actual=length, fix=DOWNLOAD_AGAIN
        )
    header = file.read(length)
    if len(header) < length:
        raise CheckpointError(f"{path} became shorter while it was read")
    return header


def _metadata(path: Path, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: __metadata__", expected="an object", actual=quoted(value))
    for key, text in value.items():
        if not isinstance(text, str):
            raise CheckpointError(f"{path}: __metadata__ entry {quoted(key)}", expected="a string", actual=quoted(text))
    return value


def _entry(path: Path, name: str, fields: object, start: int, size: int) -> TensorEntry:
    """Validate one tensor of the header; `start` is where the tensors begin in the file of `size` bytes."""
    where = f"{path}: tensor {quoted(name)}"
    if not isinstance(fields, dict):
        raise CheckpointError(where, expected="an object", actual=quoted(fields))
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"{where}: dtype", expected=" | ".join(_DTYPES), actual=quoted(dtype))
    shape = _sizes(f"{where}: shape", fields.get("shape"))
    offsets = _sizes(f"{where}: data_offsets", fields.get("data_offsets"))
    if len(shape) > _MAX_DIMS:
        raise CheckpointError(f"{where}: shape", expected=f"at most {_MAX_DIMS} dimensions", actual=len(shape))
    bits = _DTYPES[dtype][0]
    if prod(dim for dim in shape if dim) * bits > _MAX_BYTES * 8:
        raise CheckpointError(f"{where}: shape is too large", actual=quoted(list(shape)))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets", expected="[begin, end]", actual=quoted(list(offsets)))
    if offsets[1] > size - start:
        raise CheckpointError(
            f"{where} reaches beyond the file",
            expected=f"an end of at most {size - start}",
            actual=quoted(offsets[1]),
            fix=DOWNLOAD_AGAIN,
        )
    num_bits = prod(shape) * bits
    nbytes, odd_bits = divmod(num_bits, 8)
    if odd_bits or nbytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where}: data_offsets do not fit dtype and shape",
            expected=f"{num_bits / 8 if odd_bits else nbytes} bytes for {dtype} {list(shape)}",
            actual=f"{offsets[1] - offsets[0]} bytes",
        )
    return TensorEntry(name, dtype, shape, path, start + offsets[0], nbytes)


def _sizes(where: str, value: object) -> tuple[int, ...]:
    """Check that a value is a JSON list of integers >= 0 (a bool is not one)."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise CheckpointError(where, expected="a list of integers >= 0", actual=quoted(value))
    return tuple(value)


def _check_layout(path: Path, entries: Iterable[TensorEntry], start: int, size: int) -> None:
    """Check that the tensors fill the file to its last byte, without overlaps and holes."""
    end = start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != end:
            fault = "overlaps another tensor" if entry.offset < end else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: tensor {quoted(entry.name)} {fault}",
                expected=f"begin {end - start}",
                actual=entry.offset - start,
            )
        end += entry.nbytes
    if end != size:
        raise CheckpointError(
            f"{path} has bytes that belong to no tensor", expected=f"{end} bytes", actual=f"{size} bytes"
        )
