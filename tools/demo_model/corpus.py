"""Finds the training text on this machine: the standard library and permissively licensed packages.

Only a package whose metadata state a permissive licence is used. A licence expression counts before the trove
classifiers, these before the free `License` field; a package whose licence cannot be read is skipped.
"""

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
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any, cast

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

PERMISSIVE_IDS = frozenset(
    {
        "0bsd", "apache-2.0", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cnri-python", "hpnd", "isc", "mit",
        "mit-0", "mit-cmu", "psf-2.0", "python-2.0", "zlib", "llvm-exception",
    }
)  # fmt: skip
PERMISSIVE_CLASSIFIERS = frozenset(
    {
        "Apache Software License",
        "BSD License",
        "CMU License (MIT-CMU)",
        "Historical Permission Notice and Disclaimer (HPND)",
        "ISC License (ISCL)",
        "MIT License",
        "MIT No Attribution License (MIT-0)",
        "Python Software Foundation License",
    }
)
PERMISSIVE_NAMES = re.compile(
    r"(the )?("
    r"apache([ -]software)?([ -]license)?,?( version)?[ -]?v?2(\.0)?( license)?|apache"
    r"|(new |modified |simplified |[23][ -]clause )?bsd([ -][23][ -]clause)?( license)?"
    r"|mit( license)?|isc( license)?|psf(-2\.0| license)?|hpnd|python-2\.0"
    r")",
    re.IGNORECASE,
)
RESTRICTED_TEXT = re.compile(
    r"\b[AL]?GPL(v?[23]|-[23])|General Public License|Mozilla Public License|\bMPL-2|Creative Commons"
    r"|CC[ -]BY|proprietary|strictly prohibited",
    re.IGNORECASE,
)
SPDX_TAG = re.compile(r"SPDX-License-Identifier:\s*([^\n*#\"']+)")


@dataclass(frozen=True)
class Source:
    """A distribution whose text is used, with the licence that its metadata states."""

    name: str
    version: str
    licence: str
    root: str
    paths: tuple[str, ...]
    notes: tuple[str, ...] = ()


def standard_library() -> Source:
    """Returns the running interpreter's own modules, with pydoc's language reference as notes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = tuple(sorted(str(path.relative_to(root)) for path in root.rglob("*.py")))
    notes: tuple[str, ...] = ()
    if importlib.util.find_spec("pydoc_data"):
        from pydoc_data.topics import topics

        notes = tuple(topics[name] for name in sorted(topics))
    version = platform.python_version()
    return Source("CPython standard library", version, "PSF-2.0", str(root), paths, notes)


def installed_packages() -> tuple[list[Source], list[str]]:
    """Returns the permissively licensed distributions, and the names of those left out."""
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
    """Tells whether a path may hold a package's own, hand-written text."""
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
    """Returns the text to train on, None if it is generated, minified, a table, too short or long or not permissive."""
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
    """Returns one file's cleaned text; unreadable and non-UTF-8 files give None."""
    file = Path(path)
    try:
        raw = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    is_test = bool({"test", "tests", "testing"}.intersection(file.parts)) or file.name.startswith("test_")
    return clean_text(raw, is_test)


def documents_of(source: Source, stride: int, pool: multiprocessing.pool.Pool) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the documents of one source, in an order that does not favour any folder."""
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
    """Tells whether a document is held out of training: one in HELD_OUT_ONE_IN, chosen by a hash of its name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[-4:], "big") % HELD_OUT_ONE_IN == 0


def write_corpus(work: Path, stride: int) -> dict[str, object]:
    """Writes one in `stride` documents to `train.jsonl` and `heldout.jsonl` and returns the table of sources."""
    packages, skipped = installed_packages()
    seen: set[bytes] = set()
    rows: list[dict[str, Any]] = []
    held_out_bytes = 0
    with (
        multiprocessing.Pool() as pool,
        open(work / "train.jsonl", "w", encoding="utf-8") as train,
        open(work / "heldout.jsonl", "w", encoding="utf-8") as held_out,
    ):
        for source in [standard_library(), *packages]:
            row = {"name": source.name, "version": source.version, "licence": source.licence, "files": 0, "bytes": 0}
            for name, text in documents_of(source, stride, pool):
                encoded = text.encode()
                digest = hashlib.sha256(encoded).digest()
                if digest in seen or row["bytes"] >= MAX_PACKAGE_BYTES:
                    continue
                seen.add(digest)
                row["files"] += 1
                row["bytes"] += len(encoded)
                held_out_bytes += len(encoded) if is_held_out(name) else 0
                target = held_out if is_held_out(name) else train
                target.write(json.dumps({"name": name, "text": text}) + "\n")
            rows += [row] if row["files"] else []
    rows.sort(key=lambda row: -row["bytes"])
    total = sum(row["bytes"] for row in rows)
    return {"sources": rows, "skipped": skipped, "bytes": total, "held_out_bytes": held_out_bytes}


def permissive_licence(metadata: Message) -> str | None:
    """Returns the licence as the package states it, or None when it is not known to be permissive."""
    expression = metadata.get("License-Expression")
    if expression:
        return expression if expression_is_permissive(expression) else None
    classifiers = [
        line.split(" :: ")[-1]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::") and not line.endswith(":: OSI Approved")
    ]
    if classifiers:
        return " / ".join(classifiers) if PERMISSIVE_CLASSIFIERS.issuperset(classifiers) else None
    stated = (metadata.get("License") or "").strip()
    return stated if PERMISSIVE_NAMES.fullmatch(stated) else None


def expression_is_permissive(expression: str) -> bool:
    """Tells whether an SPDX expression can be met by permissive terms alone: in every AND part, one of its OR parts."""
    terms = re.split(r"\bAND\b|\bWITH\b", expression.replace("(", " ").replace(")", " "))
    return all(
        any(choice.strip().lower() in PERMISSIVE_IDS for choice in term.split(" OR ")) for term in terms
    )


def text_is_permissive(text: str) -> bool:
    """Tells whether a single file carries no notice that contradicts its package's permissive licence."""
    head = text[:6000]
    tag = SPDX_TAG.search(head)
    if tag and not expression_is_permissive(tag.group(1).strip()):
        return False
    return RESTRICTED_TEXT.search(head) is None
