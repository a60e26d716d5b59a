"""docs/server.md: it names all of the server's endpoints, fields, options, variables, limits, errors and metrics."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest
from fake_nvml import BUS_ID, FakeNvml

from cpmrt import env
from cpmrt.cli import serve
from cpmrt.cli.parser import add_quiet
from cpmrt.config.sampling import MAX_LOGPROBS
from cpmrt.cuda.step.structs import MAX_LOGIT_BIAS
from cpmrt.gpu_readings import GpuReadings
from cpmrt.server import embeddings, http_protocol, json_body, run, schema
from cpmrt.server.api import Endpoints
from cpmrt.server.metrics import GpuCollector, Metrics
from cpmrt.server.openapi import document
from cpmrt.tool_use.formats import MAX_CALL_CHARACTERS
from cpmrt.tool_use.python_literals import MAX_CODE_CHARACTERS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "server.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """Return the names in backticks in the first columns of the text's tables."""
    return [name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]


def test_every_endpoint():
    served = {f"{method} {route.path.replace(':path', '')}" for route in Endpoints(None).routes()
              for method in route.methods - {"HEAD"}}  # fmt: skip
    assert set(first_cells(section("Endpoints"))) == served


def test_every_field():
    schemas = document()["components"]["schemas"]
    fields = {name for kind, rules in schemas.items() if kind.endswith("Request") for name in rules["properties"]}
    named = set(re.findall(r"`(\w+)`", section("Fields")))
    harmless = {name for name in fields if "without effect" in str(_rules(schemas, name).get("description"))}
    assert fields - harmless <= named, fields - harmless - named
    assert set(first_cells(section("Fields"))) <= fields


def _rules(schemas: dict, field: str) -> dict:
    return next(rules["properties"][field] for rules in schemas.values() if field in rules["properties"])


def test_every_option_of_the_server():
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    add_quiet(parser)
    (group,) = [group for group in parser._action_groups if group.title == "server"]
    of_server = {option for action in group._group_actions for option in action.option_strings}
    known = {option for action in parser._actions for option in action.option_strings}
    named = set(re.findall(r"(?<!-)--[a-z][a-z-]+", TEXT)) - {"--help"}
    assert named <= known
    assert of_server - {"--port", "--served-model-name"} <= named, of_server - named


def test_every_environment_variable():
    read = set(re.findall(r'"(CPMRT_\w+|NOTIFY_SOCKET|HF_HUB_OFFLINE)"', Path(env.__file__).read_text()))
    assert set(first_cells(section("Environment"))) == read | {"CUDA_VISIBLE_DEVICES"}, "the last is the driver's"


def test_every_code_of_an_error():
    source = "".join(path.read_text() for path in (ROOT / "cpmrt" / "server").glob("*.py"))
    codes = set(re.findall(r'code="(\w+)"|40[45]: "(?!not_found_error)(\w+)"', source))
    codes = {code for pair in codes for code in pair if code}
    rows = re.findall(r"^\| \d+ \| (.*?) \|", section("Errors"), re.MULTILINE)
    assert {code for row in rows for code in re.findall(r"`(\w+)`", row)} == codes


@pytest.mark.parametrize(("row", "values"), [
    ("prompts of a request", [schema.MAX_PROMPTS]),
    ("texts to embed in a request", [embeddings.MAX_INPUTS]),
    ("answers to a prompt", [schema.MAX_CHOICES]),
    ("stop strings", [schema.MAX_STOP, schema.MAX_STOP_BYTES]),
    ("stop tokens", [schema.MAX_STOP_TOKEN_IDS]),
    ("tokens with a bias", [schema.MAX_LOGIT_BIAS, MAX_LOGIT_BIAS]),
    ("most likely tokens", [MAX_LOGPROBS]),
    ("tools", [schema.MAX_TOOLS]),
    ("a call that the model writes", [MAX_CALL_CHARACTERS, MAX_CODE_CHARACTERS]),
    ("template variables", [schema.MAX_TEMPLATE_VARIABLES]),
    ("depth of the JSON", [json_body.MAX_DEPTH]),
    ("time for the body", [json_body.BODY_TIMEOUT_S]),
    ("head of a request", [http_protocol.MAX_HEAD_BYTES, http_protocol.HEAD_TIMEOUT_S]),
    ("a client that reads nothing", [http_protocol.WRITE_TIMEOUT_S]),
    ("connections that nobody uses", [run._KEEP_ALIVE_S]),
])  # fmt: skip
def test_every_limit(row, values):
    (cells,) = re.findall(rf"^\| {re.escape(row)}.*?\| (.*?) \|$", section("Limits"), re.MULTILINE)
    assert [int(number) for number in re.findall(r"\d+", cells)] == values


def test_every_metric(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    metrics = Metrics("m", 1)
    families = [*metrics._registry.collect(), *GpuCollector(GpuReadings(BUS_ID, sysfs=Path("/nowhere"))).collect()]
    suffixes = {"counter": "_total", "info": "_info"}
    names = {family.name + suffixes.get(family.type, "") for family in families}
    assert set(first_cells(section("Metrics"))) == {name for name in names if name.startswith("cpmrt_")}


def test_every_file_of_the_deployment_is_described():
    folder = ROOT / "cpmrt" / "deploy"
    described = set(first_cells((folder / "README.md").read_text()))
    files = {path.name for path in folder.iterdir() if path.is_file()} - {"README.md", "__init__.py"}
    assert described == files - {"relay.py", "prefix_router.py"}


def test_links_lead_somewhere():
    for page in (ROOT / "docs" / "server.md", ROOT / "cpmrt" / "deploy" / "README.md"):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), link
