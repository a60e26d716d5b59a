"""`cpmrt chat --url` with servers that answer otherwise than `cpmrt serve`, or fail: one line each, no traceback."""

from __future__ import annotations

import io
import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cpmrt.cli.conversation import Conversation
from cpmrt.cli.main import main
from cpmrt.cli.remote import RemoteModel, ServerError
from cpmrt.config import SamplingParams

MODELS = b'{"data": [{"id": "m"}]}'


@contextmanager
def fake_server(answer, models=MODELS, length=None, status=200):
    """Yield a server that lists `models` (declared `length` bytes long) and answers question n with this status and
    with what `answer(n)` yields."""
    numbers = iter(range(1, 99))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", str(length or len(models)))
            self.end_headers()
            self.wfile.write(models)

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            events = answer(next(numbers))
            if events is None:
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(events.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def chat(url, lines, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
    return main(["chat", "--url", url])


def events(*values, prefix="data: ", done="data: [DONE]\n\n"):
    return "".join(f"{prefix}{json.dumps(value)}\n\n" for value in values) + done


def chunk(text, **fields):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}], **fields}


def test_a_server_that_restarts_costs_one_answer(monkeypatch, capsys):
    with fake_server(lambda number: None if number == 2 else events(chunk(f"answer {number}"))) as url:
        assert chat(url, "one\ntwo\nthree\n", monkeypatch) == 1
    out, err = capsys.readouterr()
    assert out == "answer 1\nanswer 3\n"
    assert err.startswith(f"cpmrt: error: {url} cannot be reached: ") and err.count("\n") == 1


@pytest.mark.parametrize("text", [
    events(chunk("Hello"), prefix="data:", done="data:[DONE]\n\n"),
    events(chunk("Hel", error=None), chunk("lo", error=None)),
    events({"choices": [None]}, {"choices": "x"}, {"choices": [{"delta": 3}], "usage": "none"}, chunk("Hello")),
    events(chunk("Hello"), ["no object"], 5),
    events(chunk("Hello")).replace("\n", "\r\n"),
], ids=["without a space", "error null", "odd choices", "no objects", "CRLF"])  # fmt: skip
def test_other_ways_to_write_a_stream_are_read(monkeypatch, capsys, text):
    with fake_server(lambda number: text) as url:
        assert chat(url, "hi\n", monkeypatch) == 0
    assert capsys.readouterr() == ("Hello\n", "")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_have_either_name(monkeypatch, capsys, field):
    with fake_server(lambda number: events({"choices": [{"delta": {field: "hm"}}]}, chunk("yes"))) as url:
        assert chat(url, "hi\n", monkeypatch) == 0
    assert capsys.readouterr() == ("hm\n\nyes\n", "")


@pytest.mark.parametrize("error", [{"message": "the GPU is gone", "code": 3}, "the GPU is gone"])
def test_an_error_in_a_stream_is_said(monkeypatch, capsys, error):
    with fake_server(lambda number: events({"error": error})) as url:
        assert chat(url, "hi\n", monkeypatch) == 1
    assert capsys.readouterr().err == "cpmrt: error: the GPU is gone\n"


@pytest.mark.parametrize("models", [
    b'{"data"', b'{"data": ["x"]}', b'{"data": {"id": "x"}}', b'{"data": []}', b"<html>",
    b'{"data": [{"id": 5}]}',
])  # fmt: skip
@pytest.mark.parametrize("missing", [0, 100])
def test_a_server_that_names_no_model_is_one_line(monkeypatch, capsys, models, missing):
    with fake_server(lambda number: None, models, len(models) + missing) as url:
        assert chat(url, "hi\n", monkeypatch) == 1
    assert capsys.readouterr().err == f"cpmrt: error: {url} names no model at /v1/models; check --url\n"


def test_a_question_that_does_not_fit_alone_is_refused_once_all_turns_are_left_out():
    asked, talk = [], Conversation("Be brief.")
    for number in range(2):
        talk.add(f"question {number}", "answer")

    def refuse(number):
        asked.append(number)
        return json.dumps({"error": {"message": "too long", "code": "context_length_exceeded"}})

    with fake_server(refuse, status=400) as url, pytest.raises(ServerError, match="too long"):
        RemoteModel(url, None, SamplingParams(), None).open(talk, "x" * 1000)
    assert asked == [1, 2, 3] and talk.num_turns == 2
