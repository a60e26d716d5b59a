"""Chooses a GGUF file of a repository by the name that users give it: its whole name or its end, such as Q4_K_M."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cpmrt.errors import CheckpointError, listed, quoted
from cpmrt.weights.gguf.file import has_gguf_suffix, split_paths, without_gguf_suffix

_PART = re.compile(r"-\d{5}-of-\d{5}$")
_SEPARATORS = "-._"


def select_gguf(names: Sequence[str], wish: str, where: str) -> list[str]:
    """Return the files of the one model that `wish` means, all parts of a split one, among the `names` of a repository.

    Capitals do not matter. `where` names the repository in errors. Raises CheckpointError where `wish` means no model,
    or several, or parts are missing.
    """
    found = {name: _stem(name) for name in names if has_gguf_suffix(name) and "/" not in name}
    stems = {stem for name, stem in found.items() if name.lower() == wish.lower() or _ends(stem, wish)}
    if len(stems) != 1:
        labels = listed(gguf_labels(names), 20)
        raise CheckpointError(
            f"{where}: GGUF file {quoted(wish)}", expected=f"one of {labels}" if labels else "GGUF files there",
            actual=f"{len(stems)} files that end so" if stems else "none that ends so",
        )  # fmt: skip
    parts = sorted(name for name, stem in found.items() if stem in stems)
    absent = [path.name for path in split_paths(Path(parts[0])) if path.name not in parts]
    if absent:
        raise CheckpointError(f"{where}: a split GGUF model is not whole", actual=f"no {listed(absent)}")
    return parts


def gguf_labels(names: Sequence[str]) -> list[str]:
    """Return for each GGUF model of a repository the shortest end of its name that means no other one."""
    stems = sorted({_stem(name) for name in names if has_gguf_suffix(name) and "/" not in name})
    return [_label(stem, stems) for stem in stems]


def _stem(name: str) -> str:
    """Return a file's name without its suffix and the number of its part."""
    return _PART.sub("", without_gguf_suffix(name))


def _ends(stem: str, wish: str) -> bool:
    stem, wish = stem.lower(), wish.lower()
    return stem == wish or (stem.endswith(wish) and stem[-len(wish) - 1] in _SEPARATORS)


def _label(stem: str, stems: Sequence[str]) -> str:
    cuts = [index for index, char in enumerate(stem) if char in _SEPARATORS]
    ends = [stem[cut + 1 :] for cut in reversed(cuts)]
    return next((end for end in ends if end and sum(_ends(other, end) for other in stems) == 1), stem)
