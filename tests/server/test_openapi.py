"""The OpenAPI document: it is served, it names the endpoints and fields that the code has, and nothing breaks by it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving import serving

from cpmrt import LLM
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
def test_schemathesis_finds_nothing(tmp_path):
    """All checks but one: that every request which the document allows is accepted.

    It cannot say what a request may be as a whole: a prompt fits the context, some fields go with others only.
    """
    command = shutil.which("schemathesis", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if command is None:
        pytest.skip("needs schemathesis (pip install schemathesis)")
    options = ["--exclude-checks", "positive_data_acceptance", "--max-examples", "3", "--request-timeout", "60"]
    options += ["--phases", "examples,coverage,fuzzing"]
    with serving(lambda: LLM(executor="reference", max_sequences=8, max_context=24, prefill_chunk=64)) as server:
        command_line = [command, "run", f"{server.url}/openapi.json", *options]
        done = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-6000:]
