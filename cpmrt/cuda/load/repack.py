"""Repacks quantised weights on the device, from the formats of checkpoint files to the packed layout.

The tensors of quantised sources pass through the staging area of the arena in waves, each as large as it is. A wave is
read and copied as a whole; then the device repacks it, while the next wave is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.build.spec import KernelSpec, macros_of
from cpmrt.cuda.driver.array import KernelArgument
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.load.read import ReadJob, elements_of, reads_of
from cpmrt.cuda.ops.linear_packed.layout import SLICE_COLUMNS, PackedLayout, RepackConstants, packed_layout
from cpmrt.dtypes import DType
from cpmrt.memory.plan import ALIGNMENT, Region
from cpmrt.models.layers import EMBED
from cpmrt.tensor_spec import BufferSpec, Packing, Quantization, Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats import FORMATS, format_of
from cpmrt.weights.formats.blocks import BLOCK_TYPES
from cpmrt.weights.formats.gptq import V1_STEPS
from cpmrt.weights.gguf.specs import unpaired
from cpmrt.weights.safetensors import FLOATS

OWN_FORMAT = "gptq"
"""The format in which weights are staged whose codes are rounded or random, not read from a file."""
STAGING = "staging"
LARGEST_STAGING_BYTES = 128 << 20
"""The largest staging area that several sources share; a single source that is larger gets as much as it needs."""
ROUNDED_BYTES = 16 << 20
"""The most bytes in 16 bits of a piece that is rounded from or unpacked to these, unless 64 rows have more."""
_ITEM_BYTES = 2
_BLOCK = 256
_BLOCKS_PER_SM = 8
_RUN = 8
"""Weights that a thread of `UNPACK_BLOCKS` writes."""
_REPACK, _REPACK_BLOCKS = "linear_packed/repack.cu", "linear_packed/repack_blocks.cu"
REPACK_CODES, REPACK_SCALES = (
    KernelSpec(name, _REPACK, constants=RepackConstants, reason="loading: 4-bit weights")
    for name in ("repack_codes", "repack_scales")
)
REPACK_BLOCK_CODES, REPACK_BLOCK_SCALES = (
    KernelSpec(name, _REPACK_BLOCKS, constants=RepackConstants, reason="loading: blocks of GGUF files")
    for name in ("repack_block_codes", "repack_block_scales")
)
UNPACK_BLOCKS = KernelSpec(
    "unpack_blocks", "linear_packed/unpack_blocks.cu", constants=("FORMAT",),
    reason="loading: blocks of GGUF files to 16 bits",
)  # fmt: skip
ROUND = KernelSpec(
    "round_weights", "load/round_weights.cu", constants=("WEIGHT_BITS",), reason="loading: 16 bits to 2, 4 or 8"
)


@dataclass(frozen=True)
class Destination:
    """The arena that weights are loaded into: its device address, and its regions by name.

    `launch` launches the kernels of loading; copies are in the order of its stream.
    """

    arena: int
    regions: Mapping[str, Region]
    device: Device
    launch: Launcher

    @property
    def dtype(self) -> DType:
        """The type of weights that are not quantised, and of scales."""
        return self.launch.modules.dtype

    def address(self, region: str, offset: int = 0) -> np.uint64:
        """Return the device address of a byte of a region."""
        address: np.uint64 = np.uint64(self.arena + self.regions[region].offset + offset)
        return address


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a source: its rows `begin` to `end`, which are rows from `first_row` on of the weight `spec`.

    `codes`, `scales`, `zeros` and `values` are the bytes of the staging area at which these begin: codes, scales (of
    2 bytes) and zero points as the source's format has them (blocks of GGUF hold all three), and the rows of a
    source in 16 bits, from which its codes and scales are made. `end_byte`: the end of all.
    """

    spec: TensorSpec
    source: Source
    begin: int
    end: int
    first_row: int
    codes: int = 0

    @property
    def quant(self) -> Quantization:
        assert self.spec.quant is not None, self.spec.name
        return self.spec.quant

    @property
    def num_rows(self) -> int:
        return self.end - self.begin

    @property
    def num_columns(self) -> int:
        return self.source.shape[1]

    @property
    def num_groups(self) -> int:
        return self.num_columns // self.quant.group_size

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in blocks of GGUF; 0 for any other source."""
        return self.source.packing.row_bytes if self.source.packing else 0

    @property
    def scales(self) -> int:
        if self.row_bytes:
            return self.codes
        return self.codes + _aligned(self.num_rows * self.num_columns * self.quant.bits // 8)

    @property
    def zeros(self) -> int:
        return self.scales + _aligned(self.num_rows * self.num_groups * _ITEM_BYTES)

    @property
    def values(self) -> int:
        return self.zeros + _aligned(-(-self.num_rows // 8) * 4 * self.num_groups)

    @property
    def end_byte(self) -> int:
        if self.row_bytes:
            return self.codes + _aligned(self.num_rows * self.row_bytes)
        rows_bytes = 0 if self.source.packing else self.num_rows * self.num_columns * _ITEM_BYTES
        return self.values + _aligned(rows_bytes)


def is_unpacked(spec: TensorSpec) -> bool:
    """Whether the device unpacks a weight from blocks of GGUF to 16 bits: only if its rows keep their order."""
    in_blocks = all(source.packing and source.packing.row_bytes and not source.rows for source in spec.sources)
    return spec.quant is None and in_blocks


def waves(specs: Sequence[TensorSpec], nbytes: int) -> Iterator[list[Piece]]:
    """Yield the pieces of `specs` that pass through the staging area, as many at a time as fit `nbytes` together."""
    wave, end = list[Piece](), 0
    for piece in _pieces(specs):
        if wave and end + piece.end_byte > nbytes:
            yield wave
            wave, end = [], 0
        wave.append(replace(piece, codes=end))
        end += piece.end_byte
    if wave:
        yield wave


def staging_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes of the staging area that `waves` needs; 0 where no weight passes through it."""
    sizes = [piece.end_byte for piece in _pieces(specs)]
    return max(max(sizes), min(sum(sizes), LARGEST_STAGING_BYTES)) if sizes else 0


