"""`cpmrt chat`: turns through a pipe and on a terminal, commands, a full context, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from serving import saying_llm
from tiny_checkpoint import write_checkpoint
from tokenizers import Tokenizer as Library

import cpmrt.cli.chat
from cpmrt import LLM, SamplingParams
from cpmrt.cli.conversation import Conversation
from cpmrt.cli.listeners import StopOnInterrupt, StopRequestedError
from cpmrt.cli.local_model import LocalModel
from cpmrt.cli.main import main
from cpmrt.cli.output import sampling_line
from cpmrt.config import SamplingDefaults
from cpmrt.errors import ContextLengthError, RequestError
from cpmrt.executor import Decode, Prefill, StepResult
from cpmrt.job_maker import JobMaker
from cpmrt.weights.hub import BUNDLED

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = ("--temperature", "1", "--ignore-eos", "--max-new-tokens", "8")
PARAMS = SamplingParams(max_new_tokens=8, temperature=1.0, ignore_eos=True)
# Long enough that a Ctrl-C always comes before the end.
ENDLESS = ("--hf-overrides", '{"max_position_embeddings": 60000}', "--temperature", "1", "--ignore-eos",
           "--max-new-tokens", "20000")  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def chat(checkpoint, monkeypatch):
    """Return a function that runs `cpmrt chat` on piped lines and returns the exit code."""

    def run(lines, *arguments):
        raw = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        return main(["chat", "-m", str(checkpoint), "--executor", "reference", *arguments])

    return run


@pytest.fixture
def prompts(monkeypatch):
    """The list of every question's messages and thinking option, filled as they are asked."""
    asked, chat_renderer = [], JobMaker.chat_renderer

    def spy(self, **options):
        tokens_of = chat_renderer(self, **options)

        def noted(messages):
            asked.append(([(m["role"], m["content"]) for m in messages], options["enable_thinking"]))
            return tokens_of(messages)

        return noted

    monkeypatch.setattr(JobMaker, "chat_renderer", spy)
    return asked


def answers(checkpoint, questions, **options):
    """Return the answers that the Python API gives in the same conversation."""
    messages, texts = [], []
    with LLM(checkpoint, executor="reference", **options) as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            texts.append(llm.chat(messages, PARAMS).text)
            messages.append({"role": "assistant", "content": texts[-1]})
    return texts


def test_piped_lines_are_turns(chat, checkpoint, capsys):
    assert chat("one\n\ntwo\nthree", *SAMPLING) == 0
    out = capsys.readouterr().out
    assert out == "".join(f"{text}\n" for text in answers(checkpoint, ["one", "two", "three"]))


def test_every_turn_has_the_form_that_options_give(monkeypatch, capsys):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    assert main(["chat", "--executor", "reference", "--regex", "[xy]{3}!", "--temperature", "1"]) == 0
    turns = capsys.readouterr().out.splitlines()
    assert len(turns) == 2 and all(re.fullmatch("[xy]{3}!", turn) for turn in turns)


def test_an_answer_that_loops_is_ended_by_default(chat, capsys):
    greedy = ("--temperature", "0", "--ignore-eos", "--max-new-tokens", "600")
    assert chat("one\n", *greedy, "--stats") == 0
    ended = capsys.readouterr().err
    assert "(stopped: the answer repeats itself; --loop-repeats 0" in ended and "finish: loop" in ended
    assert chat("one\n", *greedy, "--loop-repeats", "0", "--stats") == 0
    assert "finish: length" in capsys.readouterr().err


def test_how_answers_are_sampled_on_one_line():
    own = SamplingDefaults(0.8, top_p=0.9, source="generation_config.json")
    assert sampling_line(SamplingParams(), own) == "temperature 0.8, top_p 0.9 (generation_config.json)"
    asked = SamplingParams(temperature=0, repetition_penalty=1.1)
    line = "greedy, repetition penalty 1.1 (--temperature, --repetition-penalty, generation_config.json)"
    assert sampling_line(asked, own) == line


def test_the_seed_repeats_a_chat(chat, checkpoint, capsys):
    assert chat("one\ntwo\n", *SAMPLING, "--seed", "9") == 0
    out = capsys.readouterr().out
    assert out == "".join(f"{text}\n" for text in answers(checkpoint, ["one", "two"], seed=9))
    assert out != "".join(f"{text}\n" for text in answers(checkpoint, ["one", "two"]))


def test_commands(chat, prompts, capsys):
    assert chat("one\n/reset\ntwo\n/help\n/what\n/usr/bin is?\n/exit\nnever\n", *SAMPLING, "--system", "Be kind.") == 1
    err = capsys.readouterr().err
    assert "forgotten" in err and "forget the conversation" in err and "/what is no command" in err
    questions = [messages for messages, _ in prompts[1:]]
    assert questions[:2] == [[("system", "Be kind."), ("user", "one")], [("system", "Be kind."), ("user", "two")]]
    assert questions[2][-1] == ("user", "/usr/bin is?") and len(questions[2]) == 4 and len(questions) == 3


