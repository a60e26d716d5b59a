"""The speed and the host memory of loading a checkpoint of 16 GB, and its quantised version of 5 GB."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors.cuda_models import EMPTY_TOKENIZER

from cpmrt.bench.shapes import shape_config
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.models.planning import weight_specs
from cpmrt.weights.formats import stored_tensors

ROOT = Path(__file__).resolve().parents[2]
NUM_SHARDS = 8
BLOCK_BYTES = 32 << 20
MOST_HOST_BYTES = 600 << 20
QUANTISED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}
Tensor = tuple[str, str, tuple[int, ...]]
MEASURE = """
import json, re, sys, time
from pathlib import Path
from cpmrt import LLM
from cpmrt.cuda.load import upload

def status(name):
    return 1024 * int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

load = upload.load_checkpoint

def measured(*args):
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before, begin = status("VmRSS"), time.perf_counter()
    load(*args)
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "peak": status("VmHWM"), "before": before}), flush=True)
    sys.exit()

upload.load_checkpoint = measured
LLM(sys.argv[1], executor="cuda", max_context=64, prefill_chunk=64)
"""


def fitting_config(folder: Path, quantization: dict[str, Any] | None) -> dict[str, Any]:
    """Return the config of the 8B shape, with fewer layers if it does not fit the disk or the device."""
    from cupy.cuda import runtime

    config = shape_config("minicpm4-8b") | {"quantization_config": quantization}
    room = min(runtime.memGetInfo()[0], shutil.disk_usage(folder).free) - (2 << 30)
    while checkpoint_bytes(config) > room:
        config["num_hidden_layers"] -= 1
    return config


def checkpoint_bytes(config: dict[str, Any]) -> int:
    return sum(spec.num_bytes(2) for spec in weight_specs(ModelConfig.from_hf(config), EngineConfig()))


def tensors_of(config: dict[str, Any]) -> list[Tensor]:
    """Return the name, type and shape of each tensor that the checkpoint must hold."""
    found: list[Tensor] = []
    for spec in weight_specs(ModelConfig.from_hf(config), EngineConfig()):
        for source in spec.sources:
            if source.packing is None:
                found.append((source.name, "BF16", source.shape))
            else:
                needed = (tensor for tensor in stored_tensors(source) if tensor.required)
                found += [(t.name, "I32" if t.dtypes == ("I32",) else "F16", t.shape) for t in needed]
    return found


def write_large(folder: Path, config: dict[str, Any]) -> int:
    """Write shards of one repeated block of random words, finite as 16-bit floats; return the tensors' bytes."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(EMPTY_TOKENIZER)
    tensors = tensors_of(config)
    names = [f"model-{index:05}.safetensors" for index in range(NUM_SHARDS)]
    placed = {name: names[index % NUM_SHARDS] for index, (name, _, _) in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    block = np.random.default_rng(0).integers(0x3000, 0x3F00, BLOCK_BYTES // 2, np.uint16).tobytes()

    def write_shard(name: str) -> int:
        entries, end = {}, 0
        for tensor, kind, shape in tensors:
            if placed[tensor] == name:
                nbytes = (4 if kind == "I32" else 2) * int(np.prod(shape))
                entries[tensor] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + nbytes]}
                end += nbytes
        header = json.dumps(entries).encode()
        with (folder / name).open("wb", buffering=0) as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for start in range(0, end, BLOCK_BYTES):
                file.write(block[: end - start])
        return end

    with ThreadPoolExecutor(NUM_SHARDS) as pool:
        return sum(pool.map(write_shard, names))


@pytest.mark.gpu
@pytest.mark.all
@pytest.mark.alone
@pytest.mark.parametrize("quantization", [None, QUANTISED], ids=["", "gptq"])
def test_gigabytes_pass_through_little_host_memory(tmp_path: Path, quantization: dict[str, Any] | None) -> None:
    nbytes = write_large(tmp_path, fitting_config(tmp_path, quantization))
    try:
        run = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout)
    finally:
        shutil.rmtree(tmp_path)
    rate = nbytes / found["seconds"] / 1e9
    taken = found["peak"] - found["before"]
    rates = f"{nbytes / 1e9:.1f} GB in {found['seconds']:.2f} s, {rate:.1f} GB/s"
    print(f"{rates}; host memory {found['before'] >> 20} + {taken >> 20} MiB")
    assert taken < MOST_HOST_BYTES
