"""Ranks a model's tokens by their frequency in text: the lists that a draft's head is cut to (FR-Spec).

    python tools/gen_fr_index.py MODEL TEXT... --sizes 8192,16384,32768 --out DRAFT_FOLDER

MODEL is a folder or a hub id ('demo' is the bundled one); TEXT are text files, .jsonl files (their "text" fields) or
folders of such. Each size N gives OUT/freq_N.json: N token ids, the most frequent first, and last the special tokens
and the model's end tokens, which a draft must be able to propose whatever the text was. Text is read in pieces, so
files may be of any size. Source of the idea: FR-Spec, arXiv 2502.14856.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tokenizers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from cpmrt.errors import CheckpointError, ConfigError, CpmrtError  # noqa: E402
from cpmrt.quantization.calibration import SUFFIXES  # noqa: E402
from cpmrt.text import Tokenizer  # noqa: E402
from cpmrt.text.tokenizer import MAX_TOKENIZER_BYTES  # noqa: E402
from cpmrt.weights.files import open_file  # noqa: E402
from cpmrt.weights.model_files import read_file  # noqa: E402
from cpmrt.weights.model_folder import ModelFolder  # noqa: E402

_PIECE_BYTES, _PIECES_AT_A_TIME = 1 << 16, 64
Counts = np.ndarray[Any, np.dtype[np.int64]]


def text_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields the paths that are files, and all text files in folders. Raises CheckpointError if a folder has none."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not found:
            raise CheckpointError(f"{path} has no text", expected="files named *" + ", *".join(SUFFIXES))
        yield from found


def pieces(path: Path) -> Iterator[str]:
    """Yields a file's text in pieces, cut after line breaks where possible. Raises CheckpointError."""
    with open_file(path) as file:
        yield from _documents(file, path) if path.suffix == ".jsonl" else _blocks(file)


def _blocks(file: BinaryIO) -> Iterator[str]:
    rest = b""
    while block := file.read(_PIECE_BYTES):
        # A block without a line break may cut a word or a character in two, which is one token among many.
        end = block.rfind(b"\n") + 1 or len(block)
        yield (rest + block[:end]).decode("utf-8", "replace")
        rest = block[end:]
    if rest:
        yield rest.decode("utf-8", "replace")


def _documents(file: BinaryIO, path: Path) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield str(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path}: line {number}", expected='a JSON object with "text"') from error


def count_tokens(texts: Iterator[str], library: tokenizers.Tokenizer, vocab_size: int) -> Counts:
    """Returns the count of each token below `vocab_size`, int64 [vocab_size]. Few texts are in memory at a time."""
    counts = np.zeros(vocab_size, np.int64)
    # JSON may hold halves of surrogate pairs.
    texts = (text.encode("utf-8", "replace").decode() for text in texts)
    while batch := list(islice(texts, _PIECES_AT_A_TIME)):
        # Only batches are encoded by several threads, and without Python's lock.
        for encoding in library.encode_batch(batch, add_special_tokens=False):
            ids = np.array(encoding.ids, np.int64)
            counts += np.bincount(ids[ids < vocab_size], minlength=vocab_size)
    return counts


def ranked(counts: Counts, size: int, always: frozenset[int]) -> list[int]:
    """Returns `size` ids: the most frequent ones (of equal ones the lower id first), then those of `always`, ascending.

    Raises ConfigError if the vocabulary has fewer, or `always` leaves no room for others.
    """
    if not len(always) < size <= len(counts):
        expected = f"more than the {len(always)} special tokens, at most the vocabulary's {len(counts)}"
        raise ConfigError("--sizes", expected=expected, actual=size)
    order = np.argsort(-counts, kind="stable").tolist()
    frequent = list(islice((token for token in order if token not in always), size - len(always)))
    return [*frequent, *sorted(always)]


def main(arguments: list[str] | None = None) -> int:
    """Counts tokens, writes the lists and prints the share of the text that each covers. Returns the exit code."""
    options = _parse(arguments)
    try:
        folder = ModelFolder.open(options.model, weights=False)
        tokenizer, vocab_size = Tokenizer.open(folder.path), folder.config.vocab_size
        ends = (*tokenizer.special_ids, *tokenizer.eos_token_ids, *folder.config.eos_token_ids)
        always = frozenset(token for token in ends if token < vocab_size)
        for size in options.sizes:
            ranked(np.zeros(vocab_size, np.int64), size, always)  # refuse a wrong size before the work
        options.out.mkdir(parents=True, exist_ok=True)
        texts = (text for path in text_files(options.text) for text in pieces(path))
        library = tokenizers.Tokenizer.from_buffer(read_file(folder.path / "tokenizer.json", MAX_TOKENIZER_BYTES))
        counts = count_tokens(texts, library, vocab_size)
        if not counts.any():
            raise ConfigError("the text has no tokens", fix="give more of it")
        for size in options.sizes:
            _write(options.out / f"freq_{size}.json", ranked(counts, size, always), counts)
    except (CpmrtError, OSError) as error:
        print(f"gen_fr_index: error: {error}", file=sys.stderr)
        return 1
    return 0


def _write(path: Path, ids: list[int], counts: Counts) -> None:
    path.write_text(json.dumps(ids) + "\n", encoding="utf-8")
    total, unseen = int(counts.sum()), int((counts[ids] == 0).sum())
    print(f"{path}: {counts[ids].sum() / total:.2%} of {total:,} tokens; {unseen} of {len(ids)} ids are not among them")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("text", nargs="+", type=Path, help="text files, .jsonl files, folders")
    parser.add_argument("--sizes", type=_sizes, default=[32768], metavar="N,N,...", help="default: 32768")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="FOLDER", help="default: here")
    return parser.parse_args(arguments)


def _sizes(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isascii() and number.isdigit() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"expected positive numbers with commas between them, got {text!r}")
    return [int(number) for number in numbers]


if __name__ == "__main__":
    sys.exit(main())
