"""Loads a checkpoint into the arena, through a page-locked ring that is copied or converted on the device's stream.

Weights in 16 bits go to their places, quantised ones through the staging area (`repack`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.host_memory import host_buffers
from cpmrt.cuda.driver.launch import launch
from cpmrt.cuda.load import repack
from cpmrt.cuda.load.read import NUM_SLOTS, SLOT_BYTES, ReadJob, in_file_order, plan_reads, read_all
from cpmrt.cuda.load.repack import STAGING, Destination, Piece
from cpmrt.dtypes import Array, DType
from cpmrt.errors import CheckpointError, quoted
from cpmrt.memory.plan import Region
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.block_rows import check_scales
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats import format_of
from cpmrt.weights.pack import pack_blocks
from cpmrt.weights.quantised import check_values, read_order
from cpmrt.weights.safetensors import FLOATS
from cpmrt.weights.ternary import KEEP_16_BITS, NOT_TERNARY, TERNARY_BITS

CONVERT_FLOAT32, CONVERT_16BIT = (
    KernelSpec(name, "load/convert.cu", reason="loading: weights stored as another type")
    for name in ("convert_float32", "convert_16bit")
)
_BLOCK = 256
_MAX_GRID = 512
_BEYOND, _NOT_FINITE = "values beyond float16", "values that are not finite"
_SCALES = "scales that are not finite"
_FIXES = {_BEYOND: "use dtype bfloat16", NOT_TERNARY: KEEP_16_BITS}


def load_checkpoint(specs: Sequence[TensorSpec], checkpoint: Checkpoint, to: Destination) -> None:
    """Fill the regions of `specs`, those with a `quant` or in blocks of GGUF by way of the region STAGING, and wait.

    Page-locks up to 64 MiB meanwhile. Raises CheckpointError if a file cannot be read to its end or a value is not
    finite or beyond the range of float16, MemoryPlanError if the host cannot page-lock the ring.
    """
    held = [spec for spec in specs if spec.quant is not None]
    unpacked = [spec for spec in specs if repack.is_unpacked(spec)]
    packed = [spec for spec in specs if any(source.packing for source in spec.sources)]
    dequantised = [spec for spec in packed if spec.quant is None and spec not in unpacked]
    plain = [spec for spec in specs if spec.quant is None and spec not in packed]
    jobs = plan_reads(plain, checkpoint, to.regions, to.dtype)
    staged = _staged([*unpacked, *held], checkpoint, to) if unpacked or held else []
    everything = [*jobs, *(job for _, wave_jobs in staged for job in wave_jobs)]
    faults = {
        (_odd(spec, source), source.name): checkpoint.folder
        for spec in held
        for source in spec.sources
        if source.packing is None or source.packing.row_bytes
    }
    faults |= {(_BEYOND, source.name): checkpoint.folder for spec in unpacked for source in spec.sources}
    with Upload(to, everything, faults) as upload, ThreadPoolExecutor(1) as pool:
        checks = pool.submit(_check, [*held, *dequantised, *unpacked], checkpoint, to.dtype)
        read_all(jobs, upload, drop_page_cache=to.device.is_unified)
        for spec in dequantised:
            offset = to.regions[spec.name].offset
            for block in pack_blocks(spec, checkpoint, to.dtype):
                upload.put(offset, block)
                offset += block.nbytes
        if staged:
            _prepare([*unpacked, *held], checkpoint, upload, to)
        for wave, wave_jobs in staged:
            read_all(wave_jobs, upload, drop_page_cache=to.device.is_unified)
            for piece in wave:
                _repack(piece, checkpoint, upload, to)
        checks.result()
        upload.finish()


def _staged(
    specs: Sequence[TensorSpec], checkpoint: Checkpoint, to: Destination
) -> list[tuple[list[Piece], list[ReadJob]]]:
    """Return the waves of weights that pass through the staging area, each with its reads."""
    staging, found = to.regions[STAGING], []
    for wave in repack.waves(specs, staging.nbytes):
        jobs = (job for piece in wave for job in repack.piece_reads(piece, checkpoint, staging.offset, to.dtype))
        found.append((wave, in_file_order(jobs)))
    return found


def _prepare(specs: Sequence[TensorSpec], checkpoint: Checkpoint, upload: Upload, to: Destination) -> None:
    """Compile the repacking kernels, clear packed weights (no source fills their padding), copy the column orders."""
    to.launch.modules.compile(repack.repack_modules(specs, to.device))
    for spec in specs:
        if spec.quant:
            upload.clear(to.regions[f"{spec.name}.codes"])
    for spec in specs:
        if spec.quant and spec.quant.permuted:
            order = read_order(spec.sources[0], checkpoint)  # the same in all sources
            assert order is not None, spec.name
            upload.put(to.regions[f"{spec.name}.perm"].offset, order)


def _repack(piece: Piece, checkpoint: Checkpoint, upload: Upload, to: Destination) -> None:
    """Launch the kernels that write a staged piece to its packed or 16-bit weight."""
    source, stored = piece.source, to.dtype
    if piece.spec.quant is None:
        repack.unpack_blocks(piece, to, upload.fault(_BEYOND, source.name))
        return
    if piece.row_bytes:
        repack.repack_blocks(piece, to, upload.fault(_SCALES, source.name))
        return
    if source.packing is None:
        repack.round_rows(piece, to, upload.fault(_odd(piece.spec, source), source.name))
    else:
        entry = checkpoint.entries[format_of(source).scales.of(source.name)]
        # Scales in float32 were converted on the way.
        stored = to.dtype if FLOATS[entry.dtype] is DType.FLOAT32 else FLOATS[entry.dtype]
    repack.repack_codes(piece, to)
    repack.repack_scales(piece, to, stored)


def _odd(spec: TensorSpec, source: Source) -> str:
    """Return words for the numbers that a source's kernel refuses: values in 16 bits, or scales of one in blocks."""
    if source.packing is not None:
        return _SCALES
    return NOT_TERNARY if spec.quant and spec.quant.bits == TERNARY_BITS else _NOT_FINITE


