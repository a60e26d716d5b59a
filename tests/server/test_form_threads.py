"""Forms are prepared in threads of their own: requests without one pass while forms compile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpmrt.grammar import Grammars
from cpmrt.server.answer_form import may_need_form

pytest.importorskip("llguidance")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
FORMS = [
    {"guided_regex": "[ab]"}, {"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"},
    {"structured_outputs": {"choice": ["a"]}}, {"grammar": 'root ::= "a"'}, {"tools": TOOLS},
    {"text": {"format": {"type": "json_schema"}}},
]  # fmt: skip
PLAIN = [
    {}, {"response_format": None}, {"response_format": {"type": "text"}}, {"text": {"format": {"type": "text"}}},
    {"text": {"verbosity": "low"}}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"},
    {"grammar": ""}, {"text": 5},
]  # fmt: skip


def test_which_requests_may_need_a_form():
    assert [fields for fields in FORMS if not may_need_form(fields)] == []
    assert [fields for fields in PLAIN if may_need_form(fields)] == []


def test_plain_requests_pass_while_forms_compile(demo, monkeypatch):
    may_go_on, begun, usual = threading.Event(), threading.Event(), Grammars._compiled_form

    def slow(grammars, form):
        begun.set()
        assert may_go_on.wait(30)
        return usual(grammars, form)

    monkeypatch.setattr(Grammars, "_compiled_form", slow)
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(demo.chat, "a", max_tokens=2, **fields) for fields in FORMS[:3] * 2]
        try:
            assert begun.wait(10)
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            for path, body in (("/v1/chat/completions", chat), ("/tokenize", {"prompt": "a"})):
                assert demo.client.post(path, json=body, timeout=10).status_code == 200
            assert not any(future.done() for future in waiting)
        finally:
            may_go_on.set()
        assert [future.result().status_code for future in waiting] == [200] * 6