@pytest.mark.parametrize("option", [(), ("--allow-special-tokens",)])
def test_special_tokens_that_are_typed(chat, monkeypatch, option):
    allowed, chat_renderer = [], JobMaker.chat_renderer

    def spy(self, **options):
        allowed.append(options["allow_special_tokens"])
        return chat_renderer(self, **options)

    monkeypatch.setattr(JobMaker, "chat_renderer", spy)
    assert chat("one</s>\n", *SAMPLING, *option) == 0 and set(allowed) == {bool(option)}


@pytest.mark.parametrize(("option", "value"), [((), None), (("--thinking",), True), (("--no-thinking",), False)])
def test_thinking(chat, prompts, option, value):
    assert chat("one\n", *SAMPLING, *option) == 0
    assert prompts[-1][1] is value


def test_a_cut_answer_is_said_to_be_cut(chat, capsys):
    assert chat("one\n", *SAMPLING) == 0
    assert "(stopped after --max-new-tokens 8)" in capsys.readouterr().err


def test_a_full_context_drops_the_oldest_turns_but_not_the_system_message(chat, prompts, capsys):
    assert chat("first\nsecond\nthird\n", *SAMPLING, "--system", "S", "--max-context", "90") == 0
    err = capsys.readouterr().err
    assert err.count("the conversation no longer fits the context: its oldest turns (1) are dropped") >= 1
    last = prompts[-1][0]
    assert last[0] == ("system", "S") and last[-1] == ("user", "third") and ("user", "first") not in last


def test_a_question_too_long_alone_is_refused_and_forgets_nothing(chat, prompts, capsys):
    assert chat(f"first\n{'x' * 200}\nsecond\n", *SAMPLING, "--max-context", "100") == 1
    out, err = capsys.readouterr()
    assert out.count("\n") >= 2 and "cpmrt: error: the prompt does not fit the context" in err
    assert "raise --max-context" in err
    assert [content for role, content in prompts[-1][0] if role == "user"] == ["first", "second"]


def test_messages_of_several_lines_through_a_pipe(chat, prompts):
    assert chat('one \\\ntwo\n"""\n  three\n\nfour"""\n"""five', *SAMPLING) == 0
    asked = [messages[-1][1] for messages, _ in prompts[1:]]
    assert list(dict.fromkeys(asked)) == ["one \ntwo", "  three\n\nfour", "five"]


def test_undo_and_retry(chat, prompts, capsys):
    assert chat("one\ntwo\n/retry\n/undo\nthree\n/undo\n/undo\n/undo\n/retry\n", *SAMPLING) == 1
    last = [[content for role, content in messages if role == "user"] for messages, _ in prompts[1:]]
    assert list(map(tuple, last)) == [("one",), ("one", "two"), ("one", "two"), ("one", "three")]
    err = capsys.readouterr().err
    assert "forgotten: two" in err and "no question to forget" in err and "no question to ask again" in err


def test_a_retry_that_fails_keeps_the_answer_before(chat, tmp_path, capsys):
    """A retry for which a new system message leaves no room fails, and the earlier answer stays in the conversation."""
    file = tmp_path / "kept.json"
    lines = f"one\n/system {'x' * 300}\n/retry\n/system none\n/save {file}\n"
    assert chat(lines, *SAMPLING, "--max-context", "90") == 1
    assert [message["content"] for message in json.loads(file.read_text())["messages"]][0] == "one"


def test_a_saved_conversation_goes_on_in_another_run(chat, prompts, tmp_path, capsys):
    file = tmp_path / "kept.json"
    assert chat(f"one\n/save {file}\ntwo\n/save {file}\n", *SAMPLING, "--system", "S") == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["kept.json"]
    before = prompts[-1][0]
    assert chat(f"/load {file}\nthree\n", *SAMPLING) == 0
    assert prompts[-1][0][: len(before)] == before and prompts[-1][0][-1] == ("user", "three")
    assert "loaded 2 turns" in capsys.readouterr().err
    assert chat(f"/load {file}\n/undo\n/save {file}\n/load {file}\n", *SAMPLING) == 0
    assert "loaded 1 turn from" in capsys.readouterr().err


def test_a_link_to_a_saved_conversation_stays_one(chat, tmp_path):
    (tmp_path / "kept").mkdir()
    file, link = tmp_path / "kept" / "one.json", tmp_path / "last.json"
    link.symlink_to(file)
    assert chat(f"one\n/save {file}\ntwo\n/save {link}\n", *SAMPLING) == 0
    assert link.is_symlink() and len(json.loads(file.read_text())["messages"]) == 4


