"""The program `cpmrt`: it runs one command, and turns every way in which the command can end into an exit code.

0: done. 1: a CpmrtError, one line on stderr. 2: wrong usage, one line on stderr. 130: Ctrl-C. 129, 143: SIGHUP and
SIGTERM, which `serve` handles itself. 141: the reader of standard output went away (`| head`). Any other
exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext

from cpmrt import __version__, env
from cpmrt.cli.ending_signals import leaving_on_signals
from cpmrt.cli.output import complain, discard_stdout, discard_unwritten_remarks, plain_error_line, show_remarks
from cpmrt.cli.parser import Parser, UsageError, add_quiet, nearest
from cpmrt.errors import CpmrtError

COMMANDS = {
    "generate": "continue a prompt",
    "chat": "talk with a model",
    "serve": "answer over HTTP: an OpenAI-compatible API and a chat page",
    "plan": "show the memory a model needs and the largest context that fits, from its config alone",
    "inspect": "show what a checkpoint holds: sizes, tensors, tokenizer",
    "bench": "measure speed and energy of a model, or of a shape with random weights",
    "compile": "compile the CUDA kernels ahead of time, for this GPU or another",
    "quantize": "make a 4-bit checkpoint of a 16-bit one",
    "convert": "make a GGUF file, 16-bit safetensors or CPM.cu's Marlin layout of a checkpoint",
    "train-draft": "train a draft for a model (needs torch)",
    "pull": "download a model, or what is missing of it",
    "list": "list the downloaded models, with their sizes",
    "rm": "remove downloaded models",
    "doctor": "check this machine and say what is missing",
    "completion": "write the script with which a shell completes all this",
}
_OTHER_NAMES = {
    "run": "chat", "complete": "generate", "show": "inspect", "ls": "list", "download": "pull", "remove": "rm",
    "delete": "rm", "server": "serve", "start": "serve", "benchmark": "bench", "version": "--version",
}  # fmt: skip
"""Names that other programs have for a command (or an option) -> the name here, for the hint in an error."""
EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_CLOSED_PIPE = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the program's own) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    env.set_home()
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        complain(plain_error_line(error))
        return EXIT_USAGE
    except CpmrtError as error:
        from cpmrt.cli.option_names import error_line  # which only an error needs

        complain(error_line(error))
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        discard_stdout()
        return EXIT_CLOSED_PIPE
    finally:
        discard_unwritten_remarks()


def _run(arguments: list[str]) -> int:
    try:
        if not arguments or arguments[0] == "help":
            arguments = [*arguments[1:2], "--help"]
        # Only the first argument is parsed here: the command's own parser needs imports that --help should not pay.
        command = _parser().parse_args(arguments[:1]).command
        module = importlib.import_module(module_name(command))
        parser = Parser(prog=f"cpmrt {command}", description=module.__doc__)
        module.configure(parser)
        add_quiet(parser)
        args = parser.parse_args(arguments[1:])
        _start_log(is_quiet=args.quiet)
        with warnings.catch_warnings(), nullcontext() if command == "serve" else leaving_on_signals():
            warnings.showwarning = _show_warning
            code: int = module.run(args)
        return code
    except SystemExit as leaving:  # --help, --version and signals
        return leaving.code if isinstance(leaving.code, int) else 0


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Write a Python warning as one line on standard error, without the place in the program that it names."""
    from cpmrt.cli.option_names import warning_line  # which only a warning needs

    complain(warning_line(message))


def module_name(command: str) -> str:
    """Return the module of a command, which has `configure` and `run`."""
    return f"cpmrt.cli.{command.replace('-', '_')}"


def _start_log(*, is_quiet: bool) -> None:
    """Show on standard error what cpmrt logs while it fetches a model; with --quiet only errors."""
    show_remarks(not is_quiet)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("cpmrt.weights")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.ERROR if is_quiet else logging.INFO)


def _parser() -> Parser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="cpmrt",
        usage="cpmrt [--help] [--version] COMMAND ...",
        description="MiniCPM language models without torch.",
        epilog=f"commands:\n{listing}\n\n`cpmrt COMMAND --help` describes one.",
    )
    parser.add_argument("--version", action="version", version=f"cpmrt {__version__}")
    parser.add_argument("command", metavar="COMMAND", type=_command, help=argparse.SUPPRESS)
    return parser


def _command(text: str) -> str:
    if text not in COMMANDS:
        other = _OTHER_NAMES.get(text)
        meant = f" (did you mean {other}?)" if other else nearest(text, COMMANDS)
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}{meant}")
    return text


def _open_missing_streams() -> None:
    """Open the output streams that the caller has closed (None in `sys`), so that what is written there is dropped.

    A terminal that cannot show a character gets a replacement instead of a crash.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives as long as the process
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure:
            reconfigure(errors="replace" if name == "stdout" else "backslashreplace")
