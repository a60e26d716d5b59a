"""Conversations that are only counted or shown as tokens: a folder of prefixes does not hear of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cpmrt import LLM
from cpmrt.server.messages import count_tokens, prepare_message
from cpmrt.server.service import ServerSettings
from cpmrt.server.tokenizing import tokenize

CHAT = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(executor="reference", max_context=512) as llm:
        yield llm


@pytest.fixture
def heard(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(llm.maker, "on_chat", lambda ids, messages, tokens_of: found.append(messages))
    return found


def test_only_a_conversation_that_is_answered_is_a_meeting(llm: Any, heard: list[Any]) -> None:
    service: Any = SimpleNamespace(engine=SimpleNamespace(llm=llm), settings=ServerSettings("demo"))
    count = count_tokens(service, CHAT)["input_tokens"]
    assert tokenize(service, CHAT)["count"] == count > 0 and not heard
    prepare_message(service, CHAT)
    assert len(heard) == 1
