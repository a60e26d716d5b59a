"""Talk with a model, here or behind a server (--url). /help lists the commands, such as /save and /set.

The conversation is kept; when it outgrows the context its oldest turns are dropped, with a remark, but never the system
message. Of piped input each line is a message. Text between triple quotes is one message of several lines, and so is
a line that ends with a backslash with the next one. Ctrl-C ends the answer, whose beginning stays in the conversation;
Ctrl-D leaves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from cpmrt import LLM, __version__, env
from cpmrt.cli.arguments import (
    add_engine_options,
    add_model_argument,
    add_model_options,
    add_sampling_options,
    llm_arguments,
    sampling_params,
)
from cpmrt.cli.chat_commands import COMMANDS
from cpmrt.cli.chat_session import ChatSession
from cpmrt.cli.conversation import Conversation
from cpmrt.cli.listeners import StopAtOnce, StopOnInterrupt
from cpmrt.cli.local_model import LocalModel
from cpmrt.cli.multiline import messages
from cpmrt.cli.output import note, printable
from cpmrt.cli.parser import Parser, UsageError
from cpmrt.cli.prompt_source import MAX_PROMPT_BYTES, checked
from cpmrt.cli.remote import RemoteModel
from cpmrt.server.access import check_key

HINT = '/help lists the commands, """ begins several lines, Ctrl-C ends an answer, Ctrl-D leaves'


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, help="let the model think first (default: its template's)"
    )
    parser.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="special tokens in what you type count as such (default: they are plain text)",
    )
    parser.add_argument("--url", metavar="URL", help="of a running server (cpmrt serve) that has the model")
    parser.add_argument("--stats", action="store_true", help="after each answer, what it cost")
    parser.add_argument(
        "--no-markdown", dest="markdown", action="store_false", help="show Markdown on a terminal as it is written"
    )
    parser.add_argument("--api-key", metavar="KEY", help="of that server (default: $CPMRT_API_KEY)")
    _add_local_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(max_new_tokens="none", loop_repeats=8)


def _add_local_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide how a model is loaded in this process; with --url they mean nothing."""
    add_model_argument(parser)
    add_model_options(parser)
    add_engine_options(parser, "prefix_dir")


def run(args: argparse.Namespace) -> int:
    """Answer until the input ends. The exit code is 1 if a line of piped input could not be answered."""
    params = sampling_params(args)
    conversation = Conversation(args.system)
    looks = {"shows_cost": args.stats, "makes_up": args.markdown}
    if args.url is not None:
        _check_nothing_local(args)
        remote = RemoteModel(args.url, _api_key(args), params, args.thinking, args.allow_special_tokens)
        return _talk(ChatSession(remote, conversation, StopAtOnce(), **looks))
    if args.api_key is not None:
        raise UsageError("--api-key needs --url; see cpmrt chat --help")
    interrupt = StopOnInterrupt()
    with LLM(**llm_arguments(args), on_step=interrupt) as llm:
        local = LocalModel(
            llm,
            params,
            args.thinking,
            allow_special_tokens=args.allow_special_tokens,
            name=args.model or "the bundled model",
        )
        return _talk(ChatSession(local, conversation, interrupt, **looks))


def _api_key(args: argparse.Namespace) -> str | None:
    """Return the key that --api-key gives, else that of CPMRT_API_KEY; None without either. Raises ConfigError."""
    key, source = (env.api_key(), "CPMRT_API_KEY") if args.api_key is None else (args.api_key, "--api-key")
    if key is not None:
        check_key(key, source)
    return key


def _check_nothing_local(args: argparse.Namespace) -> None:
    """Raise UsageError if an option that decides how a model is loaded here has another value than its default."""
    parser = Parser(add_help=False)
    _add_local_options(parser)
    unasked = parser.parse_args([])
    for action in parser._actions:
        if action.option_strings and getattr(args, action.dest) != getattr(unasked, action.dest):
            name = next(name for name in action.option_strings if name.startswith("--"))
            raise UsageError(f"--url and {name} exclude each other; see cpmrt chat --help")


def _talk(session: ChatSession) -> int:
    session.check()
    is_interactive = sys.stdin is not None and sys.stdin.isatty()
    if is_interactive:
        lines = [printable(line) for line in session.model.describe()]
        note("\n".join([f"cpmrt {__version__}: {lines[0]}", *lines[1:], HINT]))
    num_failed = 0
    for message in _typed() if is_interactive else messages(_piped_lines()):
        num_failed += not session.take(message)
        if session.is_over:
            break
    return 1 if num_failed and not is_interactive else 0


def _typed() -> Iterator[str]:
    """Yield the messages that are typed. While one is answered, keys that are pressed are not echoed."""
    from cpmrt.cli.terminal import hidden_typing, typed_messages

    for message in typed_messages(list(COMMANDS)):
        with hidden_typing():
            yield message


def _piped_lines() -> Iterator[str]:
    """Yield the lines of standard input. Raises RequestError if one is not UTF-8, or too large for a prompt."""
    while sys.stdin is not None and (raw := sys.stdin.buffer.readline(MAX_PROMPT_BYTES + 1)):
        yield checked(raw.removesuffix(b"\n"), "standard input")