@pytest.mark.parametrize(("content", "message"), [
    (None, "cannot be read: No such file"),
    ("folder", "is no file"),
    ("fifo", "is no file"),
    ("{", "is no conversation"),
    ("[" * 100_000, "is no conversation"),
    ('{"messages": 3}', "is no conversation"),
    ('{"messages": [{"role": "user"}]}', "messages[0]: expected a role and a content"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "ends with a question"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', "do not alternate"),
    (r'[{"role": "user", "content": "\ud800"}]', "messages[0].content: expected valid Unicode"),
])  # fmt: skip
def test_a_file_that_is_no_conversation_changes_nothing(chat, prompts, tmp_path, capsys, content, message):
    file = tmp_path / "file"
    if content in ("folder", "fifo"):
        (file.mkdir if content == "folder" else lambda: os.mkfifo(file))()
    elif content is not None:
        file.write_text(content)
    assert chat(f"one\n/load {file}\ntwo\n", *SAMPLING) == 1
    err = capsys.readouterr().err
    assert message in err and [text for role, text in prompts[-1][0] if role == "user"] == ["one", "two"]


def test_no_other_file_is_written_over(chat, tmp_path, capsys):
    file = tmp_path / "notes.txt"
    file.write_text("precious")
    wrong = [tmp_path, tmp_path / "no" / "folder", "", "~nobody-of-this-name/x", "a\0b"]
    assert chat("".join(f"one\n/save {path}\n" for path in (file, *wrong)), *SAMPLING) == 1
    err = capsys.readouterr().err
    assert "exists and is no conversation" in err and "cannot be written" in err and "/save needs FILE" in err
    assert file.read_text() == "precious"


def test_settings_change_the_answers_that_follow(chat, checkpoint, prompts, capsys):
    assert chat("/set max-new-tokens 3\n/set temperature 0\none\n/set thinking on\ntwo\n/stats\n", *SAMPLING) == 0
    out, err = capsys.readouterr()
    with LLM(checkpoint, executor="reference") as llm:
        greedy = SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)
        assert out.split("\n")[0] == llm.chat([{"role": "user", "content": "one"}], greedy).text
    assert "max_new_tokens 3" in err and "new 3 tokens" in err and "of 2,048 tokens" in err
    assert [thinks for _, thinks in prompts[1:3]] == [None, True]


@pytest.mark.parametrize(("lines", "shown"), [
    ("/set stop x\n/set stop none", "stop []"), ("/set presence_penalty 2\n/set presence_penalty none", "penalty 0.0"),
    ("/set frequency_penalty 2\n/set frequency_penalty default", "penalty 0.0"), ("/set ignore_eos none", "eos off"),
    ("/set temperature 2\n/set temperature none", "temperature default"), ("/set loop_repeats none", "repeats 0"),
    ("/set stop 5", 'stop ["5"]'), ("/set stop on", 'stop ["on"]'), ('/set stop ["a", "b"]', 'stop ["a", "b"]'),
    ('/set stop "none"', 'stop ["none"]'),
])  # fmt: skip
def test_settings_can_be_taken_back_and_stop_takes_any_text(chat, capsys, lines, shown):
    assert chat(f"{lines}\n", *SAMPLING) == 0
    assert capsys.readouterr().err.endswith(f"{shown}\n")


@pytest.mark.parametrize(("line", "message"), [
    ("/set temprature 1", "/set temprature: there is no such setting; did you mean temperature?"),
    ("/set topk 3", "/set topk: there is no such setting; did you mean top_k?"),
    ("/set foo 1", "/set foo: there is no such setting; one of max_new_tokens, temperature, top_k, top_p, "),
    ("/set temperature hot", "/set temperature: expected a number"),
    ("/set temperature", "/set temperature: expected a value"),
    ("/set thinking maybe", "expected on or off"),
    ("/retri", "/retri is no command: did you mean /retry?"),
])  # fmt: skip
def test_settings_and_commands_that_are_wrong(chat, capsys, line, message):
    assert chat(f"{line}\n", *SAMPLING) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_the_system_message_can_change(chat, prompts, capsys):
    assert chat("/system Be kind.\none\n/system\n/system none\ntwo\n", *SAMPLING, "--system", "S") == 0
    assert prompts[1][0][0] == ("system", "Be kind.") and prompts[-1][0][0] == ("user", "one")
    assert capsys.readouterr().err.count("system message: Be kind.") == 2


