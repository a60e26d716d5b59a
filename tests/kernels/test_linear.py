"""linear.cu against the NumPy ops: every epilogue, shapes of models, portable path or not, bitwise row invariance,
guards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from kernel_compiles import Compiles
from linear_cases import (
    EPS,
    H200,
    ORIN,
    RTX_4090,
    UNSTORED,
    OnDevice,
    bits,
    normals,
    op_of,
    oracle,
    relative_error,
    step_operands,
)
from slow_writer import SlowWriter

from cpmrt.cuda.build.spec import macros_of
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import BLOCK_THREADS, ROW_BUCKETS, LinearPlan, plan_linear, row_bucket
from cpmrt.dtypes import DType, round_to, to_float32
from cpmrt.ops import OPS
from cpmrt.reference.ops import linear, rms_norm

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
ROWS = [1, 2, 5, 8, 9, 12, 13, 16, 31, 32, 33, 64]

SMALL = {
    "demo qkv": ("qkv", 768, 256, 64, 2),
    "demo o": ("residual", 256, 512, 0, 0),
    "demo gate_up": ("gate_up", 1280, 256, 0, 0),
    "demo down": ("residual", 256, 640, 0, 0),
    "demo head": ("head", 4096, 256, 0, 0),
    "odd head": ("head", 1003, 320, 0, 0),
    "one unit": ("residual", 16, 64, 0, 0),
    "EAGLE-3 demo qkv": ("qkv", 768, 512, 64, 2),
    "EAGLE-3 demo fc": ("residual", 256, 768, 0, 0),
    "uneven qkv": ("qkv", 2688, 256, 64, 2),
    "uneven o": ("residual", 2640, 640, 0, 0),
    "uneven head": ("head", 2629, 320, 0, 0),
    "96 qkv": ("qkv", 1152, 768, 96, 2),
    "0.5B qkv": ("qkv", 1280, 1024, 64, 2),
    "0.5B o": ("residual", 1024, 1024, 0, 0),
    "0.5B gate_up": ("gate_up", 8192, 1024, 0, 0),
    "0.5B down": ("residual", 1024, 4096, 0, 0),
}
LARGE = {
    "8B qkv": ("qkv", 4608, 4096, 128, 2),
    "8B o": ("residual", 4096, 4096, 0, 0),
    "8B gate_up": ("gate_up", 32768, 4096, 0, 0),
    "8B down": ("residual", 4096, 16384, 0, 0),
    "8B head": ("head", 40001, 4096, 0, 0),
    "EAGLE-3 qkv": ("qkv", 4608, 8192, 128, 2),
    "EAGLE-3 fc": ("residual", 4096, 12288, 0, 0),
}
SHAPES = SMALL | LARGE


@dataclass
class Case:
    """A product's operands for 64 rows, as float32 that holds storage values."""

    product: str
    dtype: DType
    out_features: int
    in_features: int
    head_dim: int
    num_kv_heads: int
    has_bias: bool
    arrays: dict[str, Any]

    @property
    def num_heads(self) -> int:
        return self.out_features // self.head_dim - 2 * self.num_kv_heads


def make_case(name: str, dtype: DType, has_bias: bool = True, is_draft: bool = False) -> Case:
    product, out_features, in_features, head_dim, num_kv_heads = SHAPES[name]
    rng = np.random.default_rng(out_features + in_features)

    normal = normals(rng, dtype)
    arrays = {
        "x": normal(64, in_features, spread=1.7),
        "weight": normal(out_features, in_features, spread=in_features**-0.5),
    }
    arrays |= step_operands(rng, dtype, product, (out_features, in_features), head_dim, has_bias, is_draft)
    return Case(product, dtype, out_features, in_features, head_dim, num_kv_heads, has_bias, arrays)


