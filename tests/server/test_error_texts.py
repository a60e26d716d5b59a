"""The texts of errors: they repeat what the client sent, and speak of the client's fields and of JSON."""

from __future__ import annotations

import pytest

from cpmrt import RequestError
from cpmrt.server.errors import as_api_error
from cpmrt.text import ChatTemplate

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def refused(server, path, body):
    """Return the error of a request that is refused."""
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(("path", "body", "said"), [
    (CHAT, {"messages": SAID, "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "/usr/bin/ls"}}}, "got '/usr/bin/ls'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "/home/me/cat.png"}]}]},
     "'/home/me/cat.png'"),
    (COMPLETIONS, {"prompt": "x", "guided_grammar": "start: /a/b/c/ (foo"}, "start: /a/b/c/ (foo"),
    (COMPLETIONS, {"prompt": "x", "guided_json": {"$ref": "/schemas/address/x"}}, "/schemas/address/x"),
    (COMPLETIONS, {"prompt": "x", "guided_json": {"type": "object", "patternProperties": {"^k1": {}, "^k": {}}}},
     "/^k1/"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_the_client_sent_stays_as_it_is(demo, path, body, said):
    assert said in refused(demo, path, body)["message"]


def test_the_folder_of_the_model_is_not_told(tmp_path):
    template = ChatTemplate({"default": "{{ messages[0].nothing.more }}"}, tmp_path / "chat_template.jinja", {})
    with pytest.raises(RequestError) as caught:
        template.render([{"role": "user", "content": "/a/b/c"}])
    message = as_api_error(caught.value).message
    assert str(tmp_path) not in message and "(chat_template.jinja, line 1 of the template)" in message
