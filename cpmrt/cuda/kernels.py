"""Every kernel of the fast path, as data.

A row is `KernelSpec(name, file, op, constants, hot)`: the kernel's name without its `_bf16` / `_fp16` suffix, its file
in `kernels_cu`, the op of `ops/spec.py` that it computes or is a part of, and the compile-time sizes that the file asks
for under `#ifndef`. A kernel that belongs to no op (the sampling chain) has op="" and says why in `reason`. `hot`
promises no spills and no local memory. `arch` is the one architecture that a file compiles for, "" for all.

A file with compile-time sizes also has a row in `CONSTANTS`: sets of values that it is tested with. The compile test
takes the first set on every architecture and the others on a few. What a model needs follows from `ahead_of_time`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One `extern "C" __global__` function."""

    name: str
    file: str
    op: str
    constants: tuple[str, ...] = ()
    hot: bool = False
    reason: str = ""
    arch: str = ""


_LINEAR = ("LINEAR", "IN_FEATURES", "TOKEN_TILES", "GROUP", "CLUSTER", "SPLIT_WARPS", "NORM", "SMEM_BYTES")
_PACKED_W4 = ("IN_FEATURES", "WEIGHT_BITS", "RUNS", "SCALE_GROUP", "ZEROS")
_ROWS_W4 = ("IN_FEATURES", "ROWS", "SCALE_GROUP", "ZEROS", "WARPGROUPS")
_LINEAR_W4 = (
    *("LINEAR", *_PACKED_W4, "ROWS", "WARPS", "WARPGROUPS", "SHARED_RUN", "NORM", "PREPARED", "STAGE_SLICES"),
    *("STAGES", "EARLY_SLOTS", "CLUSTERS", "RECEIVED_APART", "FEEDS", "TRIGGER", "SMEM_BYTES", "PORTABLE"),
)
_ATTENTION = ("HEAD_DIM", "GROUP")
_STEP = ("VOCAB", "HIDDEN")
_PORTABLE_LINEAR = {"CLUSTER": 1, "NORM": 1, "SMEM_BYTES": 98304}
_NO_NORM = {"NORM": 0}
_PLAIN = {"TREE": 0, "WINDOW": 0, "SELECTED": 0}
_W4 = {"SCALE_GROUP": 128, "ZEROS": 0, "STAGE_SLICES": 0, "STAGES": 4, "EARLY_SLOTS": 1, "WARPGROUPS": 0, "NORM": 1}
_W4 |= {"WEIGHT_BITS": 4, "PORTABLE": 0, "CLUSTERS": 0, "RECEIVED_APART": 0, "FEEDS": 0, "TRIGGER": 0}
_W4 |= {"SMEM_BYTES": 98304}
_HEAD_64, _HEAD_128 = ({**_PORTABLE_LINEAR, "HEAD_DIM": size} for size in (64, 128))

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec("convert_float32", "convert.cu", "", reason="loading: weights stored as another type"),
    KernelSpec("convert_16bit", "convert.cu", "", reason="loading: weights stored as another type"),
    KernelSpec("read_bandwidth", "bandwidth.cu", "", hot=True, reason="what the device's memory gives at best"),
    KernelSpec("fill_normal", "fill.cu", "", reason="random weights in place of a checkpoint"),
    KernelSpec("fill_words", "fill.cu", "", reason="random weights in place of a checkpoint"),
    KernelSpec("round_w4", "round_w4.cu", "", ("WEIGHT_BITS",), reason="loading: a head rounded to 4 or 8 bits"),
    KernelSpec("gather_columns", "gather.cu", "project_residual", hot=True),
    KernelSpec("gemm", "gemm.cu", "project_residual", ("TILE_N", "TILE_K", "STAGES"), hot=True),
    KernelSpec("linear_qkv", "linear.cu", "qkv", (*_LINEAR, "HEAD_DIM"), hot=True),
    KernelSpec("linear_residual", "linear.cu", "project_residual", _LINEAR, hot=True),
    KernelSpec("linear_gate_up", "linear.cu", "gate_up", _LINEAR, hot=True),
    KernelSpec("linear_head", "linear.cu", "lm_head", _LINEAR, hot=True),
    KernelSpec("linear_w4_qkv", "linear_w4.cu", "qkv", (*_LINEAR_W4, "HEAD_DIM"), hot=True),
    KernelSpec("linear_w4_residual", "linear_w4.cu", "project_residual", _LINEAR_W4, hot=True),
    KernelSpec("linear_w4_gate_up", "linear_w4.cu", "gate_up", _LINEAR_W4, hot=True),
    KernelSpec("linear_w4_head", "linear_w4.cu", "lm_head", _LINEAR_W4, hot=True),
    KernelSpec("prepare_w4", "prepare_w4.cu", "gate_up", _ROWS_W4, hot=True),
    KernelSpec(
        "repack_w4_codes", "repack_w4.cu", "", (*_PACKED_W4, "LINEAR", "FORMAT"), reason="loading: 4-bit weights"
    ),
    KernelSpec(
        "repack_w4_scales", "repack_w4.cu", "", (*_PACKED_W4, "LINEAR", "FORMAT"), reason="loading: 4-bit weights"
    ),
    KernelSpec(
        "dequantize_w4",
        "repack_w4.cu",
        "",
        (*_PACKED_W4, "LINEAR", "FORMAT"),
        hot=True,
        reason="4-bit weights of a prefill chunk",
    ),
    KernelSpec(
        "decode_attention",
        "decode_attention.cu",
        "decode_attention",
        (*_ATTENTION, "STAGES", "PORTABLE", "TREE", "WINDOW", "SELECTED"),
        hot=True,
    ),
    KernelSpec("compress_keys", "compress_keys.cu", "qkv", ("HEAD_DIM",), hot=True),
    KernelSpec("compress_path", "compress_keys.cu", "", ("HEAD_DIM",), hot=True, reason="an accepted path"),
    KernelSpec("coarse_log_sums", "select_blocks.cu", "select_blocks", (*_ATTENTION, "TREE"), hot=True),
    KernelSpec("score_blocks", "select_blocks.cu", "select_blocks", (*_ATTENTION, "TREE"), hot=True),
    KernelSpec("score_chunk", "score_chunk.cu", "select_blocks", _ATTENTION, hot=True, arch="sm_90"),
    KernelSpec("pick_blocks", "pick_blocks.cu", "select_blocks", hot=True),
    KernelSpec("dense_rows", "pick_blocks.cu", "prefill_attention"),
    KernelSpec("prefill_attention", "prefill_attention.cu", "prefill_attention", (*_ATTENTION, "WINDOW"), hot=True),
    KernelSpec(
        "prefill_attention_wgmma",
        "prefill_attention_wgmma.cu",
        "prefill_attention",
        (*_ATTENTION, "WINDOW"),
        hot=True,
        arch="sm_90",
    ),
    KernelSpec(
        "prefill_selected_wgmma", "prefill_selected_wgmma.cu", "prefill_attention", _ATTENTION, hot=True, arch="sm_90"
    ),
    KernelSpec("admit", "step.cu", "", _STEP, reason="bookkeeping: a new sequence in a slot"),
    KernelSpec("recall", "step.cu", "", _STEP, reason="bookkeeping: prompt tokens that need no prefill"),
    KernelSpec("step_begin", "step.cu", "", _STEP, hot=True, reason="bookkeeping: the rows of a decode step"),
    KernelSpec("prefill_begin", "step.cu", "", _STEP, hot=True, reason="bookkeeping: the rows of a prefill chunk"),
    KernelSpec("prefill_end", "step.cu", "", _STEP, reason="bookkeeping: a chunk without a token is done"),
    KernelSpec("first_begin", "step.cu", "", _STEP, reason="bookkeeping: the row that the first token comes from"),
    KernelSpec("loop_end", "loop.cu", "", reason="bookkeeping: whether a launch goes on with its next steps"),
    KernelSpec("sample", "sampling.cu", "", ("VOCAB", "PORTABLE"), hot=True, reason="the sampling chain"),
    KernelSpec("speculate_begin", "speculate.cu", "", hot=True, reason="bookkeeping: rows that the draft has not seen"),
    KernelSpec("catch_up_end", "speculate.cu", "", reason="bookkeeping: the draft has seen a sequence"),
    KernelSpec("prefill_rows", "carry.cu", "", hot=True, reason="bookkeeping: the draft's rows of a prefill chunk"),
    KernelSpec("carry_rows", "carry.cu", "", hot=True, reason="bookkeeping: hidden states for the draft's next pass"),
    KernelSpec("draft_top_k", "draft_top_k.cu", "", ("VOCAB", "PORTABLE"), hot=True, reason="drafting: candidates"),
    KernelSpec("tree_grow", "draft_tree.cu", "", hot=True, reason="drafting: the rows of the next pass"),
    KernelSpec("tree_finish", "draft_tree.cu", "", hot=True, reason="drafting: the nodes to verify"),
    KernelSpec("lookup", "lookup.cu", "", ("PORTABLE",), hot=True, reason="drafting: from the sequence's own tokens"),
    KernelSpec("sample_tree", "tree_sampling.cu", "", ("VOCAB", "PORTABLE"), hot=True, reason="the sampling chain"),
    KernelSpec("accept", "accept.cu", "", ("VOCAB",), hot=True, reason="bookkeeping: the end of a speculative step"),
    KernelSpec("embed", "embed.cu", "embed", ("HIDDEN",), hot=True),
    KernelSpec("rms_norm", "norm.cu", "rms_norm", ("HIDDEN",), hot=True),
    KernelSpec("join", "join.cu", "join", ("A_COLUMNS", "B_COLUMNS"), hot=True),
    KernelSpec("copy_columns", "columns.cu", "copy_columns", hot=True),
    KernelSpec("clear", "columns.cu", "clear", hot=True),
    KernelSpec("rope_append", "rope_append.cu", "qkv", ("HEAD_DIM",), hot=True),
    KernelSpec("silu_mul", "activation.cu", "gate_up", ("INTERMEDIATE",), hot=True),
    KernelSpec("residual_add", "residual.cu", "project_residual", ("HIDDEN",), hot=True),
)

