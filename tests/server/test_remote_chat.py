"""`cpmrt chat --url`: the local chat's interface, with the model behind a server."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time

import pytest
from serving import saying_llm, serving

from cpmrt.cli.main import main
from cpmrt.cli.remote import RemoteModel


@pytest.fixture
def chat(monkeypatch):
    """Feed lines to the command; its exit code."""

    def run(url, lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
        return main(["chat", "--url", url, *arguments])

    return run


def test_the_same_answers_as_the_local_chat(chat, demo, capsys):
    options = ("--max-new-tokens", "12", "--ignore-eos")
    assert chat(demo.url, "What is a list?\nAnd a set?\n", *options) == 0
    remote = capsys.readouterr()
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"What is a list?\nAnd a set?\n"), encoding="utf-8")
    assert main(["chat", "--executor", "reference", *options]) == 0
    assert capsys.readouterr() == remote and len(remote.out.strip()) > 20
    assert "(stopped after --max-new-tokens 12)" in remote.err


def test_settings_reach_the_server(chat, monkeypatch, capsys, says):
    sent = []
    monkeypatch.setattr(RemoteModel, "_send", spy_on(RemoteModel._send, sent))
    lines = "one\n/set temperature 0.5\n/set stop [\"a\"]\n/set thinking off\ntwo\n"
    assert chat(says.url, lines, "--temperature", "0", "--loop-repeats", "0") == 0
    first, second = (json.loads(body) for body in sent)
    assert first["temperature"] == 0 and "top_p" not in first and first["loop_repeats"] == 0
    assert second["temperature"] == 0.5 and second["stop"] == ["a"]
    assert second["chat_template_kwargs"] == {"enable_thinking": False}


def spy_on(send, sent):
    def spy(self, method, path, body=None):
        if body is not None:
            sent.append(body)
        return send(self, method, path, body)

    return spy


def test_turns_system_message_and_reset(chat, says, capsys):
    assert chat(says.url + "/v1/", "say(one)yas\nwhat?\n/reset\nnow?\n/help\n", "--system", "be brief") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "one"
    assert lines[1] == "one", "the question before is part of the prompt"
    assert lines[2] == "[system]be brief[user]now?[assistant]" and "/clear" in err


def test_thoughts_are_shown_and_not_remembered(chat, says, capsys):
    assert chat(says.url, "say(<think>hm</think>yes)yas\n") == 0
    assert capsys.readouterr().out == "hm\n\nyes\n"


def test_old_turns_are_dropped_when_the_context_is_full(chat, demo, capsys):
    lines = "".join(f"{number} " + "word " * 200 + "\n" for number in range(2))
    assert chat(demo.url, lines, "--max-new-tokens", "4") == 0
    assert "its oldest turns (" in capsys.readouterr().err


@pytest.mark.parametrize(("url", "message"), [
    ("http://127.0.0.1:1", "cannot be reached"),
    ("ftp://x", "--url"),
    ("http://127.0.0.1:99999", "--url"),
    ("http://", "--url"),
])  # fmt: skip
def test_a_server_that_is_not_there_is_one_line(chat, capsys, url, message):
    assert chat(url, "hi\n") == 1
    err = capsys.readouterr().err
    assert message in err and err.startswith("cpmrt: error: ") and err.count("\n") == 1


def test_url_and_model_exclude_each_other(chat, capsys):
    assert chat("http://localhost", "", "--model", "x") == 2


def test_a_key_that_the_server_wants(chat, tmp_path, capsys, monkeypatch):
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "ok"), api_keys=("sesame",)) as server:
        assert chat(server.url, "hi\n") == 1 and "API key" in capsys.readouterr().err
        assert chat(server.url, "hi\n", "--api-key", "sesame") == 0
        monkeypatch.setenv("CPMRT_API_KEY", "sesame")
        assert chat(server.url, "hi\n") == 0 and capsys.readouterr().out == "ok\nok\n"


def test_ctrl_c_leaves_the_answer_and_frees_its_slot(chat, tmp_path, capsys):
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "0123456789" * 300, delay_s=0.01)) as server:

        def press() -> None:
            while not any(job.sequence and len(job.sequence.token_ids) > 20 for job in server.engine.open_jobs):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press).start()
        assert chat(server.url, "count\n/exit\n", "--max-new-tokens", "2000") == 0
        out, err = capsys.readouterr()
        answer = out.strip()
        assert answer and ("0123456789" * 300).startswith(answer) and "(stopped)" in err
        server.wait_idle(1)


def test_a_server_that_breaks_off_is_said(chat, tmp_path, capsys):
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "0123456789" * 300, delay_s=0.01), grace=0.1) as server:

        def stop() -> None:
            while not server.engine.open_jobs:
                time.sleep(0.01)
            server.running.stop()

        threading.Thread(target=stop).start()
        assert chat(server.url, "count\n", "--max-new-tokens", "2000") == 1
        assert "shutting down" in capsys.readouterr().err
