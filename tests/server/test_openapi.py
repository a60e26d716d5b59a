"""The OpenAPI document: it is served, it names the code's endpoints and fields, and requests made from it break
nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from serving import TOOL_TEMPLATE, saying_llm, serving
from tiny_checkpoint import write_checkpoint
from tokenizers import Tokenizer as Library

from cpmrt.executor import ExecutorLimits
from cpmrt.server import json_body
from cpmrt.server.app import _OPEN_PATHS
from cpmrt.server.openapi import document
from cpmrt.server.schema import read_chat, read_completion
from cpmrt.server.unused_fields import REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS


def test_the_document_is_served(demo):
    config = demo.engine.llm.config
    served = demo.client.get("/openapi.json").json()
    assert served == document(["demo"], config.vocab_size, config.hidden_size)
    assert served["components"]["schemas"]["ModelName"] == {"enum": ["demo", None]}
    assert served["components"]["schemas"]["TokenId"]["maximum"] == 4095


def test_every_route_is_described_with_its_method(demo):
    from cpmrt.server.api import Endpoints

    described = {(path, method.upper()) for path, methods in document()["paths"].items() for method in methods}
    routes = Endpoints(demo.running.service).routes()
    served = {(route.path.replace(":path", ""), method) for route in routes for method in route.methods - {"HEAD"}}
    assert described == served


def test_the_paths_that_need_no_key_are_described_as_such():
    operations = {path: operation for path, methods in document()["paths"].items() for operation in methods.values()}
    keyless = {path for path, operation in operations.items() if operation.get("security") == [{}]}
    assert keyless == {*_OPEN_PATHS, "/page/{file}"}
    assert keyless == {path for path, operation in operations.items() if "401" not in operation["responses"]}


@pytest.mark.parametrize(("schema", "read", "body", "refused"), [
    ("ChatRequest", read_chat, {"messages": [{"role": "user", "content": "x"}]}, REFUSED_IN_CHATS),
    ("CompletionRequest", read_completion, {"prompt": "x"}, REFUSED_IN_COMPLETIONS),
])  # fmt: skip
def test_the_fields_are_those_that_the_code_reads(monkeypatch, schema, read, body, refused):
    asked = set()
    monkeypatch.setattr(json_body.Fields, "raw", lambda self, key: asked.add(self.name(key)) or self._values.get(key))
    read(body, ["demo"])
    assert set(document()["components"]["schemas"][schema]["properties"]) == asked - set(refused)


@pytest.fixture
def quick(tmp_path):
    """A server whose model supports every kind of request and answers at once."""
    folder = write_checkpoint(tmp_path / "model", vocab_size=262)
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    library.save(str(folder / "tokenizer.json"))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TOOL_TEMPLATE}))
    limits = ExecutorLimits(64, 65536, prefill_chunk=4096, run_ahead=2, max_logit_bias=1024)

    def rows(width, slot, token_ids, block_table=()):
        yield np.ones((len(token_ids), width), np.float32)

    def open_model():
        llm = saying_llm(folder, lambda prompt: "FILL", limits=limits)
        for executor in (llm.executor, llm.engine.executor):
            executor.prompt_logits = partial(rows, llm.config.vocab_size)
            executor.prompt_states = partial(rows, llm.config.hidden_size)
        return llm

    with serving(open_model, max_queue=256) as server:
        yield server


@pytest.mark.all
def test_schemathesis_finds_nothing(quick, tmp_path):
    """All checks of schemathesis pass, also that all bodies the document allows are accepted (see
    `consistent_bodies`)."""
    command = shutil.which("schemathesis", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if command is None:
        pytest.skip("needs schemathesis (pip install schemathesis)")
    options = ["--max-examples", "5", "--request-timeout", "60", "--phases", "examples,coverage,fuzzing"]
    hooks = {"SCHEMATHESIS_HOOKS": "consistent_bodies", "PYTHONPATH": str(Path(__file__).parent)}
    command_line = [command, "run", f"{quick.url}/openapi.json", "--continue-on-failure", *options]
    done = subprocess.run(
        command_line, cwd=tmp_path, env={**os.environ, **hooks}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-20_000:]