def staging_buffers(specs: Iterable[TensorSpec]) -> Iterator[BufferSpec]:
    """Yield the staging area of `specs` if any weight passes through it. It lives before the first step only."""
    if nbytes := staging_bytes(specs):
        yield BufferSpec(STAGING, (nbytes,), EMBED - 1, EMBED - 1, np.uint8)


def _pieces(specs: Iterable[TensorSpec]) -> Iterator[Piece]:
    """Yield the pieces of all `specs` that are quantised or unpacked, each at the beginning of the staging area."""
    for spec in specs:
        for source, rows in spec.parts() if spec.quant or is_unpacked(spec) else ():
            num_rows, num_columns = source.shape
            whole = source.packing is not None and spec.quant is not None
            step = num_rows if whole else max(ROUNDED_BYTES // (_ITEM_BYTES * num_columns) // 64, 1) * 64
            for begin in range(0, num_rows, step):
                yield Piece(spec, source, begin, min(begin + step, num_rows), rows.start + begin)


def takes_blocks(spec: TensorSpec) -> bool:
    """Whether a packed product can hold a weight in blocks of GGUF.

    Its rows are in order or, in qkv, reordered within each head as `unpaired` has it.
    """
    if spec.product in (None, "per_head") or spec.num_experts or spec.shape[1] % SLICE_COLUMNS:
        return False
    if any(source.packing is None or source.packing.format not in BLOCK_TYPES for source in spec.sources):
        return False
    pairs = [source for source in spec.sources if source.rows is not None]
    if spec.product != "qkv":
        return not pairs
    return spec.head_dim > 0 and all(source.rows == unpaired(source.shape[0], spec.head_dim) for source in pairs)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def piece_reads(piece: Piece, checkpoint: Checkpoint, staging: int, dtype: DType) -> Iterator[ReadJob]:
    """Plan the reads that bring a piece to the staging area, which begins at byte `staging` of the arena."""
    source, entries = piece.source, checkpoint.entries
    if source.packing is None:
        elements = elements_of(source, range(piece.begin, piece.end))
        yield from reads_of(entries[source.name], staging + piece.values, dtype, elements)
        return
    if piece.row_bytes:
        rows = range(piece.begin * piece.row_bytes, piece.end * piece.row_bytes)
        yield from reads_of(entries[source.name], staging + piece.codes, None, [rows])
        return
    row = format_of(source)
    yield from reads_of(entries[row.codes.of(source.name)], staging + piece.codes, None)
    scales = entries[row.scales.of(source.name)]
    # Repacking takes scales of either 16-bit type, so only those in float32 are converted.
    is_wide = FLOATS[scales.dtype] is DType.FLOAT32
    yield from reads_of(scales, staging + piece.scales, dtype if is_wide else None)
    if row.zeros and not source.packing.symmetric:
        yield from reads_of(entries[row.zeros.of(source.name)], staging + piece.zeros, None)


def repack_modules(specs: Iterable[TensorSpec], device: Device) -> list[Module]:
    """Return the modules that loading these weights launches, each once."""
    found: list[Module] = []
    for spec in specs:
        for source in spec.sources:
            found += [module for module in _modules(spec, source, device) if module not in found]
    return found


def _modules(spec: TensorSpec, source: Source, device: Device) -> list[Module]:
    packing = source.packing
    if spec.quant is None:
        return [_unpacking(packing)] if packing is not None and is_unpacked(spec) else []
    layout = packed_layout(spec, device)
    if packing is not None and packing.row_bytes:
        return [(_REPACK_BLOCKS, macros_of(_block_constants(layout, packing)))]
    rounding: list[Module] = [(ROUND.file, {"WEIGHT_BITS": layout.bits})] if packing is None else []
    return [(_REPACK, macros_of(_constants(layout, source))), *rounding]


def round_rows(piece: Piece, to: Destination, fault: np.uint64) -> None:
    """Make codes and scales from the rows of a staged piece in 16 bits.

    The kernel sets the word at address `fault` if a value is not finite, or in 2 bits not ternary.
    """
    sizes = (np.int32(piece.num_rows), np.int32(piece.num_columns), np.int32(piece.quant.group_size))
    codes, scales, values = (to.address(STAGING, place) for place in (piece.codes, piece.scales, piece.values))
    grid = -(-piece.num_rows * piece.num_columns // (8 * _BLOCK))
    to.launch(ROUND, {"WEIGHT_BITS": piece.quant.bits}, grid, _BLOCK, codes, scales, fault, values, *sizes)


def repack_codes(piece: Piece, to: Destination) -> None:
    """Write the staged codes to the packed weight. Its region `perm`, if any, orders the columns: it must be filled."""
    perm = f"{piece.spec.name}.perm"
    order = to.address(perm) if perm in to.regions else None
    _repack(REPACK_CODES, piece, to, piece.codes, order)


def repack_scales(piece: Piece, to: Destination, stored: DType) -> None:
    """Write the staged scales, which are of the type `stored`, and zero points to the packed weight.

    Of a weight in blocks of GGUF plain scales are staged here, for random codes.
    """
    packing = None if piece.row_bytes else piece.source.packing
    zeros = None if packing is None or packing.symmetric else to.address(STAGING, piece.zeros)
    addend = V1_STEPS[4] if packing is not None and packing.v1_zeros else 0
    more = (np.int32(piece.quant.group_size), np.int32(stored is DType.FLOAT16), np.int32(addend))
    _repack(REPACK_SCALES, piece, to, piece.scales, zeros, *more)


def repack_blocks(piece: Piece, to: Destination, fault: np.uint64) -> None:
    """Write staged blocks to the packed weight; sets the word at address `fault` where a scale is not finite."""
    assert piece.source.packing is not None, piece.source.name
    layout, packed = packed_layout(piece.spec, to.device), to.address(f"{piece.spec.name}.codes")
    counts = (piece.first_row, piece.num_rows, layout.out_features, layout.num_tiles, piece.source.rows is not None)
    constants, blocks = _block_constants(layout, piece.source.packing), to.address(STAGING, piece.codes)
    grid = _grid(to)
    to.launch(REPACK_BLOCK_CODES, constants, grid, _BLOCK, packed, blocks, *map(np.int32, counts))
    to.launch(REPACK_BLOCK_SCALES, constants, grid, _BLOCK, packed, fault, blocks, *map(np.int32, counts))


def unpack_blocks(piece: Piece, to: Destination, fault: np.uint64) -> None:
    """Write staged blocks as 16-bit weights; sets the word at address `fault` where one is beyond float16."""
    assert piece.source.packing is not None, piece.source.name
    constants, row_bytes = _unpacking(piece.source.packing)[1], piece.num_columns * _ITEM_BYTES
    out, blocks = to.address(piece.spec.name, piece.first_row * row_bytes), to.address(STAGING, piece.codes)
    count = np.int64(piece.num_rows * piece.num_columns // _RUN)
    to.launch(UNPACK_BLOCKS, constants, _grid(to), _BLOCK, out, fault, blocks, count)


def _unpacking(packing: Packing) -> Module:
    return UNPACK_BLOCKS.file, {"FORMAT": BLOCK_TYPES[packing.format].number}


def _grid(to: Destination) -> int:
    return _BLOCKS_PER_SM * to.device.num_sms


def _repack(
    kernel: KernelSpec, piece: Piece, to: Destination, staged: int, beside: KernelArgument, *more: KernelArgument
) -> None:
    layout = packed_layout(piece.spec, to.device)
    counts = (piece.first_row, piece.num_rows, layout.out_features, layout.num_tiles)
    constants, grid = _constants(layout, piece.source), _grid(to)
    packed, source = to.address(f"{piece.spec.name}.codes"), to.address(STAGING, staged)
    to.launch(kernel, constants, grid, _BLOCK, packed, source, beside, *map(np.int32, counts), *more)


def _constants(layout: PackedLayout, source: Source) -> RepackConstants:
    packing = source.packing
    return layout.repack_constants(FORMATS[packing.format if packing and not packing.row_bytes else OWN_FORMAT].number)


def _block_constants(layout: PackedLayout, packing: Packing) -> RepackConstants:
    return layout.repack_constants(BLOCK_TYPES[packing.format].number)
