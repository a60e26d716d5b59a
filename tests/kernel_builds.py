"""Builds of the kernels that are tested, as data: for each file with compile-time sizes, sets of values for them.

The compile test takes the first set on every architecture and the others on a few. What a model needs follows from
`cpmrt.cuda.precompile`.
"""

from __future__ import annotations

from collections.abc import Mapping

from cpmrt.weights.formats import FORMATS
from cpmrt.weights.formats.blocks import BLOCK_TYPES

_PORTABLE_LINEAR = {"HALF_TILE": 0, "CLUSTER": 1, "NORM": 1, "SMEM_BYTES": 98304}
_ONE_ROUND = {"TOKEN_TILES": 1, "HALF_TILE": 0, "CLUSTER": 1, "SPLIT_WARPS": 8, "ONE_ROW": 1}
_NO_NORM = {"NORM": 0}
_WIDER_ROWS = {"ROW_PITCH": 1056}
_FATRELU = {"FATRELU": 0x3C23D70A}  # 0.01 as the bits of a float
_PLAIN = {"CLUSTER": 8, "TEAMS": 1, "TREE": 0, "WINDOW": 0, "SELECTED": 0, "FP8": 0}
_TREE = {"STAGES": 3, "ROW_TILES": 2, "CLUSTER": 8, "WINDOW": 0}
_PACKED = {
    **{"SCALE_GROUP": 128, "ZEROS": 0, "WEIGHT_BITS": 4, "NORM": 1, "WARPGROUPS": 0, "STAGE_SLICES": 0, "STAGES": 4},
    **{"EARLY_SLOTS": 1, "CLUSTERS": 0, "RECEIVED_APART": 0, "FEEDS": 0, "TRIGGER": 0, "KEPT_ROUNDS": 1},
    **{"SMEM_BYTES": 98304, "PORTABLE": 0},
}
_ONE_ROW = _PACKED | {"RUNS": 8, "ROWS": 1, "SHARED_RUN": 0, "PREPARED": 0}
_W16 = {"WEIGHT_BITS": 16}
_W4 = {"WEIGHT_BITS": 4, "RUNS": 1, "SCALE_GROUP": 128, "ZEROS": 0}
_W4_SMALL_GROUPS = _W4 | {"RUNS": 8, "SCALE_GROUP": 32, "ZEROS": 1}
_DOWN = {"DOWN_RUNS": 8}
_GATE_UP = {"PRODUCT": 0, "IN_FEATURES": 2304, "WARP_TILES": 1, "AHEAD": 3, "CHUNK": 0}
_CHUNK = {"TOKEN_TILES": 8, "WARPS": 8, "CHUNK": 1}
_SHORT = {"SCALE_GROUP": 128, "ZEROS": 0, "WEIGHT_BITS": 4}
_TERNARY, _Q8_MINIMUMS = _SHORT | {"WEIGHT_BITS": 2}, {"SCALE_GROUP": 16, "ZEROS": 2, "WEIGHT_BITS": 8}
_RESCORE = {"IN_FEATURES": 4096, "VOCAB": 73448, "BLOCKS": 132}
_HEAD_64, _HEAD_128 = ({**_PORTABLE_LINEAR, "HEAD_DIM": size} for size in (64, 128))

