"""Plans the builds of the kernels of experts for a weight and a number of rows: tiles, rings, shared memory.

No choice here changes a bit of a result: the kernels add in the order of the columns whatever their sizes are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear_packed.layout import SLICE_COLUMNS, PackedWeight, Weight
from cpmrt.errors import UnsupportedModelError
from cpmrt.executor import MAX_ROWS

_PAIRS = 8
"""Pairs (a row and one of its experts) in a tile of the tensor cores."""
_PAD_BYTES = 64
"""Unused bytes after each row of x in shared memory."""
_CHUNK_TILES = 8
_STAGES = 3
_LONG_STAGE_COLUMNS = 768
_RESIDENT_BYTES = 40 << 10
_BYTES_AHEAD = 14 << 20
"""The most bytes of a weight that come to the L2 before its kernel starts: what the memory of an H200 delivers in 3 us,
about the time from the end of one product's reads to the first reads of the next."""
WARPS = 8
"""Warps of a block, except in products of few rows."""
_AHEAD = 3
"""Turns of weights that a warp of experts.cu has in flight in a step (not a chunk)."""
_ROUTE_WARPS = 12
"""The most warps that share a row when it is scored: each thread then has one piece of eight of 2304 columns."""
_ROUTE_PIECE = 8
_ROUTER_BYTES = 46 << 10
"""The most shared memory for a router and its norm; larger ones are not held there but read when they are needed."""
_MOST_ROW_WARPS = 14
_DOWN_PARTS = 4
"""Parts into which the columns of the last product's input are cut; a warp takes one part at a time."""
_ROW_AHEAD = 2
"""Turns of weights that a warp of experts_row.cu has in flight: enough to keep the memory busy. With more, warps that
finish their first products early would take bandwidth from the others."""
_RESERVED_BYTES = 1 << 10
"""Bytes of shared memory that the device keeps for itself in each block."""


