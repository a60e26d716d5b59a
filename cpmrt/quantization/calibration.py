"""Calibration: turns text files into windows of tokens, and inputs of linears into the sums that quantisation needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpmrt.errors import CheckpointError, ConfigError, RequestError
from cpmrt.quantization.arrays import module_of
from cpmrt.text import Tokenizer
from cpmrt.weights.files import open_file, reading

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
_READ_BYTES = 16 << 20


def read_texts(path: Path) -> Iterator[str]:
    """Yield the documents of a text file, of a .jsonl file (its "text" fields), or of all such files under a folder.

    A folder's files come in the order of a hash of their paths, which favours none of its parts; at most 16 MB of each
    are read. No link in it may lead out of its own folder; a `path` that is a file may be a link to anywhere. Raises
    CheckpointError.
    """
    if not path.is_dir():
        yield from _documents(path, anywhere=True)
        return
    files = [file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
    if not files:
        raise CheckpointError(f"{path} has no calibration text", expected="files named *" + ", *".join(SUFFIXES))
    for file in sorted(files, key=lambda file: hashlib.sha256(str(file.relative_to(path)).encode()).digest()):
        yield from _documents(file)


def _documents(path: Path, *, anywhere: bool = False) -> Iterator[str]:
    with open_file(path, anywhere=anywhere) as file, reading(path):
        raw = file.read(_READ_BYTES)
    if b"\0" in raw:
        raise CheckpointError(
            f"{path} is no calibration text", expected="UTF-8", actual="a zero byte", fix="unpack or convert the file"
        )
    # A character cut in two at the end of what is read is not worth an error.
    text = raw.decode("utf-8", "replace")
    if path.suffix != ".jsonl":
        yield text
        return
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1] if len(raw) == _READ_BYTES else lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path}: line {number}", expected='a JSON object with "text"') from error
        yield str(document)


def token_windows(texts: Iterable[str], tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Cut the texts, laid end to end, into `count` windows of `length` tokens, BOS first where the model has one.

    A document fills at most an eighth of them, more only where the others do not suffice. There are fewer windows where
    the text is short. Raises ConfigError where it does not fill one.
    """
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    body = max(1, length - len(bos))
    share, wanted = max(1, count // 8) * body, count * body
    ids: list[int] = []
    spare: list[int] = []
    for text in texts:
        try:
            document = tokenizer.encode(text, add_special_tokens=False)
        except RequestError:
            continue
        ids += document[:share]
        spare += document[share : share + wanted - len(spare)]
        if len(ids) >= wanted:
            break
    ids = (ids + spare)[:wanted]
    windows = [bos + ids[start : start + body] for start in range(0, len(ids) - body + 1, body)]
    if not windows:
        raise ConfigError(
            "the calibration text is too short", expected=f"at least {body} tokens", actual=len(ids),
            fix="give more text, or a smaller --window",
        )  # fmt: skip
    return windows


@dataclass
class InputSums:
    """Sums over the inputs x [T, K] of linears that share them: `hessian` of x x^T [K, K], `magnitude` of |x| [K]."""

    hessian: Any
    magnitude: Any
    num_rows: int

    @classmethod
    def over(cls, inputs: Iterator[Any], skip: int) -> InputSums:
        """Return the sums over the inputs of all sequences, without the first `skip` positions of each."""
        sums: InputSums | None = None
        for rows in inputs:
            kept = rows[skip:]
            if sums is None:
                xp, size = module_of(kept), kept.shape[1]
                sums = cls(xp.zeros((size, size), np.float32), xp.zeros(size, np.float32), 0)
            sums.hessian += kept.T @ kept
            sums.magnitude += np.abs(kept).sum(axis=0)
            sums.num_rows += len(kept)
        if sums is None:
            raise ValueError("no calibration sequences")
        return sums
