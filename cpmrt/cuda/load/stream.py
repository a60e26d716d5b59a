"""A checkpoint streamed into the arena: weights in 16 bits to their places, quantised ones through the staging area."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np

from cpmrt.cuda.build.modules import Modules, compile_all
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.driver.host_memory import HostBuffer
from cpmrt.cuda.load.read import ReadJob, load, plan_reads
from cpmrt.cuda.load.repack import Repacker, piece_reads, repack_modules
from cpmrt.cuda.load.staging import Piece, waves
from cpmrt.cuda.load.upload import Upload
from cpmrt.cuda.ops.linear_packed.layout import PackedLayout
from cpmrt.dtypes import DType
from cpmrt.errors import CheckpointError, quoted
from cpmrt.memory.plan import Region
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats import format_of
from cpmrt.weights.pack import pack_blocks
from cpmrt.weights.quantised import check_values, read_order
from cpmrt.weights.safetensors import FLOATS


def stream_checkpoint(
    arena: int,
    specs: Sequence[TensorSpec],
    checkpoint: Checkpoint,
    regions: Mapping[str, Region],
    device: Device,
    modules: Modules,
    layouts: Mapping[str, PackedLayout] | None = None,
) -> None:
    """Fill the regions of `specs` in the arena at device address `arena` with the type of `modules`; waits for the end.

    `layouts`: of the specs with a `quant`, by name; they need a region "w4_staging". Page-locks up to 64 MiB meanwhile.
    Raises CheckpointError if a file cannot be read to its end or a value is not finite or beyond the range of float16,
    MemoryPlanError if the host cannot page-lock the ring.
    """
    held = [spec for spec in specs if spec.quant is not None]
    dequantised = [spec for spec in specs if spec.quant is None and any(source.packing for source in spec.sources)]
    plain = [spec for spec in specs if spec.quant is None and spec not in dequantised]
    jobs = plan_reads(plain, checkpoint, regions, modules.dtype)
    quantised = _Quantised(held, checkpoint, regions, layouts or {}, modules) if held else None
    everything = [*jobs, *(quantised.jobs if quantised else ())]
    with Upload(arena, everything, device.index, modules) as upload, ThreadPoolExecutor(1) as pool:
        checks = pool.submit(_check, [*held, *dequantised], checkpoint, modules.dtype)
        load(jobs, upload, drop_page_cache=device.is_unified)
        for spec in dequantised:
            destination = regions[spec.name].offset
            for block in pack_blocks(spec, checkpoint, modules.dtype):
                upload.put(destination, block)
                destination += block.nbytes
        if quantised:
            quantised.stream(arena, upload, device)
        checks.result()
        upload.finish()


class _Quantised:
    """The weights with a `quant`: their reads, wave by wave, and what follows each wave."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        checkpoint: Checkpoint,
        regions: Mapping[str, Region],
        layouts: Mapping[str, PackedLayout],
        modules: Modules,
    ):
        self._specs, self._checkpoint, self._regions = specs, checkpoint, regions
        self._layouts, self._modules = layouts, modules
        staging = regions["w4_staging"]
        self._waves = list(waves(specs, staging.nbytes))
        self._jobs = [
            sorted(
                chain.from_iterable(piece_reads(piece, checkpoint, staging.offset, modules.dtype) for piece in wave),
                key=lambda job: (job.path, job.offset),
            )
            for wave in self._waves
        ]

    @property
    def jobs(self) -> list[ReadJob]:
        """Of all waves."""
        return list(chain.from_iterable(self._jobs))

    def stream(self, arena: int, upload: Upload, device: Device) -> None:
        """Read and repack everything. Raises CheckpointError where a value to be rounded is not finite."""
        compile_all(self._modules.arch, self._modules.dtype, repack_modules(self._specs, self._layouts))
        repacker = Repacker(arena, self._regions, self._layouts, self._modules, upload.stream, device.num_sms)
        repacker.clear(self._specs)
        for spec in self._specs:
            if spec.quant and spec.quant.permuted:
                upload.put(self._regions[f"{spec.name}.perm"].offset, _order(spec, self._checkpoint))
        rounded = sorted({source.name for spec in self._specs for source in spec.sources if source.packing is None})
        with HostBuffer(4 * max(len(rounded), 1)) as faults:
            flags = {name: faults.device_address + 4 * index for index, name in enumerate(rounded)}
            try:
                for jobs, wave in zip(self._jobs, self._waves, strict=True):
                    load(jobs, upload, drop_page_cache=device.is_unified)
                    self._repack(repacker, wave, flags)
            finally:
                upload.stream.synchronize()
            for name, fault in zip(rounded, faults.array(np.uint32), strict=False):
                if fault:
                    what = f"{self._checkpoint.folder}: tensor {quoted(name)} has values that are not finite"
                    raise CheckpointError(what)

    def _repack(self, repacker: Repacker, wave: Sequence[Piece], flags: Mapping[str, int]) -> None:
        for piece in wave:
            stored = self._modules.dtype
            if piece.source.packing is None:
                repacker.round(piece, flags[piece.source.name])
            else:
                stored = _scale_type(piece.source, self._checkpoint, stored)
            repacker.codes(piece)
            repacker.scales(piece, stored)


def _scale_type(source: Source, checkpoint: Checkpoint, dtype: DType) -> DType:
    """Of the scales in the staging area: float32 ones were converted on the way there."""
    stored = FLOATS[checkpoint.entries[format_of(source).scales.of(source.name)].dtype]
    return dtype if stored is DType.FLOAT32 else stored


def _order(spec: TensorSpec, checkpoint: Checkpoint) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The order of the columns, the same in all sources."""
    order = read_order(spec.sources[0], checkpoint)
    assert order is not None, spec.name
    return order


def _check(specs: Sequence[TensorSpec], checkpoint: Checkpoint, dtype: DType) -> None:
    for spec in specs:
        for source in spec.sources:
            if source.packing is not None:
                check_values(source, checkpoint, dtype)
