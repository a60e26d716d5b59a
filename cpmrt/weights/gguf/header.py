"""Reads the header of a GGUF file: the keys with their values, and where each tensor lies.

All numbers are little-endian: the magic "GGUF", the version, the numbers of tensors and of keys, the keys, the tensors'
descriptions, then the tensors themselves, each at a multiple of the alignment (format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Every length is compared with what the file has left before
it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from cpmrt.dtypes import Array, DType
from cpmrt.errors import CheckpointError, UnsupportedModelError, listed, quoted
from cpmrt.weights.files import DOWNLOAD_AGAIN
from cpmrt.weights.formats.blocks import BLOCK_TYPES
from cpmrt.weights.mapped_file import TensorEntry

Value = int | float | bool | str | list[str] | Array
"""The value of a key: one number or text, a list of texts, or an array of numbers."""

MAX_HEADER_BYTES = 100_000_000
"""The longest header that is read; the largest vocabularies take a tenth of it."""
MAX_COUNT = 1 << 16
"""The most keys, and the most tensors, of a file: each becomes objects in Python. Models have at most thousands."""
MAX_NAME_BYTES = 64
"""The longest name of a tensor, by the format."""
MAX_KEY_BYTES = 65535
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
VERSIONS = (2, 3)
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
"""The format's numbers of the types of values."""
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", UINT32: "<u4", INT32: "<i4", FLOAT32: "<f4", BOOL: "<u1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
"""The format's number of a value's type -> the NumPy type that reads it."""
FLOAT_NUMBERS = {0: DType.FLOAT32, 1: DType.FLOAT16, 30: DType.BFLOAT16}
"""The format's numbers of the tensor types without blocks -> the type."""
_BLOCK_NUMBERS = {row.number: row for row in BLOCK_TYPES.values()}
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
SUPPORTED_TYPES = (*(dtype.safetensors_name for dtype in FLOAT_NUMBERS.values()), *BLOCK_TYPES)


@dataclass(frozen=True)
class Header:
    """The checked header of a file: its version, its keys with values, and the places of its tensors.

    The tensors lie inside the file, one after another.
    """

    version: int
    metadata: dict[str, Value]
    entries: dict[str, TensorEntry]


