"""Talk with a model, here or behind a server (--url). The conversation is kept; when it outgrows the context its
oldest turns are dropped, with a remark, but never the system message. Piped input is one question a line.

Ctrl-C stops the answer, whose beginning stays in the conversation. At the prompt it leaves when pressed twice.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import suppress

from cpmrt import LLM, env
from cpmrt.cli.arguments import UsageError, add_model_options, add_sampling_options, llm_arguments, sampling_params
from cpmrt.cli.conversation import Conversation, LocalModel
from cpmrt.cli.listeners import StopAtOnce, StopOnInterrupt, StopRequestedError
from cpmrt.cli.output import complain, cost_lines, note, printable, sampling_line, write
from cpmrt.cli.prompt_source import decoded
from cpmrt.cli.remote import RemoteModel, RemoteStream
from cpmrt.errors import RequestError
from cpmrt.sharing.text_stream import TextStream

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


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
    parser.add_argument("--api-key", metavar="KEY", help="of that server (default: $CPMRT_API_KEY)")
    add_model_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(max_new_tokens="none", loop_repeats=8)


def run(args: argparse.Namespace) -> int:
    """Answer until the input ends. The exit code is 1 if a line of piped input could not be answered."""
    params = sampling_params(args)
    if args.url is not None:
        for option in ("model", "draft", "stats"):
            if getattr(args, option) not in (None, False):
                raise UsageError(f"--url and --{option} exclude each other; see cpmrt chat --help")
        remote = RemoteModel(args.url, args.api_key or env.api_key(), params, args.thinking, args.allow_special_tokens)
        return _talk(Chat(remote, Conversation(args.system), StopAtOnce(), params.max_new_tokens))
    interrupt = StopOnInterrupt()
    with LLM(**llm_arguments(args), on_step=interrupt) as llm:
        local = LocalModel(llm, params, args.thinking, args.allow_special_tokens)
        chat = Chat(local, Conversation(args.system), interrupt, params.max_new_tokens, shows_cost=args.stats)
        if sys.stdin is not None and sys.stdin.isatty():
            note(f"sampling: {sampling_line(params, llm.sampling_defaults)}")
        return _talk(chat)


def _talk(chat: Chat) -> int:
    is_interactive = sys.stdin is not None and sys.stdin.isatty()
    chat.check()
    if is_interactive:
        note(HELP)
    num_failed = 0
    for line in _typed_lines() if is_interactive else _piped_lines():
        if line.strip() == "/exit":
            break
        num_failed += not chat.take(line)
    return 1 if num_failed and not is_interactive else 0


class Chat:
    """Takes lines, commands that begin with a slash or questions, and writes the answers."""

    def __init__(
        self,
        model: LocalModel | RemoteModel,
        conversation: Conversation,
        interrupt: StopAtOnce,
        max_new_tokens: int | None,
        *,
        shows_cost: bool = False,
    ):
        self._model, self._conversation = model, conversation
        self._interrupt, self._max_new_tokens = interrupt, max_new_tokens
        self._shows_cost = shows_cost

    def check(self) -> None:
        """Raise CpmrtError if the model cannot chat at all."""
        self._model.check(self._conversation)

    def take(self, line: str) -> bool:
        """Take a line. Return False if it could not be answered; the reason has been shown then."""
        line = line.strip()
        if line == "/reset":
            self._conversation.reset()
            note("the conversation is forgotten")
        elif line == "/help":
            note(HELP)
        elif re.fullmatch(r"/\w+", line):
            note(f"{printable(line)} is no command: {HELP}")
        elif line:
            with self._interrupt:
                return self._answer(line)
        return True

    def _answer(self, question: str) -> bool:
        try:
            stream, num_dropped = self._model.open(self._conversation, question)
            if num_dropped:
                note(f"the conversation no longer fits the context: its oldest turns ({num_dropped}) are dropped")
                self._conversation.drop_oldest(num_dropped)
            answer = self._written(stream)
        except StopRequestedError:  # before the first piece, or at the very end
            note("(stopped)")
            return True
        except RequestError as error:
            complain(f"cpmrt: error: {printable(str(error))}")
            return False
        if answer:
            self._conversation.add(question, answer)
        return True

    def _written(self, stream: TextStream | RemoteStream) -> str:
        """Write the answer as it comes, and return what there is of it."""
        with stream:
            try:
                for piece in stream:
                    write(piece.text)
                    if self._interrupt.requested:
                        break
            except StopRequestedError:
                stream.close()
        write("\n")
        completion = stream.completion
        if completion.finish_reason == "length":
            limit = self._max_new_tokens
            note(f"(stopped after --max-new-tokens {limit})" if limit else "(stopped: the context is full)")
        elif completion.finish_reason == "loop":
            note("(stopped: the answer repeats itself; --loop-repeats 0 lets it go on)")
        elif completion.finish_reason == "cancelled":
            note("(stopped)")
        if self._shows_cost:
            note("\n".join(cost_lines(completion)))
        return completion.text


def _piped_lines() -> Iterator[str]:
    """Yield lines until the end of the input. Raises RequestError on what is not UTF-8."""
    for raw in sys.stdin.buffer if sys.stdin is not None else ():
        yield decoded(raw, "standard input")


def _typed_lines() -> Iterator[str]:
    """Yield lines until Ctrl-D. Raises KeyboardInterrupt when Ctrl-C is pressed twice."""
    with suppress(ImportError):  # not every Python has it
        import readline  # noqa: F401 - gives input() its line editing
    was_interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            write("\n")
            return
        except UnicodeDecodeError:
            note("that was not UTF-8 text")
            continue
        except KeyboardInterrupt:
            if was_interrupted:
                raise
            was_interrupted = True
            note("\n(Ctrl-C again or /exit to leave)")
            continue
        was_interrupted = False
        yield line
