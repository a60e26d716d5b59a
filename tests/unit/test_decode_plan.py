"""The number of blocks that share a row's runs of pages: all run on the device at once where possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention.attention import AttentionPlan, step_launch
from cpmrt.cuda.ops.attention.decode import AttentionLaunch, DecodeConstants, DecodePlan
from cpmrt.cuda.precompile import known_device
from cpmrt.ops import SHORT_KEYS, RowLength

EIGHT_B = GroupedAttention(32, 2, 128)
NOT_PLAIN: tuple[dict[str, Any], ...] = ({"is_tree": True}, {"is_tree": False, "is_selected": True})


def constants_of(
    rows: int, shape: GroupedAttention = EIGHT_B, arch: int = 90, *, is_fp8: bool = False,
    length: RowLength | None = None,
) -> DecodeConstants:  # fmt: skip
    """Return the constants of a step of plain rows, and check that its launch fits the device and covers all rows and
    runs."""
    device = known_device(f"sm_{arch}", 132)
    plan = DecodePlan.of(shape, device, 131_072, is_fp8=is_fp8)
    one = step_launch(plan, rows, is_tree=False, length=length)
    constants, (width, units, clusters) = one.constants, one.grid
    assert isinstance(constants, DecodeConstants)
    assert one.shared_bytes <= device.shared_bytes_per_block - 2048, "the kernel has some shared memory of its own"
    assert width % constants.cluster == 0 and units == rows * plan.units
    if constants.cluster != plan.cluster:
        assert width == constants.cluster and clusters * width * units <= max(132, width * units), "all at once"
    return constants


@pytest.mark.parametrize(
    ("rows", "cluster", "teams", "stages"),
    [
        (1, 8, 1, 3), (2, 8, 1, 3), (4, 8, 1, 3), (5, 8, 1, 2), (14, 8, 1, 2), (16, 2, 2, 2), (24, 4, 1, 2),
        (32, 2, 2, 2), (33, 2, 2, 2), (34, 1, 2, 2), (64, 1, 2, 2),
    ],
)  # fmt: skip
def test_fewer_blocks_share_the_runs_of_more_rows(rows: int, cluster: int, teams: int, stages: int) -> None:
    made = constants_of(rows)
    assert (made.cluster, made.teams, made.stages) == (cluster, teams, stages)


@pytest.mark.parametrize(("shape", "rows", "clusters"), [
    (EIGHT_B, 8, 4), (GroupedAttention(16, 4, 128), 4, 4), (GroupedAttention(16, 1, 128), 16, 4),
], ids=str)  # fmt: skip
def test_long_rows_have_pairs_of_blocks_where_these_fill_the_device(
    shape: GroupedAttention, rows: int, clusters: int
) -> None:
    plan = DecodePlan.of(shape, known_device("sm_90", 132), 131_072)
    long = step_launch(plan, rows, is_tree=False, length="long")
    assert long.grid == (2, rows * plan.units, clusters) and long.threads == (128, 2)
    assert long.constants == replace(constants_of(rows, shape, length="long"), cluster=2, teams=2, stages=2)
    assert constants_of(rows, shape).cluster == 8
    assert step_launch(plan, rows, is_tree=False, window=512, length="long").grid[0] == 8, "none is long"


def test_which_steps_have_a_graph_of_their_own_for_long_rows() -> None:
    """Only steps of eight rows with wide heads over two KV heads have a long-row graph, and none where rows choose
    blocks."""
    anything: Any = None
    narrow = GroupedAttention(16, 2, 64)
    for shape, chooses, counts in ((EIGHT_B, False, [8]), (EIGHT_B, True, []), (narrow, False, [])):
        decode = DecodePlan.of(shape, known_device("sm_90", 132), 131_072)
        selection: Any = chooses or None
        plan = AttentionPlan(anything, decode, anything, selection)
        assert [rows for rows in (1, 2, 4, 8, 16, 32, 64) if plan.has_long_launch(rows)] == counts


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 12, 24, 32, 64])
def test_other_numbers_of_rows_do_not_depend_on_their_length(rows: int) -> None:
    assert constants_of(rows, length="long") == constants_of(rows)
    narrow = GroupedAttention(16, 2, 64)
    assert constants_of(8, narrow, length="long") == constants_of(8, narrow)
    assert constants_of(8, is_fp8=True, length="long") == constants_of(8, is_fp8=True)


@pytest.mark.parametrize("shape", [(24, 8, 64), (36, 36, 64), (40, 1, 96), (16, 2, 128), (4, 4, 128)], ids=str)
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_every_shape_fits(shape: tuple[int, int, int], arch: int, rows: int) -> None:
    made = constants_of(rows, GroupedAttention(*shape), arch, length="long" if rows % 16 == 0 else None)
    assert (made.cluster == 1 and made.teams == 1) if arch == 80 else made.cluster > 0


@pytest.mark.parametrize("is_fp8", [False, True])
def test_the_blocks_of_one_row_have_a_multiprocessor_each(is_fp8: bool) -> None:
    device = known_device("sm_90", 132)
    plan = DecodePlan.of(EIGHT_B, device, 131_072, is_fp8=is_fp8)
    one, two = plan.launch(1, plan.constants), plan.launch(2, plan.constants)
    assert plan.num_splits == 56 and one.grid == (56, 2, 1)
    assert 2 * one.shared_bytes > device.shared_bytes_per_block >= 2 * two.shared_bytes
    of_tree, chosen = (step_launch(plan, 1, **options).shared_bytes for options in NOT_PLAIN)
    assert of_tree == two.shared_bytes
    # A row that chose, over pages in 16 bits, has a ring so long that its blocks are alone as well.
    assert chosen == two.shared_bytes if is_fp8 else 2 * chosen > device.shared_bytes_per_block


def plan_on(
    device: Device, shape: GroupedAttention = EIGHT_B, max_context: int = 131_072, *, is_fp8: bool = False
) -> AttentionPlan:
    anything: Any = None
    return AttentionPlan(anything, DecodePlan.of(shape, device, max_context, is_fp8=is_fp8), anything)


def of_each_length(plan: AttentionPlan, *, is_tree: bool = False, **options: Any) -> list[AttentionLaunch]:
    """Return the launches of one row whose length is short, unknown and long."""
    lengths: tuple[RowLength | None, ...] = ("short", None, "long")
    return [step_launch(plan.decode, 1, is_tree=is_tree, **options, length=length) for length in lengths]


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_short_row_alone_has_one_cluster_for_each_kv_head(is_fp8: bool) -> None:
    """A short row alone gets one cluster per KV head; its number of splits, and so its bits, are those of any
    length."""
    plan = plan_on(known_device("sm_90", 132), is_fp8=is_fp8)
    short, unknown, long = of_each_length(plan)
    assert plan.has_short_launch(1) and short.grid == (8, 2, 1)
    assert long == unknown == replace(short, grid=(56, 2, 1))
    assert short.sizes == (plan.decode.num_splits,) == (56,)
    for options in (*NOT_PLAIN, {"window": 512}):
        short, unknown, long = of_each_length(plan, **options)
        assert short == unknown == long, options


def test_a_short_row_alone_is_launched_as_any_where_that_has_one_cluster_too() -> None:
    """With fourteen KV heads, which fill the device, a row of any length has one cluster per KV head as a short one
    has."""
    plan = plan_on(known_device("sm_90", 132), GroupedAttention(28, 14, 128))
    short, unknown, _ = of_each_length(plan)
    assert short == unknown and short.grid == (8, 14, 1) and not plan.has_short_launch(1)


@pytest.mark.parametrize("device", [
    replace(known_device("sm_90", 132), capability=86, whole_clusters=0), known_device("sm_80"), known_device("sm_86"),
    known_device("sm_89"),
], ids=lambda device: f"{device.arch} as {device.capability}")  # fmt: skip
def test_without_clusters_no_length_counts(device: Device) -> None:
    plan = plan_on(device)
    short, unknown, long = of_each_length(plan)
    assert short == unknown == long and not plan.has_short_launch(1)


def test_which_short_rows_are_launched_otherwise() -> None:
    """Only a row alone has a short launch, and only where the device has room for more than one cluster per KV head."""
    device, many_heads = known_device("sm_90", 132), GroupedAttention(36, 36, 64)
    assert [rows for rows in (1, 2, 4, 8, 16, 32, 64) if plan_on(device).has_short_launch(rows)] == [1]
    assert plan_on(replace(device, capability=100, whole_clusters=0)).has_short_launch(1)
    assert not plan_on(device, many_heads).has_short_launch(1)


def test_where_no_text_becomes_long_one_row_is_always_launched_as_a_short_one() -> None:
    device = known_device("sm_90", 132)
    few, more = (plan_on(device, max_context=context) for context in (SHORT_KEYS, SHORT_KEYS + 1))
    assert not few.has_short_launch(1) and more.has_short_launch(1)
    assert [of_each_length(plan)[1].grid for plan in (few, more)] == [(8, 2, 1), (32, 2, 1)]
    assert of_each_length(few)[1] == replace(of_each_length(more)[0], sizes=(few.decode.num_splits,))
    assert of_each_length(few, is_tree=True)[1].grid == (few.decode.num_splits, 2, 1)


def test_blocks_share_multiprocessors_where_clusters_do_not_find_whole_ones() -> None:
    """Where whole clusters find no free multiprocessors, blocks share them, and the number of splits, so the bits,
    stay."""
    device = replace(known_device("sm_90", 132), whole_clusters=13)
    plan = DecodePlan.of(EIGHT_B, device, 131_072)
    one = plan.launch(1, plan.constants)
    assert (plan.num_splits, one.grid, one.shared_bytes) == (56, (56, 2, 1), plan.row_bytes)


@pytest.mark.parametrize(("kv_heads", "splits"), [(1, 112), (2, 56), (3, 40), (4, 32), (5, 24), (8, 16), (36, 8)])
def test_as_many_runs_as_keep_the_device_reading(kv_heads: int, splits: int) -> None:
    shape = GroupedAttention(2 * kv_heads, kv_heads, 64)
    assert DecodePlan.of(shape, known_device("sm_90", 132), 131_072).num_splits == splits


def test_rows_of_trees_and_those_that_chose_keep_their_blocks() -> None:
    plan = DecodePlan.of(EIGHT_B, replace(known_device("sm_90", 132), capability=100), 131_072)
    for options in NOT_PLAIN:
        made = step_launch(plan, 64, **options).constants
        assert isinstance(made, DecodeConstants)
        assert (made.cluster, made.teams, made.stages) == (8, 1, 3)


def test_rows_over_pages_in_fp8_keep_their_blocks() -> None:
    assert constants_of(32, is_fp8=True) == constants_of(1, is_fp8=True)
