"""Opens a checkpoint, the safetensors files of a folder or a GGUF file, and gives all its tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from cpmrt.caller_warnings import warn_caller
from cpmrt.dtypes import Array
from cpmrt.errors import CheckpointError, listed, quoted
from cpmrt.weights.gguf.names import has_gguf_suffix, is_gguf
from cpmrt.weights.mapped_file import TensorEntry
from cpmrt.weights.model_files import is_there, read_json
from cpmrt.weights.safetensors import SafetensorsFile

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONVERT_PICKLES = (
    "pickled weights can run code and are not read; convert them in their folder: "
    "pip install torch safetensors && "
    'python -c "import glob, torch, safetensors.torch as s; w = {}; '
    "[w.update(torch.load(f, map_location='cpu', weights_only=True)) "
    "for f in sorted(glob.glob('{pattern}'))]; "
    "s.save_file({k: v.contiguous().clone() for k, v in w.items()}, 'model.safetensors')\""
)
"""The advice in the error for a checkpoint of .bin files; {pattern} stands for their names."""


LANGUAGE_MODEL = ("llm.", "language_model.")
"""Prefixes of the language model's tensors in checkpoints that also have an encoder of images or sound."""
_FIRST_TENSOR = "model.embed_tokens.weight"


class TensorFile(Protocol):
    """An open file of tensors."""

    def view(self, name: str) -> Array: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False, slots=True)
