"""Finds the training text on this machine: the standard library and permissively licensed packages."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from email.message import Message
from pathlib import Path
from typing import cast

from demo_model.licences import permissive_licence, text_is_permissive

TEXT_SUFFIXES = frozenset({".py", ".md", ".rst"})
SKIPPED_FOLDERS = frozenset(
    {
        "_vendor", "vendor", "_vendored", "vendored", "_vendored_packages", "third_party", "thirdparty",
        "extern", "_external", "external", "externals", "_externals", "bundled", "_bundled", "node_modules",
        "site-packages", "dist-packages", "__pycache__", "licenses", "idlelib", "turtledemo", "encodings",
    }
)  # fmt: skip
GENERATED = re.compile(
    r"(auto(matically)?[- ]?)?generated (by|from|file|code)|do not (edit|modify)|@generated", re.IGNORECASE
)
# Special token strings inside a source file would be read as control tokens by the tokenizer.
CONTROL_STRINGS = ("<unk>", "<s>", "</s>", "<|im_end|>", "<|im_start|>")
LEADING_COMMENT = re.compile(r"\A(?:[ \t]*#[^\n]*\n|[ \t]*\n)+")
LICENCE_WORDS = re.compile(r"copyright|licen[sc]e", re.IGNORECASE)

MAX_FILE_BYTES = 256_000
MAX_TEST_BYTES = 32_000
MIN_FILE_BYTES = 200
MAX_LINE_CHARS = 400
MAX_MEAN_LINE_CHARS = 90
MAX_DIGIT_SHARE = 0.12
MAX_ODD_CHARACTER_SHARE = 0.02
MAX_PACKAGE_BYTES = 12_000_000
HELD_OUT_ONE_IN = 100


@dataclass(frozen=True)
class Source:
    """A distribution whose text is used, with the licence that its metadata states."""

    name: str
    version: str
    licence: str
    root: str
    paths: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass
class SourceRow:
    """One row of the table of what was trained on."""

    name: str
    version: str
    licence: str
    files: int = 0
    bytes: int = 0


def standard_library() -> Source:
    """The running interpreter's own modules, with the language reference that pydoc carries as notes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = tuple(sorted(str(path.relative_to(root)) for path in root.rglob("*.py")))
    notes: tuple[str, ...] = ()
    if importlib.util.find_spec("pydoc_data"):
        from pydoc_data.topics import topics

        notes = tuple(topics[name] for name in sorted(topics))
    version = platform.python_version()
    return Source("CPython standard library", version, "PSF-2.0", str(root), paths, notes)


def installed_packages() -> tuple[list[Source], list[str]]:
    """Permissively licensed distributions, and the names of those left out."""
    used: dict[str, Source] = {}
    skipped: set[str] = set()
    for distribution in importlib.metadata.distributions():
        metadata = cast(Message, distribution.metadata)
        name = metadata["Name"]
        licence = permissive_licence(metadata)
        if licence is None or distribution.files is None:
            skipped.add(name)
            continue
        paths = tuple(sorted(str(path) for path in distribution.files if path.suffix in TEXT_SUFFIXES))
        description = metadata.get_payload() or metadata.get("Description") or ""
        root = str(distribution.locate_file(""))
        notes = (str(description),)
        used[name.lower()] = Source(name, distribution.version, licence, root, paths, notes)
    return [used[key] for key in sorted(used)], sorted(skipped - {source.name for source in used.values()})


def is_wanted(path: Path) -> bool:
    """Whether a path may hold own, hand-written text of its package."""
    folders = path.parts[:-1]
    if path.name.endswith(("_pb2.py", "_pb2_grpc.py")) or ".." in folders:
        return False
    return not any(
        folder in SKIPPED_FOLDERS or folder.endswith((".dist-info", ".egg-info", ".data"))
        for folder in folders
    )


