"""Streaming a checkpoint: reads that tile the arena, real reader threads on a pretended device, damaged files."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.cuda.load import read as loader
from cpmrt.cuda.load.read import ReadJob, plan_reads, read_all
from cpmrt.dtypes import Array, DType, from_float32, to_float32
from cpmrt.errors import CheckpointError
from cpmrt.memory.plan import Region
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.pack import pack

GUARD = 0xA5
SLOT_BYTES = 64


class LazyDevice:
    """A pretended device whose copies happen as late as they may: when a slot is waited for, or at the end."""

    def __init__(self, nbytes: int, dtype: DType, num_slots: int = 4):
        self.arena, self.dtype = bytearray([GUARD]) * nbytes, dtype
        self.slots: Sequence[memoryview] = [memoryview(bytearray(SLOT_BYTES)) for _ in range(num_slots)]
        self.pending: dict[int, ReadJob] = {}
        self.num_submitted = 0

    def wait(self, slot: int) -> None:
        job = self.pending.pop(slot, None)
        if job is not None:
            words = np.frombuffer(self.slots[slot][: job.nbytes], job.stored.storage)
            converted = words if job.stored is self.dtype else from_float32(to_float32(words, job.stored), self.dtype)
            self.arena[job.destination : job.destination + converted.nbytes] = converted.tobytes()

    def submit(self, slot: int, job: ReadJob) -> None:
        assert slot not in self.pending, "a slot was submitted twice without waiting"
        self.pending[slot] = job
        self.num_submitted += 1

    def finish(self) -> None:
        for slot in list(self.pending):
            self.wait(slot)


def write_file(path: Path, tensors: Mapping[str, tuple[DType, Array]], padding: int = 0) -> None:
    """Write a safetensors file; `padding` spaces in the header shift the tensors off every alignment."""
    entries, begin = [], 0
    for name, (dtype, words) in tensors.items():
        span = f"[{begin},{begin + words.nbytes}]"
        kind = f'"dtype":"{dtype.safetensors_name}","shape":{list(words.shape)}'
        entries.append(f'"{name}":{{{kind},"data_offsets":{span}}}')
        begin += words.nbytes
    header = "{" + ",".join(entries) + "}" + " " * padding
    body = b"".join(words.tobytes() for _, words in tensors.values())
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + body)


def laid_out(specs: Sequence[TensorSpec], itemsize: int, gap: int = 16) -> tuple[dict[str, Region], int]:
    """Return regions with a gap after each, so that a write past the end of one is seen, and their total size."""
    regions, end = {}, gap
    for spec in specs:
        nbytes = spec.num_elements * itemsize
        regions[spec.name] = Region(spec.name, "layers", end, nbytes, spec.shape, np.dtype(f"u{itemsize}"))
        end += nbytes + gap
    return regions, end


@contextmanager
def checkpoint_with(files: Mapping[str, Mapping[str, tuple[DType, Array]]], padding: int = 0) -> Iterator[Checkpoint]:
    with tempfile.TemporaryDirectory() as folder:
        shards = {tensor: name for name, tensors in files.items() for tensor in tensors}
        quoted = ",".join(f'"{tensor}":"{name}"' for tensor, name in shards.items())
        Path(folder, "model.safetensors.index.json").write_text(f'{{"weight_map":{{{quoted}}}}}')
        for name, tensors in files.items():
            write_file(Path(folder, name), tensors, padding)
        with Checkpoint.open(Path(folder)) as checkpoint:
            yield checkpoint


@st.composite
def models(draw: st.DrawFn) -> tuple[list[TensorSpec], dict[str, dict[str, tuple[DType, Array]]]]:
    """Draw specs of one to three sources each, and tensors for them scattered over two files and all stored types."""
    specs: list[TensorSpec] = []
    files: dict[str, dict[str, tuple[DType, Array]]] = {"a.safetensors": {}, "b.safetensors": {}}
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    for index in range(draw(st.integers(1, 4))):
        tail = draw(st.sampled_from([(), (1,), (3,), (40,)]))
        rows = draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
        sources = tuple(Source(f"t{index}.{part}", (count, *tail)) for part, count in enumerate(rows))
        specs.append(TensorSpec(f"w{index}", (sum(rows), *tail), sources))
        for source in sources:
            stored = draw(st.sampled_from(list(DType)))
            values = random.standard_normal(source.shape, np.float32)
            files[draw(st.sampled_from(list(files)))][source.name] = (stored, from_float32(values, stored))
    return specs, {name: tensors for name, tensors in files.items() if tensors}


@given(models(), st.sampled_from([DType.BFLOAT16, DType.FLOAT16]), st.integers(4, SLOT_BYTES), st.integers(0, 3))
def test_reads_tile_every_region_once_with_the_right_bytes(
    model: Any, dtype: DType, max_bytes: int, padding: int
) -> None:
    specs, files = model
    regions, total = laid_out(specs, dtype.itemsize)
    with checkpoint_with(files, padding) as checkpoint:
        jobs = plan_reads(specs, checkpoint, regions, dtype, max_bytes=max_bytes)
        written = np.zeros(total, np.int32)
        arena = bytearray(total)
        for job in jobs:
            assert 0 < job.nbytes <= max_bytes and job.nbytes == job.num_elements * job.stored.itemsize
            words = np.frombuffer(job.path.read_bytes(), np.uint8)[job.offset : job.offset + job.nbytes]
            values = to_float32(words.view(job.stored.storage), job.stored)
            end = job.destination + job.num_elements * dtype.itemsize
            written[job.destination : end] += 1
            arena[job.destination : end] = from_float32(values, dtype).tobytes()
        expected = np.zeros(total, np.int32)
        for spec in specs:
            region = regions[spec.name]
            expected[region.offset : region.offset + region.nbytes] = 1
            assert arena[region.offset : region.offset + region.nbytes] == pack(spec, checkpoint, dtype).tobytes()
        assert np.array_equal(written, expected)
        assert jobs == sorted(jobs, key=lambda job: (job.path, job.offset))


@examples(30)
@given(models(), st.integers(1, 6), st.integers(1, 8))
def test_threads_fill_the_arena_as_pack_does(model: Any, num_slots: int, num_readers: int) -> None:
    specs, files = model
    regions, total = laid_out(specs, DType.BFLOAT16.itemsize)
    with checkpoint_with(files) as checkpoint:
        device = LazyDevice(total, DType.BFLOAT16, num_slots)
        jobs = plan_reads(specs, checkpoint, regions, DType.BFLOAT16, max_bytes=SLOT_BYTES)
        read_all(jobs, device, num_readers=num_readers, drop_page_cache=num_readers % 2 == 0)
        device.finish()
        expected = bytearray([GUARD]) * total
        for spec in specs:
            region = regions[spec.name]
            expected[region.offset : region.offset + region.nbytes] = pack(spec, checkpoint, DType.BFLOAT16).tobytes()
        assert device.arena == expected and device.num_submitted == len(jobs)


def one_tensor(shape: tuple[int, ...] = (64, 8)) -> tuple[TensorSpec, dict[str, dict[str, tuple[DType, Array]]]]:
    words = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    spec = TensorSpec("w", shape, (Source("t", shape),))
    return spec, {"a.safetensors": {"t": (DType.BFLOAT16, words)}}


def test_short_reads_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, files = one_tensor()
    regions, total = laid_out([spec], 2)
    whole = os.preadv
    monkeypatch.setattr(loader.os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:7]], offset))
    with checkpoint_with(files) as checkpoint:
        device = LazyDevice(total, DType.BFLOAT16)
        read_all(plan_reads([spec], checkpoint, regions, DType.BFLOAT16, max_bytes=SLOT_BYTES), device)
        device.finish()
    region = regions["w"]
    assert device.arena[region.offset : region.offset + region.nbytes] == np.arange(512, dtype=np.uint16).tobytes()


@pytest.mark.parametrize("kept", [0, 900])
def test_a_file_that_was_cut_is_named_and_nothing_hangs(kept: int) -> None:
    spec, files = one_tensor()
    regions, total = laid_out([spec], 2)
    with checkpoint_with(files) as checkpoint:
        jobs = plan_reads([spec], checkpoint, regions, DType.BFLOAT16, max_bytes=SLOT_BYTES)
        os.truncate(jobs[0].path, kept)
        with pytest.raises(CheckpointError, match=r"a\.safetensors became shorter.*tensor 't'.*download"):
            read_all(jobs, LazyDevice(total, DType.BFLOAT16), num_readers=3)


def test_a_file_that_is_gone_is_named() -> None:
    spec, files = one_tensor()
    regions, total = laid_out([spec], 2)
    with checkpoint_with(files) as checkpoint:
        jobs = plan_reads([spec], checkpoint, regions, DType.BFLOAT16)
        jobs[0].path.unlink()
        with pytest.raises(CheckpointError, match=r"a\.safetensors does not exist"):
            read_all(jobs, LazyDevice(total, DType.BFLOAT16))


def test_an_input_output_error_stops_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, files = one_tensor((400, 8))
    regions, total = laid_out([spec], 2)
    whole, calls = os.preadv, []

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 5:
            raise OSError(5, "Input/output error")
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(loader.os, "preadv", failing)
    with checkpoint_with(files) as checkpoint:
        jobs = plan_reads([spec], checkpoint, regions, DType.BFLOAT16, max_bytes=SLOT_BYTES)
        with pytest.raises(CheckpointError, match=r"tensor 't' cannot be read: .*Input/output error"):
            read_all(jobs, LazyDevice(total, DType.BFLOAT16), num_readers=1)
    assert len(calls) == 5 < len(jobs)


def test_an_error_of_the_device_comes_out() -> None:
    class Broken(LazyDevice):
        def submit(self, slot: int, job: ReadJob) -> None:
            raise RuntimeError("the device is gone")

    spec, files = one_tensor()
    regions, total = laid_out([spec], 2)
    with checkpoint_with(files) as checkpoint, pytest.raises(RuntimeError, match="the device is gone"):
        jobs = plan_reads([spec], checkpoint, regions, DType.BFLOAT16, max_bytes=SLOT_BYTES)
        read_all(jobs, Broken(total, DType.BFLOAT16))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source("absent", (64, 8)), "has no tensor 'absent'"),
        (Source("t", (8, 64)), r"expected F32 \| F16 \| BF16 \[8, 64\], got BF16 \[64, 8\]"),
    ],
)
def test_a_source_that_is_not_as_specified_is_refused(source: Source, message: str) -> None:
    _, files = one_tensor()
    spec = TensorSpec("w", source.shape, (source,))
    regions, _ = laid_out([spec], 2)
    with checkpoint_with(files) as checkpoint, pytest.raises(CheckpointError, match=message):
        plan_reads([spec], checkpoint, regions, DType.BFLOAT16)


def test_a_stored_type_without_conversion_is_refused() -> None:
    spec = TensorSpec("w", (4,), (Source("t", (4,)),))
    with tempfile.TemporaryDirectory() as folder:
        header = b'{"t":{"dtype":"I32","shape":[4],"data_offsets":[0,16]}}'
        Path(folder, "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        with Checkpoint.open(Path(folder)) as checkpoint, pytest.raises(CheckpointError, match="got I32"):
            plan_reads([spec], checkpoint, laid_out([spec], 2)[0], DType.BFLOAT16)
