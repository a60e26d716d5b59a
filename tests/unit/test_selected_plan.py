"""Which kernel attends to chosen blocks, and how many clusters of it are launched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.build.spec import macros_of
from cpmrt.cuda.ops.attention.attention import step_launch
from cpmrt.cuda.ops.attention.decode import DecodePlan
from cpmrt.cuda.precompile import known_device


def plan(arch: int = 90, capability: int | None = None, *, is_fp8: bool = False) -> DecodePlan:
    device = replace(known_device(f"sm_{arch}", 132), capability=capability or arch)
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


@pytest.mark.parametrize("made", [plan(80), plan(100), plan(90, capability=86), plan(90, is_fp8=True)])
def test_others_have_decode_attention(made: DecodePlan) -> None:
    assert step_launch(made, 12, is_tree=False, is_selected=True).kernel.name == "decode_attention"
