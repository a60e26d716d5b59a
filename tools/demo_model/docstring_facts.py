"""Collects facts about functions and classes of the standard library: signature and first documented sentence."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

# Modules that open windows or browsers, print when imported, or are internal to the interpreter.
SKIPPED_MODULES = frozenset(
    {
        "antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "test", "lib2to3", "ensurepip",
        "encodings", "distutils", "pydoc_data", "genericpath", "posixpath", "ntpath", "nt", "msilib",
        "opcode", "sre_compile", "sre_constants", "sre_parse", "pyexpat", "nturl2path", "venv", "posix",
        "macpath",
    }
)  # fmt: skip
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'`(])")
SIGNATURE_LINE = re.compile(r"^[\w.]+\([^\n]*\)(\s*->.*)?$|->")
MAX_ANSWER_CHARS = 170
MIN_ANSWER_CHARS = 12
MAX_SIGNATURE_CHARS = 160


@dataclass(frozen=True)
class Fact:
    """A public name with its first documented sentence (or two short ones); `signature` is "" if none is known."""

    name: str
    module: str
    summary: str
    signature: str


def documented_modules() -> Iterator[types.ModuleType]:
    """Yields the public modules of the standard library and the public submodules of its packages."""
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in SKIPPED_MODULES:
            continue
        module = quiet_import(name)
        if module is None:
            continue
        yield module
        for entry in pkgutil.iter_modules(getattr(module, "__path__", [])):
            if not entry.name.startswith(("_", "test")):
                submodule = quiet_import(f"{name}.{entry.name}")
                if submodule is not None:
                    yield submodule


def quiet_import(name: str) -> types.ModuleType | None:
    """Returns the module, or None if it cannot be imported on this platform; drops what the import prints."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except (Exception, SystemExit):
        return None


def public_members(module: types.ModuleType) -> Iterator[tuple[str, object]]:
    """Yields the public functions and classes of a module, without those that it only imports."""
    exported = getattr(module, "__all__", None)
    owns_everything = exported is not None or module.__name__ == "builtins"
    for name in sorted(vars(module) if exported is None else exported):
        member = getattr(module, name, None)
        if name.startswith("_") or not (inspect.isroutine(member) or inspect.isclass(member)):
            continue
        if owns_everything or getattr(member, "__module__", None) == module.__name__:
            yield name, member


def summary_of(docstring: object) -> str | None:
    """Returns the first sentence of a docstring, or two short ones; None if there is none of a usable form."""
    if not isinstance(docstring, str) or not docstring.strip():
        return None
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(docstring).split("\n\n")]
    if SIGNATURE_LINE.search(paragraphs[0]):
        del paragraphs[0]
    if not paragraphs or ">>>" in paragraphs[0] or "<|" in paragraphs[0]:
        return None
    sentences = SENTENCE_END.split(paragraphs[0])
    summary = sentences[0]
    if len(sentences) > 1 and len(summary) + len(sentences[1]) < MAX_ANSWER_CHARS:
        summary = f"{summary} {sentences[1]}"
    if summary[-1:].isalnum() or summary[-1:] in ")]'\"`":
        summary += "."
    is_usable = MIN_ANSWER_CHARS <= len(summary) <= MAX_ANSWER_CHARS and summary[-1] in ".!?"
    return summary if is_usable and summary.isascii() else None


def signature_of(name: str, member: object) -> str:
    """Returns `name(parameters)`, "" where it is unknown, long, or holds an object's address."""
    try:
        parameters = str(inspect.signature(member))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    text = name + parameters.split(" -> ")[0]
    return text if len(text) <= MAX_SIGNATURE_CHARS and "<" not in text and text.isascii() else ""


def named_members(module: types.ModuleType) -> Iterator[tuple[str, object]]:
    """Yields a module's members and their public methods, under the names that a user would write."""
    prefix = "" if module.__name__ == "builtins" else f"{module.__name__}."
    for name, member in public_members(module):
        yield prefix + name, member
        if inspect.isclass(member):
            for method_name, method in sorted(vars(member).items()):
                if not method_name.startswith("_") and inspect.isroutine(method):
                    yield f"{prefix}{name}.{method_name}", method


def collect_facts() -> list[Fact]:
    """Returns all facts, one for each object, under the shortest of its names."""
    found: dict[int, Fact] = {}
    alive: list[object] = []
    modules = [importlib.import_module("os.path"), *documented_modules()]
    for module in modules:
        module_name = "os.path" if module is modules[0] else module.__name__
        for name, member in named_members(module):
            public_name = name.replace("posixpath.", "os.path.").replace("ntpath.", "os.path.")
            summary = summary_of(getattr(member, "__doc__", None))
            known = found.get(id(member))
            if summary is None or (known and len(known.name) <= len(public_name)):
                continue
            alive.append(member)
            found[id(member)] = Fact(public_name, module_name, summary, signature_of(public_name, member))
    return sorted(found.values(), key=lambda fact: fact.name)