@dataclass(frozen=True, slots=True)
class ProductConstants:
    """Compile-time constants of experts.cu; the last three are for weights in 4 bits only."""

    product: int
    in_features: int
    weight_bits: int
    token_tiles: int
    warp_tiles: int
    warps: int
    ahead: int
    stage_slices: int
    chunk: bool
    runs: int | None = None
    scale_group: int | None = None
    zeros: int | None = None

    @property
    def tokens(self) -> int:
        """The pairs that a block multiplies together."""
        return _PAIRS * self.token_tiles

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory: stages of x, and in a step a ring of weights for each warp."""
        columns = self.stage_slices * slice_columns(self.weight_bits) or self.in_features
        stages = (_STAGES if self.stage_slices else 1) * self.tokens * (columns * 2 + _PAD_BYTES)
        together = 1 if self.token_tiles > 1 else slices_together(self.weight_bits, self.scale_group)
        slot = slot_bytes(self.weight_bits, self.scale_group, self.zeros)
        return stages + (0 if self.chunk else self.warps * self.ahead * together * slot) + 8 * self.tokens


@dataclass(frozen=True, slots=True)
class GateUpRowConstants:
    """Compile-time constants of gate_up_row.cu; the last three are for weights in 4 bits only."""

    in_features: int
    experts: int
    top: int
    route_warps: int
    weight_bits: int
    warps: int
    ahead: int
    runs: int | None = None
    scale_group: int | None = None
    zeros: int | None = None

    @property
    def turn_bytes(self) -> int:
        """The bytes of one turn of weights in a warp's ring."""
        return turn_bytes(self.weight_bits, self.scale_group, self.zeros)

    @property
    def turns(self) -> int:
        """The turns that a warp takes for a tile."""
        together = slices_together(self.weight_bits, self.scale_group)
        return ceil(self.in_features / (slice_columns(self.weight_bits) * together))

    @property
    def row_bytes(self) -> int:
        """The bytes of the row and of the sums of its scores."""
        return 2 * self.in_features + 4 * self.route_warps * (1 + self.experts)

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory: the rings, whose place norm and router take at first, and the row."""
        rings = self.warps * self.ahead * self.turn_bytes
        return max(rings, router_bytes(self.in_features, self.experts, self.route_warps)) + self.row_bytes


@dataclass(frozen=True, slots=True)
class ExpertsRowConstants:
    """Compile-time constants of experts_row.cu, which explains them; the last four are for weights in 4 bits only."""

    in_features: int
    inner: int
    experts: int
    top: int
    route_warps: int
    weight_bits: int
    warps: int
    ahead: int
    portable: bool
    runs: int | None = None
    down_runs: int | None = None
    scale_group: int | None = None
    zeros: int | None = None

    @property
    def grid(self) -> int:
        """The number of blocks, which must all run at once."""
        return ceil(self.top * self.inner // 8 / self.warps)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of dynamic shared memory without the rings: the row, sums of scores, parts of inner, sums of the warps
        for their tiles, barriers."""
        columns = slice_columns(self.weight_bits)
        row_sums = ceil((4 * self.route_warps * (1 + self.experts) + 132) / 16) * 16
        tiles, left = divmod(self.in_features // 16, self.grid)
        jobs = tiles * self.top * _DOWN_PARTS + ceil(left * self.top * _DOWN_PARTS / self.grid)
        parts = min(self.warps, jobs) * ceil(self.inner // columns / _DOWN_PARTS) * columns * 2
        barriers = self.warps * self.ahead * 8
        return 2 * self.in_features + row_sums + parts + tiles * self.top * _DOWN_PARTS * 64 + barriers

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory: rings, or norm and router where these are larger, and `fixed_bytes`."""
        rings = self.warps * self.ahead * turn_bytes(self.weight_bits, self.scale_group, self.zeros)
        return max(rings, router_bytes(self.in_features, self.experts, self.route_warps)) + self.fixed_bytes


@dataclass(frozen=True, slots=True)
class DownConstants:
    """Compile-time constants of experts_down.cu; the last three are for weights in 4 bits only."""

    in_features: int
    weight_bits: int
    rows: int
    ahead: int
    runs: int | None = None
    scale_group: int | None = None
    zeros: int | None = None

    def shared_bytes(self, num_pairs: int) -> int:
        """Return the bytes of dynamic shared memory in a step of `num_pairs` pairs: a ring a warp, sums, shares."""
        tokens = 1 if self.rows == 1 else _PAIRS
        together = 2 if self.rows == 1 and not has_many_groups(self.scale_group) else 1
        row_bytes = together * slice_columns(self.weight_bits) * 2 + _PAD_BYTES
        turn_bytes = together * slot_bytes(self.weight_bits, self.scale_group, self.zeros) + tokens * row_bytes
        return WARPS * (self.ahead * turn_bytes + 512 + 32) + num_pairs * (64 + 4)


def bytes_ahead(weight: Weight, num_experts: int, top: int) -> tuple[int, int]:
    """Return the bytes of an expert's part of a weight, and how many of them are fetched before its kernel starts."""
    expert_bytes = _num_bytes(weight) // num_experts
    return expert_bytes, min(expert_bytes, _BYTES_AHEAD // top // 16 * 16)


def fetched_bytes(weight: Weight) -> int:
    """Return how many bytes of a later kernel's weight experts_row.cu brings to the L2, a multiple of 16."""
    return min(_num_bytes(weight), _BYTES_AHEAD) // 16 * 16


def _num_bytes(weight: Weight) -> int:
    if isinstance(weight, PackedWeight):
        return weight.layout.num_bytes
    return 2 * weight.shape[0] * weight.shape[1]


def slice_columns(weight_bits: int) -> int:
    """Return the columns of a slice, which kernels take of a weight at a time."""
    return SLICE_COLUMNS if weight_bits == 4 else SLICE_COLUMNS // 2


def route_warps(hidden: int) -> int:
    """Return the warps that share a row of `hidden` columns when it is scored, which fixes the order of its sums.

    They are the fewest that take no more turns than the most warps would.
    """
    pieces = hidden // _ROUTE_PIECE
    return ceil(pieces / ceil(pieces / (32 * _ROUTE_WARPS)) / 32)


def router_bytes(hidden: int, num_experts: int, warps: int) -> int:
    """Return the bytes of shared memory for norm and router while `warps` warps score a row; 0 if it is too much."""
    threads = 32 * warps
    needed = (1 + num_experts) * ceil(hidden / _ROUTE_PIECE / threads) * threads * 16
    return needed if needed <= _ROUTER_BYTES else 0


def most_tiles(num_rows: int, top: int, num_experts: int, tokens: int) -> int:
    """Return the most tiles of at most `tokens` pairs of one expert that `num_rows` rows can make."""
    used = min(num_experts, num_rows * top)
    return used if num_rows <= tokens else used + num_rows * top // tokens


def product_constants(product: int, weight: Weight, num_rows: int, *, is_chunk: bool) -> ProductConstants:
    """Choose how a product of experts.cu is built; no choice changes a bit of the result."""
    bits, layout = held_in(weight)
    columns = slice_columns(bits)
    tiles = _CHUNK_TILES if is_chunk else 1 if num_rows <= _PAIRS else 2 if num_rows <= 2 * _PAIRS else 4
    in_features = weight.shape[1]
    # A stage of x covers whole turns of weights, and two stages at least as many columns as the weights in flight.
    stage = _LONG_STAGE_COLUMNS if tiles == 1 else 2 * SLICE_COLUMNS if bits == 4 and not is_chunk else SLICE_COLUMNS
    if tiles == 1 and _PAIRS * (2 * in_features + _PAD_BYTES) <= _RESIDENT_BYTES:
        stage = 0
    # A warp with two tiles reads x once for both; the scales of small groups leave no registers for that.
    is_wide = is_chunk and (bits == 16 or layout[1:] == (SLICE_COLUMNS, False))
    return ProductConstants(
        product, in_features, bits, tiles, 2 if is_wide else 1, 4 if tiles == 1 else WARPS, _AHEAD,
        stage // columns, is_chunk, *layout,
    )  # fmt: skip


def row_constants(weight: Weight, num_experts: int, top: int, device: Device) -> GateUpRowConstants:
    """Choose how gate_up_row.cu is built; no choice changes a bit of the result.

    The warps of a block are chosen so that the busiest multiprocessor, which takes one block at a time, has the fewest
    tiles.
    """
    bits, layout = held_in(weight)
    rows, in_features = weight.shape
    tiles, shares = top * rows // (2 * num_experts) // 8, route_warps(in_features)

    def busiest(warps: int) -> int:
        return ceil(ceil(tiles / warps) / device.num_sms) * warps

    warps = min(range(shares, _MOST_ROW_WARPS + 1), key=busiest)
    least = GateUpRowConstants(in_features, num_experts, top, shares, bits, warps, 1, *layout)
    ring = device.shared_bytes_per_block - least.row_bytes
    return replace(least, ahead=max(1, min(least.turns, ring // (warps * least.turn_bytes))))


def experts_row_constants(
    gate_up: Weight, down: Weight, num_experts: int, top: int, device: Device
) -> ExpertsRowConstants | None:
    """Choose how experts_row.cu is built; no choice changes a bit of the result.

    Returns None where its blocks could not all run at once.
    """
    (bits, layout), (down_bits, down_layout) = held_in(gate_up), held_in(down)
    if (bits, layout[1:]) != (down_bits, down_layout[1:]):
        return None
    in_features, inner = gate_up.shape[1], down.shape[1]
    warps = max(route_warps(in_features), ceil(top * inner // 8 / device.num_sms))
    built = ExpertsRowConstants(
        in_features, inner, num_experts, top, route_warps(in_features), bits, warps, _ROW_AHEAD, device.is_portable,
        layout[0], down_layout[0], *layout[1:],
    )  # fmt: skip
    return built if warps <= _MOST_ROW_WARPS and built.shared_bytes <= device.shared_bytes_per_block else None


def row_words(hidden: int, inner: int, top: int) -> int:
    """Return how many 8-byte words experts_row.cu exchanges: its count of launches and an unused word, words of two
    columns of inner, and sums of parts of a row."""
    return 2 + top * inner // 2 + top * _DOWN_PARTS * hidden


def down_constants(weight: Weight, num_rows: int, top: int, device: Device) -> DownConstants:
    """Choose how experts_down.cu is built; no choice changes a bit of the result.

    If possible, two blocks fit on a multiprocessor. Raises UnsupportedModelError where not even one does.
    """
    bits, layout = held_in(weight)
    rows, room = 1 if num_rows == 1 else MAX_ROWS, device.shared_bytes_per_block
    choices = [DownConstants(weight.shape[1], bits, rows, ahead, *layout) for ahead in (6, 5, 4, 3, 2, 1)]
    for blocks in (2, 1):
        for choice in choices:
            if blocks * (choice.shared_bytes(num_rows * top) + _RESERVED_BYTES) <= room + _RESERVED_BYTES:
                return choice
    raise UnsupportedModelError(
        "num_experts_per_tok is too large for this GPU", expected="sums of 64 rows in its shared memory", actual=top,
        fix="use a smaller max_sequences, or executor='reference'",
    )  # fmt: skip


def held_in(weight: Weight) -> tuple[int, tuple[int | None, int | None, int | None]]:
    """Return the bits of a weight and, for one in 4 bits, the runs, scale group and zero points of its layout."""
    if not isinstance(weight, PackedWeight):
        return 16, (None, None, None)
    layout = weight.layout
    return layout.bits, (layout.runs, layout.scale_group, layout.zeros)


def slices_together(weight_bits: int, scale_group: int | None) -> int:
    """Return the slices that a warp multiplies at a time with one tile of tokens."""
    return 1 if has_many_groups(scale_group) else 3 if weight_bits == 4 else 2


def has_many_groups(scale_group: int | None) -> bool:
    """Whether a slice of a weight has several scale groups: slices are then multiplied one at a time."""
    return scale_group is not None and scale_group < SLICE_COLUMNS


def turn_bytes(weight_bits: int, scale_group: int | None, zeros: int | None) -> int:
    """Return the bytes of a turn: the slices of a tile that a warp multiplies at a time with one row."""
    return slices_together(weight_bits, scale_group) * slot_bytes(weight_bits, scale_group, zeros)


def slot_bytes(weight_bits: int, scale_group: int | None, zeros: int | None) -> int:
    """Return the bytes of 16 rows of a slice of a weight in shared memory."""
    if scale_group is None:
        return 16 * slice_columns(weight_bits) * 2
    return 16 * slice_columns(weight_bits) // 2 + SLICE_COLUMNS // scale_group * (64 if zeros else 32)
