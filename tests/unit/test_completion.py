"""Shell completion, run in the shells themselves, and its list of options, which must be complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import shown_on_terminal

from cpmrt.cli.completion import whole_parser
from cpmrt.cli.main import COMMANDS, main

BASH = """
source {script}
complete_function=$(complete -p cpmrt | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
$complete_function cpmrt "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD - 1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
CASES = [
    (["ins"], ["inspect"]),
    (["chat", "--temper"], ["--temperature"]),
    (["plan", "--shape", "minicpm4-8"], ["minicpm4-8b"]),
    (["pull", "--qui"], ["--quiet"]),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-m", "cpmrt", "completion", shell]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        (folder / shell).write_text(done.stdout)
    return folder


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")


@pytest.mark.parametrize("words, expected", CASES)
def test_bash_completes(words: list[str], expected: list[str], scripts: Path) -> None:
    needs("bash")
    program = BASH.format(script=scripts / "bash", words=" ".join(["cpmrt", *words]))
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected, done.stderr


@pytest.mark.parametrize("words, expected", CASES)
def test_fish_completes(words: list[str], expected: list[str], scripts: Path) -> None:
    needs("fish")
    program = f"source {scripts / 'fish'}; complete -C 'cpmrt {' '.join(words)}'"
    done = subprocess.run(["fish", "-c", program], capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == expected, done.stderr


def test_zsh_takes_the_script(scripts: Path, tmp_path: Path) -> None:
    needs("zsh")
    program = f'autoload -U compinit; compinit -u -d {tmp_path / "dump"}; eval "$(cat {scripts / "zsh"})"; '
    program += "print $_comps[cpmrt]"
    done = subprocess.run(["zsh", "-f", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() and done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_no_command_and_no_option_is_forgotten(shell: str, scripts: Path) -> None:
    script = (scripts / shell).read_text()
    (commands,) = [action.choices for action in whole_parser()._actions if action.choices]
    assert list(commands) == list(COMMANDS)
    for name, command in commands.items():
        assert name in script
        for option in command._option_string_actions:
            assert option.lstrip("-") in script, (name, option)


def test_an_unknown_shell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    error = capsys.readouterr().err
    assert "invalid choice: 'csh' (choose from " in error and error.count("\n") == 1


def on_a_terminal(line: list[str], **environment: str) -> str:
    """Return the text that a command shows on a terminal."""
    shown, exit_code = shown_on_terminal(lambda terminal: subprocess.Popen(
        [sys.executable, "-m", "cpmrt", *line], cwd=Path(__file__).parents[2], stdout=terminal, stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    ))  # fmt: skip
    assert exit_code == 0
    return shown.decode()


def test_no_color_means_no_color() -> None:
    line = ["generate", "def f(", "--max-new-tokens", "2", "--executor", "reference"]
    for command in (["doctor"], line):
        shown = on_a_terminal(command, NO_COLOR="1")
        codes = {code for sequence in shown.split("\x1b[")[1:] for code in sequence.partition("m")[0].split(";")}
        assert not {code for code in codes if code.isdigit() and 30 <= int(code) <= 49}, shown