class Launcher(OnDevice):
    """A case on the device; `run` launches the product and returns the words of the first `num_rows` output rows."""

    def __init__(self, cuda: Any, case: Case, *, portable: bool):
        super().__init__(cuda, case, portable=portable)
        self.weight = cuda.array(case.arrays["weight"], case.dtype)
        self.path = {"CPMRT_PORTABLE": 1} if portable else {}

    def run(self, num_rows: int, *, pdl: bool = False, raw: bool = False, comes_ahead: bool = False) -> Any:
        """Run the product and return its words; with `raw` a qkv product stores its plain rows, without pages."""
        case, has_norm = self.case, self.case.arrays["norm"] is not None
        outputs = (self.poisoned(65, case.out_features),) if raw else self.outputs(num_rows)
        product = self.product(num_rows, (*outputs, None, None) if raw else outputs)
        plan = plan_linear(
            case.product, self.weight.shape, num_rows, self.on,
            has_norm=has_norm, head_dim=case.head_dim, comes_ahead=comes_ahead,
        )  # fmt: skip
        sizes = macros_of(product.built(plan.constants))
        kernel = self.cuda.kernel(f"linear_{case.product}", case.dtype, **sizes, **self.path)
        arguments = product.arguments(product.x, (self.weight,))
        self.wait()
        kernel(plan.grid, BLOCK_THREADS, *arguments, smem=plan.constants.smem_bytes, pdl=pdl)
        return self.words(num_rows, outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.all] if name in LARGE else []) for name in SHAPES]
)
def test_against_the_op_and_bitwise_for_every_number_of_rows(
    cuda: Any, name: str, dtype: DType, portable: bool
) -> None:
    case = make_case(name, dtype)
    expected, launcher = oracle(case), Launcher(cuda, case, portable=portable)
    widest = launcher.run(64)
    values = to_float32(widest, launcher.stored)
    kept = [row for row in range(64) if case.product != "qkv" or row not in UNSTORED]
    for row in kept:
        assert relative_error(values[row], expected[row]) < OPS[op_of(case.product)].tolerance[dtype], row
    for num_rows in ROWS:
        assert np.array_equal(bits(launcher.run(num_rows, pdl=True)), bits(widest[:num_rows])), num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("stale", ["positions", "slots", "block_tables"])
