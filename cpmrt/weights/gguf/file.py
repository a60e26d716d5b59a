"""Opens GGUF files through a memory map: no tensor byte is touched before it is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from cpmrt.dtypes import Array
from cpmrt.errors import CheckpointError, quoted
from cpmrt.weights.files import DOWNLOAD_AGAIN, LFS_POINTER, lfs_pointer, open_file, reading
from cpmrt.weights.gguf.header import Value, read_header
from cpmrt.weights.gguf.names import split_paths
from cpmrt.weights.mapped_file import MappedFile, TensorEntry, map_file, unmap
from cpmrt.weights.safetensors import FLOATS


@dataclass(frozen=True, eq=False, slots=True)
class GgufFile(MappedFile):
    """An open, mapped and validated file. Closes at the end of a `with` block.

    Shapes have the outermost dimension first: that of a matrix is [rows, columns], as everywhere in cpmrt.
    """

    version: int
    metadata: Mapping[str, Value]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Map `path` and validate its header. Raises CheckpointError, UnsupportedModelError."""
        with open_file(path) as file, reading(path):
            size = os.fstat(file.fileno()).st_size
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise lfs_pointer(path)
            if size < 24:
                raise CheckpointError(
                    f"{path} is too short", expected="at least 24 bytes", actual=f"{size} bytes",
                    fix=DOWNLOAD_AGAIN,
                )  # fmt: skip
            mapped = map_file(file, path, size)
        try:
            with memoryview(mapped) as data:
                header = read_header(data, path)
        except BaseException:
            unmap(mapped)
            raise
        metadata, entries = MappingProxyType(header.metadata), MappingProxyType(header.entries)
        return cls(path, entries, mapped, header.version, metadata)

    def view(self, name: str) -> Array:
        """Return a tensor as a read-only array of its shape over the mapped file: no copy.

        bfloat16 comes as uint16 words. A tensor in blocks comes as uint8, its last dimension the bytes of a row. Raises
        CheckpointError if there is no such tensor or the file is closed.
        """
        entry, raw = self.bytes_of(name)
        if entry.dtype in FLOATS:
            return raw.view(FLOATS[entry.dtype].storage).reshape(entry.shape)
        return raw.reshape(*entry.shape[:-1], -1)


@dataclass(frozen=True, eq=False, slots=True)
class GgufModel:
    """All files of a model, opened: one, or the parts of a split one. Closes at the end of a `with` block."""

    path: Path
    """The file that the user named; of a split model any of its parts."""
    parts: tuple[GgufFile, ...]
    entries: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, path: Path) -> GgufModel:
        """Open all files of the model that `path` is one of, and check that they belong together.

        Raises CheckpointError, UnsupportedModelError.
        """
        parts: list[GgufFile] = []
        with ExitStack() as opened:
            for number, part_path in enumerate(split_paths(path)):
                part = opened.enter_context(GgufFile.open(part_path))
                parts.append(part)
                _check_part(part, number, path)
            entries = _together(parts, path)
            opened.pop_all()
        return cls(path, tuple(parts), MappingProxyType(entries))

    @property
    def metadata(self) -> Mapping[str, Value]:
        """The keys of the model: those of its first part."""
        return self.parts[0].metadata

    def view(self, name: str) -> Array:
        """Return a tensor as `GgufFile.view` does."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {quoted(name)}")
        return next(part for part in self.parts if part.path == entry.path).view(name)

    def close(self) -> None:
        """Unmap the files; arrays that view them stay valid. May be called again."""
        for part in self.parts:
            part.close()

    def __enter__(self) -> GgufModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _check_part(part: GgufFile, number: int, path: Path) -> None:
    """Compare a part's own number and count with the names of the files."""
    count = len(split_paths(path))
    for key, value in {"split.no": number, "split.count": count}.items():
        found = part.metadata.get(key, value if count == 1 else None)
        # A model that was never split may say so: part 0 of 0.
        if type(found) is not int or (found != value and not (count == 1 and found == 0)):
            raise CheckpointError(
                f"{part.path}: key {quoted(key)}", expected=value, actual=quoted(found),
                fix="keep the names that the files of a split model were downloaded with, such as "
                "model-00001-of-00003.gguf",
            )  # fmt: skip


def _together(parts: Sequence[GgufFile], path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of all parts. Raises CheckpointError where one is there twice or their count is wrong."""
    entries: dict[str, TensorEntry] = {}
    for part in parts:
        for twice in part.entries.keys() & entries.keys():
            where = f"{entries[twice].path.name} and {part.path.name}"
            raise CheckpointError(f"{path}: tensor {quoted(twice)} is in two files", actual=where)
        entries.update(part.entries)
    total = parts[0].metadata.get("split.tensors.count")
    if len(parts) > 1 and total is not None and (type(total) is not int or total != len(entries)):
        raise CheckpointError(
            f"{parts[0].path}: key 'split.tensors.count'", expected=f"{len(entries)}, as the files have",
            actual=quoted(total), fix="the files are of different models: download them again",
        )  # fmt: skip
    return entries
