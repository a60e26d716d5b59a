"""The file of a prefix: its tokens and the KV pages that they fill, in the safetensors format.

Tensors: `token_ids` int32 [T], T a multiple of 64; `<cache>.<first page>` [layers, pages, ...] for each cache and each
run of at most RUN pages; `checksums` uint32, the CRC-32 of each of these, in their order. Metadata: `format`, and the
`fingerprint` of the model (`identity`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from cpmrt.dtypes import Array
from cpmrt.errors import CheckpointError, PrefixError, quoted
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.weights.safetensors import SafetensorsFile, encoded_header

_FORMAT_NAME = "cpmrt prefix"
FORMAT = f"{_FORMAT_NAME} 2"
RUN = 8
"""Pages that are copied and written at a time."""
_NAMES = {"uint8": "U8", "int8": "I8", "uint16": "U16", "int32": "I32", "uint32": "U32", "float32": "F32"}
_MAKE_AGAIN = "save the prefix again with this model"

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]]
"""The shape and type of each cache's array [layers, pages, ...]."""


def runs_of(num_pages: int) -> list[range]:
    """Return the runs of pages that are tensors of their own."""
    return [range(first, min(first + RUN, num_pages)) for first in range(0, num_pages, RUN)]


class PrefixWriter:
    """Writes a prefix file run by run. It appears at the end of the `with` block; after an error there is no new file.

    Raises OSError, and PrefixError where something else than a prefix file would be replaced.
    """

    def __init__(self, path: Path, fingerprint: str, token_ids: tuple[int, ...], shapes: Shapes):
        self._path, self._caches = path, tuple(shapes)
        layout = _layout(len(token_ids) // PAGE_SIZE, shapes)
        self._header = _header(fingerprint, len(token_ids), layout)
        self._token_ids = np.array(token_ids, "<i4").tobytes()
        self._checksums = [crc32(self._token_ids)]

    def __enter__(self) -> PrefixWriter:
        _check_replaceable(self._path)
        number, self._temporary = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        self._file = os.fdopen(number, "wb")
        try:
            self._file.write(self._header + self._token_ids)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def add(self, run: Mapping[str, Array]) -> None:
        """Append the next run of pages: for each cache an array [layers, pages, ...]."""
        for cache in self._caches:
            raw = np.ascontiguousarray(run[cache]).data.cast("B")
            self._checksums.append(crc32(raw))
            self._file.write(raw)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._file as file:
                if kind is None:
                    file.write(np.array(self._checksums, "<u4").tobytes())
                    file.flush()
                    os.fsync(file.fileno())
            if kind is None:
                os.replace(self._temporary, self._path)
        finally:
            with suppress(OSError):  # it is renamed by now, unless something has failed
                os.unlink(self._temporary)


def _check_replaceable(path: Path) -> None:
    """Raise PrefixError if there is something at the path that no prefix writer has put there."""
    if not os.path.lexists(path):
        return
    try:
        file = SafetensorsFile.open(path)
        file.close()
        is_prefix = file.metadata.get("format", "").startswith(_FORMAT_NAME)
    except CheckpointError:
        is_prefix = False
    if not is_prefix:
        raise PrefixError(f"{path} is there already and no prefix file", fix="choose another name, or remove it")


@dataclass(frozen=True)
class PrefixFile:
    """An open file whose header fits the model. Its pages are checked while they are read."""

    path: Path
    token_ids: tuple[int, ...]
    _file: SafetensorsFile
    _caches: tuple[str, ...]

    @classmethod
    def open(cls, path: Path, fingerprint: str, shapes: Shapes) -> PrefixFile:
        """Open a file for a model. Raises PrefixError if it is absent, damaged or of another model."""
        try:
            file = SafetensorsFile.open(path)
        except CheckpointError as error:
            raise PrefixError(error.what, expected=error.expected, actual=error.actual, fix=_MAKE_AGAIN) from error
        try:
            if file.metadata.get("format") != FORMAT:
                actual = quoted(file.metadata.get("format"))
                raise PrefixError(f"{path} is no prefix file of this version", expected=FORMAT, actual=actual)
            if file.metadata.get("fingerprint") != fingerprint:
                raise PrefixError(
                    f"{path} was made by another model, or with another dtype, context, kv_dtype, draft or executor",
                    fix=_MAKE_AGAIN,
                )
            tokens = file.entries.get("token_ids")
            num_tokens = tokens.shape[0] if tokens is not None and len(tokens.shape) == 1 else 0
            layout = _layout(num_tokens // PAGE_SIZE, shapes)
            found = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
            if not num_tokens or num_tokens % PAGE_SIZE or found != _tensors(num_tokens, layout):
                raise PrefixError(f"{path} does not hold the pages of its tokens", fix=_MAKE_AGAIN)
            ids = file.view("token_ids")
            if _checksum(ids) != file.view("checksums")[0]:
                raise PrefixError(f"{path} is damaged: the checksum of its tokens does not fit", fix=_MAKE_AGAIN)
        except BaseException:
            file.close()
            raise
        return cls(path, tuple(ids.tolist()), file, tuple(shapes))

    def runs(self) -> Iterator[tuple[range, dict[str, Array]]]:
        """Yield runs of pages with their contents. Raises PrefixError for one that was changed since it was written."""
        checksums = iter(self._file.view("checksums")[1:].tolist())
        for pages in runs_of(len(self.token_ids) // PAGE_SIZE):
            run = {cache: self._file.view(f"{cache}.{pages.start}") for cache in self._caches}
            for array in run.values():
                if _checksum(array) != next(checksums):
                    raise PrefixError(f"{self.path} is damaged: a checksum does not fit", fix=_MAKE_AGAIN)
            yield pages, run

    def close(self) -> None:
        self._file.close()


def _checksum(array: Array) -> int:
    return crc32(np.ascontiguousarray(array).data.cast("B"))


Layout = dict[str, tuple[str, tuple[int, ...]]]
"""The type and shape of each tensor with pages, in the order of the file."""


def _layout(num_pages: int, shapes: Shapes) -> Layout:
    layout: Layout = {}
    for pages in runs_of(num_pages):
        for cache, ((layers, _, *page), dtype) in shapes.items():
            layout[f"{cache}.{pages.start}"] = _NAMES[dtype.name], (layers, len(pages), *page)
    return layout


def _tensors(num_tokens: int, layout: Layout) -> Layout:
    """Return the type and shape of all tensors, in the order of the file."""
    return {"token_ids": ("I32", (num_tokens,)), **layout, "checksums": ("U32", (1 + len(layout),))}


def _header(fingerprint: str, num_tokens: int, layout: Layout) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": FORMAT, "fingerprint": fingerprint}}
    sizes, begin = {short: np.dtype(name).itemsize for name, short in _NAMES.items()}, 0
    for name, (dtype, shape) in _tensors(num_tokens, layout).items():
        end = begin + int(np.prod(shape)) * sizes[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    return encoded_header(fields)
