"""Refusals in the history of a chat: their text becomes the text of the message."""

from __future__ import annotations

import jsonschema
import pytest

from cpmrt.server.openapi import document

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
REFUSAL = {"type": "refusal", "refusal": "no"}
BEFORE, AFTER = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}


@pytest.mark.parametrize("message", [
    {"content": [REFUSAL]}, {"content": None, "refusal": "no"}, {"refusal": "no"}, {"content": "", "refusal": "no"},
    {"content": "n", "refusal": "o"}, {"content": [{"type": "text", "text": "n"}], "refusal": "o"},
    {"content": "no", "refusal": None}, {"content": [{"type": "text", "text": "n"}, REFUSAL | {"refusal": "o"}]},
], ids=str)  # fmt: skip
def test_a_refusal_in_a_chat(says, message):
    answer = says.client.post(CHAT, json={"messages": [BEFORE, {"role": "assistant", **message}, AFTER]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "[user]one[assistant]no[user]two[assistant]"


def test_a_refusal_among_the_items_of_a_response(says):
    turn = {"type": "message", "role": "assistant", "content": [REFUSAL]}
    answer = says.client.post(RESPONSES, json={"input": [BEFORE, turn, AFTER]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["content"][0]["text"] == "[user]one[assistant]no[user]two[assistant]"


@pytest.mark.parametrize(("message", "param"), [
    ({"role": "assistant", "refusal": 5}, "messages[0].refusal"),
    ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal"),
    ({"role": "assistant", "content": 5, "refusal": "no"}, "messages[0].content"),
    ({"role": "assistant", "content": None, "refusal": None}, "messages[0].content"),
    ({"role": "user", "content": [REFUSAL]}, "messages[0].content[0]"),
], ids=str)  # fmt: skip
def test_other_refusals_are_errors_of_their_fields(says, message, param):
    answer = says.client.post(CHAT, json={"messages": [message]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_the_document_allows_refusals_of_the_assistant():
    validator = jsonschema.Draft202012Validator(document()["components"]["schemas"]["ChatRequest"])
    alone = {"content": [REFUSAL]}, {"content": None, "refusal": "no"}, {"refusal": "no"}
    for message in alone:
        assert [validator.is_valid({"messages": [{"role": role, **message}]}) for role in ("assistant", "user")] == [
            True, False,
        ]  # fmt: skip
    assert validator.is_valid({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]})


@pytest.mark.parametrize("part", [
    {"type": "refusal"}, {"type": "refusal", "refusal": 5}, {"type": "refusal", "text": "x"},
], ids=str)  # fmt: skip
def test_a_refusal_without_text_is_an_error_in_a_response(says, part):
    answer = says.client.post(RESPONSES, json={"input": [{"role": "assistant", "content": [part]}]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input[0].content[0]", answer.text
