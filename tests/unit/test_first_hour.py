"""Actions of a user's first hour: each ends with what was asked for or with one line that helps.

Commands run in this process; the server, Ctrl-C and pipes that close have processes of their own.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpmrt import LLM, __version__
from cpmrt.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--max-new-tokens", "8", "--temperature", "0")
LINE = "cpmrt: error: "


@pytest.fixture(autouse=True)
def fresh_machine(tmp_path, monkeypatch):
    """An empty home without network, and a working folder with prompt.txt."""
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "HF_HOME", "MODELSCOPE_CACHE", "CPMRT_STATE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # another test may have imported it before
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "prompt.txt").write_text("def add(a, b):\n")


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs a command and returns its exit code, standard output and standard error."""

    def run(*arguments: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode()), encoding="utf-8"))
        code = main(arguments)
        return (code, *capsys.readouterr())

    return run


WORKS = [
    ((), r"commands:\n  generate"),
    (("--help",), r"commands:\n  generate"),
    (("help",), r"commands:\n  generate"),
    (("help", "chat"), r"--system TEXT"),
    (("serve", "--help"), r"--port"),
    (("--version",), rf"cpmrt {re.escape(__version__)}\n"),
    (("generate", "def add(a, b):", *SHORT), r"\S"),
    (("generate", "--prompt-file", "prompt.txt", *SHORT, "--ignore-eos"), r"\S"),
    (("generate", "def add(a, b):", *SHORT, "--draft", "eagle2"), r"\S"),
    (("generate", "import os", "--seed", "7", "--temperature", "0.8", "--max-new-tokens", "8"), r"\S"),
    (("inspect",), r"architecture +MiniCPMForCausalLM"),
    (("plan",), r"KV pages"),
    (("plan", "--shape", "minicpm4-8b", "--gpu-memory", "24GiB"), r"fits 24.00 GiB: yes"),
    (("plan", "--shape", "minicpm4-8b", "--gpu-memory", "8GiB", "--weight-bits", "4"), r"largest context .* \d"),
    (("bench", "--executor", "reference", "--case", "16:4", "--repeats", "1"), r"decode tok/s"),
    (("doctor",), r"Python +ok"),
]


@pytest.mark.parametrize(("arguments", "shown"), WORKS, ids=[" ".join(case[0]) or "nothing" for case in WORKS])
def test_it_works(run, arguments, shown):
    code, out, err = run(*arguments)
    assert code == 0 and re.search(shown, out) and LINE not in err and "Traceback" not in err


HELPS = [
    (("run", "openbmb/MiniCPM4-0.5B"), 2, "did you mean chat?"),
    (("ls",), 2, "did you mean list?"),
    (("genrate", "hi"), 2, "did you mean generate?"),
    (("generate",), 2, "there is no prompt"),
    (("generate", "hi", "--temprature", "1"), 2, "did you mean --temperature?"),
    (("generate", "hi", "--max-new-tokens", "many"), 2, "--max-new-tokens"),
    (("generate", "hi", "--top-p", "7"), 1, "--top-p: expected"),
    (("generate", "hi", "-m", "./nothing"), 1, "expected a folder or a .gguf file, got nothing there"),
    (("generate", "hi", "-m", "openbmb/MiniCPM4-0.5B"), 1, "unset HF_HUB_OFFLINE"),
    (("generate", "hi", "-m", "."), 1, "config.json"),
    (("generate", "hi", "--max-context", "1M"), 1, "at most 4096"),
    (("generate", "--prompt-file", "absent.txt"), 1, "prompt file absent.txt cannot be read"),
    (("chat", "--url", "http://127.0.0.1:9"), 1, "cannot be reached"),
    (("chat", "--api-key", "secret"), 2, "--api-key needs --url"),
    (("plan", "--shape", "minicpm4-8b", "--gpu-memory", "8GiB"), 1, "--weight-bits 4 fits"),
    (("rm", "openbmb/MiniCPM4-0.5B"), 1, "cpmrt list shows what is there"),
    (("quantize",), 2, "see cpmrt quantize --help"),
]


@pytest.mark.parametrize(("arguments", "code", "hint"), HELPS, ids=[" ".join(case[0]) for case in HELPS])
def test_one_line_says_what_is_wrong_and_what_to_do(run, arguments, code, hint):
    actual, _, err = run(*arguments)
    assert actual == code and err.startswith(LINE) and hint in err and err.count("\n") == 1


def test_text_through_a_pipe(run):
    code, out, _ = run("generate", *SHORT, typed="def add(a, b):")
    assert (code, out) == run("generate", "def add(a, b):", *SHORT)[:2] and code == 0


