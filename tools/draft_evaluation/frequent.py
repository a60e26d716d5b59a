"""Lists of frequent tokens for the sizes of a draft's head, by tools/gen_fr_index.py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gen_fr_index
from quantization.quality import standard_library_texts

from cpmrt.errors import ConfigError
from cpmrt.weights.token_index import read_token_index


@dataclass(frozen=True)
class FrequentTokens:
    """A list as the draft reads it, and what is in it."""

    path: Path
    token_ids: tuple[int, ...]


def frequent_tokens(
    model: str, texts: Sequence[Path], sizes: Sequence[int], vocab_size: int, work: Path
) -> list[FrequentTokens]:
    """A list of each size, made in `work`. Without `texts`: of the modules of this Python that were trained on.

    Raises CheckpointError, ConfigError.
    """
    if not sizes:
        return []
    if not texts:
        texts = [work / "text"]
        texts[0].mkdir()
        for name, text in standard_library_texts(held_out=False):
            (texts[0] / name.replace("/", ".")).write_text(text, encoding="utf-8")
    command = [model, *map(str, texts), "--sizes", ",".join(map(str, sizes)), "--out", str(work)]
    with contextlib.redirect_stdout(sys.stderr):
        failed = gen_fr_index.main(command)
    if failed:
        raise ConfigError("no lists of frequent tokens", fix="see the message above")
    paths = [work / f"freq_{size}.json" for size in sizes]
    return [FrequentTokens(path, read_token_index(path, vocab_size)) for path in paths]
