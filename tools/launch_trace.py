"""Every launch of every graph of a start, and of decode steps under masks, traced without a GPU: kernel, constants,
grid, block, memory, arguments.

    tools/launch_trace.py --write before.z
    tools/launch_trace.py --compare before.z

Two trees whose traces agree start the same kernels on the same bytes, so a change of structure that keeps the trace
keeps bits and speed. Pointers count by the order in which their buffers first appear, and by the offset within.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import types
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def _stand_in_for_cupy() -> None:
    """Install stand-ins for the parts of CuPy that `cpmrt.cuda` names at import; none is called while tracing."""
    names = ("cupy", "cupy.cuda", "cupy.cuda.runtime")
    cupy, cuda, runtime = (types.ModuleType(name) for name in names)
    runtime.CUDARuntimeError = type("CUDARuntimeError", (Exception,), {})  # type: ignore[attr-defined]
    cuda.runtime, cupy.cuda, cupy.ndarray = runtime, cuda, np.ndarray  # type: ignore[attr-defined]
    sys.modules.update(zip(names, (cupy, cuda, runtime), strict=True))


_stand_in_for_cupy()

from cpmrt.bench.shapes import (  # noqa: E402
    blocks_config,
    config_folder,
    draft_configs,
    gptq_config,
    shape_config,
    ternary_config,
)
from cpmrt.config import EngineConfig  # noqa: E402
from cpmrt.cuda.arena import held_arrays  # noqa: E402
from cpmrt.cuda.assembly import CudaTarget  # noqa: E402
from cpmrt.cuda.build.launcher import Launcher  # noqa: E402
from cpmrt.cuda.build.modules import Modules  # noqa: E402
from cpmrt.cuda.build.spec import KernelSpec, macros_of  # noqa: E402
from cpmrt.cuda.draft.speculation import Speculation  # noqa: E402
from cpmrt.cuda.driver.device import Device  # noqa: E402
from cpmrt.cuda.driver.graphs import Graphs  # noqa: E402
from cpmrt.cuda.driver.launch import three  # noqa: E402
from cpmrt.cuda.ops.gemm import Gemm  # noqa: E402
from cpmrt.cuda.precompile import known_device  # noqa: E402
from cpmrt.cuda.step.forward import StepForward  # noqa: E402
from cpmrt.cuda.step.kernels import StepKernels  # noqa: E402
from cpmrt.cuda.step.launches import masked_launches, step_launches  # noqa: E402
from cpmrt.cuda.step.memory import buckets, row_counts  # noqa: E402
from cpmrt.dtypes import DType  # noqa: E402
from cpmrt.memory.arena import Arena  # noqa: E402
from cpmrt.memory.plan import MemoryPlan  # noqa: E402
from cpmrt.opening import described  # noqa: E402
from cpmrt.weights.model_folder import ModelFolder  # noqa: E402

DEVICES = ("sm_90", "sm_87", "sm_80", "sm_89", "portable")
GPTQ = gptq_config()
SPARSE = {"dense_len": 512, "topk": 12, "window_size": 256}
TREES, CHAINS = [[2, 4, 12], [4, 10, 32], [3, 8, 64]], [[5, 1, 6], [3, 1, 4]]
BIG = shape_config("minicpm4-8b") | {"num_hidden_layers": 2}
SMALL = shape_config("minicpm4-0.5b") | {"num_hidden_layers": 2}
QWEN2 = SMALL | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = SMALL | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 64}
LLAMA = SMALL | {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 1536, "head_dim": 96, "num_key_value_heads": 4,
    "attention_bias": True,
}  # fmt: skip
SALA = shape_config("minicpm-sala-9b")
FAMILY = {
    name.removeprefix("minicpm").strip("-"): shape_config(name) | {"num_hidden_layers": 2}
    for name in ("minicpm3-4b", "minicpm-moe-8x2b", "minicpm-s-1b", "minicpm5-2b")
} | {"sala": SALA | {"num_hidden_layers": 2, "mixer_types": SALA["mixer_types"][:2]}}

if TYPE_CHECKING:
    from cpmrt.cuda.build.spec import Constants

Setup = tuple[Mapping[str, Any], Mapping[str, Any], Any, str | None, int]
"""A start to trace: config.json, engine settings, sparse setting, name of the draft, bits of the draft's weights."""


