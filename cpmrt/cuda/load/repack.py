"""From tensors of quantised checkpoints to packed weights: what is read where, and the launches that repack it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cpmrt.cuda.build.launcher import Module
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.launch import CudaStream, launch
from cpmrt.cuda.load.read import ReadJob, reads_of, row_reads
from cpmrt.cuda.load.staging import Piece
from cpmrt.cuda.ops.linear import PRODUCTS
from cpmrt.cuda.ops.linear_packed.layout import PackedLayout
from cpmrt.dtypes import DType
from cpmrt.memory.plan import Region
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats import FORMATS, format_of
from cpmrt.weights.formats.gptq import V1_STEP
from cpmrt.weights.safetensors import FLOATS

OWN_FORMAT = "gptq"
"""What rounded and random weights come in, and what is dequantised as: the format then does not matter."""
_REPACK = "linear_packed/repack.cu"
_CONSTANTS = ("IN_FEATURES", "WEIGHT_BITS", "RUNS", "SCALE_GROUP", "ZEROS", "LINEAR", "FORMAT")
REPACK_CODES, REPACK_SCALES = (
    KernelSpec(name, _REPACK, constants=_CONSTANTS, reason="loading: 4-bit weights")
    for name in ("repack_codes", "repack_scales")
)
DEQUANTIZE = KernelSpec(
    "dequantize", _REPACK, constants=_CONSTANTS, hot=True, reason="4-bit weights of a prefill chunk"
)
ROUND = KernelSpec(
    "round_weights", "load/round_weights.cu", constants=("WEIGHT_BITS",), reason="loading: a head to 4 or 8 bits"
)
_BLOCK = 256
_BLOCKS_PER_SM = 8


def repack_constants(layout: PackedLayout, format: str) -> dict[str, int]:
    """Compile-time sizes of repack.cu."""
    constants = layout.constants | {"LINEAR": PRODUCTS[layout.product], "FORMAT": FORMATS[format].number}
    return constants | ({"HEAD_DIM": layout.head_dim} if layout.head_dim else {})


def repack_modules(specs: Iterable[TensorSpec], layouts: Mapping[str, PackedLayout]) -> list[Module]:
    """What loading these weights launches, each once."""
    found: list[Module] = []
    for spec in specs:
        for source in spec.sources if spec.name in layouts else ():
            layout, packing = layouts[spec.name], source.packing
            used = [(_REPACK, repack_constants(layout, packing.format if packing else OWN_FORMAT))]
            if packing is None:
                used.append((ROUND.file, _round_constants(layout.bits)))
            found += [module for module in used if module not in found]
    return found


def piece_reads(piece: Piece, checkpoint: Checkpoint, staging: int, dtype: DType) -> Iterator[ReadJob]:
    """The reads that bring a piece to the staging area, which begins at byte `staging` of the arena."""
    source, entries = piece.source, checkpoint.entries
    if source.packing is None:
        entry, rows = entries[source.name], range(piece.begin, piece.end)
        yield from row_reads(source, entry, FLOATS[entry.dtype], staging + piece.values, dtype, rows)
        return
    row = format_of(source)
    yield from reads_of(entries[row.codes.of(source.name)], None, staging + piece.codes, dtype)
    scales = entries[row.scales.of(source.name)]
    # The repacking takes both 16-bit types.
    stored = DType.FLOAT32 if FLOATS[scales.dtype] is DType.FLOAT32 else None
    yield from reads_of(scales, stored, staging + piece.scales, dtype)
    if row.zeros and not source.packing.symmetric:
        yield from reads_of(entries[row.zeros.of(source.name)], None, staging + piece.zeros, dtype)


class Repacker:
    """Launches on one stream. `arena` is the device address of the regions."""

    def __init__(
        self,
        arena: int,
        regions: Mapping[str, Region],
        layouts: Mapping[str, PackedLayout],
        modules: Modules,
        stream: CudaStream,
        num_sms: int,
    ):
        self._arena, self._regions, self._layouts = arena, regions, layouts
        self._modules, self._stream, self._grid = modules, stream, _BLOCKS_PER_SM * num_sms

    def clear(self, specs: Sequence[TensorSpec]) -> None:
        """Zero what no source fills: padding."""
        from cupy.cuda import runtime

        for spec in specs:
            region = self._regions[f"{spec.name}.codes"]
            runtime.memsetAsync(self._arena + region.offset, 0, region.nbytes, self._stream.__cuda_stream__()[1])

    def round(self, piece: Piece, fault: int) -> None:
        """Codes and scales of a piece in 16 bits; sets the word at device address `fault` where one is not finite."""
        assert piece.spec.quant is not None, piece.spec.name
        count, columns = piece.end - piece.begin, piece.source.shape[1]
        sizes = (np.int32(count), np.int32(columns), np.int32(piece.spec.quant.group_size))
        codes, scales, values = (self._staged(place) for place in (piece.codes, piece.scales, piece.values))
        grid = -(-count * columns // (8 * _BLOCK))
        args = (codes, scales, np.uint64(fault), values, *sizes)
        kernel = self._modules.kernel(ROUND, _round_constants(piece.spec.quant.bits))
        launch(self._stream, kernel, grid, _BLOCK, 0, args)

    def codes(self, piece: Piece) -> None:
        """Into the packed weight, in the order of its `perm`, which must be there."""
        region, perm = self._region(piece, "codes"), self._regions.get(f"{piece.spec.name}.perm")
        order = None if perm is None else np.uint64(self._arena + perm.offset)
        self._launch(piece, REPACK_CODES, region, self._staged(piece.codes), order, *self._sizes(piece))

    def scales(self, piece: Piece, stored: DType) -> None:
        """Scales, which are `stored` so in the staging area, and zero points."""
        assert piece.spec.quant is not None, piece.spec.name
        packing = piece.source.packing
        zeros = None if packing is None or packing.symmetric else self._staged(piece.zeros)
        addend = V1_STEP if packing is not None and packing.v1_zeros else 0
        kinds = (np.int32(piece.spec.quant.group_size), np.int32(stored is DType.FLOAT16), np.int32(addend))
        region, scales = self._region(piece, "codes"), self._staged(piece.scales)
        self._launch(piece, REPACK_SCALES, region, scales, zeros, *self._sizes(piece), *kinds)

    def _launch(self, piece: Piece, spec: KernelSpec, *args: Any) -> None:
        packing = piece.source.packing
        constants = repack_constants(self._layouts[piece.spec.name], packing.format if packing else OWN_FORMAT)
        launch(self._stream, self._modules.kernel(spec, constants), self._grid, _BLOCK, 0, args)

    def _sizes(self, piece: Piece) -> tuple[np.int32, ...]:
        layout = self._layouts[piece.spec.name]
        counts = (piece.first_row, piece.end - piece.begin, layout.out_features, layout.num_tiles)
        return tuple(map(np.int32, counts))

    def _region(self, piece: Piece, name: str) -> Any:
        return np.uint64(self._arena + self._regions[f"{piece.spec.name}.{name}"].offset)

    def _staged(self, offset: int) -> Any:
        return np.uint64(self._arena + self._regions["w4_staging"].offset + offset)


def _round_constants(bits: int) -> dict[str, int]:
    """Compile-time sizes of round_weights.cu."""
    return {"WEIGHT_BITS": bits}
