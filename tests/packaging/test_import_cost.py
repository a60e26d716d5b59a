"""The cost of `import cpmrt`: it loads little, so that an application pays for parts only when it uses them."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("cupy", "torch", "tokenizers", "jinja2", "huggingface_hub", "rich", "prompt_toolkit")
CHILD = """
import json, sys, time
begun = time.process_time()
{}
seconds = time.process_time() - begun
print(json.dumps({{"seconds": seconds, "modules": sorted(sys.modules)}}))
"""


def import_once(statement: str = "import cpmrt") -> tuple[float, list[str]]:
    """Return the CPU seconds of an import in a fresh interpreter, and every module loaded afterwards."""
    code = CHILD.format(statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    report = json.loads(done.stdout)
    return report["seconds"], report["modules"]


def test_import_pulls_in_nothing_heavy() -> None:
    _, modules = import_once()
    assert "cpmrt" in modules
    assert [name for name in HEAVY if name in modules] == []


def test_import_takes_under_300_ms() -> None:
    assert any(import_once()[0] < 0.3 for _ in range(5))


def test_an_llm_can_be_asked_for_before_its_parts_are_imported() -> None:
    """Importing `LLM` imports none of its parts: `LLM` imports them while the driver creates its context."""
    _, modules = import_once("from cpmrt import LLM, SamplingParams")
    parts = ("cpmrt.engine", "cpmrt.text", "cpmrt.weights", "cpmrt.models", "cpmrt.sharing", "cpmrt.cuda.assembly")
    assert "cpmrt.llm" in modules and [name for name in (*HEAVY, *parts) if name in modules] == []


def test_a_model_of_other_files_starts_without_what_reads_gguf() -> None:
    _, modules = import_once("from cpmrt import LLM\nLLM(executor='reference').close()")
    readers = ("architectures", "config", "file", "folder", "header", "tensors", "vocabulary")
    assert "cpmrt.weights.safetensors" in modules
    assert [name for name in readers if f"cpmrt.weights.gguf.{name}" in modules] == []