def setups() -> dict[str, Setup]:
    """Return the starts to trace, by name."""
    made: dict[str, Setup] = {}
    for label, config in (("big", BIG), ("small", SMALL)):
        for name, held in ((label, config), (f"{label} int4", config | {"quantization_config": GPTQ})):
            long = {"max_context": 65536}
            many = {"max_sequences": 64, "max_context": 4096, "prefill_chunk": 1024}
            made[f"{name} 64"] = held, many, "auto", None, 16
            made[f"{name} 1"] = held, {"max_context": 131072, "prefill_chunk": 2048}, "auto", None, 16
            made[f"{name} sparse"] = held, long | {"max_sequences": 12, "prefill_chunk": 2048}, SPARSE, None, 16
            made[f"{name} nope"] = held, long, SPARSE | {"use_nope": True}, "lookup", 16
            made[f"{name} fp8"] = held, long | {"max_sequences": 8, "kv_dtype": "fp8"}, "auto", None, 16
            made[f"{name} fp8 sparse"] = held, long | {"kv_dtype": "fp8"}, SPARSE, None, 16
            for draft in ("eagle2", "eagle3", "dspark", "lookup"):
                for bits in (16, 4):
                    made[f"{name} {draft} {bits}"] = held, {"max_context": 4096}, "auto", draft, bits
            made[f"{name} sparse eagle2"] = held, long, SPARSE, "eagle2", 4
        head, few = {"max_context": 4096}, {"max_context": 4096, "max_sequences": 16}
        made[f"{label} head 8"] = config, head | {"lm_head_bits": 8}, "auto", None, 16
        for name, draft in (("screened head", None), ("screened eagle2", "eagle2")):
            made[f"{label} {name}"] = config, few | {"lm_head_screen": True}, "auto", draft, 16
        quantised = {"quantization_config": GPTQ}
        made[f"{label} int4 head 4"] = config | quantised, head | {"lm_head_bits": 4}, "auto", None, 16
        for name, changes in (("asym", {"sym": False, "group_size": 32}), ("order", {"desc_act": True})):
            made[f"{label} int4 {name}"] = config | {"quantization_config": GPTQ | changes}, few, "auto", None, 16
    for name, config in (("qwen2", QWEN2), ("qwen3", QWEN3), ("llama", LLAMA)):
        made[name] = config, {"max_context": 4096, "max_sequences": 4}, "auto", "lookup", 16
        held = config | {"quantization_config": GPTQ}
        made[f"{name} int4"] = held, {"max_context": 4096, "max_sequences": 4}, "auto", None, 16
    several = {"max_context": 4096, "max_sequences": 8}
    for name, config in FAMILY.items():
        for label, weights in (("", {}), (" int4", {"quantization_config": GPTQ})):
            made[name + label] = config | weights, several, "auto", "lookup", 16
    for name, kind in (("ternary", ternary_config()), ("Q4_K blocks", blocks_config("Q4_K"))):
        made[name] = BIG | {"quantization_config": kind}, several, "auto", "lookup", 16
    return made


