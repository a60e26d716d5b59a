"""`cpmrt compile` builds exactly the modules that a later start on the named device asks for, without having the
device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from reference.quantised_models import CASES, write_quantised

from cpmrt.bench.shapes import SHAPES, shape_config
from cpmrt.cli import compile as command
from cpmrt.cli.main import main
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.build import cubin_cache
from cpmrt.cuda.build.modules import compile_all
from cpmrt.cuda.kernels import KERNELS, files
from cpmrt.cuda.precompile import known_device, modules_of
from cpmrt.dtypes import DType
from cpmrt.errors import ConfigError
from cpmrt.opening import Blueprint
from cpmrt.weights.hub import BUNDLED

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_110", "sm_120", "sm_121")
SHAPE = ModelConfig.from_hf(shape_config("minicpm4-0.5b"))
STEP_ATTENTION = tuple(
    f"attention/{name}.cu" for name in ("decode_attention", "latent_attention", "latent_attention_wgmma")
)
LINEAR, PACKED, ROUND = "linear/linear.cu", "linear_packed/linear_packed.cu", "load/round_weights.cu"


def wanted(arch: str = "sm_90", config: ModelConfig = SHAPE, **settings: Any) -> list[tuple[str, Mapping[str, int]]]:
    device = known_device(arch, settings.pop("num_sms", None))
    return modules_of(Blueprint.of(config, EngineConfig(dtype="bfloat16", **settings), CudaTarget(device)), device)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_module_has_the_sizes_that_a_kernel_of_it_needs(arch: str, shape: str) -> None:
    modules = wanted(arch, ModelConfig.from_hf(shape_config(shape)))
    for file, sizes in modules:
        assert file in files(arch)
        assert any(set(spec.macros) <= sizes.keys() for spec in KERNELS if spec.file == file), (file, sizes)
    used = {file for file, _ in modules}
    products = {LINEAR, "linear/gemm.cu"}
    assert products | {"sampling/sampling.cu", "step/step.cu"} <= used
    assert len(used.intersection(STEP_ATTENTION)) == 1
    assert {"load/convert.cu", "load/fill.cu"} <= used
    assert any(file.startswith("attention/prefill_attention") for file in used)


def tiles_of(modules: list[tuple[str, Mapping[str, int]]], *, is_head: bool = False) -> set[int]:
    """Return the numbers of eight-row tiles for which the layers' products, or with `is_head` the head's, are built."""
    return {sizes["TOKEN_TILES"] for file, sizes in modules if file == LINEAR and (sizes["LINEAR"] == 3) == is_head}


@pytest.mark.parametrize(("max_sequences", "tiles"), [(1, {1, 2, 4}), (2, {1, 2, 4, 8}), (64, {1, 2, 4, 8})])
def test_the_settings_decide_which_steps_there_are(max_sequences: int, tiles: set[int]) -> None:
    """More sequences need products of more rows, including steps whose slots bring certain tokens."""
    assert tiles_of(wanted(max_sequences=max_sequences)) == tiles


@pytest.mark.parametrize(("max_sequences", "tiles"), [(1, {1}), (8, {1}), (16, {1, 2})])
def test_a_recurrent_state_takes_a_token_a_step(max_sequences: int, tiles: set[int]) -> None:
    config = ModelConfig.from_hf(shape_config(RECURRENT))
    assert tiles_of(wanted(config=config, max_sequences=max_sequences)) == tiles


@pytest.mark.parametrize(("chunk", "tiles"), [(512, {1, 8}), (4096, {1, 8}), (4120, {1, 4, 8})])
def test_the_logits_of_a_prompt_have_the_head_of_many_rows(chunk: int, tiles: set[int]) -> None:
    """Prompt logits use the head of 64 rows, whatever steps there are; a chunk beyond 4,096 also needs the head of its
    remaining rows, here 24."""
    config = ModelConfig.from_hf(shape_config(RECURRENT))
    assert tiles_of(wanted(config=config, prefill_chunk=chunk), is_head=True) == tiles


QUANTISED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("head_bits", "order"), [(None, False), (4, True), (8, False)])
def test_a_quantised_model_has_the_modules_of_its_products(arch: str, head_bits: int | None, order: bool) -> None:
    settings = {"quantization_config": QUANTISED | {"desc_act": order}}
    config = ModelConfig.from_hf(shape_config("minicpm4-8b") | settings)
    modules = wanted(arch, config, max_sequences=64, lm_head_bits=head_bits, lm_head_screen=False)
    for file, sizes in modules:
        assert any(set(spec.macros) <= sizes.keys() for spec in KERNELS if spec.file == file), (file, sizes)
    products = {sizes["LINEAR"] for file, sizes in modules if file == PACKED}
    assert products == ({0, 1, 2, 3} if head_bits else {0, 1, 2})
    assert products == {sizes["LINEAR"] for file, sizes in modules if file == "linear_packed/repack.cu"}
    assert {sizes["LINEAR"] for file, sizes in modules if file == LINEAR} == (set() if head_bits else {3})
    assert {sizes["ROWS"] for file, sizes in modules if file == PACKED} == {1, 8, 16, 32, 64}
    assert {"linear_packed/prepare_rows.cu", "linear_packed/gather.cu"} <= {file for file, _ in modules}
    rounded = [sizes["WEIGHT_BITS"] for file, sizes in modules if file == ROUND]
    assert rounded == [head_bits] * bool(head_bits)
    heads = {sizes["WEIGHT_BITS"] for _, sizes in modules if sizes.get("LINEAR") == 3 and "WEIGHT_BITS" in sizes}
    assert heads == ({head_bits} if head_bits else set())


@pytest.mark.parametrize("chunk", [33, 64, 65, 200])
def test_the_shortest_chunks_have_all_they_need(chunk: int) -> None:
    permuted = ModelConfig.from_hf(shape_config("minicpm4-8b") | {"quantization_config": QUANTISED})
    assert "linear_packed/gather.cu" in {file for file, _ in wanted("sm_90", permuted, prefill_chunk=chunk)}
    experts = ModelConfig.from_hf(shape_config("minicpm-moe-8x2b"))
    assert "experts/group_pairs.cu" in {file for file, _ in wanted("sm_90", experts, prefill_chunk=chunk)}


def test_the_number_of_multiprocessors_decides_too() -> None:
    assert wanted("sm_87", num_sms=8) != wanted("sm_87") == wanted("sm_87", num_sms=16)


def test_an_architecture_without_a_known_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown architecture: expected sm_80 | .*, got sm_75"):
        known_device("sm_75")


def test_neither_cupy_nor_a_driver_is_needed() -> None:
    script = (
        "import sys; sys.modules['cupy'] = None\nfrom cpmrt.cli import compile\nfrom cpmrt.config import *\n"
        "from cpmrt.bench.shapes import shape_config\nfrom cpmrt.dtypes import DType\n"
        "shape = ModelConfig.from_hf(shape_config('minicpm4-0.5b'))\n"
        "device = compile.known_device('sm_87')\nfrom cpmrt.opening import Blueprint\n"
        "model = Blueprint.of(shape, EngineConfig(dtype='float16'), compile.CudaTarget(device))\n"
        "print(len(compile.modules_of(model, device)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, timeout=60)
    assert int(done.stdout) == len(wanted("sm_87"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """The (arch, dtype, modules) that the command asks to compile; nothing is compiled."""
    calls: list[Any] = []
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path))

    def record(arch: str, dtype: DType, modules: Any, *, must_last: bool) -> list[Path]:
        assert must_last
        calls.append((arch, dtype, list(modules)))
        return [Path(f"{arch}-{index}") for index in range(len(calls[-1][2]))]

    monkeypatch.setattr(command, "compile_all", record)
    yield calls


def test_the_command_builds_a_shape_for_each_architecture(asked: list[Any], capsys: Any) -> None:
    arguments = ["--arch", "sm_87", "--arch", "sm_90", "--dtype", "float16", "--max-sequences", "8"]
    assert main(["compile", "--shape", "minicpm4-0.5b", *arguments]) == 0
    assert [(arch, dtype) for arch, dtype, _ in asked] == [("sm_87", DType.FLOAT16), ("sm_90", DType.FLOAT16)]
    assert [modules for _, _, modules in asked] == [wanted(arch, max_sequences=8) for arch in ("sm_87", "sm_90")]
    said = capsys.readouterr().out
    assert "sm_87, 16 multiprocessors (Jetson AGX Orin)" in said and f"{len(asked[0][2])} compiled now" in said


TREE_ATTENTION = "attention/tree_attention.cu"
TREES = {"sampling/tree_sampling.cu", "draft/accept.cu"}


def built(asked: list[Any], *arguments: str) -> list[tuple[str, Mapping[str, int]]]:
    """Run `cpmrt compile --arch sm_90` with `arguments` and return the modules that it asks for."""
    asked.clear()
    assert main(["compile", "--arch", "sm_90", *arguments]) == 0
    ((_, _, modules),) = asked
    return modules


RECURRENT = "minicpm-sala-9b"
"""A model with recurrent states, which can verify chains of drafts but not trees."""


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != RECURRENT])
@pytest.mark.parametrize("draft", ["eagle2", "eagle3", "dspark", "lookup"])
def test_a_draft_brings_its_modules(asked: list[Any], shape: str, draft: str) -> None:
    plain, modules = built(asked, "--shape", shape), built(asked, "--shape", shape, "--draft", draft)
    assert all(module in modules for module in plain)
    for file, sizes in modules:
        assert any(set(spec.macros) <= sizes.keys() for spec in KERNELS if spec.file == file), (file, sizes)
    more = [module for module in modules if module not in plain]
    assert {file for file, _ in more} >= TREES | {"draft/lookup.cu" if draft == "lookup" else "draft/draft_top_k.cu"}
    trees = [file for file, sizes in more if file in STEP_ATTENTION and sizes["TREE"] or file == TREE_ATTENTION]
    assert trees
    assert ("rows/join.cu" in {file for file, _ in more}) is draft.startswith("eagle")
    heads = [sizes for file, sizes in more if file == "draft/draft_top_k.cu"]
    chains = [sizes for file, sizes in more if file == "draft/block.cu"]
    assert [chain["VOCAB"] // chain["PARTS"] for chain in chains] == [head["VOCAB"] for head in heads if chains]
    assert bool(chains) is (draft == "dspark")


def test_a_start_may_screen_the_head_unless_it_is_asked_not_to(asked: list[Any]) -> None:
    shape = ("--shape", "minicpm4-0.5b")
    made = [
        {(file, frozenset(sizes.items())) for file, sizes in built(asked, *shape, *options)}
        for options in ((), ("--lm-head-screen",), ("--no-lm-head-screen",))
    ]
    assert made[0] == made[1] > made[2]
    assert {file for file, _ in made[0] - made[2]} >= {f"screened_head/{name}.cu" for name in ("head_rows", "rescore")}


def test_wishes_for_the_draft_decide_its_modules(asked: list[Any]) -> None:
    shape = ("--shape", "minicpm4-0.5b", "--no-lm-head-screen")
    whole = built(asked, *shape, "--draft", "eagle2")
    cut = built(asked, *shape, "--draft", "eagle2", "--draft-vocab", "8192", "--draft-window", "512")
    for modules, vocab, window in ((whole, 73448, 0), (cut, 8192, 512)):
        assert {sizes["VOCAB"] for file, sizes in modules if file == "draft/draft_top_k.cu"} == {vocab}
        windows = {sizes["WINDOW"] for file, sizes in modules if file == "attention/decode_attention.cu"}
        assert windows == {0, window}
    rounded = built(asked, *shape, "--draft", "eagle2", "--draft-head-bits", "8")
    heads = {sizes["WEIGHT_BITS"] for file, sizes in rounded if file in (PACKED, ROUND)}
    assert heads == {8} and not any(file == PACKED for file, _ in whole)
    packed = built(asked, *shape, "--draft", "eagle2", "--draft-weight-bits", "4")
    assert {sizes["LINEAR"] for file, sizes in packed if file == PACKED} == {0, 1, 2}
    trees = built(asked, *shape, "--draft", "lookup", "--tree-size", "12")
    assert tiles_of(trees) == {1, 2, 4}
    assert built(asked, *shape, "--draft", "eagle2", "--speculate", "off") == built(asked, *shape)


def test_every_model_that_is_known_has_its_drafts(asked: list[Any]) -> None:
    for draft in ("eagle2", "eagle3"):
        modules = built(asked, "--draft", draft)
        widths = {sizes["HIDDEN"] for file, sizes in modules if file == "step/step.cu"}
        assert widths == {256, *(shape["hidden_size"] for name, shape in SHAPES.items() if name != RECURRENT)}
        assert len([sizes for file, sizes in modules if file == "draft/draft_top_k.cu"]) >= 2


def test_a_recurrent_model_has_chains_of_drafts_only(asked: list[Any], capsys: Any) -> None:
    assert {file for file, _ in built(asked, "--shape", RECURRENT, "--draft", "lookup")} >= TREES
    assert main(["compile", "--arch", "sm_90", "--shape", RECURRENT, "--draft", "eagle2"]) == 1
    assert "draft trees cannot be used with the cache lightning_states" in capsys.readouterr().err


def test_the_weights_of_a_checkpoint_say_which_are_quantised(asked: list[Any], tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "awq_some")
    folder = str(write_quantised(case, tmp_path / case.name, 3))
    products = [
        {(file, sizes["LINEAR"]) for file, sizes in modules if file in (LINEAR, PACKED)}
        for modules in (built(asked, folder), built(asked, folder, "--weight-bits", "4"))
    ]
    assert {(LINEAR, 1), (PACKED, 1)} <= products[0] and (LINEAR, 1) not in products[1]


def test_without_a_model_it_builds_all_that_are_known(asked: list[Any]) -> None:
    assert main(["compile", "--arch", "sm_87"]) == 0
    ((_, _, modules),) = asked
    hidden = {sizes["HIDDEN"] for file, sizes in modules if file == "rows/norm.cu"}
    assert {1024, 4096} < hidden and len({(file, *sorted(sizes.items())) for file, sizes in modules}) == len(modules)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["M", "--shape", "minicpm4-8b"], "exclude each other"),
        (["--sms", "8"], "--sms needs --arch"),
        (["--arch", "sm_87", "--draft-weight-bits", "4"], "--draft-weight-bits needs --shape"),
        (["--arch", "sm_87", "--draft-window", "512"], "draft"),
        (["--arch", "sm_87", "--sms", "0"], "positive"),
        (["--arch", "hopper"], "sm_87"),
        (["--arch", "sm_75"], "unknown architecture"),
    ],
)
def test_mistakes_are_one_line(asked: list[Any], arguments: list[str], message: str, capsys: Any) -> None:
    assert main(["compile", *arguments]) != 0
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not asked


def test_a_cache_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`cpmrt compile` must fail if the cache is not writable: its only purpose is to leave files, as in a container
    image."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path / "file"))
    assert main(["compile", str(BUNDLED), "--arch", "sm_87"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"cannot be kept in {tmp_path}/file/cubins" in err and "set CPMRT_CACHE_DIR" in err


def cubins() -> set[str]:
    """Return the names of the cubins in the cache, which also holds verdicts on algorithms."""
    return {path.name for path in cubin_cache.folder().glob("*.cubin")}


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["eagle2", "eagle3", "lookup"])
def test_a_start_with_a_draft_compiles_nothing(draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cpmrt import LLM

    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path))
    assert main(["compile", str(BUNDLED), "--draft", draft, "--max-sequences", "2"]) == 0
    built = cubins()
    with LLM(executor="cuda", draft=draft, max_context=256, max_sequences=2):
        assert cubins() == built


@pytest.mark.gpu
def test_a_start_after_it_compiles_nothing(cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cpmrt import LLM

    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path))
    with LLM(executor="reference", max_context=64) as llm:
        config = llm.config
    settings = EngineConfig(dtype="bfloat16", max_sequences=2)
    modules = modules_of(Blueprint.of(config, settings, CudaTarget(cuda.device)), cuda.device)
    built = {path.name for path in compile_all(cuda.arch, DType.BFLOAT16, modules)}
    with LLM(executor="cuda", max_context=64, max_sequences=2):
        assert cubins() == built