class _Reader:
    """A cursor over the bytes of a header; reading what does not fit the file raises CheckpointError."""

    def __init__(self, data: memoryview, path: Path):
        self.data, self.path, self.place = data, path, 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def fail(
        self, what: str, expected: object = None, actual: object = None, fix: str | None = None
    ) -> CheckpointError:
        """Return the CheckpointError for `what` in this file."""
        return CheckpointError(f"{self.path}: {what}", expected=expected, actual=actual, fix=fix)

    def take(self, nbytes: int, what: str) -> memoryview:
        """Return the next `nbytes` bytes; `what` names them in errors."""
        left = self.end - self.place
        if nbytes > left:
            raise self.fail(
                f"{what} reaches beyond the file" if self.end == len(self.data) else f"{what}: the header is too long",
                expected=f"at most {left} bytes more", actual=quoted(nbytes), fix=DOWNLOAD_AGAIN,
            )  # fmt: skip
        self.place += nbytes
        return self.data[self.place - nbytes : self.place]

    def number(self, kind: str, what: str) -> Any:
        """Return the next number, little-endian, of the type that `struct` calls `kind`."""
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what))[0]

    def count(self, smallest: int, what: str, limit: int | None = None) -> int:
        """Return the next number, a count of things that take at least `smallest` bytes each, at most `limit` of them.
        """
        count: int = self.number("Q", what)
        most = (self.end - self.place) // smallest
        if count > most:
            raise self.fail(what, expected=f"at most {most} in so large a file", actual=count, fix=DOWNLOAD_AGAIN)
        if limit is not None and count > limit:
            raise self.fail(what, expected=f"at most {limit}", actual=count)
        return count

    def string(self, what: str, low: int = 0, high: int = MAX_HEADER_BYTES) -> str:
        """Return the next string, of `low` to `high` bytes."""
        length: int = self.number("Q", f"the length of {what}")
        if not low <= length <= high:
            raise self.fail(f"the length of {what}", expected=f"{low} to {high} bytes", actual=length)
        raw = self.take(length, what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8", actual=f"byte {raw[error.start]:#04x} at {error.start}") from error

    def strings(self, count: int, what: str) -> list[str]:
        """Return the next strings, of any length.

        A vocabulary has a hundred thousand, so they are read in one tight loop up to the first that is wrong; `string`
        then raises the error for it.
        """
        found, begin = list[str](), self.place + 8
        with suppress(struct.error, UnicodeDecodeError):
            while len(found) < count:
                end = begin + _LENGTH.unpack_from(self.data, begin - 8)[0]
                if end > self.end:
                    break
                found.append(str(self.data[begin:end], "utf-8"))
                begin = end + 8
        self.place = begin - 8
        return found + [self.string(f"{what}, string {index}") for index in range(len(found), count)]


def read_header(data: memoryview, path: Path) -> Header:
    """Read and check the header at the beginning of `data`, a whole file.

    Raises CheckpointError; UnsupportedModelError for a version or a type of tensors that is not supported.
    """
    reader = _Reader(data, path)
    version = _version(reader)
    num_tensors = reader.count(24, "the number of tensors", MAX_COUNT)
    num_keys = reader.count(13, "the number of keys", MAX_COUNT)
    metadata: dict[str, Value] = {}
    for index in range(num_keys):
        key = reader.string(f"key {index}", 1, MAX_KEY_BYTES)
        if key in metadata:
            raise reader.fail(f"key {quoted(key)} is there twice")
        metadata[key] = _value(reader, f"key {quoted(key)}")
    described = list(_tensors(reader, num_tensors))
    alignment = _alignment(reader, metadata)
    start = -(-reader.place // alignment) * alignment
    return Header(version, metadata, _entries(reader, described, start, alignment))


def _version(reader: _Reader) -> int:
    magic = bytes(reader.take(4, "the magic"))
    if magic != b"GGUF":
        raise reader.fail("this is no GGUF file", expected=repr(b"GGUF"), actual=repr(magic), fix=DOWNLOAD_AGAIN)
    version: int = reader.number("I", "the version")
    if version in VERSIONS:
        return version
    found = f"{version >> 24} in big-endian order" if version & 0xFFFF == 0 else str(version)
    raise UnsupportedModelError(
        f"{reader.path}: GGUF version", expected="2 or 3 in little-endian order", actual=found,
        fix="convert the model again with a current tool",
    )  # fmt: skip


def _value(reader: _Reader, what: str) -> Value:
    kind: int = reader.number("I", f"the type of {what}")
    if kind == STRING:
        return reader.string(what)
    if kind == ARRAY:
        return _array(reader, what)
    value = _numbers(reader, kind, 1, what)[0].item()
    return bool(value) if kind == BOOL else value


def _array(reader: _Reader, what: str) -> list[str] | Array:
    kind: int = reader.number("I", f"the type of the elements of {what}")
    if kind == ARRAY:
        raise UnsupportedModelError(f"{reader.path}: {what}", expected="numbers or strings", actual="a list of lists")
    if kind != STRING:
        width = np.dtype(_NUMBERS[kind]).itemsize if kind in _NUMBERS else 1
        return _numbers(reader, kind, reader.count(width, f"the length of {what}"), what)
    count = reader.count(8, f"the length of {what}")
    return reader.strings(count, what)


def _numbers(reader: _Reader, kind: int, count: int, what: str) -> Array:
    if kind not in _NUMBERS:
        raise reader.fail(f"the type of {what}", expected="0 to 12", actual=kind)
    dtype = np.dtype(_NUMBERS[kind])
    values: Array = np.frombuffer(reader.take(count * dtype.itemsize, what), dtype)
    if kind == BOOL and (values > 1).any():
        raise reader.fail(what, expected="0 or 1 for a truth value", actual=int(values.max()))
    return values.astype(np.bool_) if kind == BOOL else values.copy()  # no view: the file will be unmapped


def _alignment(reader: _Reader, metadata: dict[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power = type(value) is int and 8 <= value <= MAX_ALIGNMENT and value & value - 1 == 0
    if not is_power:
        expected = f"a power of 2 in [8, {MAX_ALIGNMENT}]"
        raise reader.fail("key 'general.alignment'", expected=expected, actual=quoted(value))
    assert isinstance(value, int)
    return value


@dataclass(frozen=True)
class _Described:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


def _tensors(reader: _Reader, count: int) -> Iterator[_Described]:
    """Yield the descriptions of tensors, with the outermost dimension first; the file has the innermost first."""
    seen: set[str] = set()
    for index in range(count):
        name = reader.string(f"the name of tensor {index}", 1, MAX_NAME_BYTES)
        where = f"tensor {quoted(name)}"
        if name in seen:
            raise reader.fail(f"{where} is there twice")
        seen.add(name)
        num_dims: int = reader.number("I", f"{where}: the number of dimensions")
        if not 1 <= num_dims <= MAX_DIMS:
            raise reader.fail(f"{where}: the number of dimensions", expected=f"1 to {MAX_DIMS}", actual=num_dims)
        dims = struct.unpack(f"<{num_dims}Q", reader.take(8 * num_dims, f"{where}: its shape"))
        dtype, size, nbytes = _type(reader, reader.number("I", f"{where}: its type"), where)
        if 0 in dims or prod(dims) > len(reader.data) * size:
            raise reader.fail(
                f"{where}: its shape", expected="sizes from 1 that fit the file", actual=quoted(list(dims[::-1])),
                fix=DOWNLOAD_AGAIN,
            )  # fmt: skip
        if dims[0] % size:
            expected = f"a multiple of {size} columns for {dtype}"
            raise reader.fail(f"{where}: its shape", expected=expected, actual=list(dims[::-1]))
        offset: int = reader.number("Q", f"{where}: its place")
        yield _Described(name, dtype, dims[::-1], prod(dims) // size * nbytes, offset)


def _type(reader: _Reader, number: int, where: str) -> tuple[str, int, int]:
    """Return the name of a tensor type, and the elements and bytes of one of its blocks (1 element without blocks)."""
    if number in FLOAT_NUMBERS:
        dtype = FLOAT_NUMBERS[number]
        return dtype.safetensors_name, 1, dtype.itemsize
    if number in _BLOCK_NUMBERS:
        row = _BLOCK_NUMBERS[number]
        return row.name, row.size, row.nbytes
    raise UnsupportedModelError(
        f"{reader.path}: {where} has a type that is not supported", expected=listed(SUPPORTED_TYPES, 99),
        actual=_OTHER_TYPES.get(number, f"type {number}"), fix="download the model in one of these types",
    )  # fmt: skip


def _entries(reader: _Reader, described: list[_Described], start: int, alignment: int) -> dict[str, TensorEntry]:
    """Return the places of the tensors, in the order of their descriptions.

    Raises CheckpointError unless they follow one another, each at the next multiple of the alignment, to the end of the
    file.
    """
    end, entries = 0, dict[str, TensorEntry]()
    for tensor in sorted(described, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        where, place = f"tensor {quoted(tensor.name)}", -(-end // alignment) * alignment
        if tensor.offset != place:
            fault = "overlaps another tensor" if tensor.offset < end else "is not where the one before it ends"
            raise reader.fail(f"{where} {fault}", expected=f"it at byte {place} of the data", actual=tensor.offset)
        end = tensor.offset + tensor.nbytes
        if start + end > len(reader.data):
            raise reader.fail(
                f"{where} reaches beyond the file", expected=f"at least {start + end} bytes",
                actual=f"{len(reader.data)} bytes", fix=DOWNLOAD_AGAIN,
            )  # fmt: skip
        entries[tensor.name] = TensorEntry(
            tensor.name, tensor.dtype, tensor.shape, reader.path, start + tensor.offset, tensor.nbytes
        )
    if described and len(reader.data) - start > -(-end // alignment) * alignment:
        raise reader.fail(
            "bytes that belong to no tensor", expected=f"{start + end} bytes", actual=f"{len(reader.data)} bytes"
        )
    return {tensor.name: entries[tensor.name] for tensor in described}
