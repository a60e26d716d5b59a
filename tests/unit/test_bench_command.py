"""`cpmrt bench`: the table, the JSON, the plot, and mistakes on its command line."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from math import prod
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from scripted import ScriptedExecutor
from tiny_checkpoint import CONFIG, write_checkpoint

from cpmrt.bench import run as run_module
from cpmrt.bench import views
from cpmrt.bench.measure import Case, Measurement, measure
from cpmrt.bench.report import CaseReport, Report
from cpmrt.bench.run import seconds_to_first_token
from cpmrt.bench.samples import Samples
from cpmrt.bench.shapes import SHAPES, shape_config, shape_folder
from cpmrt.bench.views import plot
from cpmrt.bench.work import decode_bytes, prefill_flops
from cpmrt.cli import bench as bench_module
from cpmrt.cli.main import main
from cpmrt.config import ModelConfig, WeightQuantization
from cpmrt.errors import ConfigError, CpmrtError
from cpmrt.executor import Admit, ExecutorLimits
from cpmrt.models.decoder import cache_layout, tensor_specs
from cpmrt.weights.hub import BUNDLED

LINEAR = ("qkv", "output", "gate_up", "down")
QUICK = ("--executor", "reference", "--repeats", "1", "--max-context", "64")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def test_the_table_has_a_row_for_each_case_and_ends_with_the_last(checkpoint, capsys):
    assert main(["bench", checkpoint, *QUICK, "--case", "16:4", "--case", "20:3:2"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == f"{checkpoint}, float32, executor reference on the CPU" and lines[1].startswith("loaded in ")
    assert [line.split()[0] for line in lines[2:]] == ["case", "16:4", "20:3:2"]
    assert [line.split(": ")[0] for line in err.splitlines()] == ["16:4", "20:3:2"]


def test_a_context_is_filled_to_its_end(checkpoint, capsys):
    quick = ["--executor", "reference", "--repeats", "1", "--max-context", "1024"]
    assert main(["bench", checkpoint, *quick, "--context", "128", "--context", "1k"]) == 0
    assert [line.split(": ")[0] for line in capsys.readouterr().err.splitlines()] == ["64:64", "960:64"]


def test_a_shape_takes_longer_contexts_than_its_model(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(bench_module, "run_benchmark", lambda name, settings, *rest, **more: asked.append(settings))
    monkeypatch.setattr(views, "summary", lambda report: "")
    monkeypatch.setattr(views, "rows", lambda report: [])
    for options in (["--context", "512K"], ["--context", "1K", "--hf-overrides", '{"max_position_embeddings": 2048}']):
        assert main(["bench", "--shape", "minicpm4-8b", *options]) == 0
    assert [settings["hf_overrides"]["max_position_embeddings"] for settings in asked] == [524288, 2048]


def test_sampled_text_says_so(checkpoint, tmp_path, capsys):
    """A run with a temperature prints and records it; greedy decoding is the default and is not mentioned."""
    path, seen = tmp_path / "out.json", []
    for temperature in ([], ["--temperature", "0.0"], ["--temperature", "1e4"]):
        on_case = ["--case", "16:8", "--json", str(path), *temperature]
        assert main(["bench", checkpoint, *QUICK, *on_case]) == 0
        seen.append((json.loads(path.read_text())["temperature"], "float32, T = 10000, " in capsys.readouterr().out))
    assert seen == [(0.0, False), (0.0, False), (1e4, True)]


def test_the_temperature_is_that_of_every_request():
    executor = ScriptedExecutor(ExecutorLimits(2, 64, 16))
    config = ModelConfig.from_hf(CONFIG | {"vocab_size": 50})
    measure(executor, config, Case(4, 3, 2), repeats=1, itemsize=2, temperature=0.5)
    assert {step.sampling.temperature for step in executor.steps if isinstance(step, Admit)} == {0.5}


def test_the_json_holds_everything(checkpoint, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["bench", checkpoint, *QUICK, "--case", "16:4", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["versions"].keys() >= {"cpmrt", "python", "numpy"}
    assert (record["executor"], record["dtype"], record["device"]) == ("reference", "float32", {})
    assert record["settings"]["max_context"] == 64 and record["load_s"] > 0 and record["date"].startswith("20")
    (case,) = record["cases"]
    assert case["measurement"]["case"] == {"prompt_tokens": 16, "new_tokens": 4, "sequences": 1}
    assert len(case["measurement"]["step_ms"]) == 3 and case["read_share"] is None
    assert case["decode"].keys() >= {"power_w", "joules_per_token", "throttle_reasons"}


def test_a_shape_runs_on_random_weights(monkeypatch, capsys):
    small = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "eos_token_id": 2}
    monkeypatch.setitem(SHAPES, "minicpm4-0.5b", SHAPES["minicpm4-0.5b"] | small | {"num_attention_heads": 2})
    assert main(["bench", "--shape", "minicpm4-0.5b", *QUICK, "--case", "8:2"]) == 0
    assert capsys.readouterr().out.startswith("minicpm4-0.5b, bfloat16, executor reference")


def test_a_shape_in_four_bits(monkeypatch, capsys, tmp_path):
    small = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "eos_token_id": 2}
    monkeypatch.setitem(SHAPES, "minicpm4-0.5b", SHAPES["minicpm4-0.5b"] | small | {"num_attention_heads": 2})
    shape = ["bench", "--shape", "minicpm4-0.5b", *QUICK, "--case", "8:2", "--weight-bits", "4", "--group-size", "64"]
    assert main([*shape, "--lm-head-bits", "8", "--json", str(tmp_path / "out.json")]) == 0
    facts = ["gptq 4 bits", "groups of 64", "head in 8 bits"]
    assert capsys.readouterr().out.startswith(f"minicpm4-0.5b, bfloat16, {', '.join(facts)}, executor reference")
    assert json.loads((tmp_path / "out.json").read_text())["quantization"] == facts


def test_bytes_of_a_quantised_step():
    config = ModelConfig.from_hf(shape_config("minicpm4-8b"))
    quantised = replace(config, quantization=WeightQuantization("gptq", "gptq", 128, True))
    layers = sum(spec.num_elements for spec in tensor_specs(config) if spec.name.split(".")[-1] in LINEAR)
    saved = decode_bytes(config, 100, 1, 2) - decode_bytes(quantised, 100, 1, 2)
    assert saved == layers * 2 - layers // 2 - layers // 128 * 2


def test_bytes_of_a_step_with_experts():
    """A token reads two of the eight experts of every layer, and five tokens can choose them all."""
    config = ModelConfig.from_hf(shape_config("minicpm-moe-8x2b"))
    experts = 40 * 8 * 3 * 2304 * 5760 * 2
    one, five, six = (decode_bytes(config, 0, rows, 2) for rows in (1, 5, 6))
    assert (five - one, six - five) == (experts * 6 // 8, 0)
    active = 40 * (2304 * (4 * 2304 + 2 * 3 * 5760 + 8))
    assert prefill_flops(config, 64) - prefill_flops(config, 63) == 2 * active + 40 * 2304 * 4 * 64


def test_start_up_is_timed_in_a_fresh_process(checkpoint, capsys, monkeypatch):
    monkeypatch.chdir("/")
    assert main(["bench", checkpoint, *QUICK, "--case", "8:2", "--startup"]) == 0
    seconds = re.search(r"a fresh process gives its first token after ([\d.]+) s", capsys.readouterr().out)
    assert seconds and 0.05 < float(seconds[1]) < 60


def test_a_fresh_process_finds_drafts_by_their_relative_paths(tmp_path, monkeypatch):
    (tmp_path / "own-draft").symlink_to(BUNDLED / "eagle2")
    (tmp_path / "json.py").write_text("raise ImportError('a file of the caller')")
    monkeypatch.chdir(tmp_path)
    assert seconds_to_first_token({"model": "demo", "draft": "own-draft", "executor": "reference"}) > 0.05


def test_a_fresh_process_that_fails_says_why(tmp_path):
    with pytest.raises(CpmrtError, match="a fresh process gave no token: got .*config.json"):
        seconds_to_first_token({"model": str(tmp_path), "executor": "reference"})


@pytest.mark.parametrize(("options", "code", "message"), [
    (["--weight-bits", "4"], 2, "--weight-bits needs random weights"),
    (["--shape", "minicpm4-8b", "--weight-bits", "3"], 2, "--weight-bits"),
    (["--shape", "minicpm4-8b", "--weight-bits", "4", "--group-size", "48"], 2, "--group-size"),
    (["--case", "12"], 2, "expected PROMPT:NEW or PROMPT:NEW:SEQUENCES, got '12'"),
    (["--case", "1:2:3:4"], 2, "expected PROMPT:NEW"),
    (["--context", "1G"], 2, "expected a number of tokens such as 4096 or 128K, got '1G'"),
        (["--context", "127"], 2, "expected 128 tokens or more"),
        (["--case", "0:4"], 2, "expected a positive integer, got '0'"),
    (["--case", "8:-4"], 2, "expected PROMPT:NEW"),
    (["--repeats", "0"], 2, "expected a positive integer"),
    (["--temperature", "-1"], 2, "--temperature: expected"),
    (["--shape", "minicpm4-8b"], 2, "MODEL and --shape exclude each other"),
    (["--case", "8:4:3", "--max-sequences", "2"], 2, "--max-sequences 2: a case has 3 sequences"),
    (["--case", "60:5"], 1, "case 60:5 does not fit the context: expected at most 64 tokens, got 65; shorten the case"),
    (["--json", "/absent/x.json"], 1, "/absent/x.json cannot be written"),
    (["--plot", "/absent/x.png"], 1, "/absent/x.png cannot be written"),
    (["--repeatability", "2", "--json", "x.json"], 2, "--repeatability measures no times: leave --json out"),
    (["--repeatability", "2", "--startup"], 2, "leave --startup out"),
    (["--repeatability", "2", "--case", "8:2"], 2, "leave --case and --context out"),
    (["--repeatability", "2", "--context", "1K"], 2, "leave --case and --context out"),
    (["--repeatability", "2", "--temperature", "0.5"], 2, "leave --temperature out"),
    (["--repeatability", "2"], 2, "leave --repeats out"),
], ids=lambda value: str(value)[:30])  # fmt: skip
def test_mistakes_are_one_line(checkpoint, capsys, options, code, message):
    assert main(["bench", checkpoint, *QUICK, *options]) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_a_missing_matplotlib_is_said_before_anything_runs(checkpoint, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(bench_module, "run_benchmark", lambda *arguments, **settings: pytest.fail("it ran"))
    assert main(["bench", checkpoint, *QUICK, "--plot", str(tmp_path / "x.png")]) == 1
    expected = f"a plot needs matplotlib; {sys.executable} -m pip install matplotlib"
    assert capsys.readouterr().err == f"cpmrt: error: {expected}\n"


def test_switches_reach_the_model(checkpoint, monkeypatch):
    seen = {}

    def record(name, settings, cases, **options):
        seen.update(settings, cases=cases, **options)
        return report()

    monkeypatch.setattr(bench_module, "run_benchmark", record)
    assert main(["bench", checkpoint, "--case", "8:4:3", "--no-graphs", "--no-pdl", "--dtype", "float16"]) == 0
    assert (seen["cuda_graphs"], seen["dependent_launch"], seen["dtype"]) == (False, False, "float16")
    assert (seen["max_sequences"], seen["prefill_chunk"], seen["repeats"]) == (3, 2048, 3)
    assert seen["cases"] == [Case(8, 4, 3)] and seen["executor"] == "auto"
    assert seen["steps_per_launch"] == 1
    assert main(["bench", checkpoint, "--case", "8:4", "--steps-per-launch", "8"]) == 0
    assert seen["steps_per_launch"] == 8


DEVICE = {"name": "Test GPU", "nvidia_driver": "580.1"}


def report(**changes):
    """Return the report of a GPU run of 10 s: prefill for 2 s at 600 W, decode for 6 s at 400 W, power capped."""
    times = [index / 10 for index in range(101)]
    power = [600.0 if 1 <= time < 3 else 400.0 for time in times]
    samples = Samples(times, {"power_w": power, "sm_clock_mhz": [1500.0] * 101, "throttle_bits": [4.0] * 101,
                              "utilisation_percent": [99.0] * 101})  # fmt: skip
    result = Measurement(Case(1000, 100), prefill_s=2, prefill_tokens_per_s=500, decode_tokens_per_s=50.0,
                         step_ms=[20.0], step_ms_p50=20.0, step_ms_p99=21.0, decode_gb_per_s=900.0, num_decoded=300,
                         host_us_per_step=12.0, prefill_spans=[(1.0, 2.95)], decode_spans=[(3.0, 9.0)])  # fmt: skip
    values = {
        "model": "m", "executor": "cuda", "dtype": "bfloat16", "date": "2026-01-02T03:04:05+00:00", "settings": {},
        "device": DEVICE, "load_s": 1.5, "plan_bytes": {}, "max_context": 4096, "read_gb_per_s": 1000.0,
        "cases": [CaseReport.of(result, samples, 1000.0)], "samples": samples,
    }  # fmt: skip
    return Report(**(values | changes))


def test_the_share_of_the_bandwidth_and_the_energy_of_each_phase():
    (case,) = report().cases
    assert case.read_share == 0.9 and case.decode.power_w == 400 and case.prefill.power_w == 600
    assert case.decode.joules_per_token == pytest.approx(6 * 400 / 300)
    assert case.prefill.joules_per_token == pytest.approx(1.95 * 600 / 1000, rel=0.02)
    row = dict(zip(views.header(), views.rows(report())[0], strict=True))
    assert row["% of read"] == "90.0" and row["J/token"] == "8.000" and row["throttled by"] == "power cap"
    assert (row["W"], row["MHz"], row["C"], row["host us"]) == ("400", "1,500", "-", "12.0")


def test_the_summary_names_the_device():
    text = views.summary(report(process_to_first_token_s=1.25))
    assert text == (
        "m, bfloat16, executor cuda on Test GPU, driver 580.1\nmemory reads 1,000 GB/s; loaded in 1.50 s; "
        "a fresh process gives its first token after 1.25 s\n"
    )


def test_a_case_without_decode_steps_shows_none():
    case = CaseReport.of(Measurement(Case(8, 1), prefill_spans=[(0, 1)]), Samples(), 1000.0)
    row = dict(zip(views.header(), views.rows(report(cases=[case]))[0], strict=True))
    decode = ("decode tok/s", "p50 ms", "p99 ms", "GB/s", "% of read", "host us", "J/token")
    assert {row[name] for name in decode} == {"-"}


class FakeAxes:
    """Stand-in for matplotlib's axes that records the curves and spans drawn on it."""

    def __init__(self):
        self.curves, self.spans = [], []

    def plot(self, xs, ys, **style):
        self.curves.append((xs, ys))

    def axvspan(self, start, end, **style):
        self.spans.append((round(start, 3), round(end, 3)))

    def __getattr__(self, name):
        return lambda *arguments, **settings: None


class FakeFigure:
    made: ClassVar[list[FakeFigure]] = []

    def __init__(self, **settings):
        self.panels, self.saved = [], None
        FakeFigure.made.append(self)

    def subplots(self, rows, columns, **settings):
        self.panels = [FakeAxes() for _ in range(rows)]
        return self.panels

    def suptitle(self, text):
        self.title = text

    def savefig(self, path, **settings):
        self.format = settings.get("format")
        path.write_bytes(b"\x89PNG")


@pytest.fixture
def fake_matplotlib(monkeypatch):
    package, figure = ModuleType("matplotlib"), ModuleType("matplotlib.figure")
    package.__spec__, figure.Figure = SimpleNamespace(), FakeFigure
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)


def test_the_plot_has_the_curves_and_the_phases(fake_matplotlib, tmp_path):
    plot(report(), tmp_path / "x.png")
    figure = FakeFigure.made[-1]
    power, clock, load = figure.panels
    assert (power.curves[0][1][0], clock.curves[0][1][0], load.curves[0][1][0]) == (400, 1500, 99)
    assert power.spans == clock.spans == load.spans == [(1.0, 2.95), (3.0, 9.0)]
    assert figure.title == "m, bfloat16, executor cuda, Test GPU, 2026-01-02" and (tmp_path / "x.png").exists()


def test_a_plot_is_a_png_whatever_its_name_ends_with(fake_matplotlib, tmp_path):
    plot(report(), tmp_path / "x.out")
    assert FakeFigure.made[-1].format == "png"


def test_a_plot_that_cannot_be_written_is_one_line(fake_matplotlib, tmp_path):
    with pytest.raises(CpmrtError, match="cannot be written"):
        plot(report(), tmp_path / "absent" / "x.png")


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_folder_that_may_not_be_written_is_refused_before_anything_is_measured(
    fake_matplotlib, tmp_path, monkeypatch, capsys, option
):
    monkeypatch.setattr(bench_module, "run_benchmark", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    assert main(["bench", "--case", "8:4", option, str(tmp_path / "x")]) == 1
    assert f"{tmp_path / 'x'} cannot be written: Permission denied; name a file" in capsys.readouterr().err


def test_a_plot_of_nothing_sampled(fake_matplotlib, tmp_path):
    plot(report(samples=Samples()), tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def test_the_real_matplotlib_draws_it(tmp_path):
    pytest.importorskip("matplotlib")
    plot(report(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("name", "billions"), [("minicpm4-8b", 8.19), ("minicpm4-0.5b", 0.434)])
def test_the_shapes_are_the_models(name, billions):
    config = ModelConfig.from_hf(shape_config(name))
    assert sum(spec.num_elements for spec in tensor_specs(config)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_an_unknown_shape_is_refused():
    with pytest.raises(ConfigError, match="unknown shape"), shape_folder("gpt"):
        pass


def test_the_bandwidth_is_measured_before_the_model_is_loaded(checkpoint, monkeypatch):
    """Bandwidth is measured first, as a loaded model leaves no memory for it; the monitor gets the GPU's bus id."""
    order = []
    device = SimpleNamespace(name="Test GPU")
    monkeypatch.setattr(run_module, "open_device", lambda: device)
    monkeypatch.setattr(run_module, "asdict", vars)
    monkeypatch.setattr(run_module, "read_bandwidth", lambda found: order.append("bandwidth") or 2e12)
    monkeypatch.setattr(run_module, "pci_bus_id", lambda found: order.append("bus") or "0000:3B:00.0")
    original = run_module.LLM

    def load(**settings):
        order.append("load")
        return original(**settings | {"executor": "reference"})

    monkeypatch.setattr(run_module, "LLM", load)
    found = run_module.run_benchmark("m", {"model": checkpoint, "max_context": 64}, [Case(8, 3)], repeats=1)
    assert order == ["bandwidth", "bus", "load"] and found.read_gb_per_s == 2000
    assert found.cases[0].read_share == pytest.approx(found.cases[0].measurement.decode_gb_per_s / 2000)
    assert found.device["name"] == "Test GPU"


@pytest.mark.parametrize(
    ("name", "parameters", "bytes_per_token"),
    [
        ("minicpm5-2b", 2_516_756_480, 42 << 10), ("minicpm5-1b", 1_080_632_832, 24 << 10),
        ("minicpm-moe-8x2b", 13_873_291_776, 360 << 10),
    ],
)
def test_a_shape_has_as_many_parameters_as_its_makers_say(name, parameters, bytes_per_token):
    config = ModelConfig.from_hf(shape_config(name))
    assert sum(prod(spec.shape) for spec in tensor_specs(config)) == parameters
    assert cache_layout(config, 64, 1).bytes_per_token(2) == bytes_per_token