CONSTANTS: dict[str, tuple[Mapping[str, int], ...]] = {
    "gemm.cu": (
        {"TILE_N": 128, "TILE_K": 32, "STAGES": 3},
        {"TILE_N": 128, "TILE_K": 64, "STAGES": 3},
        {"TILE_N": 256, "TILE_K": 32, "STAGES": 4},
        {"TILE_N": 256, "TILE_K": 64, "STAGES": 3},
        {"TILE_N": 256, "TILE_K": 64, "STAGES": 4},
        {"TILE_N": 64, "TILE_K": 32, "STAGES": 3},
    ),
    "linear.cu": (
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
        {"LINEAR": 3, "IN_FEATURES": 4096, "TOKEN_TILES": 2, "GROUP": 3, "SPLIT_WARPS": 1} | _PORTABLE_LINEAR,
        {"LINEAR": 3, "IN_FEATURES": 1024, "TOKEN_TILES": 4, "GROUP": 5, "SPLIT_WARPS": 8} | _PORTABLE_LINEAR,
        {"LINEAR": 0, "IN_FEATURES": 8192, "TOKEN_TILES": 2, "GROUP": 3, "SPLIT_WARPS": 8} | _HEAD_128 | _NO_NORM,
        {"LINEAR": 3, "IN_FEATURES": 4096, "TOKEN_TILES": 8, "GROUP": 2, "SPLIT_WARPS": 1}
        | {"CLUSTER": 1, "NORM": 0, "SMEM_BYTES": 232448},
    ),
    "linear_w4.cu": (
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "ROWS": 1, "WARPS": 8, "SHARED_RUN": 0, "PREPARED": 0}
        | _W4
        | _NO_NORM,
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
        | _W4
        | {"SMEM_BYTES": 182400},
        {"LINEAR": 2, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 64, "WARPS": 16, "SHARED_RUN": 1, "PREPARED": 1}
        | _W4
        | {"STAGE_SLICES": 1, "WARPGROUPS": 1, "FEEDS": 1, "SMEM_BYTES": 205696},
        {"LINEAR": 3, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 16, "WARPS": 8, "SHARED_RUN": 1, "PREPARED": 1}
        | _W4
        | {"STAGE_SLICES": 2, "ZEROS": 1, "SCALE_GROUP": 32},
        {"LINEAR": 0, "IN_FEATURES": 8192, "RUNS": 8, "ROWS": 1, "WARPS": 8, "SHARED_RUN": 0, "PREPARED": 0}
        | _W4
        | _NO_NORM
        | {"HEAD_DIM": 128},
        {"LINEAR": 0, "IN_FEATURES": 4096, "RUNS": 8, "ROWS": 32, "WARPS": 20, "SHARED_RUN": 1, "PREPARED": 0}
        | _W4
        | {"HEAD_DIM": 128, "WARPGROUPS": 1, "CLUSTERS": 1, "SMEM_BYTES": 232448},
        {"LINEAR": 1, "IN_FEATURES": 4096, "RUNS": 8, "ROWS": 16, "WARPS": 20, "SHARED_RUN": 1, "PREPARED": 0}
        | _W4
        | _NO_NORM
        | {"CLUSTERS": 1, "RECEIVED_APART": 1, "SMEM_BYTES": 232448},
        {"LINEAR": 3, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 1, "WARPS": 8, "SHARED_RUN": 1, "PREPARED": 0}
        | _W4
        | {"WEIGHT_BITS": 8},
        {"LINEAR": 3, "IN_FEATURES": 4096, "RUNS": 1, "ROWS": 64, "WARPS": 12, "SHARED_RUN": 1, "PREPARED": 1}
        | _W4
        | {"WEIGHT_BITS": 8, "STAGE_SLICES": 1, "WARPGROUPS": 1, "SMEM_BYTES": 232448},
    ),
    "round_w4.cu": ({"WEIGHT_BITS": 4}, {"WEIGHT_BITS": 8}),
    "prepare_w4.cu": ({"IN_FEATURES": 4096, "ROWS": 64, "SCALE_GROUP": 128, "ZEROS": 0, "WARPGROUPS": 1},),
    "repack_w4.cu": tuple(
        {"LINEAR": 1, "IN_FEATURES": 4096, "WEIGHT_BITS": 4, "RUNS": 8, "SCALE_GROUP": 64, "ZEROS": 1, "FORMAT": kind}
        for kind in range(4)
    )
    + (
        {"LINEAR": 3, "IN_FEATURES": 4096, "WEIGHT_BITS": 8, "RUNS": 1, "SCALE_GROUP": 128, "ZEROS": 0, "FORMAT": 0},
    ),
    "decode_attention.cu": (
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 0} | _PLAIN,
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 3, "PORTABLE": 1} | _PLAIN,
        {"HEAD_DIM": 128, "GROUP": 16, "STAGES": 2, "PORTABLE": 0} | _PLAIN,
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
    ),
    "compress_keys.cu": ({"HEAD_DIM": 128}, {"HEAD_DIM": 96}, {"HEAD_DIM": 64}),
    "select_blocks.cu": (
        {"HEAD_DIM": 128, "GROUP": 16, "TREE": 1},
        {"HEAD_DIM": 128, "GROUP": 16, "TREE": 0},
        {"HEAD_DIM": 128, "GROUP": 20, "TREE": 1},
        {"HEAD_DIM": 96, "GROUP": 5, "TREE": 1},
        {"HEAD_DIM": 64, "GROUP": 8, "TREE": 0},
        {"HEAD_DIM": 64, "GROUP": 1, "TREE": 1},
    ),
    "score_chunk.cu": tuple({"HEAD_DIM": size, "GROUP": 16} for size in (128, 96, 64)),
    "prefill_attention.cu": (
        {"HEAD_DIM": 128, "GROUP": 16, "WINDOW": 0},
        {"HEAD_DIM": 128, "GROUP": 1, "WINDOW": 0},
        {"HEAD_DIM": 96, "GROUP": 16, "WINDOW": 0},
        {"HEAD_DIM": 64, "GROUP": 8, "WINDOW": 0},
        {"HEAD_DIM": 64, "GROUP": 1, "WINDOW": 0},
        # Not 128 with a window: one register is spilled on sm_86 to sm_90.
        {"HEAD_DIM": 96, "GROUP": 1, "WINDOW": 1024},
        {"HEAD_DIM": 64, "GROUP": 8, "WINDOW": 512},
    ),
    "prefill_attention_wgmma.cu": (
        {"HEAD_DIM": 128, "GROUP": 16, "WINDOW": 0},
        {"HEAD_DIM": 128, "GROUP": 1, "WINDOW": 0},
        {"HEAD_DIM": 96, "GROUP": 16, "WINDOW": 0},
        {"HEAD_DIM": 64, "GROUP": 8, "WINDOW": 0},
        {"HEAD_DIM": 64, "GROUP": 3, "WINDOW": 0},
        {"HEAD_DIM": 128, "GROUP": 16, "WINDOW": 1024},
        {"HEAD_DIM": 96, "GROUP": 1, "WINDOW": 1024},
        {"HEAD_DIM": 64, "GROUP": 8, "WINDOW": 512},
    ),
    "prefill_selected_wgmma.cu": (
        {"HEAD_DIM": 128, "GROUP": 16},
        {"HEAD_DIM": 128, "GROUP": 8},
        {"HEAD_DIM": 96, "GROUP": 8},
        {"HEAD_DIM": 64, "GROUP": 16},
    ),
    "step.cu": ({"VOCAB": 73448, "HIDDEN": 4096},),
    "sampling.cu": (
        {"VOCAB": 73448, "PORTABLE": 0},
        {"VOCAB": 73448, "PORTABLE": 1},
        {"VOCAB": 200_003, "PORTABLE": 0},
    ),
    "draft_top_k.cu": (
        {"VOCAB": 32768, "PORTABLE": 0},
        {"VOCAB": 73448, "PORTABLE": 1},
        {"VOCAB": 200_003, "PORTABLE": 0},
    ),
    "lookup.cu": ({"PORTABLE": 0}, {"PORTABLE": 1}),
    "tree_sampling.cu": ({"VOCAB": 73448, "PORTABLE": 0}, {"VOCAB": 73448, "PORTABLE": 1}),
    "accept.cu": ({"VOCAB": 73448},),
    "embed.cu": ({"HIDDEN": 4096}, {"HIDDEN": 64}),
    "norm.cu": ({"HIDDEN": 4096}, {"HIDDEN": 64}, {"HIDDEN": 8192}),
    "join.cu": ({"A_COLUMNS": 4096, "B_COLUMNS": 4096}, {"A_COLUMNS": 1024, "B_COLUMNS": 12288}),
    "rope_append.cu": ({"HEAD_DIM": 128}, {"HEAD_DIM": 96}, {"HEAD_DIM": 64}),
    "activation.cu": ({"INTERMEDIATE": 16384}, {"INTERMEDIATE": 64}),
    "residual.cu": ({"HIDDEN": 4096}, {"HIDDEN": 64}),
}


def files(arch: str = "") -> tuple[str, ...]:
    """The sources that hold a kernel, each once, in the order of the table; with `arch`, those that compile for it."""
    family = arch.rstrip("af")
    return tuple(dict.fromkeys(spec.file for spec in KERNELS if not arch or spec.arch in ("", family)))


def constant_sets(file: str) -> tuple[Mapping[str, int], ...]:
    """The sets of compile-time sizes that `file` is tested with; one empty set if it needs none."""
    return CONSTANTS.get(file, ({},))
