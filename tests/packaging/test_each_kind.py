"""A start runs one layer of each kind and the layers it depends on: traces show that this loads every kernel that all
layers launch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
# In a process of its own: the tool puts a stand-in in CuPy's place.
CHECK = """
import json, sys
from launch_trace import *

few, long = {"max_context": 4096, "max_sequences": 2}, {"max_context": 65536}
layers = {"num_hidden_layers": 6}
big, small = (shape_config(name) | layers for name in ("minicpm4-8b", "minicpm4-0.5b"))
MODELS = {
    "dense": (big, few, "auto", 2),
    "int4": (big | {"quantization_config": GPTQ}, few, "auto", 2),
    "sparse, fp8": (small, long | {"kv_dtype": "fp8"}, SPARSE, 2),
    "latent": (shape_config("minicpm3-4b") | layers, few, "auto", 2),
    "latent, int4": (shape_config("minicpm3-4b") | layers | {"quantization_config": GPTQ}, few, "auto", 2),
    "experts": (shape_config("minicpm-moe-8x2b") | layers, few, "auto", 2),
    "lightning": (SALA | layers | {"mixer_types": SALA["mixer_types"][:6]}, few, "auto", 3),
    "lightning, int4": (
        SALA | layers | {"mixer_types": 2 * SALA["mixer_types"][:3], "quantization_config": GPTQ},
        few, "auto", 5,
    ),
}

def forward_of(config, engine, sparse, device):
    with config_folder(config, {}) as folder:
        model = ModelFolder.open(folder, weights=False, sparse=sparse)
        settings = EngineConfig(load_format="dummy", **engine)
        blueprint = described(model, settings, CudaTarget(device), "lookup", {"shapes": CHAINS})
    plan = blueprint.plan(blueprint.position_limit)
    launcher = TracingLauncher(Modules(device.arch, DType.BFLOAT16))
    arrays = held_arrays(launcher.arena(plan), device)
    gemm = Gemm(device, launcher, arrays["gemm_workspace"], use_library=False)
    made = StepForward(model.config.for_context(plan.max_context), device, launcher, gemm, arrays, plan.caches)
    return made, launcher, gemm, settings

def traced(forward, launcher, gemm, settings):
    # Products go to a library, which loads by shape.
    products, own = set(), gemm.__class__._launch_own
    def noted(y, x, w, alpha, beta, chunk=None):
        products.add((x.shape, w.shape, y.strides, alpha, beta))
        own(gemm, y, x, w, alpha, beta, chunk)
    gemm._launch_own = noted
    launcher.graphs.clear()
    launcher.begin("all")
    forward.every_shape(buckets(settings.prefill_chunk), row_counts(settings.max_sequences))
    forward.tree(12)
    launches = launcher.graphs["all"]
    return {json.dumps(launch[:6]) for launch in launches}, products, len(launches)

for name, (config, engine, sparse, num_kinds) in MODELS.items():
    for device in map(traced_device, ("sm_90", "portable")):
        made = forward_of(config, engine, sparse, device)
        *every, count = traced(*made)
        *each, few = traced(made[0].of_each_kind(), *made[1:])
        assert each == every and len(every[0]) > 8, (name, device.arch)
        kinds = len(made[0].of_each_kind()._model.layers.layers)
        assert kinds == num_kinds and few < count, (name, kinds, few, count)
"""


def test_one_layer_of_each_kind_launches_every_kernel_that_all_layers_launch() -> None:
    ended = subprocess.run([sys.executable, "-c", CHECK], cwd=TOOLS, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
