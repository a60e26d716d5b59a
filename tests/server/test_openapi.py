"""The OpenAPI document: it is served, it names the endpoints and fields that the code has, and nothing breaks by it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from cpmrt.server import json_body
from cpmrt.server.openapi import document
from cpmrt.server.schema import read_chat, read_completion
from cpmrt.server.unused_fields import REFUSED, REFUSED_IN_CHATS


def test_the_document_is_served(demo):
    assert demo.client.get("/openapi.json").json() == document()


def test_every_route_is_described_with_its_method(demo):
    from cpmrt.server.api import Endpoints

    described = {(path, method.upper()) for path, methods in document()["paths"].items() for method in methods}
    routes = Endpoints(demo.running.service).routes()
    served = {(route.path.replace(":path", ""), method) for route in routes for method in route.methods - {"HEAD"}}
    assert described == served


@pytest.mark.parametrize(("schema", "read", "body", "refused"), [
    ("ChatRequest", read_chat, {"messages": [{"role": "user", "content": "x"}]}, REFUSED_IN_CHATS),
    ("CompletionRequest", read_completion, {"prompt": "x"}, REFUSED),
])  # fmt: skip
def test_the_fields_are_those_that_the_code_reads(monkeypatch, schema, read, body, refused):
    asked = set()
    monkeypatch.setattr(json_body.Fields, "raw", lambda self, key: asked.add(self.name(key)) or self._values.get(key))
    read(body, ["demo"])
    assert set(document()["components"]["schemas"][schema]["properties"]) == asked - set(refused)


@pytest.mark.all
def test_no_request_that_the_document_allows_or_forbids_is_a_5xx(demo, tmp_path):
    command = shutil.which("schemathesis")
    if command is None:
        pytest.skip("needs schemathesis (pip install schemathesis)")
    checks = "not_a_server_error,response_schema_conformance,status_code_conformance,content_type_conformance"
    url = f"{demo.url}/openapi.json"
    command_line = [command, "run", url, "--checks", checks, "--max-examples", "15"]
    done = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
