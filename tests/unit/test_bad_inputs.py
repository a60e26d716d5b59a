"""Wrong input to the commands that fetch, remove and make models: one line that helps, and nothing half-written."""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM
from cpmrt.cli.main import main
from cpmrt.errors import CpmrtError

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip


@dataclass
class Bad:
    """A command line, whose words that begin with @ are paths in the test's folder, and what its error must say."""

    name: str
    line: str
    says: tuple[str, ...]
    code: int = 1
    words: list[str] = field(default_factory=list)
    """More words of the line, such as empty ones."""


USAGE = 2
Q = "quantize @model @out"
RTN = f"{Q} --method rtn"
CALIBRATED = f"{Q} --calibration @text.txt --windows 4 --window 32"
TRAIN = "train-draft --model demo --method eagle2 --out @out"
HUB_ID = "expected an existing folder or a hub id such as openbmb/MiniCPM4-0.5B or modelscope:"
OFFLINE = ("is not in the local cache", "offline mode is on", "unset HF_HUB_OFFLINE")

BAD_INPUTS = [
    # Arguments of `pull`
    Bad("pull nothing", "pull", ("required: NAME", "cpmrt pull --help"), USAGE),
    Bad("pull two", "pull org/a org/b", ("unrecognized arguments: org/b",), USAGE),
    Bad("pull an empty name", "pull", (HUB_ID,), words=[""]),
    Bad("pull a name without its owner", "pull MiniCPM4", (HUB_ID, "'MiniCPM4'")),
    Bad("pull an address", "pull https://huggingface.co/org/x", (HUB_ID,)),
    Bad("pull a name with two dashes", "pull org/a--b", (HUB_ID,)),
    Bad("pull from a hub that is none", "pull ms:org/tiny", (HUB_ID, "'ms:org/tiny'")),
    Bad("pull from modelscope without owner", "pull modelscope:tiny", (HUB_ID,)),
    Bad("pull what goes up", "pull org/..", (HUB_ID,)),
    Bad("pull a path", "pull ./absent", (HUB_ID,)),
    Bad("pull a folder", "pull @model", ("is a folder of this machine", "nothing to download"), USAGE),
    Bad("pull the bundled model", "pull demo", ("demo is the bundled model", "nothing to download"), USAGE),
    Bad("pull with a misspelt option", "pull org/x --revison v1", ("did you mean --revision?",), USAGE),
    Bad("pull without a revision", "pull org/x --revision", ("--revision: expected one argument",), USAGE),
    Bad("pull offline", "pull org/x", OFFLINE),
    Bad("pull a revision offline", "pull org/x --revision v7", (*OFFLINE, "at revision 'v7'")),
    Bad("pull from modelscope offline", "pull modelscope:org/x", OFFLINE),
    Bad("run what is not here offline", "generate x -m modelscope:org/x", OFFLINE),
    Bad("draft that is not here offline", "generate x -m @model --executor reference --draft org/x", OFFLINE),
    Bad("draft that there is not", "generate x --draft eagle4", ("draft 'eagle4'", "eagle2 | eagle3", "lookup")),
    Bad("list of tokens that there is not", "generate x --executor reference --draft eagle2 --draft-vocab 8K",
        ("error: --draft-vocab: expected a number of tokens", "or a file that lists them", "got '8K'")),
    Bad("bits of a draft that there is not", "plan --shape minicpm4-8b --draft-weight-bits 4",
        ("--draft-weight-bits needs --draft eagle2, eagle3 or dspark",), USAGE),
    Bad("bits of a draft without layers", "plan --shape minicpm4-8b --draft lookup --draft-weight-bits 4",
        ("--draft-weight-bits needs --draft eagle2, eagle3 or dspark",), USAGE),
    Bad("file of a model that is absent", "inspect absent.gguf", ("'absent.gguf'", "got nothing there")),
    Bad("revision of the bundled model", "generate x --revision v1", ("the bundled model has no revision",)),
    # Arguments of `list` and `rm`
    Bad("list something", "list org/tiny", ("unrecognized arguments: org/tiny",), USAGE),
    Bad("list with a misspelt option", "list --jsn", ("did you mean --json?",), USAGE),
    Bad("remove nothing", "rm", ("required: NAME",), USAGE),
    Bad("remove what is not there", "rm org/absent", ("'org/absent' is not in the cache", "cpmrt list")),
    Bad("remove from the other hub", "rm modelscope:org/tiny", ("'modelscope:org/tiny' is not in the cache",)),
    Bad("remove a misspelt name", "rm org/tinny", ("did you mean org/tiny?",)),
    Bad("remove one that is there and one that is not", "rm org/tiny org/absent", ("'org/absent' is not in",)),
    Bad("remove a path", "rm ../../model", ("is not in the cache",)),
    Bad("remove an empty name", "rm", ("'' is not in the cache",), words=[""]),
    # Arguments of `quantize`
    Bad("quantise nothing", "quantize", ("required: MODEL, OUT",), USAGE),
    Bad("quantise to nowhere", "quantize @model", ("required: OUT",), USAGE),
    Bad("method that is none", f"{Q} --method magic", ("invalid choice: 'magic'", "gptq"), USAGE),
    Bad("format that is none", f"{RTN} --format gguf", ("invalid choice: 'gguf'",), USAGE),
    Bad("group that is none", f"{RTN} --group-size 48", ("invalid choice: 48",), USAGE),
    Bad("device that is none", f"{RTN} --device tpu", ("invalid choice: 'tpu'",), USAGE),
    Bad("no GPU to quantise on", f"{RTN} --device cuda", ("CuPy cannot run on a GPU here", "--device cpu")),
    Bad("gptq without text", Q, ("method gptq looks at activations", "--calibration FILE")),
    Bad("awq without text", f"{Q} --method awq --format awq", ("--calibration FILE",)),
    Bad("awq's format without zero points", f"{CALIBRATED} --format awq --act-order", ("--static-groups",)),
    Bad("text that rtn does not read", f"{RTN} --calibration @text.txt", ("of methods gptq and awq",)),
    Bad("order without gptq", f"{RTN} --act-order", ("--act-order is of method gptq", "got --method rtn")),
    Bad("windows that rtn does not read", f"{RTN} --windows 4", ("--windows is of methods gptq and awq",)),
    Bad("damping that awq does not read", f"{Q} --method awq --damping 0.1", ("--damping is of method gptq",)),
    Bad("groups of ternary alone", f"{RTN} --group-size 256", ("--group-size 256 is of method ternary",)),
    Bad("damping of nothing", f"{CALIBRATED} --damping 0", ("--damping: expected a number between 0 and 1, got 0",)),
    Bad("damping that is no number", f"{CALIBRATED} --damping nan", ("--damping: expected", "got nan")),
    Bad("no windows", f"{CALIBRATED} --windows 0", ("--windows: expected at least 1, got 0",)),
    Bad("a window of nothing", f"{CALIBRATED} --window -5", ("--window: expected at least 1, got -5",)),
    Bad("a window longer than the text", f"{CALIBRATED} --window 2000", ("calibration text is too short", "--window")),
    Bad("a window longer than the model takes", f"{CALIBRATED} --window 999999", ("--window: expected at most 2048",)),
    Bad("nothing left of a window", f"{CALIBRATED} --skip-positions 32", ("--skip-positions", "fewer than")),
    Bad("text that is absent", f"{Q} --calibration @absent.txt", ("absent.txt does not exist",)),
    Bad("folder without text", f"{Q} --calibration @empty", ("has no calibration text", "*.txt")),
    Bad("lines without text", f"{Q} --calibration @broken.jsonl", ("broken.jsonl: line 2", 'object with "text"')),
    Bad("absent model", "quantize @absent @out --method rtn", ("absent'", "got nothing there")),
    Bad("model that is a file", "quantize @text.txt @out --method rtn", ("got a file",)),
    Bad("model that is quantised", "quantize @gptq @out --method rtn", ("is quantised already", "16-bit")),
    Bad("model of another kind", "quantize @other @out --method rtn", ("MambaForCausalLM",)),
    Bad("pickled model", "quantize @pickled @out --method rtn", ("pickled weights can run code",)),
    Bad("model whose weights are cut", "quantize @cut @out --method rtn", ("cut or damaged", "download it again")),
    Bad("weights that are not finite", "quantize @infinite @out --method rtn -q", ("mlp.up_proj",)),
    Bad("groups that do not divide", "quantize @odd @out --method rtn", ("mlp.down_proj", "group")),
    Bad("head that is the embedding", "quantize @tied @out --method rtn --lm-head", ("leave --lm-head out",)),
    Bad("folder that exists", "quantize @model @empty --method rtn", ("exists already",)),
    Bad("folder named as a file", "quantize @model @out.gguf --method rtn", ("that of a GGUF file", "cpmrt convert")),
    Bad("folder in no folder", "quantize @model @no/where --method rtn", ("not a folder",)),
    Bad("folder within a file", "quantize @model @text.txt/out --method rtn", ("not a folder",)),
    # Arguments of `convert`
    Bad("convert nothing", "convert", ("required: SOURCE, TARGET",), USAGE),
    Bad("convert to no layout", "convert @gptq @out --to onnx", ("invalid choice: 'onnx'", "marlin"), USAGE),
    Bad("convert to a type of no format", "convert @gptq @out --type q8_0", ("--type is for --to gguf",), USAGE),
    Bad("convert what is absent", "convert @absent @out", ("expected a folder or a .gguf file, got nothing there",)),
    Bad("convert a file", "convert @text.txt @out", ("expected a folder or a .gguf file, got a file",)),
    Bad("convert 16 bits", "convert @model @out", ("expected 4 bits of gptq, the head in 16, got none", "quantize")),
    Bad("convert what is not here offline", "convert org/x @out.gguf", OFFLINE),
    Bad("convert back what is no Marlin", "convert @gptq @out --to gptq", ("expected 4 bits as in marlin",)),
    Bad("convert groups of 64", "convert @small @out", ("group_size 128 or -1", "quantise again")),
    Bad("convert into a folder that exists", "convert @gptq @empty", ("exists already",)),
    # Drafts, shells, sizes
    Bad("draft by no method", "train-draft --model demo --out @out", ("required: --method",), USAGE),
    Bad("draft by another method", f"{TRAIN} --method medusa", ("invalid choice: 'medusa'",), USAGE),
    Bad("draft in fewer than no steps", f"{TRAIN} --steps -1", ("expected 0 or a positive integer, got '-1'",), USAGE),
    Bad("draft of no rows", f"{TRAIN} --rows 0", ("expected a positive integer, got '0'",), USAGE),
    Bad("draft without torch", TRAIN, ("needs torch, which is not installed", "-m pip install torch")),
    Bad("shell that is none", "completion csh", ("invalid choice: 'csh'", "bash"), USAGE),
    Bad("context in no unit", "plan @model --context 128Q", ("a number of tokens such as 4096 or 128K",), USAGE),
    Bad("memory in no unit", "plan @model --gpu-memory 8Q", ("a size such as 8GiB",), USAGE),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models of all kinds, texts, and a hub cache that holds org/tiny."""
    root = tmp_path_factory.mktemp("inputs")
    model = write_checkpoint(root / "model", **SIZES)
    write_checkpoint(root / "odd", **SIZES | {"intermediate_size": 96})
    write_checkpoint(root / "tied", **SIZES | {"tie_word_embeddings": True})
    for name in ("other", "pickled", "cut", "infinite"):
        write_checkpoint(root / name, **SIZES)
    config = json.loads((model / "config.json").read_text())
    (root / "other" / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    (root / "pickled" / "model.safetensors").rename(root / "pickled" / "pytorch_model.bin")
    with (root / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    weights = load_file(root / "infinite" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.inf
    save_file(weights, root / "infinite" / "model.safetensors")
    assert main(["quantize", str(model), str(root / "gptq"), "--method", "rtn", "--quiet"]) == 0
    assert main(["quantize", str(model), str(root / "small"), "--method", "rtn", "--group-size", "64", "-q"]) == 0
    (root / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n}\n" for n in range(60)))
    (root / "broken.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    (root / "empty").mkdir()
    cache = root / "hub" / "models--org--tiny"
    write_checkpoint(cache / "snapshots" / "abc123")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc123")
    return root


@pytest.fixture
def offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelscope_hub import config

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(folder / "modelscope"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(config, "_default_config", None)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))


def contents(folder: Path) -> set[tuple[str, int]]:
    """Return every file with its size, but for locks, which are empty."""
    files = (path for path in folder.rglob("*") if path.is_file() and "lock" not in str(path))
    return {(str(path), path.stat().st_size) for path in files}


@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.name.replace(" ", "-"))
def test_bad_input(bad: Bad, folder: Path, offline: None, no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(folder)
    line = [str(folder / word[1:]) if word.startswith("@") else word for word in bad.line.split()] + bad.words
    code = main(line)
    out, err = capsys.readouterr()
    assert code == bad.code and out == "", (out, err)
    assert err.startswith("cpmrt: error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    assert all(word in err for word in bad.says), err
    assert contents(folder) == before and not (folder / "out").exists()


def test_there_are_as_many_as_were_asked_for() -> None:
    assert len(BAD_INPUTS) >= 60 and len({(bad.line, *bad.words) for bad in BAD_INPUTS}) == len(BAD_INPUTS)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"model": "modelscope:org/x"}, "modelscope:org/x is not in the local cache"),
        ({"model": "org/x", "revision": "v1"}, "org/x at revision 'v1' is not in the local cache"),
        ({"model": "modelscope:x"}, HUB_ID),
        ({"revision": "v1"}, "the bundled model has no revision"),
        ({"memory_budget": "8 potatoes", "executor": "reference"}, "memory_budget: expected a size such as 8GiB"),
        ({"memory_budget": "0GiB", "executor": "reference"}, "a size such as 8GiB"),
        ({"memory_budget": 0.9, "executor": "reference"}, "expected a size such as 8GiB or 512MiB, got 0.9"),
        ({"memory_budget": -1, "executor": "reference"}, "memory_budget: expected an integer"),
    ],
)
def test_bad_arguments_of_a_model(arguments: dict[str, object], says: str, offline: None) -> None:
    with pytest.raises(CpmrtError) as caught:
        LLM(**arguments)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("line", [f"{RTN} -q", "convert @gptq @out"])
def test_a_full_disk_leaves_nothing(line: str, folder: Path) -> None:
    """A command that meets a full disk, here a limit on file sizes, says so in one line and leaves no output behind."""
    words = [str(folder / word[1:]) if word.startswith("@") else word for word in line.split()]
    done = subprocess.run(
        [sys.executable, "-m", "cpmrt", *words], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "cannot be written: File too large" in done.stderr and str(folder / "out") in done.stderr
    assert not [path for path in folder.iterdir() if "out" in path.name]


def test_a_cache_that_is_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hub").write_text("no folder")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["list"]) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path / 'hub'}" in error and "HF_HOME" in error and error.count("\n") == 1
