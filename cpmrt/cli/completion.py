"""Write the script that makes a shell complete cpmrt's commands, options and files.

    bash   cpmrt completion bash > ~/.local/share/bash-completion/completions/cpmrt
    zsh    cpmrt completion zsh > "${fpath[1]}/_cpmrt"
    fish   cpmrt completion fish > ~/.config/fish/completions/cpmrt.fish
"""

from __future__ import annotations

import argparse
import importlib

from cpmrt.cli.main import COMMANDS, module_name
from cpmrt.cli.output import write
from cpmrt.cli.parser import Parser, add_quiet

_FOLDERS = ("MODEL", "DRAFT", "OUT", "SOURCE", "TARGET")
_FILES = ("FILE", "N|FILE", "TEXT")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Write the script to standard output."""
    import shtab

    write(shtab.complete(whole_parser(), shell=args.shell) + "\n")
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser that has all commands; arguments that name a file or a folder are marked so for `shtab`."""
    import shtab

    parser = Parser(prog="cpmrt")
    parser.add_argument("--version", action="store_true", help="show the version")
    commands = parser.add_subparsers()
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        importlib.import_module(module_name(name)).configure(command)
        add_quiet(command)
        for action in command._actions:
            if action.metavar in _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser
