"""/metrics: names, labels and values; every query of the dashboard asks for metrics that exist."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fake_nvml import BUS_ID, FakeNvml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from serving import saying_llm, serving

import cpmrt
from cpmrt.config import Sampling
from cpmrt.engine import GenerationStats
from cpmrt.engine.sequence import Phase, Request, Sequence
from cpmrt.executor import ExecutorLimits
from cpmrt.gpu_readings import GpuReadings
from cpmrt.server.metrics import GpuCollector, Metrics
from cpmrt.sharing.jobs import Ended

DASHBOARD = Path(cpmrt.__file__).parent / "deploy" / "grafana_dashboard.json"
SLOW = 0.005


@pytest.fixture
def quiet(tmp_path):
    """A separate server with two slots and steps of five milliseconds, whose model answers `0123456789`."""
    limits = ExecutorLimits(max_sequences=2, max_context=1024, prefill_chunk=64)
    llm = saying_llm(tmp_path, lambda prompt: "0123456789", limits=limits, delay_s=SLOW)
    with serving(lambda: llm, model_name="my/model", max_queue=5) as server:
        yield server


def samples(text: str) -> dict[tuple[str, tuple], float]:
    """Return the values by name and labels, the model's name left out."""
    return {
        (sample.name, tuple(sorted(item for item in sample.labels.items() if item[0] != "model_name"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def seen(server):
    return samples(server.client.get("/metrics").text)


def fake_gpu(monkeypatch, *missing) -> str:
    """Return the metrics that the GPU collector shows for a fake GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*missing))
    registry = CollectorRegistry()
    registry.register(GpuCollector(GpuReadings(BUS_ID, sysfs=Path("/nowhere"))))
    return generate_latest(registry).decode()


def test_capacity_is_told(quiet):
    values = seen(quiet)
    assert values["cpmrt_slots", ()] == 2 and values["cpmrt_queue_capacity", ()] == 5
    assert values["cpmrt_kv_pages", ()] == 2 * 1024 / 64 and values["cpmrt_max_context_tokens", ()] == 1024
    assert values["cpmrt_ready", ()] == 1 and values["cpmrt_arena_bytes", ()] > 0
    (build,) = [dict(labels) for name, labels in values if name == "cpmrt_build_info"]
    assert build["version"] == cpmrt.__version__ and build["executor"] == "reference" and build["device"] == "cpu"
    assert values["process_resident_memory_bytes", ()] > 2**20


def test_everything_of_the_model_has_its_name(quiet):
    quiet.chat()
    for family in text_string_to_metric_families(quiet.client.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("cpmrt_") and not sample.name.startswith("cpmrt_build"):
                assert sample.labels["model_name"] == "my/model", sample


def test_requests_are_counted_and_timed(quiet):
    before = seen(quiet)
    for _ in range(3):
        assert quiet.chat().json()["usage"]["completion_tokens"] == 11
    quiet.chat(temperature=-1)
    quiet.client.get("/nothing")
    after = seen(quiet)

    def grown(name, **labels):
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    chat = "/v1/chat/completions"
    assert grown("cpmrt_requests_total", path=chat, status="200") == 3
    assert grown("cpmrt_requests_total", path=chat, status="400") == 1
    assert grown("cpmrt_requests_total", path="other", status="404") == 1
    assert grown("cpmrt_sequences_ended_total", reason="stop") == 3
    assert grown("cpmrt_generated_tokens_total") == 33
    prompt = len("[user]hi[assistant]") + 1
    assert grown("cpmrt_prompt_tokens_total") == 3 * prompt
    for name in ("cpmrt_queue_seconds", "cpmrt_time_to_first_token_seconds", "cpmrt_time_per_output_token_seconds"):
        assert grown(f"{name}_count") == 3, name
    assert SLOW <= grown("cpmrt_time_to_first_token_seconds_sum") / 3 < 1
    assert SLOW <= grown("cpmrt_time_per_output_token_seconds_sum") / 3 < 0.5
    assert grown("cpmrt_request_seconds_count", path=chat) == 4
    assert 3 * 11 * SLOW <= grown("cpmrt_request_seconds_sum", path=chat) < 20


def test_paths_with_a_parameter_are_counted_by_their_pattern(quiet):
    paths = {"/v1/models/my/model": 200, "/v1/models/other": 404, "/page/chat.js": 200, "/page/a/b": 404, "/page": 404}
    before = seen(quiet)
    for path, status in paths.items():
        assert quiet.client.get(path).status_code == status, path
    assert quiet.client.get("/v1/models/{model:path}").status_code == 404
    after = seen(quiet)
    grown = {(dict(key[1])["path"], dict(key[1])["status"]): after[key] - before.get(key, 0.0)
             for key in after if key[0] == "cpmrt_requests_total"}  # fmt: skip
    assert {key: count for key, count in grown.items() if count and key[0] != "/metrics"} == {
        ("/v1/models/{model}", "200"): 1, ("/v1/models/{model}", "404"): 2,
        ("/page/{file}", "200"): 1, ("/page/{file}", "404"): 1, ("other", "404"): 1,
    }  # fmt: skip


def test_time_in_the_queue_is_that_before_a_slot(quiet):
    before = seen(quiet)["cpmrt_queue_seconds_sum", ()]
    quiet.chat(n=5)
    # Two run at a time: two sequences wait for one round of eleven steps, and one for two rounds.
    assert seen(quiet)["cpmrt_queue_seconds_sum", ()] - before >= 4 * 10 * SLOW


def test_pages_held_and_cached(demo):
    demo.wait_idle()
    demo.client.post("/v1/completions", json={"prompt": [7] * 130, "max_tokens": 2, "ignore_eos": True})
    values = seen(demo)
    assert values["cpmrt_kv_pages_held", ()] == 0 and values["cpmrt_kv_pages_cached", ()] >= 2
    assert values["cpmrt_kv_pages", ()] >= values["cpmrt_kv_pages_cached", ()]


def test_the_gpu_is_read_when_somebody_asks(monkeypatch):
    values = samples(fake_gpu(monkeypatch))
    assert values["cpmrt_gpu_memory_used_bytes", ()] == 17 << 30 and values["cpmrt_gpu_memory_bytes", ()] == 80 << 30
    assert values["cpmrt_gpu_power_watts", ()] == 700 and values["cpmrt_gpu_energy_joules_total", ()] > 0
    assert values["cpmrt_gpu_utilisation_ratio", ()] == pytest.approx(0.97)
    assert values["cpmrt_gpu_temperature_celsius", ()] == 55


def test_what_a_gpu_does_not_tell_is_left_out(monkeypatch):
    text = fake_gpu(monkeypatch, "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetMemoryInfo")
    assert "energy" not in text and "memory" not in text and "cpmrt_gpu_power_watts" in text
    assert fake_gpu(monkeypatch, "nvmlInit") == ""


def test_every_query_of_the_dashboard_names_metrics_and_labels_that_exist(quiet, monkeypatch):
    quiet.chat()
    text = quiet.client.get("/metrics").text + fake_gpu(monkeypatch)
    labels = {"model_name", "job", "le"}
    for family in text_string_to_metric_families(text):
        labels |= {name for sample in family.samples for name in sample.labels}
    names = {name for name, _ in samples(text)}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 30
    for query in queries:
        asked = set(re.findall(r"\b(?:cpmrt|process)_\w+", query))
        assert asked and asked <= names, query
        grouped = {name.strip() for group in re.findall(r"by \(([^)]*)\)", query) for name in group.split(",")}
        assert grouped | set(re.findall(r"(\w+)=~", query)) <= labels, query
        for name in set(re.findall(r"\$\{?(\w+)", query)) - {"__rate_interval"}:
            assert name in {variable["name"] for variable in dashboard["templating"]["list"]}, query


def test_the_dashboard_is_one_that_grafana_loads():
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["title"] and dashboard["schemaVersion"] >= 36 and "id" not in dashboard
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        grid = panel["gridPos"]
        columns, rows = (range(grid[at], grid[at] + grid[size]) for at, size in (("x", "w"), ("y", "h")))
        cells = {(x, y) for x in columns for y in rows}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["title"] and panel["type"] in ("timeseries", "stat")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == [chr(65 + i) for i in range(len(panel["targets"]))]


def test_prompts_that_are_embedded_hold_slots_and_pages(demo):
    texts = ["What does os.path.join do? " * 10] * 12
    asking = threading.Thread(target=lambda: demo.client.post("/v1/embeddings", json={"input": texts}))
    asking.start()
    told = set()
    while asking.is_alive():
        values = samples(httpx.get(demo.url + "/metrics").text)
        told.add((values["cpmrt_sequences_running", ()], values["cpmrt_kv_pages_used", ()] >= 4))
    assert (4, True) in told
    demo.wait_idle()
    assert demo.metric("cpmrt_sequences_running") == demo.metric("cpmrt_kv_pages_used") == 0


@pytest.mark.parametrize(("phase", "running"), [
    (Phase.WAITING, 0), (Phase.PREFILL, 1), (Phase.DECODE, 1), (Phase.PAUSED, 1), (Phase.FINISHED, 0),
])  # fmt: skip
def test_a_sequence_waits_or_holds_a_slot(phase, running):
    seq = Sequence(Request(tuple(range(100)), Sampling(), 0, (), 50), phase=phase)
    values = samples(Metrics("m", 1).text((SimpleNamespace(sequence=seq),), None).decode())
    assert values["cpmrt_sequences_running", ()] == running
    assert values["cpmrt_sequences_waiting", ()] == (phase is Phase.WAITING)


def test_an_answer_that_goes_on_behind_a_pause_fills_its_pages_once():
    seq = Sequence(Request(tuple(range(100)), Sampling(), 0, (), 150), phase=Phase.DECODE)
    seq.token_ids = [7] * 120
    seq.text = seq.all_token_ids
    seq.num_prefilled = seq.num_computed = len(seq.text)
    values = samples(Metrics("m", 1).text((SimpleNamespace(sequence=seq),), None).decode())
    assert values["cpmrt_kv_pages_used", ()] == 4


def test_a_sequence_without_a_token_is_counted_as_ended_and_has_no_first_token():
    metrics = Metrics("m", 4)
    metrics.add_ended(Ended("cancelled", GenerationStats(prompt_tokens=7), queued_s=2.0))
    text = metrics.text((), None).decode()
    assert 'cpmrt_sequences_ended_total{model_name="m",reason="cancelled"} 1.0' in text
    counts = {"queue_seconds_count": 1, "time_to_first_token_seconds_count": 0, "prompt_tokens_total": 0}
    for name, count in counts.items():
        assert f'cpmrt_{name}{{model_name="m"}} {count:.1f}\n' in text