def test_json_is_one_object_and_nothing_else(run):
    code, out, err = run("generate", "def add(a, b):", *SHORT, "--json")
    answer = json.loads(out)
    assert code == 0 and not err and answer["finish_reason"] == "length" and len(answer["token_ids"]) == 8


def test_quiet(run):
    code, out, err = run("generate", "def add(a, b):", *SHORT, "--quiet")
    assert code == 0 and out.strip() and not err


def test_inspect_for_programs(run):
    assert json.loads(run("inspect", "--json")[1])["architecture"] == "MiniCPMForCausalLM"


def test_an_empty_cache():
    """`cpmrt list` without any models prints only a hint; a process of its own, as ModelScope's client finds its cache
    once."""
    command = [sys.executable, "-m", "cpmrt", "list"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0 and not done.stdout and "cpmrt pull" in done.stderr


def test_a_chat_through_a_pipe_that_is_saved(run):
    code, out, err = run("chat", *SHORT, typed="What is a list?\n/stats\n/save kept.json\n/bye\nnever\n")
    assert code == 0 and out.strip() and "context:" in err and "saved to kept.json" in err
    kept = json.loads(Path("kept.json").read_text())["messages"]
    assert [message["role"] for message in kept] == ["user", "assistant"]


def test_readme_from_python(capsys):
    """The Python snippet of README.md runs as it stands."""
    source = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    exec(compile(source, "README.md", "exec"), {})
    assert "KV pages" in capsys.readouterr().out


def test_a_typing_error_in_python_is_told():
    with LLM() as llm, pytest.raises(Exception, match="SamplingParams|max_tokens"):
        llm.generate("hi", max_tokens=5)


@contextmanager
def program(*arguments: str, **streams):
    command = [sys.executable, "-m", "cpmrt", *arguments]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, **streams) as child:
        try:
            yield child
        finally:
            child.kill()


def test_a_reader_that_goes_away_is_no_error():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with program("generate", "import os", "--ignore-eos", "--max-new-tokens", "200", **pipes) as child:
        child.stdout.readline()
        child.stdout.close()
        assert "Traceback" not in child.stderr.read() and child.wait(30) == 141


def test_ctrl_c_ends_a_generation():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with program("generate", "import os", "--ignore-eos", "--max-new-tokens", "2000", **pipes) as child:
        child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        assert "Traceback" not in child.communicate(timeout=30)[1] and child.returncode == 130


@contextmanager
def served():
    """Yield the address and the process of `cpmrt serve`, started as by hand."""
    pytest.importorskip("uvicorn")
    with program("serve", "--port", "0", stderr=subprocess.PIPE) as child:
        address = next(found[0] for line in child.stderr if (found := re.search(r"http://[\d.:]+", line)))
        for line in child.stderr:
            if "ready" in line:
                break
        yield address, child


@pytest.fixture(scope="module")
def server():
    with served() as found:
        yield found


def get(url: str, body: object = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


HI = {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 8}


@pytest.mark.parametrize(("path", "body", "status", "shown"), [
    ("/", None, 200, "<html"),
    ("/health", None, 200, ""),
    ("/v1/models", None, 200, '"cpmrt-demo"'),
    ("/v1/chat/completions", HI, 200, '"finish_reason"'),
    ("/v1/chat/completions", HI | {"stream": True}, 200, "data: [DONE]"),
    ("/v1/completions", {"prompt": "import", "max_tokens": 4}, 200, '"text"'),
    ("/v1/chat/completions", HI | {"model": "gpt-4"}, 404, "cpmrt-demo"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/nothing", None, 404, "error"),
    ("/metrics", None, 200, "cpmrt_"),
])  # fmt: skip
def test_the_server_answers(server, path, body, status, shown):
    actual, text = get(server[0] + path, body)
    assert actual == status and shown in text


def test_curl(server):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl")
    command = [curl, "-s", f"{server[0]}/v1/chat/completions", "-H", "Content-Type: application/json"]
    done = subprocess.run([*command, "-d", json.dumps(HI)], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_a_chat_with_the_server(server, run):
    code, out, _ = run("chat", "--url", server[0], *SHORT, typed="What is a list?\n")
    assert code == 0 and out.strip()


def test_a_port_that_is_taken(server, run):
    code, _, err = run("serve", "--port", server[0].rpartition(":")[2])
    assert code == 1 and err.splitlines()[-1].startswith(LINE) and "--port" in err and "Traceback" not in err


def test_the_server_stops_when_told():
    """Ctrl-C ends the server with exit code 130. It is a server of its own: tests may run in any order."""
    with served() as (_, child):
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
