"""`cpmrt chat` on a terminal: the screen, the keys, and the history kept between runs."""

from __future__ import annotations

import shlex
import signal
import stat
import sys

import pytest
from terminal import ROOT, Terminal

pytest.importorskip("httpx")
SAYS = [sys.executable, str(ROOT / "tests" / "says_chat.py")]
LONG = "word " * 400


def starter(tmp_path):
    def start(*arguments, delay_s=0.0, shell="", **sizes):
        command = [*SAYS, str(tmp_path / "model"), str(delay_s), *arguments]
        if shell:
            command = ["sh", "-c", f"exec {shlex.join(command)} {shell}"]
        variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CPMRT_STATE_DIR": str(tmp_path / "state")}
        return Terminal(command, **variables, **sizes)

    return start


@pytest.fixture
def chat(tmp_path):
    """Return a function that starts a chat whose model answers with the text between say( and )yas."""
    return starter(tmp_path)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A running chat that several tests share, one after the other."""
    with starter(tmp_path_factory.mktemp("chat"))("--no-markdown") as terminal:
        terminal.wait_for_prompt()
        yield terminal


@pytest.fixture
def terminal(running):
    """The shared running chat, with its conversation forgotten and its screen emptied."""
    running.type("/clear\r")
    running.wait("the conversation is forgotten\n>")
    running.screen.reset()
    running.type("\x0c")  # Ctrl-L draws the prompt again
    running.wait_for_prompt()
    return running


def test_a_banner_a_question_an_answer_and_ctrl_d(chat):
    with chat(columns=100) as terminal:
        terminal.wait_for_prompt()
        assert "on the CPU (NumPy), context 4,096 tokens, memory" in terminal.text and "/help" in terminal.text
        terminal.type("say(fine)yas\r")
        terminal.wait("\nfine\n>")
        terminal.type("\x04")
        assert terminal.end() == 0


def test_quiet_shows_no_banner(chat):
    with chat("--quiet") as terminal:
        terminal.wait_for_prompt()
        assert terminal.lines == [">"]


def test_pasted_lines_are_one_message(terminal):
    terminal.paste("first\nsecond\n  third")
    terminal.type("\r")
    terminal.wait("[user]first\nsecond\n  third[assistant]")


def test_quotes_and_backslashes_make_several_lines(terminal):
    terminal.type('"""one\rtwo\r\r"""\r')
    terminal.wait("[user]one\ntwo[assistant]\n>")
    terminal.type("three\\\rfour\r")
    terminal.wait("[user]three\nfour[assistant]")


def test_words_are_not_broken(chat):
    words = [f"word{index}" for index in range(40)]
    with chat("--no-markdown", columns=40) as terminal:
        terminal.wait_for_prompt()
        terminal.type("/set max_new_tokens 1000\r")
        terminal.wait("max_new_tokens 1000")
        terminal.paste(f"say({' '.join(words)} end.)yas")
        terminal.type("\r")
        terminal.wait("end.\n>")
        shown = terminal.text.rpartition(")yas\n")[2]
        assert [word for line in shown.splitlines() for word in line.split()][:41] == [*words, "end."]


def test_markdown_is_made_up_when_the_answer_ends(chat):
    answer = "See **this**:\n\n```python\ndef f():\n    return 1\n```\nand List<int>."
    with chat(delay_s=0.01) as terminal:
        terminal.wait_for_prompt()
        terminal.paste(f"say({answer})yas")
        terminal.type("\r")
        terminal.wait("and List<int>.\n>")
        shown = terminal.text.rpartition(")yas\n")[2]
        assert "See this:" in shown and "**" not in shown and "```" not in shown and "def f():" in shown
        row = next(y for y, line in enumerate(terminal.screen.display) if line.strip() == "def f():")
        colours = {terminal.screen.buffer[row][x].fg for x in range(10)}
        assert len(colours) > 1, "code has colours"


def test_an_answer_longer_than_the_screen_stays_whole(chat):
    answer = "\n\n".join(f"- item **{number}**" for number in range(30))
    with chat(rows=10) as terminal:
        terminal.wait_for_prompt()
        terminal.paste(f"say({answer})yas")
        terminal.type("\r")
        terminal.wait("item 29\n>")
        shown = terminal.text.rpartition(")yas\n")[2]
        assert [line.rpartition(" ")[2] for line in shown.splitlines() if "item" in line] == [str(n) for n in range(30)]


def test_what_is_typed_ahead_stays_out_of_the_answer(chat):
    with chat("--no-markdown", delay_s=0.02) as terminal:
        terminal.wait_for_prompt()
        terminal.type(f"say({'x' * 60})yas\r")
        terminal.wait(lambda: terminal.lines[-1].startswith("xxxxx"))
        terminal.type("say(second)yas\r")
        terminal.wait("\nsecond\n>")
        answer = terminal.text.partition("> say(second)yas")[0].rpartition(")yas\n")[2]
        assert answer.replace("\n", "") == "x" * 60


def test_ctrl_c_ends_the_answer_and_not_the_chat(chat):
    with chat(delay_s=0.02) as terminal:
        terminal.wait_for_prompt()
        terminal.type(f"say(begin {'x ' * 200})yas\r")
        terminal.wait("\nbegin x x")
        terminal.type("\x03")
        terminal.wait("(stopped)\n>")
        terminal.type("half typed\x03")
        terminal.wait("Ctrl-C again")
        terminal.type("say(still here)yas\r")
        terminal.wait("\nstill here\n>")
        terminal.type("\x03")
        terminal.wait(lambda: terminal.text.count("Ctrl-C again") == 2)
        terminal.type("\x03")
        assert terminal.end() == 130


@pytest.mark.all
def test_a_signal_that_ends_the_chat_leaves_a_terminal_that_shows_what_is_typed(chat):
    with chat(delay_s=0.02) as terminal:
        terminal.wait_for_prompt()
        terminal.type(f"say({LONG})yas\r")
        terminal.wait("\nword")
        assert not terminal.echoes
        terminal.child.send_signal(signal.SIGTERM)
        assert terminal.end() == 143 and terminal.echoes


def test_the_history_is_kept_between_runs_for_this_user_alone(chat, tmp_path):
    for _ in range(2):
        with chat() as terminal:
            terminal.wait_for_prompt()
            terminal.type("\x1b[A")  # up
            terminal.read(0.3)
            terminal.type("\x15say(one)yas\r")  # Ctrl-U
            terminal.wait("\none\n>")
            terminal.type("/bye\r")
            assert terminal.end() == 0
    history = tmp_path / "state" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600 and stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    with chat() as terminal:
        terminal.wait_for_prompt()
        terminal.type("\x1b[A\x1b[A")
        terminal.wait("> say(one)yas")


@pytest.mark.parametrize(("obstacle", "says"), [
    (lambda state: state.write_text("a file where the folder should be"), "state is not a folder"),
    (lambda state: (state / "chat_history").mkdir(parents=True), "state/chat_history: Is a directory"),
], ids=["folder", "file"])  # fmt: skip
def test_a_history_that_cannot_be_kept_is_said_and_no_reason_to_stop(chat, tmp_path, obstacle, says):
    obstacle(tmp_path / "state")
    with chat(columns=300) as terminal:
        terminal.wait_for_prompt()
        assert f"messages typed here are not kept for later runs: {tmp_path}/{says}\n" in terminal.text
        terminal.type("say(one)yas\r")
        terminal.wait("\none\n>")


def test_answers_into_a_file(chat, tmp_path):
    """With its output redirected to a file, a chat still takes its input from the terminal."""
    with chat("--no-markdown", shell=f"> {tmp_path / 'answers'}") as terminal:
        terminal.wait_for_prompt()
        terminal.type("say(one)yas\r")
        terminal.wait(lambda: (tmp_path / "answers").read_text() == "one\n")
        terminal.type("/bye\r")
        assert terminal.end() == 0 and "\none" not in terminal.text


def test_tab_completes_commands(terminal):
    terminal.type("/he\t\r")
    terminal.wait("forget the conversation")


def test_answers_cannot_steer_the_terminal(terminal):
    terminal.paste("say(a\x1b]0;owned\x07\x1b[2Jb)yas")
    terminal.type("\r")
    terminal.wait("\na\\x1b]0;owned\\x07\\x1b[2Jb\n>")
    assert terminal.screen.title != "owned"


def test_thoughts_are_apart(terminal):
    terminal.type("say(<think>hm</think>yes)yas\r")
    terminal.wait("\nhm\n\nyes\n>")
