"""`cpmrt chat --url`: the local chat's interface, with the model behind a server."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import fields, replace

import pytest
from serving import saying_llm, serving

from cpmrt.cli.arguments import add_sampling_options, sampling_params
from cpmrt.cli.main import main
from cpmrt.cli.parser import Parser
from cpmrt.cli.remote import RemoteModel
from cpmrt.executor import ExecutorLimits
from cpmrt.server.schema import read_chat


@pytest.fixture
def chat(monkeypatch):
    """Return a function that runs the command on these lines and returns its exit code."""

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


@pytest.fixture
def files(tmp_path):
    """The folder of the files that options name."""
    (tmp_path / "schema.json").write_text('{"enum": ["ja", "nein"]}')
    (tmp_path / "any.json").write_text("true")
    (tmp_path / "answer.lark").write_text('start: "a" "b"{2,4}')
    return tmp_path


@pytest.mark.parametrize("options", [
    ("--regex", "[xy]{3}!"),
    ("--json-schema", "schema.json"),
    ("--json-schema", "any.json"),
    ("--grammar", "answer.lark"),
    ("--choices", "a set", "--choices", "a list"),
    ("--logit-bias", "300:100", "--logit-bias", "7:-1.5"),
], ids=" ".join)  # fmt: skip
def test_a_form_and_biases_bind_the_answer_of_a_server_too(chat, demo, files, capsys, monkeypatch, options):
    pytest.importorskip("llguidance")
    monkeypatch.chdir(files)
    assert chat(demo.url, "What is a list?\n", "--max-new-tokens", "6") == 0
    free = capsys.readouterr().out
    assert chat(demo.url, "What is a list?\n", "--max-new-tokens", "6", *options) == 0
    remote = capsys.readouterr().out
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"What is a list?\n"), encoding="utf-8")
    assert main(["chat", "--executor", "reference", "--max-new-tokens", "6", *options]) == 0
    assert capsys.readouterr().out == remote != free


def test_every_sampling_option_is_read_by_the_server_as_here(chat, demo, monkeypatch, capsys):
    """Every sampling option, all given at once but only one form, is read by the server as the local command reads
    it."""
    pytest.importorskip("llguidance")
    sent, values = [], {"int": "3", "float": "1.5"}
    monkeypatch.setattr(RemoteModel, "_send", spy_on(RemoteModel._send, sent))
    parser = Parser()
    add_sampling_options(parser)
    special = {
        "top_p": "0.5", "min_p": "0.5", "max_new_tokens": "3", "stop": "x", "logit_bias": "300:1.5",
        "regex": "[xy]{3}",
    }  # fmt: skip
    line = []
    for action in parser._actions:
        if action.dest in ("help", "json_schema", "grammar", "grammar_trigger", "choices"):
            continue
        value = special.get(action.dest) or values.get(getattr(action.type, "__name__", ""), "")
        line += [action.option_strings[0], *filter(None, [value])]
    assert chat(demo.url, "hi\n", *line) == 0
    here = sampling_params(parser.parse_args(line))
    there = read_chat(json.loads(sent[-1]), ["demo"]).wanted.sampling
    assert there == replace(here, seed=there.seed)
    untouched = [field.name for field in fields(here) if getattr(here, field.name) == field.default]
    assert untouched == ["seed", "logprobs", "n", "json_schema", "grammar", "choices", "grammar_trigger"]


def test_what_no_field_of_a_request_can_say_is_refused(chat, says, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert chat(says.url, "hi\n", "--grammar", "answer.lark", "--grammar-trigger", "<call>") == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("cpmrt: error: --grammar-trigger") and err.count("\n") == 1


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


def test_old_turns_make_room_for_whole_answers(chat, tmp_path, capsys):
    limits = ExecutorLimits(max_sequences=1, max_context=400, prefill_chunk=64)
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "0123456789" * 6, limits=limits)) as server:
        assert chat(server.url, "".join(f"question {number}\n" for number in range(12))) == 0
        first = capsys.readouterr()
        assert chat(server.url, "".join(f"question {number}\n" for number in range(12)), "--max-new-tokens", "61") == 0
    for out, err in (first, capsys.readouterr()):
        assert out == ("0123456789" * 6 + "\n") * 12
        assert "the context is full" not in err and "its oldest turns (" in err


@pytest.mark.parametrize(("url", "message"), [
    ("http://127.0.0.1:1", "cannot be reached"),
    ("ftp://x", "--url"),
    ("http://127.0.0.1:99999", "--url"),
    ("http://", "--url"),
    ("http://[bad", "--url: Invalid IPv6 URL"),
    ("http://a\u2100b", "--url"),
    ("http://a b", "--url: expected http://HOST:PORT, got 'http://a b'"),
    ("http://user:pw@127.0.0.1:1", "--url holds a user or a password; leave them out"),
])  # fmt: skip
def test_a_server_that_is_not_there_is_one_line(chat, capsys, url, message):
    assert chat(url, "hi\n") == 1
    err = capsys.readouterr().err
    assert message in err and err.startswith("cpmrt: error: ") and err.count("\n") == 1 and "pw" not in err


@pytest.mark.parametrize("line", [
    "--model x", "--draft lookup", "--dtype nonsense", "--executor reference", "--max-context 64",
    "--memory-budget 8GiB", "--seed 3", "--kv-dtype fp8", "--lm-head-screen", "--prefix-dir x", "--revision main",
    "--hf-overrides {}", "--sparse off", "--prefix-cache fast", "--draft-topk 3", "--tree-size 8", "--speculate off",
])  # fmt: skip
def test_what_is_about_a_model_here_is_refused_beside_a_url(chat, capsys, line):
    assert chat("http://localhost:1", "hi\n", *line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"cpmrt: error: --url and {line.split()[0]} exclude each other; see cpmrt chat --help\n"


def test_other_ways_to_say_the_same_are_refused_beside_a_url(chat, capsys):
    assert chat("http://localhost:1", "hi\n", "openbmb/MiniCPM4-0.5B") == 2
    assert "--url and --model" in capsys.readouterr().err
    assert chat("http://localhost:1", "hi\n", "--no-prefix-cache") == 2
    assert "--url and --prefix-cache" in capsys.readouterr().err


def test_the_time_of_the_prompt_is_that_until_the_first_text(chat, tmp_path, capsys):
    """The prompt's time in --stats ends with the first text; the server sends even the status with it, here after 0.3
    s."""
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "ok", delay_s=0.3)) as server:
        assert chat(server.url, "hi\n", "--stats") == 0
    seconds = float(re.search(r"prompt \d+ tokens in ([\d.]+) s", capsys.readouterr().err)[1])
    assert 0.3 <= seconds < 5


def test_an_answer_without_text_took_no_time_after_its_prompt(chat, says, capsys):
    assert chat(says.url, "say()yas\n", "--stats") == 0
    assert re.search(r"prompt \d+ tokens in [\d.]+ s .*, new \d tokens?, finish: stop", capsys.readouterr().err)


def test_a_key_that_the_server_wants(chat, tmp_path, capsys, monkeypatch):
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "ok"), api_keys=("sesame",)) as server:
        assert chat(server.url, "hi\n") == 1 and "API key" in capsys.readouterr().err
        assert chat(server.url, "hi\n", "--api-key", "sesame") == 0
        monkeypatch.setenv("CPMRT_API_KEY", "sesame")
        assert chat(server.url, "hi\n") == 0 and capsys.readouterr().out == "ok\nok\n"


def test_a_key_that_is_empty_is_not_another_one(chat, capsys, monkeypatch):
    """An empty key, as an unset variable gives, is refused and not replaced by the environment's key, meant for
    elsewhere."""
    monkeypatch.setenv("CPMRT_API_KEY", "sesame")
    assert chat("http://127.0.0.1:1", "hi\n", "--api-key", "") == 1
    assert "error: --api-key is empty" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["ö", "é€", "a\nb"])
def test_a_key_that_no_header_can_carry_is_refused(chat, capsys, monkeypatch, key):
    url, wanted = "http://127.0.0.1:1", "cannot be sent in an HTTP header: expected printable ASCII"
    assert chat(url, "hi\n", "--api-key", key) == 1
    assert f"error: --api-key {wanted}" in capsys.readouterr().err
    monkeypatch.setenv("CPMRT_API_KEY", key)
    assert chat(url, "hi\n") == 1
    assert f"error: CPMRT_API_KEY {wanted}" in capsys.readouterr().err
    assert chat(url, "hi\n", "--api-key", "sesame") == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_ctrl_c_leaves_the_answer_and_frees_its_slot(chat, tmp_path, capsys):
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "0123456789" * 300, delay_s=0.01)) as server:

        shown = sys.stdout  # of capsys

        def press() -> None:
            while len(shown.getvalue()) < 20:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press, daemon=True).start()
        assert chat(server.url, "count\n/exit\n", "--max-new-tokens", "2000") == 0
        out, err = capsys.readouterr()
        answer = out.strip()
        assert answer and ("0123456789" * 300).startswith(answer) and "(stopped)" in err
        server.wait_idle(10)  # all of the answer would take 20 s


def test_a_server_that_breaks_off_is_said(chat, tmp_path, capsys):
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "0123456789" * 300, delay_s=0.01), grace=0.1) as server:

        def stop() -> None:
            while not server.engine.open_jobs:
                time.sleep(0.01)
            server.running.stop()

        threading.Thread(target=stop).start()
        assert chat(server.url, "count\n", "--max-new-tokens", "2000") == 1
        assert "shutting down" in capsys.readouterr().err
