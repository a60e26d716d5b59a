"""Plans of attention to chosen blocks: the kernel, and the number of clusters launched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.build.spec import macros_of
from cpmrt.cuda.ops.attention.attention import step_launch
from cpmrt.cuda.ops.attention.decode import DecodePlan
from cpmrt.cuda.precompile import known_device


def plan(
    arch: int = 90, capability: int | None = None, *, is_fp8: bool = False, has_wide_clusters: bool = False
) -> DecodePlan:
    device = known_device(f"sm_{arch}", 132)
    device = replace(device, capability=capability or arch, has_wide_clusters=has_wide_clusters)
    return DecodePlan.of(GroupedAttention(32, 2, 128), device, 131_072, is_fp8=is_fp8)


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 7, 8, 12, 15, 16, 64])
def test_clusters_that_find_room_at_once(rows: int, is_tree: bool) -> None:
    one = step_launch(plan(), rows, is_tree=is_tree, is_selected=True)
    width, units, clusters = one.grid
    assert one.kernel.name == "selected_attention" and macros_of(one.constants)["TREE"] == is_tree
    assert (width, units) == (8, 2 * rows) and 1 <= clusters <= 7
    assert one.threads == 128 and one.shared_bytes == 16 * 128 * 2 + 3 * 64 * 128 * 4 + 5 * 16 * 128
    assert clusters == 1 or units * clusters <= 30
    assert clusters == 7 or units * (clusters + 1) > 29


@pytest.mark.parametrize("is_tree", [False, True])
def test_one_row_has_pairs_of_clusters_where_a_device_has_them(is_tree: bool) -> None:
    wide = plan(has_wide_clusters=True)
    one = step_launch(wide, 1, is_tree=is_tree, is_selected=True)
    assert one.grid == (16, 2, 4) and macros_of(one.constants)["PAIRED"] == 1
    assert macros_of(one.constants)["STAGES"] == 6
    assert one.shared_bytes == 16 * 128 * 2 + 6 * 64 * 128 * 4 + 5 * 16 * 128 <= wide.device.shared_bytes_per_block
    several = step_launch(wide, 2, is_tree=is_tree, is_selected=True)
    assert several == step_launch(plan(), 2, is_tree=is_tree, is_selected=True)
    assert macros_of(several.constants)["PAIRED"] == 0


@pytest.mark.parametrize("made", [plan(80), plan(100), plan(90, capability=86), plan(90, is_fp8=True)])
def test_others_have_decode_attention(made: DecodePlan) -> None:
    assert step_launch(made, 12, is_tree=False, is_selected=True).kernel.name == "decode_attention"
