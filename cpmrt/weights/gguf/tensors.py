"""Opens the tensors of a GGUF model under their Hugging Face names."""

from __future__ import annotations

from pathlib import Path

from cpmrt.errors import CheckpointError, CpmrtError, quoted
from cpmrt.weights.gguf.architectures import NOT_WEIGHTS, GgufArchitecture, architecture_of
from cpmrt.weights.gguf.config import head_dim
from cpmrt.weights.gguf.file import GgufModel
from cpmrt.weights.mapped_file import TensorEntry


def open_tensors(path: Path) -> tuple[GgufModel, dict[str, TensorEntry], dict[str, int]]:
    """Open the model that `path` is a file of; return it, its weights by their Hugging Face names, and `pairs`.

    `pairs` is as in `Checkpoint`. Raises CheckpointError, UnsupportedModelError.
    """
    model = GgufModel.open(path)
    try:
        row, rows = architecture_of(model.metadata, path), head_dim(model)
        entries = _renamed(model, row)
    except CpmrtError:
        model.close()
        raise
    return model, entries, {name: rows for name in entries if row.pairs_rows(name)}


def _renamed(model: GgufModel, row: GgufArchitecture) -> dict[str, TensorEntry]:
    """Return the weights of a GGUF model by their Hugging Face names. Raises CheckpointError where two have the same.
    """
    entries: dict[str, TensorEntry] = {}
    for name, entry in model.entries.items():
        renamed = row.hugging_face_name(name)
        if renamed in entries:
            raise CheckpointError(
                f"{model.path}: two tensors are {quoted(renamed)}",
                actual=f"{quoted(entries[renamed].name)} and {quoted(name)}",
            )
        if name not in NOT_WEIGHTS:
            entries[renamed] = entry
    return entries