def test_thoughts_between_special_tokens_are_told_apart(tmp_path, monkeypatch, capsys):
    """Thought markers that are special tokens, which decoding leaves out of the text, still separate thought and
    answer."""
    folder = write_checkpoint(tmp_path / "model", vocab_size=261)
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<think>", "</think>"])
    library.save(str(folder / "tokenizer.json"))
    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return "<think>hm</think>yes"

    monkeypatch.setattr(cpmrt.cli.chat, "LLM", lambda **options: saying_llm(folder, reply))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n"), encoding="utf-8"))
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == "hm\n\nyes\n" * 2 and asked[-1].count("hm") == 0


def test_fit_drops_no_more_than_it_must(checkpoint):
    conversation = Conversation("system")
    for index in range(5):
        conversation.add(f"question {index}", "x" * 30)
    with LLM(checkpoint, executor="reference", max_context=200) as llm:
        model = LocalModel(llm, PARAMS, None)
        ids, skipped = model.fit(conversation, "now?")
        assert 0 < skipped < 5 and len(ids) <= 192 and conversation.num_turns == 5
        assert len(llm.chat_prompt(conversation.asked("now?", skip=skipped - 1))) > 192
        with pytest.raises(ContextLengthError):
            model.open(conversation, "y" * 300)


@pytest.mark.parametrize(("line", "says"), [(b"\xff\xfe", "is not UTF-8"), (b"x" * 2**26 + b"yz", "is too large")])
def test_input_that_is_no_message(chat, capsys, line, says):
    assert chat(b"one\n" + line + b"\n", *SAMPLING) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"cpmrt: error: standard input {says}")


def test_the_end_of_a_piped_line_does_not_count_for_its_limit(monkeypatch):
    for module in ("chat", "prompt_source"):
        monkeypatch.setattr(f"cpmrt.cli.{module}.MAX_PROMPT_BYTES", 4)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1234\n\n123\n1234\n12345\n")))
    lines = cpmrt.cli.chat._piped_lines()
    assert [next(lines) for _ in range(4)] == ["1234", "", "123", "1234"]
    with pytest.raises(RequestError, match="at most 4 bytes"):
        next(lines)


def test_a_stop_between_prompt_chunks_leaves_the_engine_whole(checkpoint):
    interrupt = StopOnInterrupt()
    with LLM(checkpoint, executor="reference", prefill_chunk=4, on_step=interrupt) as llm:
        expected = llm.generate("after", SamplingParams(max_new_tokens=8, seed=1)).token_ids
        with interrupt, llm.stream("a prompt of several chunks", PARAMS) as stream:
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(StopRequestedError):
                next(stream)
        assert stream.completion.finish_reason == "cancelled" and stream.completion.token_ids == ()
        assert llm.generate("after", SamplingParams(max_new_tokens=8, seed=1)).token_ids == expected


def test_a_second_ctrl_c_interrupts_at_once_and_the_handler_goes_back():
    before = signal.getsignal(signal.SIGINT)
    interrupt = StopOnInterrupt()
    with pytest.raises(KeyboardInterrupt), interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        interrupt(Decode((0,)), StepResult())
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    interrupt(Prefill(0, (1,), 0, True), StepResult())


@contextmanager
def start(checkpoint, *arguments, **streams):
    """Yield a chat in a process of its own, which is killed at the end even if the test fails."""
    command = [sys.executable, "-m", "cpmrt", "chat", "-m", str(checkpoint), "--executor", "reference", *arguments]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **streams) as child:
        try:
            yield child
        finally:
            child.kill()


def test_ctrl_c_stops_the_answer_and_not_the_program(checkpoint):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(checkpoint, *ENDLESS, **pipes) as child:
        for question in (b"one\n", b"two\n"):
            child.stdin.write(question)
            child.stdin.flush()
            assert child.stdout.read(30)
            child.send_signal(signal.SIGINT)
            assert until(child.stderr.fileno(), b"(stopped)\n")
        child.stdin.write(b"/help\n")
        _, err = child.communicate(timeout=30)
        assert child.returncode == 0 and b"forget the conversation" in err


def until(descriptor, mark, seconds=30):
    """Return everything read up to and including `mark`; fail if it does not come in time."""
    seen, deadline = b"", time.monotonic() + seconds
    while mark not in seen:
        assert time.monotonic() < deadline, f"{mark!r} did not come: {seen!r}"
        if select.select([descriptor], [], [], 0.2)[0]:
            chunk = os.read(descriptor, 1)
            assert chunk, f"{mark!r} did not come: {seen!r}"
            seen += chunk
    return seen


@pytest.mark.skipif(not (BUNDLED / "model.safetensors").exists(), reason="the bundled model is not there yet")
def test_the_bundled_model_chats(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What does os.path.join do?\n")))
    assert main(["chat", "--max-new-tokens", "16"]) == 0
    assert capsys.readouterr().out.strip()
