"""Loading a GGUF file to a GPU, on a pretended device: every weight's words and place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf_models as models
import numpy as np
import pytest

from cpmrt.config import EngineConfig
from cpmrt.cuda.load.read import ReadJob, plan_reads, read_all
from cpmrt.dtypes import DType, from_float32, to_float32
from cpmrt.memory.plan import Region
from cpmrt.models.planning import open_weights
from cpmrt.weights.gguf.specs import without_blocks
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.pack import pack, pack_blocks


class Device:
    """A pretended device: an arena of bytes that receives the data read, converted as the device converts it."""

    def __init__(self, nbytes: int, dtype: DType):
        self.arena, self.dtype = bytearray(b"\xa5") * nbytes, dtype
        self.slots: Sequence[memoryview] = [memoryview(bytearray(4 << 20))]

    def wait(self, slot: int) -> None:
        """Return at once, as no copy is ever in flight."""

    def submit(self, slot: int, job: ReadJob) -> None:
        words = np.frombuffer(self.slots[slot][: job.nbytes], job.stored.storage)
        converted = words if job.stored is self.dtype else from_float32(to_float32(words, job.stored), self.dtype)
        self.arena[job.destination : job.destination + converted.nbytes] = converted.tobytes()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, pytest.param(DType.FLOAT16, marks=pytest.mark.all)])
@pytest.mark.parametrize("kind", ["BF16", "F32", "Q4_K"])
@pytest.mark.parametrize("architecture", ["llama", "minicpm", "qwen2", "qwen3"])
def test_every_weight_comes_to_its_place(tmp_path: Path, architecture: str, kind: str, dtype: DType) -> None:
    """Weights of a GGUF file, with paired rows and blocks, are loaded as the same words as from the model's
    safetensors."""
    pair = models.write_pair(tmp_path, architecture, lambda name: kind)
    expected = {}
    with open_weights(ModelFolder.open(pair.folder), EngineConfig()) as (plain, specs):
        for spec in specs:
            expected[spec.name] = pack(spec, plain, dtype).tobytes()
    with open_weights(ModelFolder.open(pair.gguf), EngineConfig()) as (checkpoint, specs):
        specs, regions, end = without_blocks(specs, {spec.name for spec in specs}), {}, 0
        for spec in specs:
            nbytes = spec.num_elements * dtype.itemsize
            regions[spec.name] = Region(spec.name, spec.part, end, nbytes, spec.shape, np.dtype(np.uint16))
            end += nbytes
        device = Device(end, dtype)
        read = [spec for spec in specs if not any(source.packing for source in spec.sources)]
        read_all(plan_reads(read, checkpoint, regions, dtype), device, num_readers=1)
        for spec in specs:
            place = regions[spec.name].offset
            for block in pack_blocks(spec, checkpoint, dtype) if spec not in read else ():
                device.arena[place : place + block.nbytes] = block.tobytes()
                place += block.nbytes
    assert regions.keys() == expected.keys() and (len(read) < len(specs)) == (kind == "Q4_K")
    for name, region in regions.items():
        assert device.arena[region.offset : region.offset + region.nbytes] == expected[name], name