@pytest.mark.parametrize("name", ["0.5B qkv", "uneven qkv", "96 qkv", "8B qkv"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_where_a_row_was_is_not_taken_for_where_it_is(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, name: str, stale: str, num_rows: int
) -> None:
    """The product reads rows' positions, slots and block tables after its wait: until the preceding kernel is done they
    are those of other rows."""
    launcher = Launcher(cuda, make_case(name, DType.BFLOAT16), portable=False)
    expected, held = launcher.run(num_rows), launcher.arrays[stale]
    writer, wait = SlowWriter(cuda, [held], [held[::-1].copy()], [held.copy()]), launcher.wait
    monkeypatch.setattr(launcher, "wait", lambda: (wait(), writer.launch()))
    for _ in range(3):
        assert np.array_equal(bits(launcher.run(num_rows, pdl=True)), bits(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ["demo gate_up", "0.5B gate_up"])
def test_gates_of_a_fatrelu(cuda: Any, name: str, dtype: DType) -> None:
    case = make_case(name, dtype)
    case.arrays["fatrelu"] = 1.1
    launcher = Launcher(cuda, case, portable=False)
    widest = launcher.run(64)
    values = to_float32(widest, dtype)
    assert 0.7 < (values == 0).mean() < 0.95
    assert relative_error(values, oracle(case)) < OPS["gate_up"].tolerance[dtype]
    for num_rows in (1, 12, 33):
        assert np.array_equal(bits(launcher.run(num_rows, pdl=True)), bits(widest[:num_rows])), num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize(
    "name",
    ["EAGLE-3 demo qkv", "96 qkv", "uneven qkv", "demo head", "odd head", "uneven head"]
    + [pytest.param(name, marks=pytest.mark.all) for name in ("EAGLE-3 qkv", "8B head")],
)
def test_rows_of_a_draft(cuda: Any, name: str, dtype: DType, portable: bool) -> None:
    case = make_case(name, dtype, is_draft=True)
    expected, launcher = oracle(case), Launcher(cuda, case, portable=portable)
    widest = launcher.run(64)
    values = to_float32(widest, launcher.stored)
    for row in (row for row in range(64) if case.product != "qkv" or row not in UNSTORED):
        assert relative_error(values[row], expected[row]) < OPS[op_of(case.product)].tolerance[dtype], row
    for num_rows in ROWS:
        assert np.array_equal(bits(launcher.run(num_rows, pdl=True)), bits(widest[:num_rows])), num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["demo qkv", "demo o", "96 qkv", "0.5B down"])
def test_without_bias(cuda: Any, name: str) -> None:
    case = make_case(name, DType.BFLOAT16, has_bias=False)
    kept = [row for row in range(64) if case.product != "qkv" or row not in UNSTORED]
    out = to_float32(Launcher(cuda, case, portable=False).run(64), case.dtype)
    assert relative_error(out[kept], oracle(case)[kept]) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 12, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
def test_the_raw_projection(cuda: Any, dtype: DType, num_rows: int) -> None:
    case = make_case("0.5B qkv", dtype)
    a = case.arrays
    normalised = round_to(rms_norm(a["x"], a["norm"], EPS), dtype)
    expected = round_to(linear(normalised, a["weight"]) + a["bias"], dtype)[:num_rows]
    out = to_float32(Launcher(cuda, case, portable=False).run(num_rows, raw=True), dtype)
    assert relative_error(out, expected) < OPS["qkv"].tolerance[dtype]


@pytest.mark.gpu
def test_a_row_does_not_see_the_others(cuda: Any) -> None:
    case = make_case("demo gate_up", DType.BFLOAT16)
    launcher = Launcher(cuda, case, portable=False)
    before = launcher.run(12)
    case.arrays["x"][1:] = np.nan
    assert np.array_equal(bits(Launcher(cuda, case, portable=False).run(12)[0]), bits(before[0]))


@pytest.mark.parametrize("device", [H200, ORIN, RTX_4090], ids=["H200", "Orin", "4090"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_order_of_a_sum_does_not_depend_on_the_rows(name: str, device: Device) -> None:
    product, out_features, in_features, _, _ = SHAPES[name]
    plans = [plan_linear(product, (out_features, in_features), rows, device) for rows in range(1, 65)]
    assert len({plan.constants.cluster for plan in plans}) == 1
    for rows, plan in enumerate(plans, 1):
        assert 8 * plan.constants.token_tiles == row_bucket(rows, ROW_BUCKETS) >= rows
        assert plan.constants.smem_bytes <= device.shared_bytes_per_block and plan.grid % plan.constants.cluster == 0
        assert device.capability >= 90 or plan.constants.cluster == 1


def plan_of_row(name: str, device: Device, *, comes_ahead: bool) -> LinearPlan:
    return plan_linear(SHAPES[name][0], SHAPES[name][1:3], 1, device, comes_ahead=comes_ahead)


def test_blocks_of_a_small_models_row_ask_for_weights_side_by_side() -> None:
    """With one row of the 0.5B, a block of gate_up has room on a multiprocessor beside one of o or down, though both
    hold only three quarters of their weights in shared memory. Two blocks of gate_up have room, too, for when attention
    holds other multiprocessors, two of down have not, and o leaves most multiprocessors to them."""
    o, gate_up, down = (plan_of_row(f"0.5B {name}", H200, comes_ahead=True) for name in ("o", "gate_up", "down"))
    taken = [plan.constants.smem_bytes for plan in (o, gate_up, down)]
    assert taken[1] + max(taken[0], taken[2]) <= H200.shared_bytes_per_block
    assert taken[1] < H200.lone_block_bytes == taken[2]
    assert [plan.constants.held_chunks for plan in (o, gate_up, down)] == [0, 2, 2]
    assert [plan.grid for plan in (o, gate_up, down)] == [32, 128, 64]


def test_blocks_of_one_row_find_room_beside_those_of_the_product_before() -> None:
    """Where it does not come ahead, a block of gate_up fits on a multiprocessor beside one of o, and so do two of
    gate_up."""
    o, gate_up = (plan_of_row(f"0.5B {name}", H200, comes_ahead=False).constants for name in ("o", "gate_up"))
    assert o.smem_bytes + gate_up.smem_bytes <= H200.shared_bytes_per_block
    assert gate_up.smem_bytes < H200.lone_block_bytes


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("0.5B")])
def test_a_small_models_weights_are_streamed_where_nothing_comes_ahead(name: str) -> None:
    assert plan_of_row(name, H200, comes_ahead=False).constants.held_chunks is None
    for device in (ORIN, RTX_4090, replace(H200, arch="sm_100", capability=100)):
        assert plan_of_row(name, device, comes_ahead=True).constants.held_chunks is None


@pytest.mark.parametrize(("shape", "held"), [((1536, 1536), 0), ((1536, 4608), 0), ((4096, 4096), None)])
def test_a_wider_models_weights_are_asked_for_before_the_row_if_shared_memory_has_room(
    shape: tuple[int, int], held: int | None
) -> None:
    assert plan_linear("residual", shape, 1, H200).constants.held_chunks == held


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ["0.5B o", "0.5B gate_up", "0.5B down"])
def test_a_row_that_comes_ahead_has_the_bits_of_any_other(cuda: Any, name: str, dtype: DType) -> None:
    launcher = Launcher(cuda, make_case(name, dtype), portable=False)
    expected = bits(launcher.run(1))
    for pdl in (False, True):
        assert np.array_equal(bits(launcher.run(1, pdl=pdl, comes_ahead=True)), expected)


@dataclass(frozen=True)
class PlanBuild:
    """A product to compile for a device, for every number of rows that has its own build."""

    name: str
    device: Device
    arch: str

    def sizes(self) -> Iterator[Any]:
        """Yield the product's compile-time sizes for each number of rows."""
        product, out_features, in_features, head_dim, _ = SHAPES[self.name]
        size = out_features, in_features
        for rows in (1, 8, 12, 16, 32, 64):
            yield plan_linear(product, size, rows, self.device, head_dim=head_dim).constants
        yield plan_linear(product, size, 1, self.device, head_dim=head_dim, comes_ahead=True).constants


BUILDS = [PlanBuild(name, H200, "sm_90") for name in SHAPES] + [
    PlanBuild(name, *device)
    for device in ((H200, "sm_100"), (ORIN, "sm_87"), (RTX_4090, "sm_89"))
    for name in SHAPES
    if name.startswith("8B")
]


def tiered(build: PlanBuild) -> Any:
    """Return the pytest parameter of a build: only one product of the 0.5B's shape is in the first tier of tests."""
    marks = () if build.name == "0.5B gate_up" else pytest.mark.all
    return pytest.param(build, id=f"{build.name}-{build.arch}", marks=marks)


@pytest.mark.parametrize("build", list(map(tiered, BUILDS)))
def test_every_plan_compiles_without_spills(compiles: Compiles, build: PlanBuild) -> None:
    for sizes in build.sizes():
        log = compiles.module("linear/linear.cu", build.arch, DType.BFLOAT16, sizes).log
        assert "warning" not in log and " 0 bytes spill stores, 0 bytes spill loads" in log, log


@pytest.mark.parametrize("rows", [0, 65, -1])
def test_a_step_has_1_to_64_rows(rows: int) -> None:
    with pytest.raises(ValueError, match="1 to 64"):
        row_bucket(rows, ROW_BUCKETS)


def test_lanes_meet_every_k_once_and_both_operands_agree() -> None:
    """Within 32 columns the lanes' order of k covers each k once, and it is the same for both operands: words 0-3 of
    row g that a lane holds meet the same k of the token."""
    weights, tokens = np.random.default_rng(0).standard_normal((2, 8, 32))
    total = np.zeros((8, 8))
    for step in range(2):
        for quarter in range(4):
            held = [8 * quarter + 4 * step + word * 2 + half for word in range(2) for half in range(2)]
            total += weights[:, held] @ tokens[:, held].T
    np.testing.assert_allclose(total, weights @ tokens.T)
