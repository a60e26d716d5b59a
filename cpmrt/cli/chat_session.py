"""One session of `cpmrt chat`: it takes messages and commands, and shows the answers."""

from __future__ import annotations

import sys

from cpmrt.cli.answer_view import AnswerView, PlainView
from cpmrt.cli.chat_commands import run_command
from cpmrt.cli.conversation import Answer, ChatModel, Conversation
from cpmrt.cli.listeners import StopAtOnce, StopRequestedError
from cpmrt.cli.option_names import error_line
from cpmrt.cli.output import complain, cost_lines, note
from cpmrt.errors import RequestError
from cpmrt.generation import Completion

_ENDS = {
    "cancelled": "(stopped)",
    "loop": "(stopped: the answer repeats itself; --loop-repeats 0 or /set loop_repeats 0 lets it go on)",
}


class ChatSession:
    """A conversation with a model. It runs commands, has questions answered, shows the answers and keeps the turns.

    `shows_cost`: show the cost after each answer; `makes_up`: render Markdown on a terminal. Both may change between
    answers.
    """

    def __init__(
        self,
        model: ChatModel,
        conversation: Conversation,
        interrupt: StopAtOnce,
        *,
        shows_cost: bool = False,
        makes_up: bool = True,
    ):
        self.model, self.conversation = model, conversation
        self.shows_cost, self.makes_up = shows_cost, makes_up
        self.last: Completion | None = None
        """The completion of the last answer, None before the first."""
        self.is_over = False
        self._interrupt = interrupt

    def check(self) -> None:
        """Raise CpmrtError if the model cannot chat at all."""
        self.model.check(self.conversation)

    def take(self, message: str) -> bool:
        """Take a message or a command. Return False if it failed; the reason has been shown then."""
        if not message.strip():
            return True
        done = run_command(self, message.strip()) if message.startswith("/") else None
        return self.answer(message) if done is None else done

    def answer(self, question: str) -> bool:
        """Answer a question, and keep question and answer. Return False if it could not be answered."""
        with self._interrupt:
            try:
                answer, num_dropped = self.model.open(self.conversation, question)
                if num_dropped:
                    note(f"the conversation no longer fits the context: its oldest turns ({num_dropped}) are dropped")
                    self.conversation.drop_oldest(num_dropped)
                self._show(answer)
            except StopRequestedError:  # Ctrl-C came before the first part or after the last
                note("(stopped)")
                return True
            except RequestError as error:
                complain(error_line(error))
                return False
        if answer.text:
            self.conversation.add(question, answer.text)
        return True

    def _show(self, answer: Answer) -> None:
        """Show the answer as it comes, and afterwards why it ended, unless the model ended it."""
        view = self._view()
        with answer:
            try:
                for part in answer:
                    view.show(part)
                    if self._interrupt.requested:
                        break
            except StopRequestedError:
                pass
            finally:
                view.end()
        self.last = answer.completion
        if self.last.finish_reason == "length":
            limit = self.model.params.max_new_tokens
            note(f"(stopped after --max-new-tokens {limit})" if limit else "(stopped: the context is full)")
        elif self.last.finish_reason != "stop":
            note(_ENDS.get(self.last.finish_reason, f"({self.last.finish_reason})"))
        if self.shows_cost:
            note("\n".join(cost_lines(self.last)))

    def _view(self) -> AnswerView:
        if not sys.stdout.isatty():
            return PlainView()
        from rich.console import Console

        from cpmrt.cli.terminal_view import TerminalView

        return TerminalView(Console(highlight=False), makes_up=self.makes_up)
