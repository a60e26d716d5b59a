"""The command line in a process of its own: Ctrl-C, closed pipes, full disks, terminals."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = ("--temperature", "1", "--max-new-tokens", "12", "--ignore-eos")
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def start(*arguments, **streams):
    """Start the program in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen([sys.executable, "-m", "cpmrt", *map(str, arguments)], env=environment, **streams)


def test_text_that_the_terminal_cannot_show(checkpoint):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "cpmrt", "generate", "-m", str(checkpoint), "--executor", "reference", "abc"]
    done = subprocess.run([*command, *SAMPLING], env=environment, capture_output=True, timeout=60, check=False)
    with LLM(checkpoint, executor="reference") as llm:
        text = llm.generate("abc", SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True)).text
    assert not text.isascii()
    assert done.returncode == 0 and done.stdout.isascii() and b"Traceback" not in done.stderr


def long_run(checkpoint, *arguments, **streams):
    """Start a generation that takes many seconds."""
    options = ("--hf-overrides", '{"max_position_embeddings": 60000}', "--max-new-tokens", "50000", "--ignore-eos")
    model = ("-m", checkpoint, "--executor", "reference", "--temperature", "1")
    return start("generate", *model, *options, *arguments, **streams)


def test_ctrl_c_is_quiet(checkpoint):
    child = long_run(checkpoint, "abc")
    assert child.stdout.read(20)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and err == b""


INTERRUPTED = """
import runpy, sys

class Finder:
    def find_spec(name, path, target=None):
        if name == "cpmrt.cli.main":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder)
runpy.run_module("cpmrt", run_name="__main__")
"""


def test_ctrl_c_while_the_program_is_still_imported_is_quiet():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_quantize_leaves_nothing_of_its_folder(tmp_path, number):
    text, folder = tmp_path / "text.txt", tmp_path / "made"
    text.write_text("def f(x):\n    return x + 1\n" * 4000)
    folder.mkdir()
    # Under nohup this process ignores SIGHUP, and its children would.
    command = "quantize", "demo", folder / "out", "--calibration", text
    child = start(*command, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    deadline = time.monotonic() + 60
    while not list(folder.glob(".out.*")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 128 + number and b"Traceback" not in err
    assert not list(folder.iterdir())


def test_a_signal_that_was_ignored_stays_so(checkpoint):
    child = long_run(checkpoint, "abc", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert child.stdout.read(20)
    child.send_signal(signal.SIGHUP)
    assert child.stdout.read(20)
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 143 and err == b""


def test_a_closed_pipe_is_quiet(checkpoint):
    child = long_run(checkpoint, "abc")
    assert child.stdout.read(20)
    child.stdout.close()
    assert child.wait(timeout=60) == 141 and child.stderr.read() == b""
    child.stderr.close()


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"], ["doctor", "--json"]])
def test_a_pipe_that_nobody_reads(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with start(*arguments, stdout=writer) as child:
        os.close(writer)
        assert child.wait(timeout=60) == 141 and child.stderr.read() == b""


@needs_full
@pytest.mark.parametrize("arguments", [["generate", "abc"], ["--help"], ["generate", "--help"], ["--version"]])
def test_a_full_disk_is_one_line(arguments, checkpoint):
    model = ("-m", checkpoint, "--executor", "reference") if "abc" in arguments else ()
    with open("/dev/full", "w") as full:
        child = start(*arguments, *model, stdout=full)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 1 and err.startswith(b"cpmrt: error: standard output") and err.count(b"\n") == 1


@needs_full
@pytest.mark.parametrize(("prompt", "code"), [(("abc",), 0), ((), 2), (("abc", "--executor", "cuda"), 1)])
def test_remarks_that_cannot_be_written_are_lost(prompt, code, checkpoint):
    with open("/dev/full", "w") as full:
        child = start("generate", "-m", checkpoint, "--executor", "reference", *prompt, stderr=full)
        out, _ = child.communicate(timeout=60)
    assert child.returncode == code and bool(out) == (code == 0)


def test_closed_standard_streams_are_no_bug(checkpoint):
    command = f"{sys.executable} -m cpmrt generate -m {checkpoint} --executor reference abc >&- 2>&- <&-"
    done = subprocess.run(["sh", "-c", command], env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60, check=False)
    assert done.returncode == 0


def test_a_long_prompt_shows_its_progress_on_a_terminal(checkpoint, tmp_path):
    (tmp_path / "prompt").write_text("word " * 300)
    ours, theirs = pty.openpty()
    arguments = ("--prompt-file", tmp_path / "prompt", "--max-new-tokens", "2")
    with start("generate", "-m", checkpoint, "--executor", "reference", *arguments, stderr=theirs) as child:
        os.close(theirs)
        shown = read_terminal(ours)
        assert child.wait(timeout=60) == 0 and b"reading" not in child.stdout.read()
    assert "reading the prompt" in shown and "1501/1501" in shown and "tok/s" in shown


def read_terminal(descriptor):
    """Return everything read from a terminal until its other side is closed."""
    chunks = []
    while True:
        try:
            chunk = os.read(descriptor, 4096)
        except OSError:  # Linux: EIO at the end
            chunk = b""
        if not chunk:
            os.close(descriptor)
            return b"".join(chunks).decode("utf-8", "replace")
        chunks.append(chunk)
