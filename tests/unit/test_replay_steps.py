"""tools/replay_steps.py: a logged run agrees with itself; a changed result, and a file that is no log, are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import replay_steps

from cpmrt.cli.main import main

REFERENCE = ("--executor", "reference")


@pytest.fixture
def logged(tmp_path, capsys):
    """Return a function that logs a run of the bundled model with the given options and returns the log's path."""

    def run(*options: str) -> Path:
        log = tmp_path / "run.jsonl"
        sampling = ("--temperature", "0.8", "--max-new-tokens", "12", "--json", "--logprobs", "2", "--ignore-eos")
        arguments = ("def load_config(path):", *sampling, *REFERENCE, *options, "--log-steps", str(log))
        assert main(["generate", *arguments]) == 0
        capsys.readouterr()
        return log

    return run


@pytest.mark.parametrize("options", [
    (), ("--draft", "eagle2"), ("--kv-dtype", "fp8", "--dtype", "bfloat16"), ("--regex", "[a-z]{3}( [a-z]{3})*"),
], ids=str)  # fmt: skip
def test_a_run_agrees_with_itself(logged, capsys, options):
    log = logged(*options)
    settings = () if "--regex" in options else options
    assert replay_steps.main([str(log), *REFERENCE, *settings]) == 0
    out = capsys.readouterr().out
    assert f"all {len(log.read_text().splitlines())} steps agree" in out and "differ by at most 0\n" in out


def test_another_result_is_named(logged, capsys):
    log = logged()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    number, record = next((at, each) for at, each in enumerate(records, 1) if each["step"] == "Decode")
    token = record["result"][0]["token_ids"][0]
    record["result"][0]["token_ids"][0] = token + 1
    log.write_text("".join(json.dumps(each) + "\n" for each in records))
    assert replay_steps.main([str(log), *REFERENCE]) == 1
    named = f"step {number} of {len(records)} (Decode), entry 0: logged tokens [{token + 1}], replayed tokens [{token}]"
    assert named in capsys.readouterr().out


@pytest.mark.parametrize(("text", "message"), [
    (None, "cannot be read: No such file"), (b"", "expected a step a line, got an empty file"),
    (b"{}\n", "line 1: not a step"), (b"\xae\n", "line 1: not a step"),
])  # fmt: skip
def test_what_is_no_log_is_refused_on_one_line(tmp_path, capsys, text, message):
    log = tmp_path / "log"
    if text is not None:
        log.write_bytes(text)
    assert replay_steps.main([str(log)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("replay_steps.py: error: ") and message in err and err.count("\n") == 1
