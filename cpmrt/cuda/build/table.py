"""Every kernel of the fast path, as data.

A row is `KernelSpec(name, file, op, constants, hot)`: the kernel's name without its `_bf16` / `_fp16` suffix, its file
in `kernels_cu`, the op of `ops/spec.py` that it computes or is a part of, and the compile-time sizes that the file asks
for under `#ifndef`. A kernel that belongs to no op (the sampling chain) has op="" and says why in `reason`. `hot`
promises no spills and no local memory. `arch` is the one architecture that a file compiles for, "" for all.

A file with compile-time sizes also has a row in `tests/kernel_builds.py`, the sets of values that it is tested with.
"""

from __future__ import annotations

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


_LINEAR = (
    *("LINEAR", "IN_FEATURES", "TOKEN_TILES", "HALF_TILE", "GROUP", "CLUSTER", "SPLIT_WARPS", "NORM", "SMEM_BYTES"),
)
_PACKED_W4 = ("IN_FEATURES", "WEIGHT_BITS", "RUNS", "SCALE_GROUP", "ZEROS")
_ROWS_W4 = ("IN_FEATURES", "ROWS", "SCALE_GROUP", "ZEROS", "WARPGROUPS")
_LINEAR_W4 = (
    *("LINEAR", *_PACKED_W4, "ROWS", "WARPS", "WARPGROUPS", "SHARED_RUN", "NORM", "PREPARED", "STAGE_SLICES"),
    *("STAGES", "EARLY_SLOTS", "CLUSTERS", "RECEIVED_APART", "FEEDS", "TRIGGER", "KEPT_ROUNDS", "SMEM_BYTES"),
    "PORTABLE",
)
_ATTENTION = ("HEAD_DIM", "GROUP")
_STEP = ("VOCAB", "HIDDEN")

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
        (*_ATTENTION, "STAGES", "PORTABLE", "TREE", "WINDOW", "SELECTED", "FP8"),
        hot=True,
    ),
    KernelSpec(
        "tree_attention",
        "tree_attention.cu",
        "decode_attention",
        (*_ATTENTION, "STAGES", "ROW_TILES", "CLUSTER", "WINDOW"),
        hot=True,
        arch="sm_90",
    ),
    KernelSpec(
        "selected_attention",
        "selected_attention.cu",
        "decode_attention",
        (*_ATTENTION, "STAGES", "TREE"),
        hot=True,
        arch="sm_90",
    ),
    KernelSpec("compress_keys", "compress_keys.cu", "qkv", ("HEAD_DIM", "FP8"), hot=True),
    KernelSpec("compress_path", "compress_keys.cu", "", ("HEAD_DIM", "FP8"), hot=True, reason="an accepted path"),
    KernelSpec("coarse_log_sums", "select_blocks.cu", "select_blocks", (*_ATTENTION, "TREE"), hot=True),
    KernelSpec("score_blocks", "select_blocks.cu", "select_blocks", (*_ATTENTION, "TREE"), hot=True),
    KernelSpec("score_chunk", "score_chunk.cu", "select_blocks", _ATTENTION, hot=True, arch="sm_90"),
    KernelSpec("pick_blocks", "pick_blocks.cu", "select_blocks", hot=True),
    KernelSpec("dense_rows", "pick_blocks.cu", "prefill_attention"),
    KernelSpec("expand_pages", "expand_pages.cu", "prefill_attention", ("HEAD_DIM",), hot=True),
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
    KernelSpec("rope_append", "rope_append.cu", "qkv", ("HEAD_DIM", "FP8"), hot=True),
    KernelSpec("silu_mul", "activation.cu", "gate_up", ("INTERMEDIATE",), hot=True),
    KernelSpec("residual_add", "residual.cu", "project_residual", ("HIDDEN",), hot=True),
)


def files(arch: str = "") -> tuple[str, ...]:
    """The sources that hold a kernel, each once, in the order of the table; with `arch`, those that compile for it."""
    family = arch.rstrip("af")
    return tuple(dict.fromkeys(spec.file for spec in KERNELS if not arch or spec.arch in ("", family)))
