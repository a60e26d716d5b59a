"""Plans of the choice of blocks: passes, workspace, launch shapes."""

from __future__ import annotations

from math import ceil

import pytest

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.ops.selection import SelectionPlan
from cpmrt.cuda.precompile import known_device
from cpmrt.memory.caches import pages_for


def plan(context: int, rows: int, *, heads: int = 32, sms: int = 132, capability: int = 90) -> SelectionPlan:
    return SelectionPlan.of(GroupedAttention(heads, 2, 128), known_device(f"sm_{capability}", sms), context, rows)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("context", "passes"), [(2048, 1), (65_536, 1), (131_200, 2), (1_000_000, 11)])
def test_passes_of_equal_length_in_a_bounded_workspace(context: int, passes: int, capability: int) -> None:
    made = plan(context, 2048, capability=capability)
    assert made.scores >= made.rows_per_pass * 2 * pages_for(context) * 2
    assert 4 * made.scores <= 52 << 20
    if capability == 90:
        assert ceil(2048 / made.rows_per_pass) == passes
        assert made.rows_per_pass * passes - 2048 < 16 * passes


@pytest.mark.parametrize("context", [131_072, 8_000_000])
def test_rows_of_a_decode_step_are_one_pass(context: int) -> None:
    made = plan(context, 64)
    assert made.rows_per_pass == 64
    assert made.log_sums == 64 * 2 * made.coarse_tiles * 16


def test_which_chunks_have_a_kernel() -> None:
    assert plan(4096, 256).has_chunk_kernel
    assert not plan(4096, 256, capability=80).has_chunk_kernel
    assert not plan(4096, 256, capability=100).has_chunk_kernel
    others = plan(4096, 256, heads=16)
    assert not others.has_chunk_kernel and others.log_sums == 256 * 2 * others.coarse_tiles * 16


@pytest.mark.parametrize("sms", [1, 16, 132, 5000])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 12, 64, 300, 2048])
def test_shapes_of_steps(rows: int, sms: int) -> None:
    """Every row has a warp, no block is empty by its place in the grid, and grids wider than a block fit the device."""
    made = plan(131_072, max(rows, 64), sms=sms, capability=80)
    for tiles in (made.coarse_tiles, made.fine_tiles, 1):
        (x, groups, heads), threads = made.shape(rows, tiles)
        together, warps = made.rows_per_block(rows), threads // 32
        assert warps in (1, 2, 4) and warps % together == 0 and heads == 2
        assert groups * together >= rows > (groups - 1) * together
        assert 1 <= x <= tiles and (x - 1) * warps < tiles * together
        assert x == 1 or x * groups * heads <= 3 * sms


@pytest.mark.parametrize("rows", [1, 64, 100, 2048])
def test_a_block_of_a_chunk_for_each_multiprocessor(rows: int) -> None:
    x, groups, heads = plan(131_072, 2048).chunk_grid(rows)
    assert groups == ceil(rows / 16) and heads == 2
    assert x == 1 or x * groups * heads <= 132 < (x + 1) * groups * heads
