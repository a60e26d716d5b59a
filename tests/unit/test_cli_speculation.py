"""Speculation on the command line: unchanged text, its statistics, and simulated results."""

from __future__ import annotations

import io
import json
import sys

import pytest
from draft_checkpoint import EAGLE_OF_VLLM, TARGET, eagle_of_vllm_tensors, write_folder
from scripted import ScriptedExecutor
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM
from cpmrt.bench import views
from cpmrt.bench.measure import Case, measure
from cpmrt.bench.report import CaseReport, Report
from cpmrt.bench.samples import Samples
from cpmrt.bench.shapes import draft_configs, shape_folder
from cpmrt.bench.work import decode_bytes
from cpmrt.cli import bench as bench_module
from cpmrt.cli.main import main
from cpmrt.cli.output import cost_lines
from cpmrt.config import EngineConfig, ModelConfig, SpeculationConfig, TreeShape
from cpmrt.engine import GenerationStats
from cpmrt.executor import ExecutorLimits, StepParts
from cpmrt.generation import Completion
from cpmrt.models.draft_weights import open_draft
from cpmrt.models.planning import weight_specs
from cpmrt.weights.draft_folder import method_of
from cpmrt.weights.model_folder import ModelFolder

PROMPT = "one two one two one two one two"
OPTIONS = ("--executor", "reference", "--max-new-tokens", "24", "--ignore-eos", "--max-context", "128")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.mark.parametrize("options", [(), ("--draft-iters", "4"), ("--speculate", "off")])
def test_the_text_is_the_same_with_a_draft(checkpoint, capsys, options):
    records = []
    for draft in ((), ("--draft", "lookup", *options)):
        assert main(["generate", "-m", checkpoint, *OPTIONS, PROMPT, "--json", *draft]) == 0
        records.append(json.loads(capsys.readouterr().out))
    plain, drafted = records
    assert drafted["token_ids"] == plain["token_ids"]
    assert plain["stats"]["accept_histogram"] == [] and plain["stats"]["mean_accept_length"] is None
    histogram = drafted["stats"]["accept_histogram"]
    is_off = "off" in options
    assert (histogram == []) == is_off and sum(n * count for n, count in enumerate(histogram, 1)) == (not is_off) * 23


def test_stats_of_generate_and_chat(checkpoint, capsys, monkeypatch):
    arguments = ("-m", checkpoint, *OPTIONS, "--draft", "lookup", "--stats")
    assert main(["generate", PROMPT, *arguments]) == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    assert main(["chat", *arguments]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("speculative steps ") for line in lines) == 3
    assert sum("mean accept length" in line for line in lines) == 3


def test_what_a_generation_cost():
    stats = GenerationStats(
        3, 10, 0.5, 2.0, 2.0, accept_histogram=(1, 2, 1), accept_rates=(0.75, 1 / 3), draft_ms=0.25, verify_ms=1.5,
        rest_ms=0.125,
    )  # fmt: skip
    assert cost_lines(Completion("x", (1,), "stop", (), stats))[1:] == [
        "speculative steps 4, of 5 decode steps; by the tokens they gave 1: 25%, 2: 50%, 3: 25%",
        "accept rate by depth 1: 75%, 2: 33%",
        "a speculative step: draft 0.250 ms, verify 1.500 ms, rest 0.125 ms (measured at start)",
    ]
    plain = Completion("x", (1,), "stop", (), GenerationStats(3, 10, 0.5, 2.0, None))
    assert len(cost_lines(plain)) == 1


