"""Show what a checkpoint holds: architecture, sizes, tensors, tokenizer, and what keeps it from running, if anything.

A hub id is looked at without fetching its weights; those that are in the local cache are shown.
"""

from __future__ import annotations

import argparse
from typing import Any

from cpmrt.cli.arguments import add_hf_overrides, add_model_source
from cpmrt.cli.checkpoint_report import report
from cpmrt.cli.output import printable, write, write_json, write_table
from cpmrt.memory.plan import format_bytes

_NESTED = ("sizes", "sparse", "scales", "special_ids", "tokenizer", "quantization")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_model_source(parser, positional=True)
    add_hf_overrides(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor, not only each kind")
    parser.add_argument("--json", action="store_true", help="write one JSON object, every tensor in it")


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises CheckpointError where there is no config.json to begin with."""
    found = report(args.model, args.revision, args.hf_overrides)
    if args.json:
        write_json(found)
        return 0
    write_table([(name, _shown(name, value)) for name, value in _facts(found).items()])
    if found["files"]:
        write("\n")
        write_table([(file["name"], format_bytes(file["bytes"])) for file in found["files"]], ("file", "size"))
    if found["tensors"]:
        write("\n")
        _write_tensors(found["tensors"], every=args.tensors)
    verdict = "this version can run it" + ("" if found["files"] else " once its weights are fetched")
    lines = [f"will not run: {printable(problem)}" for problem in found["problems"]] or [verdict]
    write("\n" + "\n".join(lines) + "\n")
    return 0


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    """The report without its lists, nested objects on one level."""
    facts: dict[str, Any] = {}
    for name, value in found.items():
        if name in ("files", "tensors", "problems") or (name == "config" and found["sizes"]):
            continue
        if name == "config":
            facts |= {f"config.{key}": entry for key, entry in value.items() if not isinstance(entry, (dict, list))}
        elif name in _NESTED and isinstance(value, dict) and value:
            facts |= {key if name == "sizes" else f"{name}.{key}": entry for key, entry in value.items()}
        else:
            facts[name] = value
    return facts


def _shown(name: str, value: Any) -> str:
    if value is None or value in ({}, []):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shortened(entry)}" for key, entry in value.items())
    if name == "parameters":
        return f"{value:,}"
    return _shortened(value)


def _shortened(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _write_tensors(tensors: list[dict[str, Any]], *, every: bool) -> None:
    if every:
        rows = [(t["name"], t["dtype"], str(t["shape"]), format_bytes(t["bytes"])) for t in tensors]
        write_table(rows, ("tensor", "dtype", "shape", "size"))
        return
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for tensor in tensors:
        parts = ("*" if part.isdigit() else part for part in tensor["name"].split("."))
        key = (".".join(parts), tensor["dtype"], str(tensor["shape"]))
        kinds.setdefault(key, []).append(tensor["bytes"])
    kind_rows = [(str(len(sizes)), *key, format_bytes(sum(sizes))) for key, sizes in kinds.items()]
    write_table(kind_rows, ("count", "tensor", "dtype", "shape", "size"))