def _check(specs: Sequence[TensorSpec], checkpoint: Checkpoint, dtype: DType) -> None:
    for spec in specs:
        for source in spec.sources:
            if source.packing is not None and not source.packing.row_bytes:
                check_values(source, checkpoint, dtype)
            elif repack.is_unpacked(spec):
                check_scales(source, checkpoint)


class Upload:
    """The `Ring` of a device for a list of jobs; the end of the `with` block waits and frees it.

    `faults`: the faults that kernels other than its own may report, as (words for the values, tensor), and the path of
    each tensor's file or folder.
    """

    def __init__(self, to: Destination, jobs: Sequence[ReadJob], faults: Mapping[tuple[str, str], Path]):
        from cupy.cuda import Event, runtime

        self._to, self._runtime, self._stream = to, runtime, to.launch.stream
        converted = [job for job in jobs if job.stored not in (None, to.dtype)]
        self._converters = {
            stored: to.launch.modules.kernel(CONVERT_FLOAT32 if stored is DType.FLOAT32 else CONVERT_16BIT, {})
            for stored in {job.stored for job in converted}
        }
        self._faults = {**faults, **{(_BEYOND, job.tensor): job.path for job in converted}}
        self._fault_index = {fault: index for index, fault in enumerate(self._faults)}
        num_slots = max(1, min(NUM_SLOTS, len(jobs)))
        self._next_slot = 0
        self._events = [Event(block=True, disable_timing=True) for _ in range(num_slots)]
        self._ring, self._fault_words = host_buffers(num_slots * SLOT_BYTES, 4 * max(len(self._faults), 1))
        ring = self._ring.array(np.uint8).data
        self._slots = [ring[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] for slot in range(num_slots)]

    @property
    def slots(self) -> Sequence[memoryview]:
        return self._slots

    def wait(self, slot: int) -> None:
        """Return once the device has read what was submitted in `slot`."""
        # A new thread is on device 0 until it says otherwise.
        self._runtime.setDevice(self._to.device.index)
        self._events[slot].synchronize()

    def submit(self, slot: int, job: ReadJob) -> None:
        """Copy or convert the job's bytes to the arena, in the order of the stream."""
        if job.stored in (None, self._to.dtype):
            self._copy(slot, job.destination, job.nbytes)
        else:
            count, source = job.num_elements, self._ring.device_address + slot * SLOT_BYTES
            target, fault = np.uint64(self._to.arena + job.destination), self.fault(_BEYOND, job.tensor)
            args = (target, fault, np.uint64(source), np.int32(count))
            launch(self._stream, self._converters[job.stored], min(-(-count // _BLOCK), _MAX_GRID), _BLOCK, 0, args)
        self._events[slot].record(self._stream)

    def put(self, destination: int, words: Array) -> None:
        """Copy words of the host to byte `destination` of the arena; not while a `read_all` is under way."""
        data = np.ascontiguousarray(words).reshape(-1).view(np.uint8)
        for begin in range(0, data.size, SLOT_BYTES):
            piece = data[begin : begin + SLOT_BYTES]
            slot = self._next_slot = (self._next_slot + 1) % len(self._slots)
            self.wait(slot)
            self._slots[slot][: piece.size] = piece.data
            self._copy(slot, destination + begin, piece.size)
            self._events[slot].record(self._stream)

    def clear(self, region: Region) -> None:
        """Zero a region of the arena, in the order of the stream."""
        self._runtime.memsetAsync(self._to.arena + region.offset, 0, region.nbytes, self._stream.ptr)

    def fault(self, what: str, tensor: str) -> np.uint64:
        """Return the device address of the word that a kernel sets if it meets such a value in the tensor."""
        address: np.uint64 = np.uint64(self._fault_words.device_address + 4 * self._fault_index[what, tensor])
        return address

    def finish(self) -> None:
        """Wait for everything submitted. Raises CheckpointError if a kernel met a value that does not fit."""
        self._stream.synchronize()
        words = self._fault_words.array(np.uint32)
        for ((what, tensor), path), fault in zip(self._faults.items(), words, strict=False):
            if fault:
                raise CheckpointError(f"{path}: tensor {quoted(tensor)} has {what}", fix=_FIXES.get(what))

    def _copy(self, slot: int, destination: int, nbytes: int) -> None:
        source, runtime = self._ring.address + slot * SLOT_BYTES, self._runtime
        target, kind = self._to.arena + destination, runtime.memcpyHostToDevice
        runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._stream.synchronize()
        finally:
            self._ring.close()
            self._fault_words.close()
