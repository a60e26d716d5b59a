"""tree_attention: the steps that it is planned for, and its groups of rows and clusters of every size against plain
rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_cases import AttentionDevice
from tree_cases import assert_same_bits, make_trees, random_tree

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.build.spec import macros_of
from cpmrt.cuda.ops.attention.attention import step_launch
from cpmrt.cuda.ops.attention.decode import AttentionLaunch, DecodePlan
from cpmrt.cuda.ops.attention.tree import TreeConstants
from cpmrt.cuda.precompile import known_device
from cpmrt.dtypes import DType

SHARED_BYTES = 232_448 - 2048
"""The dynamic shared memory that a block can have on sm_90: all of it less the part that the kernel declares itself."""
EVERY_BLOCK = (16, 24, 32, 64)
"""Numbers of rows with which two units (2 KV heads of 16 heads) get row tiles and clusters of (3, 8), (2, 4), (3, 4),
(2, 2)."""


def plan(
    num_heads: int, kv_heads: int, head_dim: int, arch: int = 90, portable: bool = False, is_fp8: bool = False
) -> DecodePlan:
    device = known_device(f"sm_{arch}", num_sms=132)
    device = replace(device, capability=86) if portable else device
    return DecodePlan.of(GroupedAttention(num_heads, kv_heads, head_dim), device, max_context=4096, is_fp8=is_fp8)


def blocks(launch: AttentionLaunch) -> tuple[int, int]:
    assert isinstance(launch.constants, TreeConstants)
    return launch.constants.row_tiles, launch.constants.cluster


def test_many_rows_of_a_tree_share_pages() -> None:
    chosen = [step_launch(plan(32, 2, 128), rows, is_tree=True) for rows in (1, 12, *EVERY_BLOCK)]
    assert [launch.kernel.name for launch in chosen] == ["decode_attention"] * 2 + ["tree_attention"] * 4
    assert [blocks(launch) for launch in chosen[2:]] == [(3, 8), (2, 4), (3, 4), (2, 2)]
    assert all(macros_of(launch.constants)["TREE"] == 1 for launch in chosen[:2])


def test_rows_over_fp8_pages_have_two_tiles() -> None:
    chosen = [step_launch(plan(32, 2, 128, is_fp8=True), rows, is_tree=True) for rows in (12, *EVERY_BLOCK)]
    assert [launch.kernel.name for launch in chosen] == ["decode_attention"] + ["tree_attention"] * 4
    assert [blocks(launch) for launch in chosen[1:]] == [(2, 4), (2, 4), (2, 2), (2, 2)]
    assert all(macros_of(launch.constants)["FP8"] == 1 for launch in chosen)
    assert "FP8" not in macros_of(step_launch(plan(32, 2, 128), 64, is_tree=True).constants)


@pytest.mark.parametrize(
    ("arch", "portable", "is_tree", "is_selected"),
    [
        (90, False, False, False), (90, True, True, True), (90, True, True, False), (80, False, True, False),
        (120, False, True, False),
    ],
)  # fmt: skip
def test_other_rows_and_devices_do_not(arch: int, portable: bool, is_tree: bool, is_selected: bool) -> None:
    launch = step_launch(plan(32, 2, 128, arch, portable), 64, is_tree=is_tree, is_selected=is_selected)
    assert launch.kernel.name == "decode_attention"
    constants = macros_of(launch.constants)
    assert (constants["TREE"], constants["SELECTED"]) == (is_tree, is_selected)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 36), (5, 8), (8, 2), (16, 2), (20, 1), (24, 4)])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_every_launch_fits(group: int, kv_heads: int, head_dim: int, is_fp8: bool) -> None:
    decode = plan(group * kv_heads, kv_heads, head_dim, is_fp8=is_fp8)
    heads = -(-group // -(-group // 16))
    row_elements = (8 if heads <= 8 else 16) * head_dim
    assert decode.tables[0].num_elements >= 64 * decode.units * (decode.num_splits // 8) * row_elements * 5 // 4
    for rows in range(1, 65):
        launch = step_launch(decode, rows, is_tree=True)
        assert launch.shared_bytes <= SHARED_BYTES
        if launch.kernel.name == "tree_attention":
            row_tiles, cluster = blocks(launch)
            assert launch.grid[:2] == (cluster, decode.units)
            assert launch.grid[2] * row_tiles * (2 if heads <= 8 else 1) >= rows
            assert launch.threads == 128 * row_tiles
            assert launch.sizes == (rows, decode.num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"), [(16, 128, DType.BFLOAT16), (8, 64, DType.FLOAT16), (5, 96, DType.BFLOAT16)]
)
@pytest.mark.parametrize("base", [100, 127, 1000])
def test_blocks_and_clusters_of_every_size(cuda: Any, group: int, head_dim: int, dtype: DType, base: int) -> None:
    masks = random_tree(np.random.default_rng(base), 63, keep=0.7)
    tree, plain = make_trees(dtype, group, 2, head_dim, [(base, [*masks, 2**64 - 1])])
    assert_same_bits(cuda, tree, plain, counts=EVERY_BLOCK)


@pytest.mark.gpu
@pytest.mark.parametrize("base", [510, 1020, 2044, 2047, 4990])
def test_rows_whose_pages_are_cut_differently(cuda: Any, base: int) -> None:
    """A node's row has the bits of a plain row at every cut of pages: runs become longer from 9 and from 17 pages on;
    from 33 there are more than eight, of several clusters."""
    masks = random_tree(np.random.default_rng(base), 33, keep=0.3)
    tree, plain = make_trees(DType.FLOAT16, 16, 2, 64, [(base, masks)])
    assert_same_bits(cuda, tree, plain, counts=EVERY_BLOCK[:3])


@pytest.mark.gpu
def test_rows_of_several_trees_and_padding(cuda: Any) -> None:
    rng = np.random.default_rng(3)
    trees = [(base, random_tree(rng, 7)) for base in (0, 64, 1021, 2100)]
    tree, plain = make_trees(DType.BFLOAT16, 8, 2, 64, trees)
    expected = AttentionDevice(cuda, tree).run(plain)
    padding = [0, 9, 27]
    tree.slots[padding], tree.positions[9], tree.tree_base[9], tree.tree_masks[27] = -1, 10**9, 10**9, 0
    out = AttentionDevice(cuda, tree).run(tree, pdl=True)
    assert not out[padding].any()
    others = [row for row in range(len(out)) if row not in padding]
    assert np.array_equal(out[others], expected[others])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 64, 1000])
def test_a_window_of_many_rows(cuda: Any, window: int) -> None:
    rng = np.random.default_rng(window)
    trees = [(base, random_tree(rng, 9, keep=0.2)) for base in (3, 62, 1010, 2043)]
    tree, plain = make_trees(DType.BFLOAT16, 16, 2, 128, trees)
    assert_same_bits(cuda, tree, plain, window=window, counts=(18,))
