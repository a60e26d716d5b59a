"""List the models in the caches of the hubs, with the disk space that they take.

A model is ready to run, a draft for another one, incomplete (`cpmrt pull` completes it) or unsupported.
"""

from __future__ import annotations

import argparse
from datetime import datetime

from cpmrt.byte_sizes import format_bytes
from cpmrt.cli.output import note, write_json, write_table
from cpmrt.weights.hub_cache import CachedModel, cached_models


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the models, the largest first."""
    models = sorted(cached_models(), key=lambda model: -model.num_bytes)
    if args.json:
        rows = [
            {"name": model.name, "state": model.state.value, "bytes": model.num_bytes, "modified": model.modified,
             "path": str(model.path)}
            for model in models
        ]  # fmt: skip
        write_json({"models": rows, "total_bytes": sum(model.num_bytes for model in models)})
        return 0
    if not models:
        note("no models in the cache; cpmrt pull NAME downloads one")
        return 0
    write_table([_row(model) for model in models], ("model", "state", "size", "changed"))
    return 0


def _row(model: CachedModel) -> tuple[str, ...]:
    changed = datetime.fromtimestamp(model.modified)
    return model.name, model.state.value, format_bytes(model.num_bytes), f"{changed:%Y-%m-%d}"