class TracingLauncher(Launcher):
    """A launcher that records launches in `graphs`, by graph, and launches nothing."""

    is_recording = True

    def __init__(self, modules: Modules):
        super().__init__(None, modules, use_pdl=False)
        self.graphs: dict[str, list[Any]] = {}
        self._regions: list[tuple[int, int]] = []
        self._seen: dict[int, int] = {}

    def begin(self, graph: str) -> None:
        """Record the launches that follow under the name `graph`."""
        self._graph = self.graphs.setdefault(graph, [])

    def arena(self, plan: MemoryPlan) -> Arena:
        """Return an arena of reserved addresses without memory, in which no two regions overlap."""
        end, apart = 4096, []
        for region in plan.regions:
            apart.append(replace(region, offset=end))
            end += -(-region.nbytes // 256) * 256 + 4096
        no_reserve = 0x4000
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        buffer = np.frombuffer(mmap.mmap(-1, end, flags=flags), np.uint8)
        self._regions = [(buffer.ctypes.data + region.offset, region.nbytes) for region in apart]
        return Arena(replace(plan, regions=tuple(apart), total_bytes=end), buffer)

    def __call__(
        self, spec: KernelSpec, constants: Constants, grid: Any, block: Any, *args: Any, smem: int = 0,
        prefers_shared: bool = False,
    ) -> None:  # fmt: skip
        self.release()
        blocks, threads = ([int(size) for size in three(sizes)] for sizes in (grid, block))
        chosen = sorted((key, int(value)) for key, value in macros_of(constants).items())
        launch = [spec.name, chosen, blocks, threads, int(smem), bool(prefers_shared)]
        self._graph.append([*launch, [self._shown(arg) for arg in args]])

    def _shown(self, arg: Any) -> Any:
        if isinstance(arg, np.ndarray):
            address = arg.ctypes.data
            start = next(at for at, size in self._regions if at <= address < at + max(size, 1))
            return [self._seen.setdefault(start, len(self._seen)), address - start]
        return None if arg is None else f"{arg.dtype} {arg!r}" if isinstance(arg, np.generic) else repr(type(arg))


def _label(name: Any) -> str:
    """Return the name of a graph in words: True in it reads "screened", False is left out."""
    parts = name if isinstance(name, tuple) else (name,)
    words = ("screened" if part is True else "" if part is False else str(part) for part in parts)
    return " ".join(filter(None, words)).replace("_", " ")


class Rings:
    """A stand-in for the rings in host memory."""

    addresses = (np.uint64(111), np.uint64(222))
    command_bytes = 4096


class Masks:
    """A stand-in for the ring of masks in host memory."""

    addresses = (np.uint64(333), np.uint64(444))
    num_rows, num_words = 64, 4096


def traced_device(name: str) -> Device:
    """Return a known device; "portable" is an sm_90 device on the portable path."""
    if name != "portable":
        return known_device(name)
    return replace(known_device("sm_90"), capability=86, shared_bytes_per_block=101376, whole_clusters=0)


def trace(setup: Setup, device: Device) -> dict[str, list[Any]]:
    """Return the launches of each graph of a start on a device."""
    config_json, engine, sparse, draft_name, draft_bits = setup
    with config_folder(config_json, _draft_configs(config_json, draft_bits)) as folder:
        model = ModelFolder.open(folder, weights=False, sparse=sparse)
        shapes = CHAINS if draft_name in ("dspark", "lookup") else TREES
        wish: Any = "auto" if draft_name is None else {"shapes": shapes}
        if draft_name in ("eagle2", "dspark") and draft_bits == 4:
            wish |= {"draft_vocab": 32768, "head_bits": 4} | ({"window": 1024} if draft_name == "eagle2" else {})
        # Screened graphs are traced only where a setup asks for them: they differ from the others by the head alone.
        settings = EngineConfig(load_format="dummy", **{"lm_head_screen": False} | engine)
        blueprint = described(model, settings, CudaTarget(device), draft_name, wish)
    plan, draft = blueprint.plan(blueprint.position_limit), blueprint.draft
    config = model.config.for_context(plan.max_context)
    launcher = TracingLauncher(Modules(device.arch, DType.BFLOAT16))
    arrays = held_arrays(launcher.arena(plan), device)
    gemm = Gemm(device, launcher, arrays["gemm_workspace"], use_library=False)
    forward = StepForward(config, device, launcher, gemm, arrays, plan.caches, draft.config.taps if draft else ())
    rings: Any = Rings()
    masks: Any = Masks()
    looped = Graphs(launcher.stream, enabled=False, release=launcher.release).loop
    steps = StepKernels(launcher, config, arrays, rings, device)
    drafting = draft and Speculation(draft, config, device, launcher, gemm, arrays, rings, forward, plan, looped)
    chunks, rows = buckets(settings.prefill_chunk), row_counts(settings.max_sequences)
    after_decode = drafting.after_decode if drafting else None
    launches = step_launches(steps, forward, chunks, rows, after_decode)
    decode_masked, launches["first masked"] = masked_launches(steps, forward, masks, after_decode)
    kinds = ((count, kind) for count in rows for kind in forward.row_kinds(count))
    launches |= {("decode masked", count, kind): partial(decode_masked, count, kind) for count, kind in kinds}
    launches["loop"] = partial(steps.loop_end, 1, 1, np.uint64(7), 2, 4)
    launches |= drafting.launches(chunks) if drafting else {}
    for name, launch in launches.items():
        launcher.begin(_label(name))
        launch()
        launcher.release()
    return launcher.graphs


def _draft_configs(config: Mapping[str, Any], bits: int) -> dict[str, dict[str, Any]]:
    """Return the drafts of the shape of `config` for a target of two layers, with weights of `bits` bits."""
    shape = "minicpm4-8b" if config["hidden_size"] == BIG["hidden_size"] else "minicpm4-0.5b"
    drafts, quantised = draft_configs(shape), {"quantization_config": GPTQ} if bits == 4 else {}
    drafts["dspark"]["target_layer_ids"] = [0]
    drafts["eagle3"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 1]
    return {name: draft | quantised for name, draft in drafts.items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the graphs that differ, each with its first launch that differs."""
    found = []
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if old is None or new is None:
            found.append(f"{name}: only {'after' if old is None else 'before'}")
            continue
        place = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        found.append(f"{name}, launch {place}:\n    {old[place : place + 1]}\n    {new[place : place + 1]}")
    return found


def read_traces(text: str) -> Any:
    """Return the traces in a file of --write. Raises ArgumentTypeError, so that a wrong file stops the run early."""
    try:
        return json.loads(zlib.decompress(Path(text).read_bytes()))
    except (OSError, ValueError, zlib.error) as error:
        raise argparse.ArgumentTypeError(f"{text}: expected a file that --write has written, got {error}") from error


def main(arguments: Sequence[str]) -> int:
    """Trace all starts, write and compare the traces. Return 1 if a graph differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the traces")
    parser.add_argument("--compare", type=read_traces, metavar="FILE", help="with those that were kept there")
    args = parser.parse_args(arguments)
    graphs = {
        f"{device} | {name} | {graph}": launches
        for device in DEVICES
        for name, setup in setups().items()
        for graph, launches in trace(setup, traced_device(device)).items()
    }
    graphs = json.loads(json.dumps(graphs))
    print(f"{len(graphs)} graphs, {sum(map(len, graphs.values()))} launches")
    if args.write:
        args.write.write_bytes(zlib.compress(json.dumps(graphs).encode()))
    if args.compare is None:
        return 0
    wrong = differences(args.compare, graphs)
    print("\n".join([*wrong[:10], f"{len(wrong)} graphs differ"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
