"""The conversation of `cpmrt chat`: what was said, how it is kept in a file, and what a model must do to answer it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cpmrt.config import SamplingParams
from cpmrt.errors import RequestError, quoted, reason_of
from cpmrt.generation import Completion
from cpmrt.text.messages import check_unicode

Message = dict[str, str]
MAX_FILE_BYTES = 64 * 2**20


class Part(NamedTuple):
    """A piece of an answer as it comes; `is_thought` says that it belongs to the model's thoughts."""

    text: str
    is_thought: bool = False


class Answer(Protocol):
    """An answer that is being given. Leaving its `with` block cancels what has not come yet."""

    def __iter__(self) -> Iterator[Part]: ...
    def __enter__(self) -> Answer: ...
    def __exit__(self, *exception: object) -> None: ...

    @property
    def text(self) -> str:
        """The text that has come so far, without the thoughts."""
        ...

    @property
    def completion(self) -> Completion:
        """The completion so far: how the answer ended and what it cost, as far as that is known."""
        ...


class ChatModel(Protocol):
    """A model that chats, in this process or behind a server. The settings may be changed between answers."""

    params: SamplingParams
    enable_thinking: bool | None

    def check(self, conversation: Conversation) -> None:
        """Raise CpmrtError if the model cannot chat at all, or not with this system message."""
        ...

    def open(self, conversation: Conversation, question: str) -> tuple[Answer, int]:
        """Begin the answer to one more question; also return how many of the oldest turns had to be left out."""
        ...

    def describe(self) -> list[str]:
        """Return lines that name the model, where it runs, its context and, if known, its memory and sampling."""
        ...

    def usage(self, conversation: Conversation) -> str:
        """Return a line that says how much of the context the conversation takes; "" if that is not known."""
        ...


class Conversation:
    """The turns of a chat, questions with their answers, after a system message that always stays."""

    def __init__(self, system: str | None):
        self.system = system
        self._turns: list[tuple[str, str]] = []

    @property
    def num_turns(self) -> int:
        """The number of questions that were answered and are remembered."""
        return len(self._turns)

    @property
    def last(self) -> tuple[str, str] | None:
        """The last question and its answer."""
        return self._turns[-1] if self._turns else None

    def messages(self, *, skip: int = 0) -> list[Message]:
        """Return the messages: the system message, and all turns except the `skip` oldest."""
        start = [] if self.system is None else [_message("system", self.system)]
        turns = [(_message("user", question), _message("assistant", answer)) for question, answer in self._turns[skip:]]
        return [*start, *(message for turn in turns for message in turn)]

    def asked(self, question: str, *, skip: int = 0) -> list[Message]:
        """Return the messages followed by one more question, which is not kept yet."""
        return [*self.messages(skip=skip), _message("user", question)]

    def add(self, question: str, answer: str) -> None:
        self._turns.append((question, answer))

    def undo(self) -> tuple[str, str] | None:
        """Forget the last question and its answer, and return both; None if there is none."""
        return self._turns.pop() if self._turns else None

    def drop_oldest(self, count: int) -> None:
        """Forget the oldest questions and their answers."""
        del self._turns[:count]

    def clear(self) -> None:
        """Forget all questions and answers."""
        self._turns.clear()

    def save(self, path: Path) -> None:
        """Write the messages as JSON into a file that only this user can read, replacing it in one step.

        An existing file, also one that `path` links to, is replaced only if it is a conversation. Raises RequestError.
        """
        if os.path.lexists(path):
            try:
                _read(path)
            except RequestError as error:
                raise RequestError(f"{path} exists and is no conversation", fix="save to another file") from error
        text = json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=1)
        try:
            target = Path(os.path.realpath(path))
            number, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        except (OSError, ValueError) as error:
            raise _failed(path, "written", error) from error
        try:
            with open(number, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(name, target)
        except (OSError, ValueError) as error:
            with suppress(OSError):
                os.unlink(name)
            raise _failed(path, "written", error) from error

    def load(self, path: Path) -> None:
        """Replace the conversation by that of a file. Raises RequestError, and then changes nothing."""
        self.system, self._turns = _read(path)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _failed(path: Path, verb: str, error: Exception) -> RequestError:
    return RequestError(f"{path} cannot be {verb}: {reason_of(error)}")


def _read(path: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the system message and the turns in a file. Raises RequestError."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise RequestError(f"{path} is no file")  # reading a pipe would wait for ever
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        value = json.loads(raw) if len(raw) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise _failed(path, "read", error) from error
    except (ValueError, RecursionError):
        value = None
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise RequestError(f"{path} is no conversation", expected='JSON with "messages", as /save writes it')
    pairs = [_checked(message, f"{path}: messages[{index}]") for index, message in enumerate(messages)]
    system = pairs.pop(0)[1] if pairs and pairs[0][0] == "system" else None
    for index, (role, _) in enumerate(pairs):
        if role != ("user", "assistant")[index % 2]:
            raise RequestError(f"{path}: the roles do not alternate", expected="user, assistant, user, ...")
    if len(pairs) % 2:
        raise RequestError(f"{path} ends with a question", expected="an answer to each question")
    return system, [(pairs[i][1], pairs[i + 1][1]) for i in range(0, len(pairs), 2)]


def _checked(message: Any, where: str) -> tuple[str, str]:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise RequestError(where, expected="a role and a content, both strings", actual=quoted(message))
    check_unicode(content, f"{where}.content")
    return role, content
