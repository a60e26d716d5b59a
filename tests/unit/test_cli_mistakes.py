"""Mistakes of users on the command line: each gives one line on stderr, the right exit code and no traceback."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_checkpoint import CONFIG, write_checkpoint

from cpmrt.caller_warnings import CpmrtWarning
from cpmrt.cli.main import main
from cpmrt.cli.option_names import warning_line

Spoil = Callable[[Path], object]


def nothing(folder: Path) -> None:
    """Leave the checkpoint as it is."""


def config(**changes: object) -> Spoil:
    return lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def write(name: str, content: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def remove(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)


POINTER = ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 16\n")


def adapter(folder: Path) -> None:
    """Turn the checkpoint into an adapter folder as peft saves it."""
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def no_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")


@dataclass
class Mistake:
    """A command line, in which M is the checkpoint folder, and the message and exit code that it must give."""

    name: str
    line: list[str]
    says: str
    code: int = 1
    spoil: Spoil = nothing
    stdin: bytes = b""


G = ["generate", "-m", "M", "--executor", "reference", "--max-new-tokens", "4"]
GP = [*G, "prompt"]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
MISTAKES = [
    # The command line itself
    Mistake("a command of another program", ["run"], "invalid choice: 'run' (did you mean chat?)", 2),
    Mistake("two models", ["chat", "a", "-m", "b"], "the model is given twice: a and b", 2),
    Mistake("misspelt option beside a model", ["chat", "-m", "M", "--temprature", "0.5"],
            "--temprature (did you mean --temperature?)", 2),
    Mistake("unknown command", ["sing"], "invalid choice: 'sing'", 2),
    Mistake("misspelt command", ["genrate"], "(did you mean generate?)", 2),
    Mistake("misspelt option", [*GP, "--temprature", "0.5"], "(did you mean --temperature?)", 2),
    Mistake("misspelt option with its value", [*GP, "--max-contxt=9"], "(did you mean --max-context?)", 2),
    Mistake("an option of vLLM", ["serve", "--max-model-len", "9"], "(did you mean --max-context?)", 2),
    Mistake("an option of llama.cpp", [*GP, "--ctx-size=9"], "(did you mean --max-context?)", 2),
    Mistake("an option of other programs", [*GP, "--n-predict", "9"], "(did you mean --max-new-tokens?)", 2),
    Mistake("context in no unit", [*GP, "--max-context", "4X"], "a number of tokens such as 4096 or 128K", 2),
    Mistake("unknown option", [*GP, "--beam", "4"], "unrecognized arguments: --beam 4", 2),
    Mistake("abbreviated option", [*GP, "--temp", "1"], "unrecognized arguments: --temp", 2),
    Mistake("option without value", [*GP, "--top-k"], "--top-k: expected one argument", 2),
    Mistake("text for a number", [*GP, "--top-k", "many"], "--top-k: expected an integer, got 'many'", 2),
    Mistake("text for a fraction", [*GP, "--top-p", "most"], "--top-p: expected a number, got 'most'", 2),
    Mistake("fraction of a token", [*GP, "--max-new-tokens", "1.5"], "expected a number of tokens, or none", 2),
    Mistake("logprobs that nothing shows", [*GP, "--logprobs", "2"], "--logprobs needs --json", 2),
    Mistake("groups of nothing", ["plan", "M", "--group-size", "64"], "--group-size needs --weight-bits 2 or 4", 2),
    Mistake("groups of 16 bits", ["plan", "M", "--group-size", "64", "--weight-bits", "16"], "--group-size needs", 2),
    Mistake("blocks and bits", ["plan", "M", "--weight-bits", "4", "--block-type", "Q8_0"], "exclude each other", 2),
    Mistake("two prompts", [*GP, "again"], "arguments: again; quote the prompt: 'prompt again'", 2),
    Mistake("nonsense memory budget", [*GP, "--memory-budget", "lots"], "a size such as 8GiB", 2),
    Mistake("negative memory budget", [*GP, "--memory-budget=-1"], "a size such as 8GiB", 2),
    Mistake("nonsense GPU memory", ["plan", "M", "--gpu-memory", "8XB"], "a size such as 8GiB", 2),
    Mistake("overrides are not JSON", [*GP, "--hf-overrides", "{num_layers: 1}"], "not valid JSON", 2),
    Mistake("overrides are no object", [*GP, "--hf-overrides", "[1]"], "expected a JSON object", 2),
    Mistake("a word for sparse attention", [*GP, "--sparse", "on"], "expected auto, off or a JSON object, got 'on'", 2),
    Mistake("deep overrides", [*GP, "--hf-overrides", "[" * 100_000], "JSON", 2),
    Mistake("a path of no letters", ["convert", "M", ""], "argument TARGET: expected a path, got ''", 2),
    Mistake("a file of no letters", ["bench", "M", "--json", ""], "argument --json: expected a path, got ''", 2),
    Mistake("an endless schema", [*GP, "--json-schema", "/dev/zero"], "'/dev/zero' is too large: expected at most", 2),
    Mistake("a host of no letters", ["serve", "--host", ""], "argument --host: expected a name, got ''", 2),
    Mistake("prompts for no log", ["serve", "-q", "--log-prompts"], "--log-prompts writes lines of the log", 2),
    Mistake("ids that are none", [*G, "--prompt-ids", "1,a"], "expected token ids such as 1,15,27", 2),
    Mistake("a long lookup", [*GP, "--draft", "lookup", "--draft-lookup", "999"], "--draft-lookup: expected"),
    # The prompt
    Mistake("no prompt", G, "there is no prompt", 2),
    Mistake(
        "argument and file", [*GP, "--prompt-file", "M/config.json"], "more than once (PROMPT and --prompt-file)", 2
    ),
    Mistake("file and ids", [*G, "--prompt-file", "-", "--prompt-ids", "1"], "(--prompt-file and --prompt-ids)", 2),
    Mistake("empty piped prompt", [*G, "--prompt-file", "-"], "there is no prompt", 2),
    Mistake("empty prompt", [*G, ""], "the prompt is empty", spoil=no_template),
    Mistake("no prompt file", [*G, "--prompt-file", "M/absent"], "absent cannot be read: No such file"),
    Mistake("folder as prompt file", [*G, "--prompt-file", "M"], "cannot be read: Is a directory"),
    Mistake("binary prompt file", [*G, "--prompt-file", "M/p"], "not UTF-8 text: byte 1 ", spoil=write("p", b"a\xff")),
    Mistake("endless prompt file", [*G, "--prompt-file", "/dev/zero"], "too large for a prompt"),
    Mistake("binary pipe", G, "standard input is not UTF-8 text: byte 2", stdin=b"ab\xfe"),
    Mistake("surrogate in the prompt", [*G, "a\udcff"], "lone surrogate"),
    Mistake("prompt too long", [*G, "x" * 3000], "; shorten the prompt or raise --max-context"),
    Mistake("answer too long", [*GP, "--max-new-tokens", "5000"], "ask for at most"),
    Mistake("id beyond the vocabulary", [*G, "--prompt-ids", "1,99999"], "an id in [0, 259)"),
    Mistake(
        "text without a tokenizer", [*GP, "--load-format", "dummy"], "no tokenizer", spoil=remove("tokenizer.json")
    ),
    # Sampling
    Mistake("no new tokens", [*GP, "--max-new-tokens", "0"], "--max-new-tokens: expected"),
    Mistake("negative temperature", [*GP, "--temperature", "-1"], "--temperature: expected"),
    Mistake("infinite temperature", [*GP, "--temperature", "inf"], "--temperature: expected"),
    Mistake("temperature that is no number", [*GP, "--temperature", "nan"], "--temperature: expected"),
    Mistake("negative top-k", [*GP, "--top-k", "-1"], "--top-k: expected"),
    Mistake("negative top-p", [*GP, "--top-p", "-0.1"], "--top-p: expected"),
    Mistake("min-p above one", [*GP, "--min-p", "2"], "--min-p: expected"),
    Mistake("zero repetition penalty", [*GP, "--repetition-penalty", "0"], "--repetition-penalty: expected"),
    Mistake("empty stop string", [*GP, "--stop", ""], "--stop: expected non-empty strings"),
    Mistake("negative stop id", [*GP, "--stop-token-id", "-5"], "--stop-token-id: expected ids >= 0"),
    Mistake("too many logprobs", [*GP, "--logprobs", "1000"], "--logprobs: expected"),
    Mistake("bad sampling in a chat", ["chat", "-m", "M", "--top-p", "7"], "--top-p: expected"),
    # Settings of the engine
    Mistake("unknown executor", [*GP, "--executor", "tpu"], "--executor: expected auto | cuda | reference"),
    Mistake("no GPU", [*GP, "--executor", "cuda"], "no NVIDIA driver"),
    Mistake("slow by default", ["generate", "-m", "M", "prompt"], "; use --executor='reference' to run it anyway"),
    Mistake("unknown dtype", [*GP, "--dtype", "int3"], "--dtype: expected auto | float32"),
    Mistake("unknown dtype of a plan", ["plan", "M", "--dtype", "int3"], "--dtype: expected auto"),
    Mistake("unknown load format", [*GP, "--load-format", "gguf"], "--load-format: expected auto | safetensors"),
    Mistake("seed of 65 bits", [*GP, "--seed", str(2**64)], "--seed: expected an integer"),
    Mistake("context beyond the model", [*GP, "--max-context", "9999"], "beyond the model's positions"),
    Mistake("context of nothing", [*GP, "--max-context", "0"], "--max-context: expected an integer"),
    Mistake("head of 5 bits", [*GP, "--lm-head-bits", "5"], "--lm-head-bits: expected 4 | 8"),
    Mistake("copy of a copy", [*GP, "--lm-head-screen", "--lm-head-bits", "8"], "got --lm-head-bits=8; leave one of"),
    Mistake("a setting as a value", [*GP, "--kv-dtype", "kv_dtype"], "-dtype: expected auto | fp8, got 'kv_dtype'"),
    Mistake("budget too small", [*GP, "--memory-budget", "1000"], "a larger --memory-budget"),
    Mistake("plan beyond the model", ["plan", "M", "--context", "9999"], "beyond the model's positions"),
    Mistake("plan for zettabytes", ["plan", "M", "--gpu-memory", "99999999999G"], "--memory-budget: expected"),
    Mistake("plan that does not fit", ["plan", "M", "--context", "2048", "--gpu-memory", "1MiB"], "2048 tokens"),
    Mistake("plan of nobody", ["plan", "M", "--max-sequences", "0"], "error: --max-sequences: expected an integer"),
    Mistake("override of a wrong type", [*GP, "--hf-overrides", '{"hidden_size": "big"}'], "hidden_size"),
    Mistake("overridden size", [*GP, "--hf-overrides", '{"vocab_size": "a"}'], "json with hf_overrides: vocab_size"),
    Mistake("few blocks", [*GP, "--sparse", '{"topk": 0}'], "config.json with sparse: sparse_config: topk: expected"),
    Mistake(
        "both change the config", ["plan", "M", "--hf-overrides", '{"hidden_size": 0}', "--sparse", '{"topk": 9}'],
        "config.json with hf_overrides and sparse: hidden_size: expected",
    ),
    # The model
    Mistake("no such folder", ["generate", "-m", "M/absent", "x"], "nothing there"),
    Mistake("file for a folder", ["generate", "-m", "M/config.json", "x"], "a folder or a .gguf file, got a file"),
    Mistake("neither folder nor id", ["plan", "what is this"], "an existing folder or a hub id"),
    Mistake("hub id while offline", ["plan", "openbmb/MiniCPM4-0.5B"], "offline mode is on"),
    Mistake("revision of a folder", [*GP, "--revision", "main"], "which has no revision"),
    Mistake("empty folder", GP, "config.json does not exist", spoil=empty),
    Mistake("empty folder planned", ["plan", "M"], "expected config.json beside the weights", spoil=empty),
    Mistake("empty folder inspected", ["inspect", "M"], "config.json does not exist", spoil=empty),
    Mistake("config that is no JSON", GP, "config.json is not valid JSON", spoil=write("config.json", b"{")),
    Mistake("config inspected that is no JSON", ["inspect", "M"], "not valid JSON", spoil=write("config.json", b"{")),
    Mistake("config that is a list", ["plan", "M"], "expected a JSON object", spoil=write("config.json", b"[1]")),
    Mistake("unsupported architecture", GP, "GPT2LMHeadModel is not", spoil=config(architectures=["GPT2LMHeadModel"])),
    Mistake("unsupported plan", ["plan", "M"], "is not supported", spoil=config(architectures=["Gemma"])),
    Mistake("quantised in 3 bits", GP, "bits: expected 4", spoil=config(quantization_config=GPTQ | {"bits": 3})),
    Mistake("quantised and not", GP, "no tensor is quantised", spoil=config(quantization_config=GPTQ)),
    Mistake("quantised plan", ["plan", "M"], "'fp8'", spoil=config(quantization_config={"quant_method": "fp8"})),
    Mistake("weights left in git", GP, "model.safetensors is a Git LFS pointer", spoil=write(*POINTER)),
    Mistake("tokenizer left in git", GP, "git lfs pull", spoil=write("tokenizer.json", POINTER[1])),
    Mistake("adapter for a model", GP, "LoRA adapter (adapter_config.json): expected a whole model", spoil=adapter),
    Mistake("adapter planned", ["plan", "M"], "its base model 'org/base' with peft", spoil=adapter),
    Mistake("adapter inspected", ["inspect", "M"], "merge_and_unload()", spoil=adapter),
    Mistake("no weights", GP, "no safetensors weights", spoil=remove("model.safetensors")),
    Mistake("pickled weights", GP, "pickled weights can run code", spoil=pickled),
    Mistake("cut weights", GP, "cut or damaged", spoil=cut),
    Mistake("weights that are text", GP, "header length", spoil=write("model.safetensors", b"not tensors")),
    Mistake("weights of another model", GP, "missing", spoil=config(num_hidden_layers=4)),
    Mistake("no tokenizer", GP, "has no tokenizer.json", spoil=remove("tokenizer.json")),
    Mistake("tokenizer that is none", GP, "tokenizer.json", spoil=write("tokenizer.json", b"{}")),
    Mistake("no chat template", ["chat", *G[1:]], "no chat template", spoil=no_template, stdin=b"hi\n"),
    Mistake("broken chat template", ["chat", *G[1:]], "line 1", spoil=write("chat_template.jinja", b"{% if %}")),
    # Files to write
    Mistake("step log in no folder", [*GP, "--log-steps", "M/no/log"], "step log", spoil=nothing),
    Mistake("step log that is a folder", [*GP, "--log-steps", "M"], "Is a directory"),
    Mistake("step log on a full disk", [*GP, "--log-steps", "/dev/full"], "No space left"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_mistake(mistake: Mistake, tmp_path: Path, no_gpu, capsys, monkeypatch) -> None:
    if "/dev/full" in mistake.line and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(mistake.stdin), encoding="utf-8"))
    folder = write_checkpoint(tmp_path / "model")
    mistake.spoil(folder)
    code = main([str(folder) + part[1:] if part[:2] in ("M", "M/") else part for part in mistake.line])
    out, err = capsys.readouterr()
    assert code == mistake.code, err
    assert err.startswith("cpmrt: error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert mistake.says in err and "Traceback" not in err
    assert out == "" or mistake.name == "plan that does not fit"


def test_warnings_name_options_but_leave_the_words_of_others():
    told = "hf_overrides: 'max_context' of /max_context/draft.json; choose max_context=9, a draft or draft='lookup'"
    assert warning_line(CpmrtWarning(told)) == (
        "cpmrt: warning: --hf-overrides: 'max_context' of /max_context/draft.json; choose --max-context=9, a draft or "
        "--draft='lookup'"
    )
    assert warning_line(UserWarning("array(x, dtype=float)")) == "cpmrt: warning: array(x, dtype=float)"


def test_hub_ids_come_from_the_cache_when_offline(tmp_path, capsys, monkeypatch):
    """Offline, a hub id is resolved to the snapshot folder that refs/main of the hub's cache names."""
    home = tmp_path / "hub" / "models--org--tiny"
    write_checkpoint(home / "snapshots" / "abc123")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["plan", "org/tiny"]) == 0
    assert str(home / "snapshots" / "abc123") in capsys.readouterr().out
    assert main(["generate", "-m", "org/tiny", "--executor", "reference", "abc", "--quiet"]) == 0
    (home / "snapshots" / "abc123" / "model.safetensors").unlink()
    assert main(["inspect", "org/tiny"]) == 0
    assert capsys.readouterr().out.endswith("this version can run it once its weights are fetched\n")


@contextmanager
def nobody():
    """Run the body as the user nobody if the tests run as root, since root may read everything."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(mine)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111], ids=["closed", "only-listed", "only-passed"])
def test_a_folder_without_permission_is_named(mode, capsys):
    lines = (["plan", "M"], ["inspect", "M"], ["generate", "x", "-m", "M", "--executor", "reference"])
    with tempfile.TemporaryDirectory() as root:  # other users cannot enter tmp_path
        folder = write_checkpoint(Path(root) / "model")
        lines = [[part.replace("M", str(folder)) for part in line] for line in lines]
        assert [main(line) for line in lines] == [0, 0, 0]  # this imports all modules, too
        capsys.readouterr()
        os.chmod(root, 0o755)
        os.chmod(folder, mode)
        with nobody():
            codes = [main(line) for line in lines]
        os.chmod(folder, 0o755)
        err = capsys.readouterr().err.splitlines()
        assert codes == [1, 1, 1] and len(err) == 3
        assert all(f"no permission to read the folder {folder}: expected" in line and "chmod" in line for line in err)
