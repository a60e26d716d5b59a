"""Reads the small files in a model's folder, such as config.json and tokenizer.json.

A GGUF file counts as a folder with the files that can be made from its keys: `model.gguf/config.json`.
"""

from __future__ import annotations

from pathlib import Path

from cpmrt.weights import files
from cpmrt.weights.files import MAX_JSON_BYTES, parse_object
from cpmrt.weights.gguf.names import is_gguf


def is_there(path: Path) -> bool:
    """Whether a folder, or GGUF file, has a file of that name; a link that leads nowhere counts as one.

    Only an absent file counts as absent: whatever else keeps it from being found raises CheckpointError.
    """
    if not is_gguf(path.parent):
        return files.is_there(path)
    from cpmrt.weights.gguf.folder import has_member

    return has_member(path.parent, path.name)


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return all bytes of a file. Raises CheckpointError if it cannot be opened or read, or has more than `max_bytes`.
    """
    made = None
    if is_gguf(path.parent):
        from cpmrt.weights.gguf.folder import read_member

        made = read_member(path.parent, path.name)
    return files.read_file(path, max_bytes) if made is None else files.bounded(made, path, max_bytes)


def read_json(path: Path, *, unique_keys: bool = False) -> dict[str, object]:
    """Read the object in a JSON file such as config.json or tokenizer_config.json.

    NaN and Infinity are accepted, as Python's own writer makes them; `unique_keys` as in `parse_object`.
    Raises CheckpointError if the file is missing, over 10 MB, not UTF-8, not JSON or not an object.
    """
    return parse_object(read_file(path, MAX_JSON_BYTES), str(path), unique_keys=unique_keys)


def read_json_if_there(path: Path) -> dict[str, object] | None:
    """Read the object in a JSON file as `read_json` does; None if the folder has no such file."""
    return read_json(path) if is_there(path) else None