@pytest.mark.parametrize(("arguments", "code", "says"), [
    (["generate", "x", "--draft", "lookup", "--tree-size", "0"], 1, "--tree-size: expected an integer in [2, 64]"),
    (["generate", "x", "--tree-size", "8"], 1, "needs a draft; name one with --draft=..., or --draft='lookup'"),
    (["generate", "x", "--draft", "lookup", "--draft-iters", "99"], 1, "error: --draft-iters: expected an integer"),
    (["generate", "x", "--draft", "lookup", "--draft-vocab", "8"], 1, "--draft-vocab means nothing to method lookup"),
    (["generate", "x", "--draft", "no-such-draft"], 1, "no-such-draft"),
    (["generate", "x", "--draft", "lookup", "--draft-topk", "3"], 1, "drafts chains: expected --draft-topk 1, got 3"),
    (["generate", "x", "--draft", "lookup", "--speculate", "on"], 2, "invalid choice: 'on'"),
    (["chat", "--url", "http://127.0.0.1:9", "--draft", "lookup"], 2, "--url and --draft exclude"),
    (["bench", "--case", "8:4", "--simulate-accept", "2"], 1, "speculate needs a draft"),
    (["bench", "--case", "8:4", "--draft", "lookup", "--simulate-accept", "7"], 1, "-accept: expected a number"),
    (["bench", "--draft", "lookup", "--speculate", "off", "--simulate-accept", "2"], 1, "--simulate-accept needs spec"),
    (["bench", "--case", "8:4", "--draft-weight-bits", "4"], 2, "--draft-weight-bits needs --shape"),
], ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None)  # fmt: skip
def test_mistakes_are_one_line(checkpoint, capsys, arguments, code, says):
    model = [] if "--url" in arguments else [checkpoint] if arguments[0] == "bench" else ["-m", checkpoint]
    reference = [] if "--url" in arguments else ["--executor", "reference", "--max-context", "64"]
    assert main([arguments[0], *model, *reference, *arguments[1:]]) == code
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1


@pytest.mark.parametrize(("line", "speculate"), [
    ((), {"adaptive": False, "simulate_accept": 2.5}),
    (("--draft-iters", "2", "--speculate", "auto"), {"num_passes": 2, "adaptive": False, "simulate_accept": 2.5}),
])  # fmt: skip
def test_forced_results_do_not_choose_the_shape(checkpoint, monkeypatch, line, speculate):
    seen = {}
    monkeypatch.setattr(bench_module, "run_benchmark", lambda name, settings, cases, **options: seen.update(settings))
    with pytest.raises(AttributeError):  # there is no report
        main(["bench", checkpoint, "--draft", "d", "--simulate-accept", "2.5", *line])
    assert (seen["draft"], seen["speculate"]) == ("d", speculate)


SHAPES = (TreeShape.chain(3), TreeShape.chain(2))
MODEL = ModelConfig.from_hf({
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 256,
})  # fmt: skip


def measured(*, simulated, shapes=SHAPES, sequences=1, **others):
    limits = ExecutorLimits(sequences, 256, 64, tree_shapes=shapes, **others)
    executor = ScriptedExecutor(limits, accuracy=0.5)
    return measure(executor, MODEL, Case(8, 40, sequences), repeats=2, itemsize=2, simulated=simulated, adaptive=False)


def test_a_measurement_counts_what_the_draft_steps_gave():
    parts = (StepParts(0.001, 0.002, 0.003), StepParts(9, 9, 9))
    result = measured(simulated=False, step_parts=parts)
    steps = sum(result.accept_histogram)
    assert result.mean_accept_length == pytest.approx(2 * 39 / steps) and len(result.accept_rates) == 3
    assert (result.draft_ms, result.verify_ms, result.rest_ms) == pytest.approx((1, 2, 3))
    assert not result.is_simulated
    plain = measured(simulated=True, shapes=())
    assert (plain.mean_accept_length, plain.accept_histogram, plain.is_simulated) == (None, (), False)


def test_a_simulated_result_says_so_wherever_it_is_shown(monkeypatch, checkpoint, tmp_path, capsys):
    case = CaseReport.of(measured(simulated=True), Samples(), None)
    report = Report(
        "m", "cuda", "bfloat16", "2026-01-02", {}, {}, 1.0, {}, 64, draft="eagle2", simulated_accept=2.5, cases=[case]
    )
    row = dict(zip(views.header(), views.rows(report)[0], strict=True))
    assert row["accept"].endswith(" simulated") and "simulated" in views.line(case)
    assert "m, bfloat16, draft eagle2, simulated accept length 2.5, executor cuda" in views.summary(report)
    record = report.record()
    assert record["simulated_accept"] == 2.5 and record["cases"][0]["measurement"]["is_simulated"]


