"""ffn_row: with the launch of the next attention it gives the bits of the mlp's two ops; the mlps that it takes; an mlp
that is held back in vain."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from linear_cases import EPS, H200, ORIN, bits, layout_of
from row_layer_cases import (
    DTYPES,
    PROJECTED,
    OneRow,
    Shape,
    Step,
    assert_joining_keeps_bits,
    assert_same,
    behind_slow_writer,
)

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.ops.linear import ResidualRest, StepProduct
from cpmrt.cuda.ops.linear_packed.ffn_row import FfnRowPlan, HeldFfn
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight
from cpmrt.dtypes import DType

POSITIONS = [0, 63, 64, 700, 1087, 2047]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", PROJECTED)
def test_the_bits_are_those_of_a_launch_for_each_op(cuda: Any, name: str, dtype: DType) -> None:
    assert_joining_keeps_bits(OneRow(cuda, PROJECTED[name], dtype).layers, POSITIONS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROJECTED)
def test_dependent_launches_give_the_same_bits(cuda: Any, name: str) -> None:
    """Each launch reads what the one before has changed: x, and the sums."""
    row = OneRow(cuda, PROJECTED[name], DType.BFLOAT16)
    for position in (0, 64, 1087):
        expected = row.layers(position, 2, joined=False, launches=12)
        assert_same(row.layers(position, 2, joined=True, pdl=True, launches=12), expected, position)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROJECTED)
def test_x_is_read_once_the_kernel_before_has_written_it(cuda: Any, name: str) -> None:
    row = OneRow(cuda, PROJECTED[name], DType.BFLOAT16)
    apart = Step(row, 5, 0)
    apart.run_mlp()
    apart.project(joined=False)
    for _ in range(3):
        step = behind_slow_writer(row, 5)
        step.run_mlp()
        step.project(joined=True)
        assert np.array_equal(*(bits(cuda.numpy(given.x)) for given in (step, apart)))


@pytest.mark.gpu
def test_to_padding_nothing_is_added(cuda: Any) -> None:
    row = OneRow(cuda, PROJECTED["0.5B"], DType.BFLOAT16)
    for position, slot in ((10**9, -1), (-1, 1)):
        x, k, v = row.layers(position, slot, joined=True)
        assert_same([x, k, v], [bits(cuda.numpy(row.held["x"])), *Step(row, position, slot).words()[1:]], slot)


@pytest.mark.gpu
def test_what_is_launched_between_finds_x_complete(cuda: Any) -> None:
    row = OneRow(cuda, PROJECTED["0.5B"], DType.BFLOAT16)
    held, alone = Step(row, 5, 0), Step(row, 5, 0)
    for step in (held, alone):
        step.run_mlp()
    alone.release()
    held.launch(is_attended=True)  # attention without the output's projection adds no sums
    assert np.array_equal(*(bits(cuda.numpy(step.x)) for step in (held, alone)))
    assert np.isfinite(cuda.numpy(held.inner, row.dtype)).all(), "two launches"
    assert not np.array_equal(bits(cuda.numpy(held.x)), bits(cuda.numpy(row.held["x"])))


class Paper(Launcher):
    """A launcher that notes the kernels that it would launch."""

    def __init__(self) -> None:
        super().__init__(None, None, use_pdl=False)  # type: ignore[arg-type]
        self.launched: list[str] = []

    def __call__(self, spec: Any, *args: Any, **options: Any) -> None:
        self.release()
        self.launched.append(spec.name)


class Mlp:
    """The mlp of the 0.5B on paper, with ops that may differ from it."""

    def __init__(self) -> None:
        self.paper = Paper()
        self.x, self.inner = np.zeros((1, 1024), np.float16), np.zeros((1, 4096), np.float16)
        layouts = PROJECTED["0.5B"].mlp_layouts(H200)
        self.gate_up, self.down = (PackedWeight(np.zeros(0), None, layout) for layout in layouts)  # type: ignore[arg-type]
        self.held = HeldFfn(self.paper, H200, np.zeros(8192, np.float32))  # type: ignore[arg-type]

    def run(self, *, rows: int = 1, down: PackedWeight | None = None, to: Any = None, bias: Any = None) -> list[bool]:
        """Offer both products and return whether each is held; one that is not is launched."""
        x, inner = np.repeat(self.x, rows, axis=0) if rows > 1 else self.x, self.inner
        gate_up = StepProduct("gate_up", (inner,), x, np.zeros(1024), EPS, ())  # type: ignore[arg-type]
        rest = ResidualRest(np.int32(1), np.int32(1024), np.float32(0.2))
        added = StepProduct("residual", (x if to is None else to,), inner, None, 0.0, rest, bias)  # type: ignore[arg-type]
        taken = []
        for product, weight in ((gate_up, self.gate_up), (added, down or self.down)):
            launch_one = partial(self.paper, SimpleNamespace(name=product.kind))
            taken.append(self.held.takes(product, weight, launch_one))
            if not taken[-1]:
                launch_one()
        return taken


def test_an_mlp_is_launched_once_in_its_order() -> None:
    mlp = Mlp()
    assert mlp.run() == [True, True] and not mlp.paper.launched
    assert mlp.held.launch_sums(np.zeros((1, 1024)))[0] is None, "another row"  # type: ignore[arg-type]
    sums, scale = mlp.held.launch_sums(mlp.x)  # type: ignore[arg-type]
    assert sums is not None and scale == np.float32(0.2)
    mlp.paper.release()
    assert mlp.paper.launched == ["ffn_row"]
    assert mlp.held.launch_sums(mlp.x)[0] is None, "it was launched"  # type: ignore[arg-type]
    mlp.run()
    mlp.run()
    assert mlp.paper.launched == ["ffn_row", "gate_up", "residual"], "the first, before the second is held"
    mlp.paper.release()
    assert mlp.paper.launched[3:] == ["gate_up", "residual"]


def test_what_is_not_an_mlp_in_one_launch_is_launched_in_its_order() -> None:
    permuted = replace(Mlp().down, perm=np.zeros(4096, np.int32))  # type: ignore[arg-type]
    other = PackedWeight(np.zeros(0), None, layout_of("residual", (1024, 4096), 64, H200))  # type: ignore[arg-type]
    for given in ({"down": permuted}, {"down": other}, {"to": np.zeros((1, 1024))}, {"bias": np.zeros(1024)}):
        mlp = Mlp()
        assert mlp.run(**given) == [True, False], given  # type: ignore[arg-type]
        assert mlp.paper.launched == ["gate_up", "residual"], given
    mlp = Mlp()
    assert mlp.run(rows=2) == [False, False] and mlp.paper.launched == ["gate_up", "residual"]


def test_which_mlps_take_one_launch() -> None:
    def plan(shape: Shape, device: Any = H200) -> FfnRowPlan | None:
        return FfnRowPlan.of(*shape.mlp_layouts(device), device)

    small = PROJECTED["0.5B"]
    found = plan(small)
    assert found is not None
    own = found.constants
    assert (found.grid, own.warps, own.kept_rounds, own.inner_features) == (128, 8, 4, 4096)
    assert all(plan(shape) is not None for shape in PROJECTED.values())
    for device in (ORIN, replace(H200, has_wide_clusters=False), replace(H200, num_sms=114)):
        assert plan(small, device) is None
    for columns, inner in ((1536, 4608), (2048, 6144), (1024, 4224), (4096, 16384)):
        assert plan(replace(small, columns=columns, inner=inner)) is None, (columns, inner)
    gate_up, down = small.mlp_layouts(H200)
    assert FfnRowPlan.of(gate_up, layout_of("residual", (1024, 4096), 64, H200), H200) is None, "other groups"
    assert FfnRowPlan.of(gate_up, layout_of("residual", (1024, 4096), 128, H200, zeros=1), H200) is None