CONSTANTS: dict[str, tuple[Mapping[str, int], ...]] = {
    "linear/gemm.cu": (
        {"TILE_N": 128, "TILE_K": 32, "STAGES": 3},
        {"TILE_N": 128, "TILE_K": 64, "STAGES": 3},
        {"TILE_N": 256, "TILE_K": 32, "STAGES": 4},
        {"TILE_N": 256, "TILE_K": 64, "STAGES": 3},
        {"TILE_N": 256, "TILE_K": 64, "STAGES": 4},
        {"TILE_N": 64, "TILE_K": 32, "STAGES": 3},
    ),
    "linear/linear.cu": (
        {"LINEAR": 0, "IN_FEATURES": 1024, "TOKEN_TILES": 1, "GROUP": 4, "SPLIT_WARPS": 8} | _HEAD_64,
        {"LINEAR": 0, "IN_FEATURES": 4096, "TOKEN_TILES": 4, "GROUP": 3, "SPLIT_WARPS": 8} | _HEAD_128,
        {"LINEAR": 1, "IN_FEATURES": 4096, "TOKEN_TILES": 1, "GROUP": 4, "SPLIT_WARPS": 8}
        | _PORTABLE_LINEAR
        | _NO_NORM,
        {"LINEAR": 1, "IN_FEATURES": 4096, "TOKEN_TILES": 4, "GROUP": 4, "SPLIT_WARPS": 8}
        | _PORTABLE_LINEAR
        | _NO_NORM,
        {"LINEAR": 2, "IN_FEATURES": 4096, "TOKEN_TILES": 1, "GROUP": 4, "SPLIT_WARPS": 1} | _PORTABLE_LINEAR,
        {"LINEAR": 2, "IN_FEATURES": 1024, "TOKEN_TILES": 2, "GROUP": 4, "SPLIT_WARPS": 8} | _PORTABLE_LINEAR,
        {"LINEAR": 2, "IN_FEATURES": 1536, "TOKEN_TILES": 1, "GROUP": 4, "SPLIT_WARPS": 8}
        | _PORTABLE_LINEAR
        | _FATRELU,
        {"LINEAR": 3, "IN_FEATURES": 4096, "TOKEN_TILES": 2, "GROUP": 3, "SPLIT_WARPS": 1} | _PORTABLE_LINEAR,
        {"LINEAR": 3, "IN_FEATURES": 1024, "TOKEN_TILES": 4, "GROUP": 5, "SPLIT_WARPS": 8} | _PORTABLE_LINEAR,
        {"LINEAR": 0, "IN_FEATURES": 8192, "TOKEN_TILES": 2, "GROUP": 3, "SPLIT_WARPS": 8} | _HEAD_128 | _NO_NORM,
        {"LINEAR": 0, "IN_FEATURES": 768, "TOKEN_TILES": 1, "GROUP": 2, "SPLIT_WARPS": 8} | _HEAD_64 | _WIDER_ROWS,
        {"LINEAR": 2, "IN_FEATURES": 4096, "TOKEN_TILES": 2, "GROUP": 4, "SPLIT_WARPS": 8}
        | _PORTABLE_LINEAR
        | {"HALF_TILE": 1},
        {"LINEAR": 3, "IN_FEATURES": 4096, "TOKEN_TILES": 8, "GROUP": 2, "SPLIT_WARPS": 1}
        | {"HALF_TILE": 0, "CLUSTER": 1, "NORM": 0, "SMEM_BYTES": 232448},
        {"LINEAR": 2, "IN_FEATURES": 1024, "GROUP": 4, "NORM": 1, "SMEM_BYTES": 104832, "HELD_CHUNKS": 2} | _ONE_ROUND,
        {"LINEAR": 1, "IN_FEATURES": 4096, "GROUP": 1, "NORM": 0, "SMEM_BYTES": 117248, "HELD_CHUNKS": 2} | _ONE_ROUND,
        {"LINEAR": 1, "IN_FEATURES": 1024, "GROUP": 2, "NORM": 0, "SMEM_BYTES": 68992, "HELD_CHUNKS": 0} | _ONE_ROUND,
    ),
    "screened_head/head_rows.cu": ({"IN_FEATURES": 4096, "OWNERS": 8}, {"IN_FEATURES": 320, "OWNERS": 16}),
    "screened_head/rescore.cu": (
        _RESCORE | {"ROWS": 1, "CLUSTER": 1},
        _RESCORE | {"ROWS": 8, "CLUSTER": 2, "IN_FEATURES": 320},
        _RESCORE | {"ROWS": 8, "CLUSTER": 1, "VOCAB": 151936, "BLOCKS": 16},
        _RESCORE | {"ROWS": 16, "CLUSTER": 2, "IN_FEATURES": 2048, "VOCAB": 130560},
        _RESCORE | {"ROWS": 32, "CLUSTER": 1},
    ),
    "screened_head/screen_head.cu": tuple(
        {"IN_FEATURES": size, "RUNS": runs, "SCALE_GROUP": 128, "WEIGHT_BITS": 8, "ZEROS": 0, "STEPS": 32}
        for size, runs in ((4096, 1), (1024, 8))
    ),
    "rows/route.cu": (
        {"HIDDEN": 2304, "EXPERTS": 8, "TOP": 2, "ROUTE_WARPS": 9},
        {"HIDDEN": 4096, "EXPERTS": 32, "TOP": 8, "ROUTE_WARPS": 8},
    ),
    "rows/combine.cu": ({"HIDDEN": 2304},),
    "experts/group_pairs.cu": ({"EXPERTS": 8}, {"EXPERTS": 32}),
    "experts/experts.cu": (
        _GATE_UP | _W4 | {"TOKEN_TILES": 1, "WARPS": 4, "STAGE_SLICES": 0},
        _GATE_UP | _W4 | {"TOKEN_TILES": 1, "WARPS": 4, "STAGE_SLICES": 6, "IN_FEATURES": 8192},
        _GATE_UP | _W4_SMALL_GROUPS | {"TOKEN_TILES": 2, "WARPS": 8, "STAGE_SLICES": 2},
        _GATE_UP | _W16 | {"TOKEN_TILES": 2, "WARPS": 8, "STAGE_SLICES": 2},
        _GATE_UP | _W4_SMALL_GROUPS | {"TOKEN_TILES": 4, "WARPS": 8, "STAGE_SLICES": 2},
        _GATE_UP | _W16 | {"TOKEN_TILES": 4, "WARPS": 8, "STAGE_SLICES": 2},
        _GATE_UP | _CHUNK | _W4 | {"WARP_TILES": 2, "STAGE_SLICES": 1},
        _GATE_UP | _CHUNK | _W4_SMALL_GROUPS | {"STAGE_SLICES": 1},
        _GATE_UP | _CHUNK | _W16 | {"WARP_TILES": 2, "STAGE_SLICES": 2},
        _GATE_UP | _CHUNK | _W4 | {"WARP_TILES": 2, "STAGE_SLICES": 1, "PRODUCT": 1, "IN_FEATURES": 5760},
        _GATE_UP | _CHUNK | _W16 | {"WARP_TILES": 2, "STAGE_SLICES": 2, "PRODUCT": 1, "IN_FEATURES": 5760},
    ),
    "experts/gate_up_row.cu": tuple(
        held | {"IN_FEATURES": 2304, "EXPERTS": 8, "TOP": 2, "ROUTE_WARPS": 9, "WARPS": 11, "AHEAD": ahead}
        for held, ahead in ((_W4, 6), (_W16, 5), (_W4_SMALL_GROUPS, 3))
    )
    + (_W16 | {"IN_FEATURES": 4096, "EXPERTS": 32, "TOP": 8, "ROUTE_WARPS": 8, "WARPS": 14, "AHEAD": 1},),
    "experts/experts_row.cu": tuple(
        held
        | {"IN_FEATURES": 2304, "INNER": 5760, "EXPERTS": 8, "TOP": 2, "ROUTE_WARPS": 9, "WARPS": 11, "AHEAD": 2}
        | {"PORTABLE": portable}
        for held, portable in ((_W4 | _DOWN, 0), (_W4 | _DOWN, 1), (_W16, 0), (_W4_SMALL_GROUPS | _DOWN, 0))
    )
    + (
        _W16
        | {"IN_FEATURES": 4096, "INNER": 1152, "EXPERTS": 32, "TOP": 8, "ROUTE_WARPS": 8, "WARPS": 9, "AHEAD": 2}
        | {"PORTABLE": 0},
    ),
    "experts/experts_down.cu": tuple(
        held | {"IN_FEATURES": 5760, "ROWS": rows, "AHEAD": 4}
        for held in (_W4, _W16, _W4_SMALL_GROUPS)
        for rows in (1, 64)
    ),
    "linear_packed/linear_packed.cu": (
        _ONE_ROW
        | {"LINEAR": 4, "IN_FEATURES": 768, "WARPS": 16}
        | _WIDER_ROWS
        | {"KEPT_ROUNDS": 3, "SMEM_BYTES": 83200, "KV_RANK": 256, "NOPE_DIM": 64, "ROPE_DIM": 32, "VALUE_DIM": 64},
        _ONE_ROW
        | {"LINEAR": 1, "IN_FEATURES": 4096, "WARPS": 8}
        | _NO_NORM
        | {"AHEAD": 1},
        _ONE_ROW
        | {"LINEAR": 1, "IN_FEATURES": 2048, "WARPS": 8}
        | _NO_NORM
        | {"EARLY_SLOTS": 5, "SMEM_BYTES": 27520},
        _ONE_ROW
        | {"LINEAR": 1, "IN_FEATURES": 2048, "WARPS": 8}
        | _NO_NORM
        | {"EARLY_SLOTS": 2, "KEPT_ROUNDS": 2, "SMEM_BYTES": 49024},
        _ONE_ROW
        | {"LINEAR": 0, "IN_FEATURES": 2048, "WARPS": 8}
        | {"HEAD_DIM": 128, "EARLY_SLOTS": 2, "KEPT_ROUNDS": 2, "SMEM_BYTES": 49024, "TRIGGER": 3},
        _ONE_ROW
        | {"LINEAR": 2, "IN_FEATURES": 2048, "WARPS": 24}
        | {"EARLY_SLOTS": 2, "KEPT_ROUNDS": 2, "SMEM_BYTES": 136064, "TILE_COPIES": 1},
        _ONE_ROW
        | {"LINEAR": 1, "IN_FEATURES": 6144, "WARPS": 8}
        | _NO_NORM
        | {"EARLY_SLOTS": 3, "SMEM_BYTES": 87936},
        {
            "LINEAR": 0,
            "IN_FEATURES": 4096,
            "RUNS": 8,
            "ROWS": 8,
            "WARPS": 24,
            "SHARED_RUN": 0,
            "PREPARED": 0,
            "HEAD_DIM": 128,
        }
        | _PACKED
        | {"SMEM_BYTES": 182400},
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 64, "WARPS": 16, "SHARED_RUN": 1, "PREPARED": 1}
        | _PACKED
        | {"STAGE_SLICES": 1, "WARPGROUPS": 1, "FEEDS": 1, "SMEM_BYTES": 205696},
        {"LINEAR": 3, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 16, "WARPS": 8, "SHARED_RUN": 1, "PREPARED": 1}
        | _PACKED
        | {"STAGE_SLICES": 2, "ZEROS": 1, "SCALE_GROUP": 32},
        _ONE_ROW
        | {"LINEAR": 0, "IN_FEATURES": 8192, "WARPS": 8}
        | _NO_NORM
        | {"HEAD_DIM": 128},
        _ONE_ROW
        | {"LINEAR": 0, "IN_FEATURES": 768, "WARPS": 16}
        | _WIDER_ROWS
        | {"HEAD_DIM": 16},
        {"LINEAR": 0, "IN_FEATURES": 4096, "RUNS": 8, "ROWS": 32, "WARPS": 20, "SHARED_RUN": 1, "PREPARED": 0}
        | _PACKED
        | {"HEAD_DIM": 128, "WARPGROUPS": 1, "CLUSTERS": 1, "SMEM_BYTES": 232448},
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "ROWS": 16, "WARPS": 20, "SHARED_RUN": 1, "PREPARED": 0}
        | _PACKED
        | _NO_NORM
        | {"CLUSTERS": 1, "RECEIVED_APART": 1, "SMEM_BYTES": 232448},
        {"LINEAR": 3, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 1, "WARPS": 8, "SHARED_RUN": 1, "PREPARED": 0}
        | _PACKED
        | {"WEIGHT_BITS": 8},
        {"LINEAR": 3, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 64, "WARPS": 12, "SHARED_RUN": 1, "PREPARED": 1}
        | _PACKED
        | {"WEIGHT_BITS": 8, "STAGE_SLICES": 1, "WARPGROUPS": 1, "SMEM_BYTES": 232448},
        _ONE_ROW
        | {"LINEAR": 2, "IN_FEATURES": 1024, "WARPS": 16}
        | {"KEPT_ROUNDS": 2},
        _ONE_ROW
        | {"LINEAR": 1, "IN_FEATURES": 16384, "WARPS": 8}
        | _NO_NORM
        | {"KEPT_ROUNDS": 2, "SMEM_BYTES": 84864, "EARLY_SLOTS": 0, "PORTABLE": 1, "SMALL_CHUNKS": 2},
        _ONE_ROW
        | {"LINEAR": 2, "IN_FEATURES": 1536, "WARPS": 16}
        | _FATRELU,
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 1, "WARPS": 16, "SHARED_RUN": 1, "PREPARED": 0}
        | _PACKED
        | {"WEIGHT_BITS": 2, "SMEM_BYTES": 149376, "EARLY_WARPS": 8},
        _ONE_ROW
        | {"LINEAR": 1, "IN_FEATURES": 16384, "WARPS": 16}
        | _NO_NORM
        | {"WEIGHT_BITS": 2, "KEPT_ROUNDS": 2, "SMEM_BYTES": 182400, "EARLY_WARPS": 8, "OWN_RUNS": 1},
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "ROWS": 8, "WARPS": 16, "SHARED_RUN": 0, "PREPARED": 0}
        | _PACKED
        | _NO_NORM
        | {"WEIGHT_BITS": 2, "SCALE_GROUP": 32, "SMEM_BYTES": 149376},
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 64, "WARPS": 16, "SHARED_RUN": 1, "PREPARED": 1}
        | _PACKED
        | {"WEIGHT_BITS": 2, "STAGE_SLICES": 1, "WARPGROUPS": 1, "FEEDS": 1, "SMEM_BYTES": 209792},
        _ONE_ROW
        | {"LINEAR": 1, "IN_FEATURES": 4096, "WARPS": 16}
        | _NO_NORM
        | {"WEIGHT_BITS": 8, "SCALE_GROUP": 16, "ZEROS": 2, "SMEM_BYTES": 182400},
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 16, "WARPS": 16, "SHARED_RUN": 1, "PREPARED": 1}
        | _PACKED
        | {"SCALE_GROUP": 32, "ZEROS": 2, "STAGE_SLICES": 2, "WARPGROUPS": 1, "SMEM_BYTES": 205696},
        {"LINEAR": 0, "IN_FEATURES": 4096, "RUNS": 8, "ROWS": 8, "WARPS": 20, "SHARED_RUN": 1, "PREPARED": 0}
        | _PACKED
        | {"HEAD_DIM": 128, "CLUSTERS": 1, "RECEIVED_APART": 1, "EARLY_SLOTS": 0, "SMEM_BYTES": 107008},
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "ROWS": 8, "WARPS": 20, "SHARED_RUN": 1, "PREPARED": 0}
        | _PACKED
        | _NO_NORM
        | {"CLUSTERS": 1, "RECEIVED_APART": 1, "EARLY_SLOTS": 0, "SMEM_BYTES": 107008},
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 8, "WARPS": 16, "SHARED_RUN": 1, "PREPARED": 1}
        | _PACKED
        | {"FEEDS": 1, "SMEM_BYTES": 203392},
        {"LINEAR": 1, "IN_FEATURES": 16384, "RUNS": 8, "ROWS": 32, "WARPS": 16, "SHARED_RUN": 1, "PREPARED": 1}
        | _PACKED
        | _NO_NORM
        | {"WARPGROUPS": 1, "STAGE_SLICES": 2, "TRIGGER": 2, "SMEM_BYTES": 204288},
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "ROWS": 32, "WARPS": 20, "SHARED_RUN": 1, "PREPARED": 0}
        | _PACKED
        | _NO_NORM
        | {"WARPGROUPS": 1, "CLUSTERS": 1, "RECEIVED_APART": 1, "EARLY_WARPS": 10, "SMEM_BYTES": 169728},
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 32, "WARPS": 16, "SHARED_RUN": 1, "PREPARED": 1}
        | _PACKED
        | {"WARPGROUPS": 1, "STAGE_SLICES": 2, "FEEDS": 1, "TRIGGER": 2, "SMEM_BYTES": 205696},
    ),
    "load/round_weights.cu": ({"WEIGHT_BITS": 4}, {"WEIGHT_BITS": 8}, {"WEIGHT_BITS": 2}),
    "linear_packed/prepare_rows.cu": (
        {"IN_FEATURES": 4096, "ROWS": 64, "SCALE_GROUP": 128, "ZEROS": 0, "WARPGROUPS": 1},
        {"IN_FEATURES": 4096, "ROWS": 64, "SCALE_GROUP": 32, "ZEROS": 2, "WARPGROUPS": 0},
    ),
    "linear_packed/row_layers.cu": tuple(
        {"IN_FEATURES": hidden, "ATTENTION": attention, "INNER": inner, "QKV_ROWS": rows, "HEAD_DIM": head_dim}
        | {"RUNS": 8, "GATE_UP_RUNS": runs, "WEIGHT_BITS": 4, "SCALE_GROUP": 128, "ZEROS": 0, "NEXT": follows}
        | {"GRID": grid, "SLOTS": 5, "SMEM_BYTES": 101376 - 1024 * bool(attends), "ATTENDS": int(bool(attends))}
        | attends
        for hidden, attention, inner, rows, head_dim, follows, runs, grid, attends in (
            (4096, 4096, 16384, 4608, 128, 1, 1, 132, {}), (4096, 4096, 16384, 16, 16, 0, 1, 82, {}),
            (2048, 2048, 6144, 2560, 128, 1, 8, 132, {}), (512, 768, 1408, 1536, 96, 1, 8, 30, {}),
            (4096, 4096, 16384, 4608, 128, 1, 1, 128, {"GROUP": 16, "PAGE_STAGES": 2}),
            (4096, 4096, 16384, 4608, 128, 1, 1, 82, {"GROUP": 16, "PAGE_STAGES": 2}),
            (2048, 2048, 6144, 2560, 128, 1, 8, 132, {"GROUP": 8, "PAGE_STAGES": 2}),
            (1024, 1024, 4096, 1280, 64, 1, 8, 132, {"GROUP": 8, "PAGE_STAGES": 2}),
        )
    )
    + tuple(
        {"IN_FEATURES": 1536, "ATTENTION": 1536, "INNER": 3840, "QKV_ROWS": 2560, "HEAD_DIM": 64, "NEXT": 1}
        | {"RUNS": 8, "GATE_UP_RUNS": 8, "WEIGHT_BITS": 4, "SCALE_GROUP": 128, "ZEROS": 0}
        | {"GRID": 128, "SLOTS": 5, "SMEM_BYTES": 100352, "ATTENDS": int(bool(attends))}
        | attends
        | _FATRELU
        for attends in ({}, {"GROUP": 3, "PAGE_STAGES": 2})
    ),
    "linear_packed/packed_gemm.cu": (
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "TILES": 16, "TILE_WARPS": 1, "STAGES": 6} | _SHORT,
        {"LINEAR": 1, "IN_FEATURES": 16384, "RUNS": 8, "TILES": 4, "TILE_WARPS": 2, "STAGES": 6} | _SHORT,
        {"LINEAR": 0, "IN_FEATURES": 4096, "RUNS": 8, "TILES": 8, "TILE_WARPS": 2, "STAGES": 4}
        | _SHORT
        | {"HEAD_DIM": 128, "ZEROS": 1, "SCALE_GROUP": 32},
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "TILES": 16, "TILE_WARPS": 1, "STAGES": 5} | _TERNARY,
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "TILES": 4, "TILE_WARPS": 2, "STAGES": 3} | _Q8_MINIMUMS,
    ),
    "linear_packed/packed_gemm_wide.cu": (
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "TILES": 16, "STAGES": 4} | _SHORT,
        {"LINEAR": 1, "IN_FEATURES": 16384, "RUNS": 8, "TILES": 8, "STAGES": 4} | _SHORT,
        {"LINEAR": 0, "IN_FEATURES": 4096, "RUNS": 8, "TILES": 16, "STAGES": 3}
        | _SHORT
        | {"HEAD_DIM": 128, "ZEROS": 1, "SCALE_GROUP": 32},
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "TILES": 8, "STAGES": 4}
        | _SHORT
        | {"SCALE_GROUP": 64},
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "TILES": 16, "STAGES": 4, "GATED": 1} | _SHORT,
        {"LINEAR": 2, "IN_FEATURES": 1536, "RUNS": 8, "TILES": 8, "STAGES": 4, "GATED": 1}
        | _SHORT
        | _FATRELU,
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "TILES": 16, "STAGES": 4} | _TERNARY,
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "TILES": 8, "STAGES": 3} | _Q8_MINIMUMS,
    ),
    "linear_packed/packed_gemm_wgmma.cu": (
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "TOKENS": 64, "TILES": 16, "STAGES": 6} | _SHORT,
        {"LINEAR": 1, "IN_FEATURES": 16384, "RUNS": 8, "TOKENS": 64, "TILES": 4, "STAGES": 11} | _SHORT,
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "TOKENS": 128, "TILES": 16, "STAGES": 4, "GATED": 1} | _SHORT,
        {"LINEAR": 2, "IN_FEATURES": 1536, "RUNS": 8, "TOKENS": 128, "TILES": 12, "STAGES": 4, "GATED": 1}
        | _SHORT
        | _FATRELU,
        {"LINEAR": 0, "IN_FEATURES": 4096, "RUNS": 8, "TOKENS": 128, "TILES": 16, "STAGES": 4}
        | _SHORT
        | {"HEAD_DIM": 128, "ZEROS": 1, "SCALE_GROUP": 32},
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "TOKENS": 128, "TILES": 8, "STAGES": 5}
        | _SHORT
        | {"ZEROS": 1, "SCALE_GROUP": 64},
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "TOKENS": 128, "TILES": 16, "STAGES": 5} | _TERNARY,
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "TOKENS": 128, "TILES": 16, "STAGES": 3}
        | _TERNARY
        | {"WEIGHT_BITS": 8, "SCALE_GROUP": 16},
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "TOKENS": 64, "TILES": 16, "STAGES": 4} | _Q8_MINIMUMS,
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "TOKENS": 128, "TILES": 8, "STAGES": 5}
        | _Q8_MINIMUMS
        | {"WEIGHT_BITS": 4, "SCALE_GROUP": 32},
    ),
    "linear_packed/repack.cu": tuple(
        {"LINEAR": 1, "IN_FEATURES": 4096, "WEIGHT_BITS": 4, "RUNS": 8, "SCALE_GROUP": 64, "ZEROS": 1, "FORMAT": kind}
        for kind in sorted({row.number for row in FORMATS.values()})
    )
    + (
        {"LINEAR": 3, "IN_FEATURES": 4096, "WEIGHT_BITS": 8, "RUNS": 1, "SCALE_GROUP": 128, "ZEROS": 0, "FORMAT": 0},
        {"LINEAR": 1, "IN_FEATURES": 4096, "WEIGHT_BITS": 2, "RUNS": 8, "SCALE_GROUP": 128, "ZEROS": 0, "FORMAT": 0},
        {"LINEAR": 1, "IN_FEATURES": 4096, "WEIGHT_BITS": 4, "RUNS": 8, "SCALE_GROUP": 32, "ZEROS": 2, "FORMAT": 0},
    ),
    "linear_packed/repack_blocks.cu": tuple(
        {"LINEAR": 1, "IN_FEATURES": 4096, "WEIGHT_BITS": 8, "RUNS": 8, "SCALE_GROUP": 16, "ZEROS": 2}
        | {"FORMAT": row.number}
        for row in BLOCK_TYPES.values()
    ),
    "linear_packed/unpack_blocks.cu": tuple({"FORMAT": row.number} for row in BLOCK_TYPES.values()),
    "attention/decode_attention.cu": (
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 0} | _PLAIN,
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 1} | _PLAIN,
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 2, "PORTABLE": 0} | _PLAIN,
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 2, "PORTABLE": 0} | _PLAIN | {"CLUSTER": 4},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 2, "PORTABLE": 0} | _PLAIN | {"CLUSTER": 2, "TEAMS": 2},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 2, "PORTABLE": 0} | _PLAIN | {"CLUSTER": 1, "TEAMS": 2},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 2, "PORTABLE": 0} | _PLAIN | {"CLUSTER": 2, "TEAMS": 2, "FP8": 1},
        {"HEAD_DIM": 64, "GROUP": 1, "STAGES": 2, "PORTABLE": 0} | _PLAIN | {"CLUSTER": 1, "TEAMS": 2, "WINDOW": 1000},
        {"HEAD_DIM": 64, "GROUP": 8, "STAGES": 3, "PORTABLE": 0} | _PLAIN,
        {"HEAD_DIM": 64, "GROUP": 1, "STAGES": 2, "PORTABLE": 0} | _PLAIN,
        {"HEAD_DIM": 96, "GROUP": 20, "STAGES": 3, "PORTABLE": 0} | _PLAIN,
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"TREE": 1},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 1} | _PLAIN | {"TREE": 1},
        {"HEAD_DIM": 64, "GROUP": 8, "STAGES": 2, "PORTABLE": 0} | _PLAIN | {"TREE": 1},
        {"HEAD_DIM": 64, "GROUP": 1, "STAGES": 2, "PORTABLE": 1} | _PLAIN | {"TREE": 1, "WINDOW": 1000},
        {"HEAD_DIM": 96, "GROUP": 20, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"TREE": 1, "WINDOW": 512},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"WINDOW": 1024},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"SELECTED": 1},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"SELECTED": 1, "TREE": 1},
        {"HEAD_DIM": 64, "GROUP": 8, "STAGES": 3, "PORTABLE": 1} | _PLAIN | {"SELECTED": 1, "TREE": 1},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 1} | _PLAIN | {"SELECTED": 2},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"FP8": 1},
        {"HEAD_DIM": 128, "GROUP": 4, "STAGES": 2, "PORTABLE": 1} | _PLAIN | {"FP8": 1},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"FP8": 1, "SELECTED": 1},
        {"HEAD_DIM": 96, "GROUP": 20, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"FP8": 1},
        {"HEAD_DIM": 64, "GROUP": 8, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"FP8": 1},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"FP8": 1, "TREE": 1},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 2, "PORTABLE": 1} | _PLAIN | {"FP8": 1, "TREE": 1},
        {"HEAD_DIM": 96, "GROUP": 20, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"FP8": 1, "TREE": 1},
        {"HEAD_DIM": 64, "GROUP": 8, "STAGES": 3, "PORTABLE": 1} | _PLAIN | {"FP8": 1, "TREE": 1},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 0} | _PLAIN | {"FP8": 1, "TREE": 1, "SELECTED": 1},
        {"HEAD_DIM": 64, "GROUP": 1, "STAGES": 2, "PORTABLE": 1} | _PLAIN | {"FP8": 1, "TREE": 1, "SELECTED": 1},
    ),
    "linear_packed/ffn_row.cu": tuple(
        _PACKED
        | {"LINEAR": 2, "RUNS": 8, "ROWS": 1, "WARPS": 8, "SHARED_RUN": 0, "PREPARED": 0, "EARLY_SLOTS": 11}
        | sizes
        for sizes in (
            {"IN_FEATURES": 1024, "INNER_FEATURES": 4096, "KEPT_ROUNDS": 4, "SMEM_BYTES": 56704},
            {"IN_FEATURES": 1024, "INNER_FEATURES": 3072, "KEPT_ROUNDS": 3, "SMEM_BYTES": 45824, "SCALE_GROUP": 32}
            | {"FATRELU": 0},
            {"IN_FEATURES": 512, "INNER_FEATURES": 1024, "SMEM_BYTES": 16512, "ZEROS": 1},
        )
    ),
    "attention/qkv_attention.cu": tuple(
        _PACKED
        | {"LINEAR": 0, "HEAD_DIM": 64, "RUNS": 8, "ROWS": 1, "WARPS": 8, "SHARED_RUN": 0, "PREPARED": 0, "STAGES": 3}
        | {"EARLY_SLOTS": 11, "OUTPUT_ROUNDS": 0}
        | sizes
        for sizes in (
            {"IN_FEATURES": 1024, "GROUP": 8, "HEAD_ROUNDS": 5, "SMEM_BYTES": 53632},
            {"IN_FEATURES": 1024, "GROUP": 8, "HEAD_ROUNDS": 5, "SMEM_BYTES": 53632, "OUTPUT_ROUNDS": 4, "KV_HEADS": 2},
            {"IN_FEATURES": 512, "GROUP": 4, "HEAD_ROUNDS": 3, "SMEM_BYTES": 33920, "OUTPUT_ROUNDS": 2, "KV_HEADS": 2}
            | {"ZEROS": 1},
            {"IN_FEATURES": 512, "GROUP": 8, "HEAD_ROUNDS": 5, "SMEM_BYTES": 52352, "OUTPUT_ROUNDS": 4, "KV_HEADS": 1},
            {"IN_FEATURES": 256, "GROUP": 4, "HEAD_ROUNDS": 3, "SMEM_BYTES": 33280},
            {"IN_FEATURES": 640, "GROUP": 1, "HEAD_ROUNDS": 2, "SMEM_BYTES": 27136, "SCALE_GROUP": 32, "ZEROS": 1},
        )
    ),
    "attention/linear_qkv_attention.cu": (
        {"HEAD_DIM": 64, "GROUP": 8, "IN_FEATURES": 1024, "HEAD_ROUNDS": 5, "STAGES": 3, "SMEM_BYTES": 164480}
        | {"PORTABLE": 0},
        {"HEAD_DIM": 64, "GROUP": 3, "IN_FEATURES": 512, "HEAD_ROUNDS": 3, "STAGES": 3, "SMEM_BYTES": 49664}
        | {"PORTABLE": 0},
    ),
    "attention/tree_attention.cu": (
        {"HEAD_DIM": 128, "GROUP": 16} | _TREE,
        {"HEAD_DIM": 128, "GROUP": 16} | _TREE | {"ROW_TILES": 3},
        {"HEAD_DIM": 128, "GROUP": 16} | _TREE | {"ROW_TILES": 3, "CLUSTER": 4},
        {"HEAD_DIM": 128, "GROUP": 16} | _TREE | {"CLUSTER": 2},
        {"HEAD_DIM": 64, "GROUP": 8} | _TREE,
        {"HEAD_DIM": 64, "GROUP": 1} | _TREE | {"CLUSTER": 4, "WINDOW": 1000},
        {"HEAD_DIM": 96, "GROUP": 20} | _TREE | {"CLUSTER": 2, "WINDOW": 512},
        {"HEAD_DIM": 128, "GROUP": 16} | _TREE | {"FP8": 1},
        # Three tiles with codes are left out: 20 registers would be spilled.
        {"HEAD_DIM": 128, "GROUP": 16} | _TREE | {"FP8": 1, "CLUSTER": 2},
        {"HEAD_DIM": 128, "GROUP": 4} | _TREE | {"FP8": 1},
        {"HEAD_DIM": 64, "GROUP": 8} | _TREE | {"FP8": 1},
        {"HEAD_DIM": 96, "GROUP": 20} | _TREE | {"FP8": 1, "CLUSTER": 4},
    ),
    "attention/selected_attention.cu": (
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "TREE": 0, "PAIRED": 0},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 6, "TREE": 0, "PAIRED": 1},
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "TREE": 1, "PAIRED": 0},
        {"HEAD_DIM": 96, "GROUP": 4, "STAGES": 6, "TREE": 1, "PAIRED": 1},
        {"HEAD_DIM": 64, "GROUP": 8, "STAGES": 3, "TREE": 1, "PAIRED": 0},
        {"HEAD_DIM": 64, "GROUP": 20, "STAGES": 6, "TREE": 0, "PAIRED": 1},
    ),
    "attention/compress_keys.cu": tuple({"HEAD_DIM": size, "FP8": fp8} for fp8 in (0, 1) for size in (128, 96, 64)),
    "attention/pick_blocks.cu": ({"THREADS": 512}, {"THREADS": 128}),
    "attention/select_blocks.cu": (
        {"HEAD_DIM": 128, "GROUP": 16, "TREE": 1},
        {"HEAD_DIM": 128, "GROUP": 16, "TREE": 0},
        {"HEAD_DIM": 128, "GROUP": 20, "TREE": 1},
        {"HEAD_DIM": 96, "GROUP": 5, "TREE": 1},
        {"HEAD_DIM": 64, "GROUP": 8, "TREE": 0},
        {"HEAD_DIM": 64, "GROUP": 1, "TREE": 1},
        {"HEAD_DIM": 128, "GROUP": 16, "TREE": 1, "FP8": 1},
        {"HEAD_DIM": 96, "GROUP": 20, "TREE": 1, "FP8": 1},
        {"HEAD_DIM": 64, "GROUP": 8, "TREE": 1, "FP8": 1},
    ),
    "attention/accept_nodes.cu": tuple({"HEAD_DIM": size} for size in (128, 96, 64)),
    "attention/score_chunk.cu": tuple({"HEAD_DIM": size, "GROUP": 16} for size in (128, 96, 64)),
    "attention/prefill_attention.cu": (
        {"HEAD_DIM": 128, "GROUP": 16, "WINDOW": 0},
        {"HEAD_DIM": 128, "GROUP": 1, "WINDOW": 0},
        {"HEAD_DIM": 96, "GROUP": 16, "WINDOW": 0},
        {"HEAD_DIM": 64, "GROUP": 8, "WINDOW": 0},
        {"HEAD_DIM": 64, "GROUP": 1, "WINDOW": 0},
        # 128 with a window is left out: one register would be spilled on sm_86 to sm_90.
        {"HEAD_DIM": 96, "GROUP": 1, "WINDOW": 1024},
        {"HEAD_DIM": 64, "GROUP": 8, "WINDOW": 512},
    ),
    "attention/prefill_attention_wgmma.cu": (
        {"HEAD_DIM": 128, "GROUP": 16, "WINDOW": 0},
        {"HEAD_DIM": 128, "GROUP": 1, "WINDOW": 0},
        {"HEAD_DIM": 96, "GROUP": 16, "WINDOW": 0},
        {"HEAD_DIM": 64, "GROUP": 8, "WINDOW": 0},
        {"HEAD_DIM": 64, "GROUP": 3, "WINDOW": 0},
        {"HEAD_DIM": 128, "GROUP": 16, "WINDOW": 1024},
        {"HEAD_DIM": 96, "GROUP": 1, "WINDOW": 1024},
        {"HEAD_DIM": 64, "GROUP": 8, "WINDOW": 512},
    ),
    "attention/prefill_selected_wgmma.cu": (
        {"HEAD_DIM": 128, "GROUP": 16},
        {"HEAD_DIM": 128, "GROUP": 32},
        {"HEAD_DIM": 96, "GROUP": 16},
        {"HEAD_DIM": 64, "GROUP": 16},
    ),
    "rows/append_latent.cu": ({"Q_RANK": 768, "KV_RANK": 256, "ROPE_DIM": 32},),
    "attention/absorb_queries.cu": ({"KV_RANK": 256, "NOPE_DIM": 64, "ROPE_DIM": 32, "VALUE_DIM": 64},),
    "attention/latent_attention.cu": tuple(
        {"HEADS": heads, "KV_RANK": 256, "ROPE_DIM": 32, "STAGES": 2, "TREE": tree}
        for heads in (40, 3)
        for tree in (0, 1)
    ),
    "attention/latent_attention_wgmma.cu": tuple(
        {"HEADS": heads, "KV_RANK": 256, "ROPE_DIM": 32, "STAGES": 4, "TREE": tree}
        for heads in (40, 20)
        for tree in (0, 1)
    ),
    "attention/merge_latents.cu": ({"HEADS": 40, "KV_RANK": 256, "NOPE_DIM": 64, "VALUE_DIM": 64},),
    "attention/expand_latents.cu": (
        {"KV_RANK": 256, "NOPE_DIM": 64, "ROPE_DIM": 32, "VALUE_DIM": 64, "HEAD_DIM": 96},
    ),
    "attention/latent_chunk.cu": ({"NOPE_DIM": 64, "ROPE_DIM": 32, "VALUE_DIM": 64},),
    "step/step.cu": ({"VOCAB": 73448, "HIDDEN": 4096},),
    "sampling/sampling.cu": (
        {"VOCAB": 73448, "PORTABLE": 0},
        {"VOCAB": 73448, "PORTABLE": 1},
        {"VOCAB": 200_003, "PORTABLE": 0},
    ),
    "sampling/masked_sampling.cu": (
        {"VOCAB": 73448, "PORTABLE": 0},
        {"VOCAB": 73448, "PORTABLE": 1},
        {"VOCAB": 151_936, "PORTABLE": 1},
    ),
    "draft/draft_top_k.cu": (
        {"VOCAB": 32768, "PORTABLE": 0},
        {"VOCAB": 73448, "PORTABLE": 1},
        {"VOCAB": 200_003, "PORTABLE": 0},
    ),
    "draft/block.cu": ({"VOCAB": 130560, "PARTS": 8, "RANK": 256}, {"VOCAB": 99, "PARTS": 1, "RANK": 8}),
    "draft/lookup.cu": ({"PORTABLE": 0}, {"PORTABLE": 1}),
    "sampling/tree_sampling.cu": ({"VOCAB": 73448, "PORTABLE": 0}, {"VOCAB": 73448, "PORTABLE": 1}),
    "sampling/masked_tree_sampling.cu": ({"VOCAB": 73448, "PORTABLE": 0}, {"VOCAB": 151_936, "PORTABLE": 1}),
    "draft/accept.cu": ({"VOCAB": 73448},),
    "rows/embed.cu": ({"HIDDEN": 4096}, {"HIDDEN": 64}),
    "rows/norm.cu": ({"HIDDEN": 4096}, {"HIDDEN": 64}, {"HIDDEN": 8192}),
    "rows/join.cu": ({"A_COLUMNS": 4096, "B_COLUMNS": 4096}, {"A_COLUMNS": 1024, "B_COLUMNS": 12288}),
    "attention/rope_append.cu": tuple({"HEAD_DIM": size, "FP8": fp8} for fp8 in (0, 1) for size in (128, 96, 64))
    + tuple({"HEAD_DIM": 128, "FP8": fp8, "NO_ROPE": 1} for fp8 in (0, 1))
    + tuple({"HEAD_DIM": size, "FP8": 1, "TREE": 1} for size in (128, 96, 64))
    + ({"HEAD_DIM": 128, "FP8": 1, "TREE": 1, "NO_ROPE": 1},),
    "mixers/lightning_decode.cu": (
        {"HEAD_DIM": 128, "CHAIN": 1},
        {"HEAD_DIM": 128, "CHAIN": 0},
        {"HEAD_DIM": 64, "CHAIN": 1},
        {"HEAD_DIM": 64, "CHAIN": 0},
    ),
    "mixers/lightning_prefill.cu": ({"HEAD_DIM": 128}, {"HEAD_DIM": 64}),
    "rows/gate.cu": ({"HIDDEN": 4096}, {"HIDDEN": 192}),
    "attention/expand_pages.cu": tuple({"HEAD_DIM": size} for size in (128, 96, 64)),
    "rows/activation.cu": ({"INTERMEDIATE": 16384}, {"INTERMEDIATE": 64}, {"INTERMEDIATE": 3840} | _FATRELU),
    "rows/residual.cu": ({"HIDDEN": 4096}, {"HIDDEN": 64}),
}


def constant_sets(file: str) -> tuple[Mapping[str, int], ...]:
    """The sets of compile-time sizes that `file` is tested with; one empty set if it needs none."""
    return CONSTANTS.get(file, ({},))