def test_the_benchmark_with_a_draft(checkpoint, tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = [checkpoint, "--executor", "reference", "--repeats", "1", "--case", "16:12", "--max-context", "64"]
    assert main(["bench", *arguments, "--draft", "lookup", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "float32, draft lookup, executor reference" in out and "simulated" not in out + err
    record = json.loads(path.read_text())
    measurement = record["cases"][0]["measurement"]
    assert record["draft"] == "lookup" and record["simulated_accept"] is None
    assert sum(measurement["accept_histogram"]) == len(measurement["step_ms"]) and "at accept length" in err


def test_a_draft_reads_no_part_of_the_bytes_of_a_step():
    with shape_folder("minicpm4-8b") as model:
        folder = ModelFolder.open(model, weights=False)
        settings = EngineConfig(load_format="dummy", draft="eagle2", speculation=SpeculationConfig("eagle2"))
        specs = weight_specs(folder.config, settings)
        with open_draft(folder, settings, specs) as (_, draft):
            tensors = (*specs, *draft.tensors)
    assert decode_bytes(folder.config, 9, 1, 2, tensors) == decode_bytes(folder.config, 9, 1, 2, specs)


@pytest.mark.parametrize(("method", "layers", "vocab"), [
    ("eagle2", 1, 73448), ("eagle3", 1, 32768), ("dspark", 5, 73448),
])  # fmt: skip
@pytest.mark.parametrize("bits", [16, 4])
def test_shapes_come_with_drafts(method, layers, vocab, bits):
    changes = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}}
    with shape_folder("minicpm4-8b", changes if bits == 4 else None) as model:
        folder = ModelFolder.open(model, weights=False)
        assert method_of(method, folder.path, weights=False) == method
        wish = SpeculationConfig(method, (TreeShape.chain(2),))
        settings = EngineConfig(load_format="dummy", draft=method, speculation=wish)
        with open_draft(folder, settings, weight_specs(folder.config, settings)) as (_, draft):
            assert draft.config.decoder.num_layers == layers
            assert {spec.quant is not None for spec in draft.tensors if spec.name.endswith("qkv")} == {bits == 4}
            assert draft.vocab_size == vocab
    assert draft_configs("minicpm4-0.5b")[method]["hidden_size"] == 1024


def test_plan_holds_the_draft(checkpoint, capsys):
    assert main(["plan", checkpoint, "--draft", "lookup"]) == 0
    with LLM(checkpoint, executor="reference", draft="lookup") as llm:
        assert capsys.readouterr().out.endswith(f"float32\n{llm.plan}\n")


def test_plan_with_a_draft_that_has_a_head_needs_no_weights_of_the_target(tmp_path, capsys):
    draft = write_folder(tmp_path / "draft", EAGLE_OF_VLLM, eagle_of_vllm_tensors())
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET))
    assert main(["plan", str(tmp_path / "target"), "--draft", str(draft)]) == 0
    assert "draft KV" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_of_a_shape_with_its_draft(capsys, dtype):
    records = []
    for draft in ([], ["--draft", "eagle3"], ["--draft", "eagle3", "--speculate", "off"]):
        arguments = ["--shape", "minicpm4-0.5b", "--context", "4096", "--dtype", dtype]
        assert main(["plan", *arguments, *draft, "--json"]) == 0
        records.append(json.loads(capsys.readouterr().out))
    plain, drafted, off = records
    assert off == plain and drafted["total_bytes"] == sum(drafted["part_bytes"].values())
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    assert drafted["part_bytes"]["draft KV"] == 4096 * 2 * 2 * 64 * itemsize
    assert drafted["part_bytes"]["draft"] > 32768 * 1024 * itemsize
