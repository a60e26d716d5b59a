"""A checkpoint loaded onto a pretended device that runs copies and kernels as late as it may: order, waits, results."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from threading import RLock
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reference.quantised_models import CASES, raw_tensors, write_quantised, write_safetensors

from cpmrt.config import EngineConfig
from cpmrt.cuda.driver import host_memory
from cpmrt.cuda.load import repack, upload
from cpmrt.cuda.ops.linear_packed.layout import packed_layout
from cpmrt.cuda.precompile import known_device
from cpmrt.dtypes import DType, from_float32, round_to, to_float32
from cpmrt.errors import CheckpointError
from cpmrt.memory.plan import Region
from cpmrt.models.planning import weight_specs
from cpmrt.ops import QuantizedWeight
from cpmrt.tensor_spec import Quantization
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats import FORMATS, GPTQ
from cpmrt.weights.formats.format import unpack_nibbles
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.pack import pack
from cpmrt.weights.quantised import load_quantised, round_to_nearest

DEVICE = known_device("sm_87")
BY_NUMBER = {row.number: row for row in FORMATS.values()}
BY_NAME = {case.name: case for case in CASES}


def at(address: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return the memory at an address as an array."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * count).from_address(int(address)), dtype).reshape(shape)


class LateStream:
    """A stream whose work is done only when somebody waits for it."""

    ptr = 0

    def __init__(self) -> None:
        self.work: list[Any] = []
        self.done, self.lock = 0, RLock()

    def run(self, end: int) -> None:
        with self.lock:
            for work in self.work[self.done : end]:
                work()
            self.done = max(self.done, end)

    def synchronize(self) -> None:
        self.run(len(self.work))


class Event:
    def __init__(self, **_: bool):
        self.wait: Any = lambda: None

    def record(self, stream: LateStream) -> None:
        end = len(stream.work)
        self.wait = lambda: stream.run(end)

    def synchronize(self) -> None:
        self.wait()


class HostMemory:
    def __init__(self, nbytes: int):
        self.bytes = np.zeros(nbytes, np.uint8)
        self.address = self.device_address = self.bytes.ctypes.data

    def array(self, dtype: Any) -> Any:
        return self.bytes.view(dtype)

    def close(self) -> None:
        self.bytes[:] = 0xA5

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Device:
    """A pretended device that runs the kernels of loading; it keeps packed weights as plain numbers by their
    addresses."""

    def __init__(self, dtype: DType):
        self.stream, self.modules = LateStream(), self
        self.arch, self.dtype = DEVICE.arch, dtype
        self.held: dict[int, dict[str, Any]] = {}

    def compile(self, modules: Any) -> None:
        pass

    def kernel(self, spec: Any, constants: Any) -> Any:
        return spec, constants

    def __call__(self, spec: Any, constants: Any, grid: Any, block: int, *args: Any) -> None:
        self.stream.work.append(lambda: getattr(self, spec.name)(constants, *args))

    def memcpyAsync(self, target: int, source: int, count: int, *_: object) -> None:
        self.stream.work.append(lambda: ctypes.memmove(target, source, count))

    def memsetAsync(self, target: int, value: int, count: int, _: object) -> None:
        self.stream.work.append(lambda: ctypes.memset(target, value, count))

    def convert_float32(self, _: Any, target: Any, fault: Any, source: Any, count: Any) -> None:
        self._convert(target, fault, at(source, np.float32, (int(count),)))

    def convert_16bit(self, _: Any, target: Any, fault: Any, source: Any, count: Any) -> None:
        stored = DType.FLOAT16 if self.dtype is DType.BFLOAT16 else DType.BFLOAT16
        self._convert(target, fault, to_float32(at(source, stored.storage, (int(count),)), stored))

    def _convert(self, target: Any, fault: Any, values: Any) -> None:
        words = at(target, self.dtype.storage, values.shape)
        words[:] = from_float32(values, self.dtype)
        at(fault, np.uint32, (1,))[0] |= int(np.isinf(to_float32(words, self.dtype)).any())

    def round_weights(self, sizes: Any, codes: Any, scales: Any, fault: Any, values: Any, *counts: Any) -> None:
        n, k, group = map(int, counts)
        rows, bits = to_float32(at(values, self.dtype.storage, (n, k)), self.dtype), sizes["WEIGHT_BITS"]
        at(fault, np.uint32, (1,))[0] |= int(not np.isfinite(rows).all())
        rounded, steps = round_to_nearest(np.nan_to_num(rows), Quantization(bits, group), self.dtype)
        if bits == 8:
            words = np.ascontiguousarray((rounded.astype(np.int16) + 128).astype(np.uint8)).view(np.int32).T
        else:
            words = GPTQ.codes.pack(unpack_nibbles(rounded.view(np.int32)))
        at(codes, np.int32, words.shape)[:] = words
        at(scales, self.dtype.storage, (k // group, n))[:] = from_float32(steps, self.dtype).T

    def repack_codes(self, sizes: Any, packed: Any, staged: Any, order: Any, *counts: Any) -> None:
        (first, n), k, row = map(int, counts[:2]), sizes.in_features, BY_NUMBER[sizes.format]
        if sizes.weight_bits == 8:
            u = np.ascontiguousarray(at(staged, np.int32, (k // 4, n)).T).view(np.uint8)
        else:
            u = row.codes.unpack(at(staged, np.int32, row.codes.shape(n, k, 1)))
        place = self.held.setdefault(int(packed), {"codes": np.zeros((int(counts[2]), k), np.uint8)})
        place["codes"][first : first + n] = u if order is None else u[:, at(order, np.int32, (k,))]

    def repack_scales(self, sizes: Any, packed: Any, staged: Any, zeros: Any, *counts: Any) -> None:
        first, n, num_rows, _, group, is_float16, addend = map(int, counts)
        row, shape = BY_NUMBER[sizes.format], (n, sizes.in_features, sizes.in_features // group)
        stored = DType.FLOAT16 if is_float16 else DType.BFLOAT16
        steps = row.scales.unpack(at(staged, stored.storage, row.scales.shape(*shape)))
        place = self.held[int(packed)]
        for name in ("scales", "zeros"):
            place.setdefault(name, np.zeros((num_rows, shape[2]), np.float32))
        place["scales"][first : first + n] = round_to(to_float32(np.ascontiguousarray(steps), stored), self.dtype)
        words = None if zeros is None else at(zeros, np.uint32, row.zeros.shape(*shape)) + np.uint32(addend)
        place["zeros"][first : first + n] = 8 if words is None else row.zeros.unpack(words.view(np.int32))


@pytest.fixture
def device(request: Any, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(request.param)
    runtime = SimpleNamespace(
        memcpyHostToDevice=1, setDevice=lambda index: None, memcpyAsync=made.memcpyAsync, memsetAsync=made.memsetAsync
    )
    for name, names in (("cupy.cuda", {"Event": Event, "runtime": runtime}), ("cupy", {})):
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(host_memory, "HostBuffer", HostMemory)
    monkeypatch.setattr(upload, "launch", lambda stream, kernel, grid, block, smem, args: made(*kernel, 1, 1, *args))
    return made


def load(folder: Path, device: Device, head_bits: int | None) -> None:
    """Load a checkpoint and compare everything with what NumPy makes of it."""
    config = ModelFolder.open(folder).config
    with Checkpoint.open(folder) as checkpoint:
        specs = weight_specs(config, EngineConfig(lm_head_bits=head_bits), checkpoint)
        regions, end = dict[str, Region](), 0
        sizes = {spec.name: 2 * spec.num_elements for spec in specs if not spec.quant}
        for spec in specs:
            if spec.quant:
                sizes[f"{spec.name}.codes"] = packed_layout(spec, DEVICE).num_bytes
            if spec.quant and spec.quant.permuted:
                sizes[f"{spec.name}.perm"] = 4 * spec.shape[1]
        for name, nbytes in (sizes | {repack.STAGING: repack.staging_bytes(specs)}).items():
            regions[name] = Region(name, "layers", end, nbytes, (nbytes,), np.dtype(np.uint8))
            end += -(-nbytes // 256) * 256
        arena = np.zeros(end, np.uint8)
        launcher: Any = device
        upload.load_checkpoint(specs, checkpoint, repack.Destination(arena.ctypes.data, regions, DEVICE, launcher))
        for spec in specs:
            if spec.quant is None:
                found = arena[regions[spec.name].offset :][: 2 * spec.num_elements]
                assert found.tobytes() == pack(spec, checkpoint, device.dtype).tobytes(), spec.name
                continue
            expected = empty(spec.quant, spec.shape)
            load_quantised(spec, checkpoint, device.dtype, expected)
            held = device.held.pop(arena.ctypes.data + regions[f"{spec.name}.codes"].offset)
            u = expected.codes.astype(np.int16) + 128
            if spec.quant.bits == 4:
                u = unpack_nibbles(expected.codes.view(np.int32))
            np.testing.assert_array_equal(held["codes"], u, spec.name)
            np.testing.assert_array_equal(held["scales"], expected.scales, spec.name)
            np.testing.assert_array_equal(held["zeros"], 8 if expected.zeros is None else expected.zeros, spec.name)
    assert not device.held


def empty(quant: Quantization, shape: tuple[int, ...]) -> QuantizedWeight:
    (n, k), groups = shape, shape[1] // quant.group_size
    codes = np.zeros((n, k * quant.bits // 8), np.uint8 if quant.bits == 4 else np.int8)
    zeros = None if quant.symmetric else np.zeros((n, groups), np.uint8)
    perm = np.zeros(k, np.int32) if quant.permuted else None
    return QuantizedWeight(codes, np.zeros((n, groups), np.float32), zeros, perm, (n, k), quant.group_size, quant.bits)


@pytest.mark.parametrize("device", [DType.BFLOAT16, DType.FLOAT16], ids=lambda dtype: dtype.label, indirect=True)
@pytest.mark.parametrize(("name", "head_bits", "staging"), [
    ("gptq", 4, 0), ("gptq_v2_act_order", 8, 1 << 16), ("gptq_orders_apart", 4, 1 << 30), ("gptq_row", None, 0),
    ("awq_some", 8, 0), ("compressed_asymmetric", 4, 1 << 16), ("compressed", None, 1 << 30), ("marlin", 8, 0),
])  # fmt: skip
def test_everything_arrives(
    name: str, head_bits: int | None, staging: int, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack, "LARGEST_STAGING_BYTES", staging)
    monkeypatch.setattr(repack, "ROUNDED_BYTES", 20_000)
    load(write_quantised(BY_NAME[name], tmp_path / "model", 3), device, head_bits)


@pytest.mark.parametrize("device", [DType.FLOAT16], indirect=True)
@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        ("lm_head.weight", np.nan, r"model: tensor 'lm_head\.weight' has values that are not finite$"),
        (
            "model.norm.weight",
            1e6,
            r"safetensors: tensor 'model\.norm\.weight' has values beyond float16; use dtype bf",
        ),
    ],
)
def test_values_that_do_not_fit_are_named(
    tensor: str, value: float, message: str, device: Device, tmp_path: Path
) -> None:
    folder = write_quantised(BY_NAME["gptq"], tmp_path / "model", 3)
    tensors = raw_tensors(BY_NAME["gptq"], 3)
    changed = tensors[tensor][1].astype(np.float32)
    changed.reshape(-1)[7] = value
    write_safetensors(folder / "model.safetensors", tensors | {tensor: ("F32", changed)})
    with pytest.raises(CheckpointError, match=message):
        load(folder, device, 4)
