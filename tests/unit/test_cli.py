"""The command line as a whole, and `cpmrt generate`: text, JSON, options, sources of the prompt."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
from serving import saying_llm
from tiny_checkpoint import write_checkpoint

import cpmrt
from cpmrt import LLM, SamplingParams
from cpmrt.cli.arguments import MODEL_FIELDS
from cpmrt.cli.main import COMMANDS, main, module_name
from cpmrt.cli.option_values import token_count
from cpmrt.cli.output import printable, write_json, write_table
from cpmrt.cli.parser import Parser
from cpmrt.config import Sampling
from cpmrt.engine import request_seed
from cpmrt.engine.step_log import read_steps
from cpmrt.executor import Prefill
from cpmrt.weights.hub import BUNDLED

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = ("--temperature", "1", "--max-new-tokens", "12", "--ignore-eos")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def generate(checkpoint):
    """Return a function that runs `cpmrt generate` on the checkpoint and returns the exit code."""
    return lambda *arguments: main(["generate", "-m", str(checkpoint), "--executor", "reference", *arguments])


@pytest.fixture
def piped(monkeypatch):
    """Return a function that makes the given bytes the standard input."""
    return lambda raw: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


def expected(checkpoint, prompt="abc", *, seed=0, stop=(), logprobs=0):
    with LLM(checkpoint, executor="reference", seed=seed) as llm:
        params = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True, stop=stop, logprobs=logprobs)
        return llm.generate(prompt, params)


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert f"usage: cpmrt {name}" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cpmrt {cpmrt.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_every_default(command):
    parser = Parser(prog=command)
    import_module(module_name(command)).configure(parser)
    for action in parser._actions:
        needs_none = not action.option_strings or action.nargs == 0 or action.default in (None, False, [])
        assert needs_none or "(default: " in action.help, action.option_strings


def test_help_imports_no_command(tmp_path):
    code = "import sys; from cpmrt.cli.main import main; main(['--help']); print([m for m in sys.modules if m in {!r}])"
    heavy = {"numpy", "rich", "prompt_toolkit", "tokenizers", "huggingface_hub", "cpmrt.cli.generate"}
    done = subprocess.run(
        [sys.executable, "-c", code.format(heavy)], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.endswith("\n[]\n")


def test_generate_writes_the_text_and_a_summary(generate, checkpoint, capsys):
    assert generate("abc", *SAMPLING) == 0
    out, err = capsys.readouterr()
    assert out == expected(checkpoint).text.rstrip("\n") + "\n"
    assert err.count("\n") == 1 and "prompt 4 tokens" in err and "new 12 tokens" in err and "finish: length" in err
    assert "tok/s" in err and "accept length" not in err


@pytest.mark.parametrize(("text", "shown"), [("done", "done\n"), ("done\n", "done\n"), ("done\n\n", "done\n\n")])
def test_a_newline_is_added_where_the_model_made_none(tmp_path, monkeypatch, capsys, text, shown):
    monkeypatch.setattr("cpmrt.cli.generate.LLM", lambda **options: saying_llm(tmp_path, lambda prompt: text))
    assert main(["generate", "hi", "--quiet"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(("text", "tokens"), [
    ("4096", 4096), ("32K", 32768), ("128k", 131_072), ("1M", 1_048_576), ("2m", 2_097_152),
])  # fmt: skip
def test_tokens_are_counted_in_binary_thousands(text, tokens):
    assert token_count(text) == tokens


def test_summary_names_the_accept_length_where_there_is_one():
    from cpmrt.cli.output import summary
    from cpmrt.engine import GenerationStats
    from cpmrt.generation import Completion

    completion = Completion("x", (1,), "stop", (), GenerationStats(3, 9, 0.5, 2.0, 2.25))
    assert summary(completion) == (
        "prompt 3 tokens in 0.50 s (6.0 tok/s), new 9 tokens in 2.00 s (4.0 tok/s), finish: stop, "
        "mean accept length 2.25"
    )


def test_the_summary_of_one_token_has_no_speed(generate, capsys):
    assert generate("abc", "--max-new-tokens", "1") == 0
    assert ", new 1 token, finish: length\n" in capsys.readouterr().err


def test_quiet_says_nothing(generate, capsys):
    assert generate("abc", "--quiet", "--max-new-tokens", "3") == 0
    assert capsys.readouterr().err == ""


def test_json_is_one_object(generate, checkpoint, capsys):
    assert generate("abc", *SAMPLING, "--seed", "7", "--logprobs", "2", "--json") == 0
    out, err = capsys.readouterr()
    record, whole = json.loads(out), expected(checkpoint, seed=7, logprobs=2)
    assert err == ""
    assert record["text"] == whole.text and record["token_ids"] == list(whole.token_ids)
    assert record["finish_reason"] == "length" and record["model"] == str(checkpoint)
    assert record["stats"]["prompt_tokens"] == 4 and record["stats"]["new_tokens"] == 12
    assert record["stats"]["decode_tokens_per_s"] > 0
    assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in record["logprobs"])


def test_an_answer_takes_the_form_that_options_give(tmp_path, capsys):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["größer", 3]}', encoding="utf-8-sig")
    grammar.write_text('start: "a" | "b"', encoding="utf-8")
    options = [
        ("--json-schema", str(schema), ('"größer"', "3")), ("--regex", "[xy]{2}", ("xx", "xy", "yx", "yy")),
        ("--grammar", str(grammar), ("a", "b")), ("--choices=one", "--choices=two", ("one", "two")),
    ]  # fmt: skip
    for name, value, allowed in options:
        assert main(["generate", "--executor", "reference", "-q", name, value, "x"]) == 0
        assert capsys.readouterr().out.rstrip("\n") in allowed
    assert main(["generate", "--executor", "reference", "--json-schema", str(tmp_path / "none"), "x"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["generate", "--executor", "reference", "--regex", "(", "x"]) != 0
    assert "--regex" in capsys.readouterr().err


def test_every_sampling_field_has_an_option(generate, capsys):
    main(["generate", "--help"])
    shown = capsys.readouterr().out
    for field in fields(SamplingParams):
        if field.name == "n":  # a command streams one answer
            continue
        option = "stop-token-id" if field.name == "stop_token_ids" else field.name.replace("_", "-")
        assert f"--{option} " in shown or f"--{option}\n" in shown


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_what_loads_a_model_has_an_option_for_each_of_its_fields(command, capsys):
    main([command, "--help"])
    shown = capsys.readouterr().out
    assert [name for name in MODEL_FIELDS if f"--{name.replace('_', '-')} " not in shown] == []


def test_options_reach_the_request(generate, tmp_path):
    log = tmp_path / "steps"
    code = generate(
        "abc", "--quiet", "--log-steps", str(log), "--max-new-tokens", "5", "--temperature", "0.5", "--top-k", "7",
        "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1", "--presence-penalty", "-1",
        "--frequency-penalty", "0.25", "--stop", "zz", "--stop", "yy", "--stop-token-id", "258", "--seed", "11",
        "--logit-bias", "9:-2.5", "--logit-bias", "4:1",
    )  # fmt: skip
    assert code == 0
    admit = next(read_steps(log))[0]
    assert admit.sampling == Sampling(
        0.5, 7, 0.9, 0.01, 1.1, -1.0, 0.25, logit_bias=((4, 1.0), (9, -2.5))
    )
    assert admit.seed == request_seed(11, 0) and admit.max_new_tokens == 5
    assert set(admit.stop_token_ids) == {2, 258}


def test_the_step_log_holds_the_generation(generate, checkpoint, tmp_path, capsys):
    log = tmp_path / "steps"
    assert generate("abc", *SAMPLING, "--quiet", "--log-steps", str(log)) == 0
    steps = list(read_steps(log))
    tokens = [token for _, result in steps for slot in result.slots for token in slot.token_ids]
    assert tokens == list(expected(checkpoint).token_ids)
    assert next(step for step, _ in steps if isinstance(step, Prefill)).is_last


def test_an_answer_that_loops_is_named_in_the_summary(generate, capsys):
    options = ("--temperature", "0", "--ignore-eos", "--max-new-tokens", "none", "--loop-repeats", "4")
    assert generate("abc", *options, "--max-context", "400") == 0
    assert "finish: loop" in capsys.readouterr().err
    assert generate("abc", *options, "--max-context", "400", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["finish_reason"] == "loop" and 128 <= len(record["token_ids"]) < 300


def test_stop_string(generate, checkpoint, capsys):
    text = expected(checkpoint).text
    stop = next(char for char in text[3:] if char.isprintable() and char != "\ufffd" and char not in text[:3])
    assert generate("abc", *SAMPLING, "--stop", stop, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == text.partition(stop)[0] and record["finish_reason"] == "stop"


@pytest.mark.parametrize("text", ["abc", "héllo 世界 🙂\n", "[bold]not markup[/bold]"])
def test_prompt_from_file_and_stdin_and_ids(generate, checkpoint, piped, tmp_path, capsys, text):
    results = []
    (tmp_path / "prompt").write_bytes(text.encode())
    with LLM(checkpoint, executor="reference") as llm:
        ids = ",".join(map(str, llm.tokenizer.encode(text)))
    for arguments in (
        [text],
        ["--prompt-file", str(tmp_path / "prompt")],
        ["--prompt-file", "-"],
        [],
        ["--prompt-ids", ids],
    ):
        piped(text.encode())
        assert generate(*arguments, *SAMPLING, "--json") == 0
        results.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert len(results[0]) == 12 and all(result == results[0] for result in results)


def test_an_argument_wins_over_an_unread_pipe(generate, checkpoint, piped, capsys):
    piped(b"something else")
    assert generate("abc", *SAMPLING, "--quiet") == 0
    assert capsys.readouterr().out == expected(checkpoint).text.rstrip("\n") + "\n"


def test_dummy_weights_without_a_tokenizer(checkpoint, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    model = ["-m", str(tmp_path), "--executor", "reference", "--load-format", "dummy"]
    assert main(["generate", *model, "--prompt-ids", "1,5,9", "--max-new-tokens", "4", "--ignore-eos", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == "" and len(record["token_ids"]) == 4


def test_hf_overrides_and_dtype(generate, capsys):
    options = ("--hf-overrides", '{"num_hidden_layers": 1}', "--load-format", "dummy", "--dtype", "bf16")
    assert generate("abc", *options, "--memory-budget", "64MiB", "--max-new-tokens", "2", "--quiet") == 0


def test_a_bug_keeps_its_traceback(monkeypatch, generate):
    monkeypatch.setattr("cpmrt.cli.generate.read_prompt", lambda args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate("abc")


def test_control_characters_are_escaped():
    assert printable("a\x1b[31m\n世界") == "a\\x1b[31m\\n世界"


def test_json_has_no_numbers_that_json_lacks(capsys):
    write_json({"a": [float("-inf"), 1.5, (float("nan"), True)], "b": "世"})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, [None, True]], "b": "世"}


def test_tables_are_aligned_without_a_terminal(capsys):
    write_table([("a", "\x1b[1m"), ("bbb", "c")], ("x", "long"))
    assert capsys.readouterr().out == "x    long\na    \\x1b[1m\nbbb  c\n"


def test_tables_on_a_terminal_hold_no_markup(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_table([("[red]a[/red]", "b")], ("x", "y"))
    assert "[red]a[/red]" in capsys.readouterr().out


@pytest.mark.skipif(not (BUNDLED / "model.safetensors").exists(), reason="the bundled model is not there yet")
def test_the_bundled_model_is_the_default(capsys):
    assert main(["generate", "def read_lines(path):", "--max-new-tokens", "16", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] and record["model"] == str(BUNDLED)