def without_licence_comment(text: str) -> str:
    """Drops a leading licence comment: thousands of files share it, and it would be learnt by heart."""
    comment = LEADING_COMMENT.match(text)
    if comment and LICENCE_WORDS.search(comment.group()):
        return text[comment.end() :]
    return text


def clean_text(raw: str, is_test: bool = False) -> str | None:
    """The text to train on, or None where it is generated, minified, a table, or not ours to use."""
    text = raw.removeprefix("\ufeff").replace("\r\n", "\n").replace("\f", "").replace("\u2581", " ")
    if not text_is_permissive(text) or GENERATED.search(text[:2000]):
        return None
    text = without_licence_comment(text).strip("\n") + "\n"
    size = len(text)
    if not MIN_FILE_BYTES <= size <= (MAX_TEST_BYTES if is_test else MAX_FILE_BYTES):
        return None
    if any(mark in text for mark in CONTROL_STRINGS):
        return None
    lines = text.splitlines()
    if max(map(len, lines)) > MAX_LINE_CHARS or size / len(lines) > MAX_MEAN_LINE_CHARS:
        return None
    digits = sum(map(text.count, "0123456789"))
    odd = size - len(text.encode("ascii", "ignore"))
    if digits > MAX_DIGIT_SHARE * size or odd > MAX_ODD_CHARACTER_SHARE * size:
        return None
    return text


def read_document(path: str) -> str | None:
    """One file's cleaned text; unreadable and non-UTF-8 files give None."""
    file = Path(path)
    try:
        raw = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    is_test = bool({"test", "tests", "testing"}.intersection(file.parts)) or file.name.startswith("test_")
    return clean_text(raw, is_test)


def documents_of(source: Source, stride: int, pool: multiprocessing.pool.Pool) -> Iterator[tuple[str, str]]:
    """Pairs (name, text) of one source, in an order that does not favour any folder."""
    paths = [path for path in source.paths if is_wanted(Path(path))]
    paths.sort(key=lambda path: hashlib.sha256(path.encode()).digest())
    paths = paths[::stride]
    texts = pool.imap(read_document, [str(Path(source.root, path)) for path in paths], chunksize=32)
    for index, note in enumerate(source.notes[::stride]):
        text = clean_text(note)
        if text:
            yield f"{source.name}/note-{index}", text
    for path, text in zip(paths, texts, strict=True):
        if text:
            yield f"{source.name}/{path}", text


def is_held_out(name: str) -> bool:
    """A fixed share of the documents, chosen by name, is never trained on."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[-4:], "big") % HELD_OUT_ONE_IN == 0


def write_corpus(work: Path, stride: int) -> dict[str, object]:
    """Writes one in `stride` documents to `train.jsonl` and `heldout.jsonl` and returns the table of sources."""
    packages, skipped = installed_packages()
    seen: set[bytes] = set()
    rows: list[SourceRow] = []
    held_out_bytes = 0
    with (
        multiprocessing.Pool() as pool,
        open(work / "train.jsonl", "w", encoding="utf-8") as train,
        open(work / "heldout.jsonl", "w", encoding="utf-8") as held_out,
    ):
        for source in [standard_library(), *packages]:
            row = SourceRow(source.name, source.version, source.licence)
            for name, text in documents_of(source, stride, pool):
                digest = hashlib.sha256(text.encode()).digest()
                if digest in seen or row.bytes >= MAX_PACKAGE_BYTES:
                    continue
                seen.add(digest)
                size = len(text.encode())
                row.files += 1
                row.bytes += size
                held_out_bytes += size if is_held_out(name) else 0
                target = held_out if is_held_out(name) else train
                target.write(json.dumps({"name": name, "text": text}) + "\n")
            if row.files:
                rows.append(row)
    rows.sort(key=lambda row: -row.bytes)
    table = [asdict(row) for row in rows]
    total = sum(row.bytes for row in rows)
    return {"sources": table, "skipped": skipped, "bytes": total, "held_out_bytes": held_out_bytes}
