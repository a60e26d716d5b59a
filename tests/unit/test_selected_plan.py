"""Which kernel attends to chosen blocks, and how many clusters of it are launched."""

from __future__ import annotations

from typing import Any

import pytest

from cpmrt.cuda.ops.attention.plan import DecodeAttentionPlan, decode_launch, plan_decode_attention


def plan(arch: int = 90, **settings: Any) -> DecodeAttentionPlan:
    heads = {"num_heads": 32, "num_kv_heads": 2, "head_dim": 128}
    return plan_decode_attention(**heads, max_context=131_072, max_rows=64, arch=arch, num_sms=132, **settings)


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 7, 8, 12, 15, 16, 64])
def test_clusters_that_find_room_at_once(rows: int, is_tree: bool) -> None:
    one = decode_launch(plan(), rows, is_tree=is_tree, selected=1)
    width, units, clusters = one.grid
    assert one.kernel.name == "selected_attention" and one.constants["TREE"] == is_tree
    assert (width, units) == (8, 2 * rows) and 1 <= clusters <= 8
    assert clusters == 1 or units * clusters <= 30
    assert clusters == 8 or units * (clusters + 1) > 29


@pytest.mark.parametrize(("arch", "settings"), [(80, {}), (100, {}), (90, {"portable": True}), (90, {"is_fp8": True})])
def test_others_have_decode_attention(arch: int, settings: dict[str, bool]) -> None:
    made = plan(arch, **settings)
    assert decode_launch(made, 12, is_tree=False, selected=1).kernel.name == "decode_attention"
