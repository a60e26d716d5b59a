"""Chooses a GGUF file of a repository by the name that users give it: its whole name or its end, such as Q4_K_M."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cpmrt.errors import CheckpointError, listed, quoted
from cpmrt.weights.gguf.names import has_gguf_suffix, split_paths, without_gguf_suffix

_PART = re.compile(r"-[0-9]{5}(-of-[0-9]{5})$")
_SEPARATORS = "-._"


def select_gguf(names: Sequence[str], wish: str, where: str) -> list[str]:
    """Return the files of the one model that `wish` means, all parts of a split one, among the `names` of a repository.

    Capitals do not matter. `where` names the repository in errors. Raises CheckpointError where `wish` means no model,
    or several, or parts are missing.
    """
    models = _models(names)
    named = [files for files in models if wish.lower() in [name.lower() for name in files]]
    meant = named or [files for files in models if _ends(_stem(files[0]), wish)]
    if len(meant) != 1:
        labels = listed(gguf_labels(names), 20)
        raise CheckpointError(
            f"{where}: GGUF file {quoted(wish)}", expected=f"one of {labels}" if labels else "GGUF files there",
            actual=f"{len(meant)} files that end so" if meant else "none that ends so",
        )  # fmt: skip
    parts = meant[0]
    absent = [path.name for path in split_paths(Path(parts[0])) if path.name not in parts]
    if absent:
        raise CheckpointError(f"{where}: a split GGUF model is not whole", actual=f"no {listed(absent)}")
    return parts


def gguf_labels(names: Sequence[str]) -> list[str]:
    """Return for each GGUF model of a repository the shortest end of its name that means no other one.

    It is the whole name of a file where every end means another one too.
    """
    models = _models(names)
    stems = [_stem(files[0]) for files in models]
    return [_label(files[0], stems) for files in models]


def _models(names: Sequence[str]) -> list[list[str]]:
    """Return the files of each model among the `names` of a repository."""
    models: dict[str, list[str]] = {}
    for name in sorted(name for name in names if has_gguf_suffix(name) and "/" not in name):
        models.setdefault(_PART.sub(r"\1", without_gguf_suffix(name)), []).append(name)
    return list(models.values())


def _stem(name: str) -> str:
    """Return a file's name without its suffix and the number of its part."""
    return _PART.sub("", without_gguf_suffix(name))


def _ends(stem: str, wish: str) -> bool:
    stem, wish = stem.lower(), wish.lower()
    return stem == wish or (stem.endswith(wish) and stem[-len(wish) - 1] in _SEPARATORS)


def _label(name: str, stems: Sequence[str]) -> str:
    stem = _stem(name)
    cuts = [index for index, char in enumerate(stem) if char in _SEPARATORS]
    ends = [*(stem[cut + 1 :] for cut in reversed(cuts)), stem]
    return next((end for end in ends if end and sum(_ends(other, end) for other in stems) == 1), name)
