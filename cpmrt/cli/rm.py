"""Remove models from the caches of the hubs. What other programs keep under the same name goes too.

NAME is as `cpmrt list` shows it.
"""

from __future__ import annotations

import argparse

from cpmrt.byte_sizes import format_bytes
from cpmrt.cli.output import printable, write
from cpmrt.cli.parser import nearest
from cpmrt.errors import ConfigError, quoted
from cpmrt.weights.hub_cache import cached_models


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="+", help="as `cpmrt list` shows it")


def run(args: argparse.Namespace) -> int:
    """Remove all named models. Raises ConfigError, before anything is removed, if one is not in the cache."""
    there = {model.name: model for model in cached_models()}
    for name in args.names:
        if name not in there:
            raise ConfigError(
                f"{quoted(name)} is not in the cache{nearest(name, there)}", fix="cpmrt list shows what is there"
            )
    for name in dict.fromkeys(args.names):
        there[name].remove()
        write(f"removed {printable(name)}: {format_bytes(there[name].num_bytes)}\n")
    return 0
