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

# What a start on a GPU does with a dense model, without a GPU: a stand-in takes CuPy's place and launches are recorded.
START = """
import sys, types
sys.modules["cupy"] = types.ModuleType("cupy")
import numpy as np
from cpmrt import LLM
import cpmrt.loaded_model, cpmrt.cuda.assembly, cpmrt.cuda.executor, cpmrt.cuda.load.upload
from cpmrt.config import EngineConfig
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.step.forward import StepForward
from cpmrt.opening import open_blueprint
from cpmrt.weights.draft_folder import with_speculation
from cpmrt.weights.model_folder import ModelFolder

folder = ModelFolder.open(None)
settings = with_speculation(EngineConfig(), folder)
device = Device(0, "", "sm_90", 90, 132, 232448, 0, False, (0, 0))
with open_blueprint(folder, settings, cpmrt.cuda.assembly.CudaTarget(device)) as blueprint:
    plan = blueprint.plan(512)
arrays = {region.name: np.broadcast_to(np.uint16(0), region.shape) for region in plan.regions}
launcher = Launcher(None, Modules(device.arch, blueprint.dtype), use_pdl=False)
gemm = Gemm(device, launcher, arrays["gemm_workspace"], use_library=False)
with launcher.recording() as recorded:
    StepForward(blueprint.config, device, launcher, gemm, arrays, plan.caches).every_shape((64, 512), (1,))
assert any(file == "linear/linear.cu" for file, _ in recorded)
"""
ANSWER = """
from cpmrt import LLM, SamplingParams
with LLM(executor="reference") as llm:
    assert llm.generate("def f(", SamplingParams(max_new_tokens=2)).token_ids
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


def test_a_model_of_one_kind_of_layer_starts_without_the_other_kinds() -> None:
    _, modules = import_once(START)
    others = ("cuda.ops.latent", "cuda.ops.lightning", "cuda.ops.experts", "cuda.ops.expert_plan")
    kinds = ("models.mixers.latent", "models.mixers.lightning", "models.mlps.experts")
    assert {"cpmrt.models.mixers.grouped", "cpmrt.models.mlps.gated", "cpmrt.cuda.ops.linear"} <= set(modules)
    assert [name for name in (*others, *kinds) if f"cpmrt.{name}" in modules] == []


def test_a_model_without_a_draft_starts_without_what_makes_drafts() -> None:
    _, modules = import_once(START)
    configs = ("config.draft", "config.eagle", "config.dspark")
    drafts = ("models.draft", "models.draft_weights", "models.drafts", "cuda.draft", "cuda.step.costs")
    assert [name for name in (*configs, *drafts) if f"cpmrt.{name}" in modules] == []


def test_an_answer_without_a_form_or_tools_is_given_without_what_makes_these() -> None:
    _, modules = import_once(ANSWER)
    assert [name for name in modules if name == "html" or name.startswith("cpmrt.grammar")] == []
    small = ["cpmrt.tool_use.calls", "cpmrt.tool_use.tool_choice"]
    assert sorted(name for name in modules if name.startswith("cpmrt.tool_use.")) == small


def test_a_text_is_continued_without_what_runs_chat_templates() -> None:
    for statement in (START, ANSWER):
        _, modules = import_once(statement)
        assert [name for name in modules if name.partition(".")[0] in ("jinja2", "markupsafe")] == []


def test_neither_a_start_nor_an_answer_imports_what_only_mistakes_or_masked_arrays_need() -> None:
    for statement in (START, ANSWER):
        _, modules = import_once(statement)
        assert [name for name in ("difflib", "numpy.ma") if name in modules] == []