class Checkpoint:
    """All tensors of a model, mapped and validated. Closes at the end of a `with` block.

    `entries` maps the Hugging Face name of each tensor to its entry, whose own `name` is that in the file. Of a model
    that also sees or hears there are only the tensors of the language model, without their prefix. `pairs` maps the
    names of the tensors whose rows lie in pairs (row j of a head, then its row j + half a head) to the rows of a head.
    """

    folder: Path
    """The folder, or the GGUF file."""
    entries: Mapping[str, TensorEntry]
    _files: Mapping[Path, TensorFile]
    pairs: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open the files of `model.safetensors.index.json`, else `model.safetensors`, else the folder's only
        .safetensors file, else its only `model_gptq*.safetensors`; or a GGUF file with its other parts.

        Raises CheckpointError where there is nothing to open, a file is not valid or the index contradicts the files;
        for a GGUF file also UnsupportedModelError.
        """
        if is_gguf(folder):
            return cls._of_gguf(folder)
        shard_of = read_index(folder / INDEX_NAME) if is_there(folder / INDEX_NAME) else None
        names = select_files(_names(folder), shard_of, str(folder))
        files: dict[Path, SafetensorsFile] = {}
        entries: dict[str, TensorEntry] = {}
        with ExitStack() as opened:
            for name in names:
                file = opened.enter_context(SafetensorsFile.open(folder / name))
                files[file.path] = file
                for twice in file.entries.keys() & entries.keys():
                    raise CheckpointError(
                        f"{folder}: tensor {quoted(twice)} is in two files",
                        actual=f"{entries[twice].path.name} and {name}",
                    )
                entries.update(file.entries)
            if shard_of is not None:
                _check_index(folder, shard_of, entries)
            opened.pop_all()
        return cls(folder, MappingProxyType(_language_part(folder, entries)), files)

    @classmethod
    def _of_gguf(cls, path: Path) -> Checkpoint:
        from cpmrt.weights.gguf.tensors import open_tensors

        model, entries, pairs = open_tensors(path)
        return cls(path, MappingProxyType(entries), {part.path: part for part in model.parts}, pairs)

    @property
    def is_gguf(self) -> bool:
        """Whether the tensors come from GGUF files."""
        return any(has_gguf_suffix(path.name) for path in self._files)

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def view(self, name: str) -> Array:
        """Return the tensor as a read-only array over its mapped file, as `SafetensorsFile.view` gives it."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} has no tensor {quoted(name)}")
        return self._files[entry.path].view(entry.name)

    def release(self) -> None:
        """Give the memory of the bytes read so far back to the system; arrays that view them stay valid."""
        for file in self._files.values():
            file.release()

    def close(self) -> None:
        """Unmap the files; arrays that view them stay valid. May be called again."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _language_part(folder: Path, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of the language model by their names without its prefix; warns of tensors left out."""
    prefix = next((prefix for prefix in LANGUAGE_MODEL if prefix + _FIRST_TENSOR in entries), None)
    if prefix is None or _FIRST_TENSOR in entries:
        return entries
    kept = {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}
    others = sorted({f"{name.split('.')[0]}.*" for name in entries if not name.startswith(prefix)})
    if others:
        warn_caller(
            f"{folder}: only the language model runs ({quoted(prefix + '*')}); {len(entries) - len(kept)} tensors "
            f"beside it are left out: {listed(others)}"
        )
    return kept


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor from an index, checked to be a plain name. Raises CheckpointError."""
    weight_map = read_json(path, unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: weight_map", expected="an object of tensor and file names", actual=quoted(weight_map)
        )
    for tensor, name in weight_map.items():
        # A name with a separator or a NUL could reach a file outside the folder.
        if not isinstance(name, str) or not name.endswith(".safetensors") or any(c in name for c in "/\\\0"):
            raise CheckpointError(
                f"{path}: file of tensor {quoted(tensor)}",
                expected="a plain name that ends with .safetensors",
                actual=quoted(name),
            )
    return weight_map


def _check_index(folder: Path, shard_of: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
    for tensor, name in shard_of.items():
        entry = entries.get(tensor)
        if entry is None or entry.path.name != name:
            raise CheckpointError(
                f"{folder / INDEX_NAME}: tensor {quoted(tensor)}",
                expected=f"it in {name}",
                actual=f"it in {entry.path.name}" if entry else "it in no file",
                fix="index and files are of different models: download them again",
            )


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not a folder that can be read: {error}") from error


def select_files(names: Sequence[str], shard_of: Mapping[str, str] | None, where: str) -> list[str]:
    """Return which of the files in a folder or repository (`names`) hold its weights: all that the index `shard_of`
    (tensor -> file) names, else the one file that `Checkpoint.open` takes.

    `where` names the folder in errors. Raises CheckpointError.
    """
    if shard_of is not None:
        return sorted(set(shard_of.values()))
    present = sorted(names)
    if SINGLE_NAME in present:
        return [SINGLE_NAME]
    candidates = [name for name in present if name.endswith(".safetensors")]
    # Beside other weights CPM.cu keeps its own in model_gptq_marlin.safetensors or model_gptq.safetensors.
    marlin = [name for name in candidates if name.startswith("model_gptq")]
    for found in (candidates, marlin):
        if len(found) == 1:
            return found
    if candidates:
        raise CheckpointError(
            f"{where} has several safetensors files and no {INDEX_NAME}",
            actual=listed([quoted(name) for name in candidates]),
            fix="add the index, or leave one file",
        )
    raise _nothing_to_open(where, present)


def _nothing_to_open(where: str, present: Sequence[str]) -> CheckpointError:
    found = listed([quoted(name) for name in present]) or "an empty folder"
    pickles = [name for name in present if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        # No file name goes into a command line that a user may paste: only a pattern.
        stem = "pytorch_model*" if pickles[-1].startswith("pytorch_model") else "*"
        fix = CONVERT_PICKLES.replace("{pattern}", stem + Path(pickles[-1]).suffix)
    elif any(has_gguf_suffix(name) for name in present):
        fix = "name the .gguf file itself (of a hub: ORG/NAME:FILE)"
    else:
        fix = "name the folder that holds config.json and the weights"
    return CheckpointError(
        f"{where} has no safetensors weights",
        expected=f"{INDEX_NAME}, {SINGLE_NAME} or one other *.safetensors",
        actual=found,
        fix=fix,
    )
