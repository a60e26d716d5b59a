"""The conversation of `cpmrt chat`: what failures leave of it, and how much of a context is for the prompt."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpmrt.cli import conversation as under_test
from cpmrt.cli.chat_commands import run_command
from cpmrt.cli.chat_session import ChatSession
from cpmrt.cli.context_room import room_for_prompt
from cpmrt.cli.conversation import Conversation, Part
from cpmrt.cli.listeners import StopAtOnce, StopRequestedError
from cpmrt.config import SamplingParams
from cpmrt.engine import GenerationStats
from cpmrt.errors import RequestError
from cpmrt.generation import Completion


def test_a_save_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, talk = tmp_path / "talk.json", Conversation("Be brief.")
    talk.save(path)
    before = path.read_bytes()

    def fail(*names: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(under_test.os, "replace", fail)
    talk.add("a", "b")
    with pytest.raises(RequestError, match="talk.json cannot be written: No space left on device"):
        talk.save(path)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(("context", "max_new_tokens", "room"), [
    (32768, 512, 32256), (32768, None, 31744), (4096, 1024, 3072), (4096, 1025, 3072), (2048, None, 1536), (3, 5, 3),
])  # fmt: skip
def test_an_answer_has_its_tokens_but_at_most_a_quarter_of_the_context(
    context: int, max_new_tokens: int | None, room: int
) -> None:
    assert room_for_prompt(context, max_new_tokens) == room


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_question_that_gets_no_new_answer_keeps_the_old_one(num_before: int) -> None:
    talk, asked = Conversation(None), list[str]()
    turns = [*((f"question {number}", "answer") for number in range(num_before)), ("last", "old")]
    for turn in turns:
        talk.add(*turn)
    kept = talk.messages()

    def answer(question: str) -> bool:
        asked.append(question)
        return False

    session: Any = SimpleNamespace(conversation=talk, answer=answer)
    assert run_command(session, "/retry") is False
    assert asked == ["last"] and talk.messages() == kept


class Given:
    """An answer that is there at once."""

    text = "new"
    completion = Completion("new", (), "stop", (), GenerationStats())

    def __iter__(self) -> Iterator[Part]:
        yield Part("new")

    def __enter__(self) -> Given:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def test_turns_that_no_longer_fit_are_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation("Be brief.")
    for number in range(3):
        talk.add(f"question {number}", "answer")
    model: Any = SimpleNamespace(open=lambda conversation, question: (Given(), 2), params=SamplingParams())
    session = ChatSession(model, talk, StopAtOnce())
    assert session.answer("one more")
    texts = [message["content"] for message in talk.messages()]
    assert texts == ["Be brief.", "question 2", "answer", "one more", "new"]
    assert "its oldest turns (2) are dropped" in capsys.readouterr().err


def test_a_question_that_is_stopped_before_its_answer_begins_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def stop(conversation: Conversation, question: str) -> Any:
        raise StopRequestedError

    talk, model = Conversation(None), SimpleNamespace(open=stop)
    session = ChatSession(model, talk, StopAtOnce())  # type: ignore[arg-type]
    assert session.answer("a question") and not talk.num_turns
    assert capsys.readouterr().err == "(stopped)\n"
