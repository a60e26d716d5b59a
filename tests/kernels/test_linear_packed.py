"""linear_packed.cu and prepare_rows.cu against the NumPy ops on dequantised weights; a row's bits must not depend on
the other rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from kernel_compiles import Compiles
from linear_cases import (
    DIVISOR,
    EPS,
    H200,
    ORIN,
    RTX_4090,
    OnDevice,
    bits,
    layout_of,
    normals,
    op_of,
    oracle,
    relative_error,
    step_operands,
    stored_rows,
)
from packed_oracle import pack, unit_offsets, unpack_codes
from slow_writer import SlowWriter

from cpmrt.cuda.build.spec import macros_of
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import StepProduct, row_bucket
from cpmrt.cuda.ops.linear_packed.constants import PREPARE_THREADS, PrepareConstants
from cpmrt.cuda.ops.linear_packed.division import ROW_BUCKETS
from cpmrt.cuda.ops.linear_packed.layout import MINIMUMS, PackedLayout, PackedWeight
from cpmrt.cuda.ops.linear_packed.plan import plan_packed
from cpmrt.cuda.ops.linear_packed.products import PackedProducts
from cpmrt.dtypes import DType, from_float32, round_to, to_float32
from cpmrt.errors import UnsupportedModelError
from cpmrt.ops import NOTHING, OPS

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
ROWS = [1, 2, 5, 8, 12, 16, 31, 32, 64]

# Product, rows, columns, head size, KV heads, group size, zero points, permuted columns.
SMALL = {
    "demo qkv": ("qkv", 768, 256, 64, 2, 128, False, False),
    "demo o": ("residual", 256, 512, 0, 0, 64, True, False),
    "demo gate_up": ("gate_up", 1280, 256, 0, 0, 32, True, False),
    "demo down": ("residual", 256, 640, 0, 0, 640, False, False),
    "one slice": ("residual", 16, 128, 0, 0, 128, False, False),
    "odd head": ("head", 1003, 384, 0, 0, 128, False, False),
    "wide gate_up": ("gate_up", 2 * 1056 * 16 + 32, 256, 0, 0, 128, False, False),
    "feeding gate_up": ("gate_up", 2 * 128 * 128, 256, 0, 0, 128, False, False),
    "feeding gate_up, groups of 64": ("gate_up", 2 * 128 * 128, 128, 0, 0, 64, False, False),
    "feeding gate_up, groups of 32": ("gate_up", 2 * 128 * 128, 128, 0, 0, 32, True, False),
    "uneven qkv": ("qkv", 2688, 256, 96, 2, 32, False, False),
    "two rounds of qkv": ("qkv", 6400, 256, 64, 2, 128, False, False),
    "uneven o": ("residual", 2640, 640, 0, 0, 64, False, False),
    "long down": ("residual", 80, 16384, 0, 0, 128, False, False),
    "long down, groups of 32": ("residual", 48, 8192, 0, 0, 32, True, False),
    "long down, groups of 64": ("residual", 80, 16384, 0, 0, 64, False, False),
    "few tiles in clusters": ("residual", 80, 4096, 0, 0, 64, True, False),
    "two rounds in clusters": ("residual", 6400, 3072, 0, 0, 128, False, False),
    "empty run in clusters": ("qkv", 768, 3200, 64, 2, 128, False, False),
    "EAGLE-3 demo fc": ("residual", 256, 768, 0, 0, 128, False, False),
    "permuted qkv": ("qkv", 768, 512, 64, 2, 128, False, True),
    "permuted o": ("residual", 2640, 1152, 0, 0, 128, True, True),
    "permuted o in two rounds": ("residual", 6400, 256, 0, 0, 128, False, True),
    "0.5B qkv": ("qkv", 1280, 1024, 64, 2, 128, False, False),
    "0.5B gate_up": ("gate_up", 8192, 1024, 0, 0, 128, True, False),
    "0.5B down": ("residual", 1024, 4096, 0, 0, 128, False, False),
}
LARGE = {
    "8B qkv": ("qkv", 4608, 4096, 128, 2, 128, False, False),
    "8B o": ("residual", 4096, 4096, 0, 0, 128, False, False),
    "8B gate_up": ("gate_up", 32768, 4096, 0, 0, 128, False, False),
    "8B down": ("residual", 4096, 16384, 0, 0, 128, False, False),
    "MiniCPM3 gate_up": ("gate_up", 12800, 2560, 0, 0, 128, False, False),
    "8B head": ("head", 20001, 4096, 0, 0, 64, True, False),
    "5-2B qkv": ("qkv", 2560, 2048, 128, 2, 128, False, False),
    "5-2B o": ("residual", 2048, 2048, 0, 0, 128, False, False),
    "5-2B gate_up": ("gate_up", 12288, 2048, 0, 0, 128, False, False),
    "5-2B down": ("residual", 2048, 6144, 0, 0, 128, False, False),
    "5-2B qkv, groups of 32": ("qkv", 2560, 2048, 128, 2, 32, True, False),
    "permuted 5-2B o, groups of 64": ("residual", 2048, 2048, 0, 0, 64, False, True),
    "5-2B down, groups of 64": ("residual", 2048, 6144, 0, 0, 64, True, False),
    "runs without columns, side by side": ("gate_up", 7680, 1536, 0, 0, 128, False, False),
    "EAGLE-3 qkv": ("qkv", 4608, 8192, 128, 2, 128, False, False),
    "EAGLE-3 fc": ("residual", 4096, 12288, 0, 0, 128, False, False),
}
EIGHT_BITS = {
    "odd head in 8 bits": ("head", 1003, 384, 0, 0, 128, False, False),
    "head in 8 bits, groups of 32": ("head", 1003, 640, 0, 0, 32, False, False),
    "head in 8 bits, groups of 64": ("head", 519, 2304, 0, 0, 64, False, False),
    "head in 8 bits, one slice": ("head", 40, 128, 0, 0, 128, False, False),
    "long head in 8 bits": ("head", 1000, 4096, 0, 0, 128, False, False),
    "whole rows in 8 bits": ("head", 17001, 640, 0, 0, 128, False, False),
    "whole rows in 8 bits, groups of 32": ("head", 17001, 256, 0, 0, 32, False, False),
}
LARGE_EIGHT_BITS = {
    "8B head in 8 bits": ("head", 20001, 4096, 0, 0, 128, False, False),
    "8B head in 8 bits, groups of 64": ("head", 20001, 4032 + 64, 0, 0, 64, False, False),
}
# Ternary weights never have the code 0, but the kernels take it.
TWO_BITS = {
    "ternary qkv": ("qkv", 768, 256, 64, 2, 128, False, False),
    "ternary o, groups of 64": ("residual", 256, 512, 0, 0, 64, False, False),
    "ternary gate_up, groups of 32": ("gate_up", 1280, 256, 0, 0, 32, False, False),
    "ternary down, a group a row": ("residual", 256, 640, 0, 0, 640, False, False),
    "ternary, long down, groups of 32": ("residual", 48, 8192, 0, 0, 32, False, False),
    "ternary 0.5B gate_up": ("gate_up", 8192, 1024, 0, 0, 128, False, False),
    "ternary 0.5B down": SMALL["0.5B down"],
    "ternary gate_up, half of the warps early": ("gate_up", 2 * 128 * 128, 1024, 0, 0, 128, False, False),
}
TWO_BITS |= {
    f"ternary, {name}": SMALL[name]
    for name in (
        "one slice", "odd head", "wide gate_up", "feeding gate_up", "uneven qkv", "uneven o", "two rounds in clusters",
        "empty run in clusters", "long down",
    )
}  # fmt: skip
LARGE_TWO_BITS = {f"ternary {name}": LARGE[name] for name in ("8B qkv", "8B o", "8B gate_up", "8B down")}
# Groups of 16 and minimums, as blocks of GGUF files have them.
BLOCKS_4 = {
    "minimums qkv": ("qkv", 768, 256, 64, 2, 32, MINIMUMS, False),
    "minimums o": ("residual", 256, 512, 0, 0, 32, MINIMUMS, False),
    "minimums, groups of 16": ("residual", 272, 640, 0, 0, 16, MINIMUMS, False),
    "minimums, feeding gate_up": ("gate_up", 2 * 128 * 128, 256, 0, 0, 32, MINIMUMS, False),
    "minimums, long down": ("residual", 48, 8192, 0, 0, 32, MINIMUMS, False),
    "groups of 16": ("residual", 256, 512, 0, 0, 16, 0, False),
}
BLOCKS_8 = {
    "8 bits qkv, groups of 16, minimums": ("qkv", 768, 256, 64, 2, 16, MINIMUMS, False),
    "8 bits o": ("residual", 256, 512, 0, 0, 32, 0, False),
    "8 bits gate_up, groups of 16": ("gate_up", 1280, 256, 0, 0, 16, 0, False),
    "8 bits, feeding gate_up": ("gate_up", 2 * 128 * 128, 256, 0, 0, 32, 0, False),
    "8 bits long down, groups of 16": ("residual", 48, 8192, 0, 0, 16, 0, False),
    "8 bits, two rounds in clusters": ("residual", 6400, 3072, 0, 0, 32, 0, False),
    "8 bits head, groups of 16": ("head", 1003, 640, 0, 0, 16, 0, False),
}
LARGE_BLOCKS_4 = {"8B gate_up, minimums": ("gate_up", 32768, 4096, 0, 0, 32, MINIMUMS, False)}
LARGE_BLOCKS_8 = {
    "8B qkv, 8 bits, minimums": ("qkv", 4608, 4096, 128, 2, 16, MINIMUMS, False),
    "8B o, 8 bits": ("residual", 4096, 4096, 0, 0, 32, 0, False),
    "8B gate_up, 8 bits": ("gate_up", 32768, 4096, 0, 0, 32, 0, False),
    "8B down, 8 bits, groups of 16": ("residual", 4096, 16384, 0, 0, 16, 0, False),
}
CODE_BITS = dict.fromkeys(TWO_BITS | LARGE_TWO_BITS, 2)
CODE_BITS |= dict.fromkeys(EIGHT_BITS | LARGE_EIGHT_BITS | BLOCKS_8 | LARGE_BLOCKS_8, 8)
"""Bits of a code in the cases where they are not 4."""
SMALL |= BLOCKS_4 | BLOCKS_8 | EIGHT_BITS | TWO_BITS
LARGE |= LARGE_BLOCKS_4 | LARGE_BLOCKS_8 | LARGE_EIGHT_BITS | LARGE_TWO_BITS
SHAPES = SMALL | LARGE
FEEDING = {
    H200: {
        "8B gate_up, minimums", "8B gate_up, 8 bits", "minimums, feeding gate_up", "8 bits, feeding gate_up",
        "8B gate_up", "ternary 8B gate_up", "ternary, feeding gate_up", "feeding gate_up",
        "ternary gate_up, half of the warps early", "feeding gate_up, groups of 64",
        "feeding gate_up, groups of 32",
    },  # fmt: skip
    ORIN: set(),
    RTX_4090: set(),
}
"""By device, the products whose blocks write whole slices of the output rows, so that they can prepare these for the
next product."""


@dataclass
class Case:
    """A packed product's operands for 64 rows, as float32 that holds storage values; `weight` is dequantised in
    float32."""

    product: str
    dtype: DType
    out_features: int
    in_features: int
    head_dim: int
    num_kv_heads: int
    group_size: int
    code_bits: int
    beside: int
    arrays: dict[str, Any]

    @property
    def num_heads(self) -> int:
        return self.out_features // self.head_dim - 2 * self.num_kv_heads

    def layout(self, device: Device) -> PackedLayout:
        size = self.out_features, self.in_features
        kind = {"zeros": self.beside, "head_dim": self.head_dim, "bits": self.code_bits}
        return layout_of(self.product, size, self.group_size, device, **kind)


def make_case(name: str, dtype: DType, has_bias: bool = True, is_draft: bool = False) -> Case:
    product, out_features, in_features, head_dim, num_kv_heads, group_size, beside, permuted = SHAPES[name]
    rng = np.random.default_rng(out_features + in_features)

    groups = in_features // group_size
    code_bits = code_bits_of(name)
    codes = rng.integers(0, 2**code_bits, (out_features, in_features)).astype(np.uint8)
    spread = np.float32(3.2 / 2**code_bits * in_features**-0.5)
    scales = round_to((0.5 + rng.random((out_features, groups), np.float32)) * spread, dtype)
    zeros = rng.integers(0, 2**code_bits + 1, (out_features, groups)).astype(np.float32) if beside else None
    if zeros is not None and beside == MINIMUMS:
        zeros = round_to(zeros * scales, dtype)
        weight = codes * np.repeat(scales, group_size, axis=1) - np.repeat(zeros, group_size, axis=1)
    else:
        centre = np.float32(2 ** (code_bits - 1)) if zeros is None else np.repeat(zeros, group_size, axis=1)
        weight = (codes - centre) * np.repeat(scales, group_size, axis=1)
    permutation = rng.permutation(in_features).astype(np.int32) if permuted else None
    if permutation is not None:
        stored_order = weight
        weight = np.empty_like(stored_order)
        weight[:, permutation] = stored_order
    arrays = {
        "x": normals(rng, dtype)(64, in_features, spread=1.7),
        "weight": weight,
        "codes": codes,
        "scales": scales,
        "zeros": zeros,
        "permutation": permutation,
    }
    arrays |= step_operands(rng, dtype, product, (out_features, in_features), head_dim, has_bias, is_draft)
    sizes = (out_features, in_features, head_dim, num_kv_heads, group_size, code_bits, int(beside))
    return Case(product, dtype, *sizes, arrays)


def code_bits_of(name: str) -> int:
    return CODE_BITS.get(name, 4)


def packed_weight(case: Case, layout: PackedLayout) -> Any:
    a = case.arrays
    repeat = case.group_size // layout.scale_group
    words = [
        None if array is None else np.repeat(from_float32(array, case.dtype), repeat, axis=1)
        for array in (a["scales"], a["zeros"])
    ]
    return pack(layout, a["codes"], *words)


class Launcher(OnDevice):
    """A case on the device; `run` launches the product and returns the words of the first `num_rows` output rows."""

    def __init__(self, cuda: Any, case: Case, *, portable: bool = False):
        super().__init__(cuda, case, portable=portable)
        self.layout = case.layout(self.on)
        self.weight = cuda.array(packed_weight(case, self.layout))

    def run(self, num_rows: int, *, pdl: bool = False, is_fed: bool = False, **changes: Any) -> Any:
        """Run the product as planned, but for `changes` of its constants."""
        case, permutation, outputs = self.case, self.arrays["permutation"], self.outputs(num_rows)
        kind = {"permuted": permutation is not None, "has_norm": self.arrays["norm"] is not None, "is_fed": is_fed}
        plan = plan_packed(self.layout, num_rows, self.on, **kind)
        plan = replace(plan, constants=replace(plan.constants, **changes))
        product = self.product(num_rows, outputs)
        sizes = macros_of(product.built(plan.constants))
        kernel = self.cuda.kernel(f"linear_packed_{case.product}", case.dtype, **sizes)
        partials = self.cuda.cupy.empty(plan.partial_bytes, np.uint8) if plan.partial_bytes else None
        arrivals = self.cuda.cupy.zeros(plan.num_arrivals, np.int32) if plan.num_arrivals else None
        fed = self.poisoned(plan.fed_bytes // 2, 1) if plan.fed else None
        x = self.poisoned(plan.prepared_bytes // 2, 1) if plan.constants.prepared else product.x
        self.wait()
        if plan.constants.prepared:
            self.prepare(plan.prepare, num_rows, x, product.x, product.norm, permutation, pdl)
        weight = self.weight, partials, arrivals
        arguments = product.arguments(x, weight, (fed,) if case.product == "gate_up" else ())
        kernel(plan.grid, plan.block, *arguments, smem=plan.shared_bytes, pdl=pdl)
        if plan.fed:
            expected = self.poisoned(plan.fed_bytes // 2, 1)
            self.prepare(plan.fed, num_rows, expected, outputs[0], None, None, pdl)
            assert np.array_equal(bits(self.cuda.numpy(fed)), bits(self.cuda.numpy(expected)))
        words = self.words(num_rows, outputs)
        assert arrivals is None or not arrivals.any()
        return words

    def prepare(
        self, constants: PrepareConstants, num_rows: int, to: Any, x: Any, norm: Any, permutation: Any, pdl: bool
    ) -> None:
        kernel = self.cuda.kernel("prepare_rows", self.case.dtype, **macros_of(constants))
        kernel(num_rows, PREPARE_THREADS, to, x, norm, permutation, np.float32(EPS), pdl=pdl)


def check_every_number_of_rows(cuda: Any, case: Case, portable: bool) -> None:
    """Check 64 rows against the op, and that fewer rows have the bits that they have among the 64."""
    expected, launcher = oracle(case), Launcher(cuda, case, portable=portable)
    widest = launcher.run(64)
    values = to_float32(widest, launcher.stored)
    for row in stored_rows(64) if case.product == "qkv" else range(64):
        assert relative_error(values[row], expected[row]) < OPS[op_of(case.product)].tolerance[case.dtype], row
    for num_rows in ROWS:
        assert np.array_equal(bits(launcher.run(num_rows, pdl=True)), bits(widest[:num_rows])), num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.all] if name in LARGE else []) for name in SHAPES]
)
def test_against_the_op_and_bitwise_for_every_number_of_rows(
    cuda: Any, name: str, dtype: DType, portable: bool
) -> None:
    check_every_number_of_rows(cuda, make_case(name, dtype), portable)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ["demo gate_up", "feeding gate_up"])
def test_gates_of_a_fatrelu(cuda: Any, name: str, dtype: DType) -> None:
    case = make_case(name, dtype)
    # A gate that rounding carries over the threshold changes the output by the threshold times `up`, so it is small.
    case.arrays["fatrelu"] = 0.02
    values = to_float32(Launcher(cuda, case).run(64), dtype)
    assert 0.4 < (values == 0).mean() < 0.7
    check_every_number_of_rows(cuda, case, portable=False)


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize(
    "name",
    ["demo qkv", "uneven qkv", "permuted qkv", "odd head", "odd head in 8 bits", "whole rows in 8 bits", "ternary qkv"]
    + [pytest.param(name, marks=pytest.mark.all) for name in ("EAGLE-3 qkv", "8B head")],
)
def test_rows_of_a_draft(cuda: Any, name: str, dtype: DType, portable: bool) -> None:
    check_every_number_of_rows(cuda, make_case(name, dtype, is_draft=True), portable)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["demo qkv", "demo o"])
def test_without_bias(cuda: Any, name: str) -> None:
    case = make_case(name, DType.BFLOAT16, has_bias=False)
    kept = stored_rows(64)
    out = to_float32(Launcher(cuda, case).run(64), case.dtype)
    assert relative_error(out[kept], oracle(case)[kept]) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["demo down", "long down", "long down, groups of 32", "0.5B down", "ternary, long down", "ternary 0.5B down"],
)
def test_rows_that_the_product_before_prepared(cuda: Any, name: str) -> None:
    launcher = Launcher(cuda, make_case(name, DType.BFLOAT16))
    for num_rows in (5, 8, 12, 16, 31, 64):
        assert np.array_equal(bits(launcher.run(num_rows, is_fed=True)), bits(launcher.run(num_rows))), num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["demo gate_up", "permuted o", "ternary qkv"])
def test_a_row_does_not_see_the_others(cuda: Any, name: str) -> None:
    case = make_case(name, DType.BFLOAT16)
    before = Launcher(cuda, case).run(12)
    case.arrays["x"][1:] = np.nan
    assert np.array_equal(bits(Launcher(cuda, case).run(12)[0]), bits(before[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("stale", ["positions", "slots", "block_tables"])
@pytest.mark.parametrize("name", ["0.5B qkv", "two rounds of qkv", "uneven qkv", "permuted qkv", "ternary qkv"])
def test_where_a_row_was_is_not_taken_for_where_it_is(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, name: str, stale: str
) -> None:
    """The product reads the row's position, slot and block table after its wait: until the preceding kernel is done
    they are those of another row."""
    launcher = Launcher(cuda, make_case(name, DType.BFLOAT16))
    expected, held = launcher.run(1), launcher.arrays[stale]
    writer, wait = SlowWriter(cuda, [held], [held[::-1].copy()], [held.copy()]), launcher.wait
    monkeypatch.setattr(launcher, "wait", lambda: (wait(), writer.launch()))
    for _ in range(3):
        assert np.array_equal(bits(launcher.run(1, pdl=True)), bits(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["0.5B down", "ternary 0.5B down"])
@pytest.mark.parametrize("spread", [1e-6, 1e6])
def test_large_and_small_activations(cuda: Any, spread: float, name: str) -> None:
    case = make_case(name, DType.BFLOAT16)
    case.arrays["x"] = round_to(case.arrays["x"] * np.float32(spread), DType.BFLOAT16)
    case.arrays["residual"][:] = 0
    case.arrays["bias"] = None
    out = to_float32(Launcher(cuda, case).run(5), DType.BFLOAT16)
    assert relative_error(out, oracle(case)[:5]) < OPS["project_residual"].tolerance[DType.BFLOAT16]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ["odd head", "odd head in 8 bits"])
def test_small_elements_beside_large_ones(cuda: Any, name: str, dtype: DType, num_rows: int) -> None:
    """Each element of x enters the product with an error of at most 2^-14 of the largest element of its slice."""
    case = make_case(name, dtype, is_draft=True)
    case.arrays["x"][:, ::128] = round_to(case.arrays["x"][:, ::128] * np.float32(1000), dtype)
    x, weight = case.arrays["x"].astype(np.float64), case.arrays["weight"].astype(np.float64)
    largest = np.abs(x).reshape(64, -1, 128).max(axis=2)
    of_slices = np.abs(weight).reshape(len(weight), -1, 128).sum(axis=2)
    bound = largest @ of_slices.T * 2.0**-14 + np.abs(x) @ np.abs(weight).T * 2.0**-20
    out = to_float32(Launcher(cuda, case).run(num_rows), DType.FLOAT32).astype(np.float64) * DIVISOR
    away = np.abs(out - (x @ weight.T)[:num_rows]) / bound[:num_rows]
    assert 1e-3 < away.max() < 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        (DType.BFLOAT16, 2.0**-130), (DType.BFLOAT16, 2.0**-101), (DType.BFLOAT16, 2.0**-88),
        (DType.BFLOAT16, 2.0**-86), (DType.BFLOAT16, 2.0**120), (DType.FLOAT16, 2.0**-24), (DType.FLOAT16, 2.0**-14),
        (DType.FLOAT16, 65504.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["odd head", "long head in 8 bits"])
def test_slices_of_the_least_and_of_the_largest_elements(cuda: Any, name: str, dtype: DType, largest: float) -> None:
    """Slices of tiny, huge or zero elements keep the bound on errors. No quantum is below 2^-100, so elements below
    2^-101 may become zero; every second slice is zeros."""
    case = make_case(name, dtype, is_draft=True)
    x = np.random.default_rng(3).uniform(-largest, largest, case.arrays["x"].shape)
    x.reshape(64, -1, 128)[:, :, 7], x.reshape(64, -1, 128)[:, 1::2] = largest, 0
    case.arrays["x"] = round_to(x.astype(np.float32), dtype)
    launcher, x = Launcher(cuda, case), case.arrays["x"].astype(np.float64)
    weight = case.arrays["weight"].astype(np.float64)
    steps = np.maximum(np.abs(x).reshape(64, -1, 128).max(axis=2) * 2.0**-14, 2.0**-101)
    bound = steps @ np.abs(weight).reshape(len(weight), -1, 128).sum(axis=2).T + np.abs(x) @ np.abs(weight).T * 2.0**-20
    for num_rows in (1, 8, 16, 64):
        out = to_float32(launcher.run(num_rows), DType.FLOAT32).astype(np.float64) * DIVISOR
        assert (np.abs(out - (x @ weight.T)[:num_rows]) < bound[:num_rows]).all()
        assert largest < 2.0**-100 or out.any()


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["odd head", "odd head in 8 bits", "demo gate_up", "demo down"])
def test_what_is_not_finite_stays_so(cuda: Any, name: str, value: float) -> None:
    case = make_case(name, DType.BFLOAT16)
    case.arrays["x"][2, 5] = value
    launcher = Launcher(cuda, case)
    for num_rows in (5, 12):
        values = to_float32(launcher.run(num_rows), launcher.stored)
        assert not np.isfinite(values[2]).any()
        assert np.isfinite(values[[0, 1, 4]]).all()


@pytest.mark.parametrize("device", [H200, ORIN, RTX_4090], ids=["H200", "Orin", "4090"])
@pytest.mark.parametrize("name", SHAPES)
def test_plans_fit_the_device(name: str, device: Device) -> None:
    layout = make_layout(name, device)
    assert layout.num_bytes >= layout.out_features * layout.in_features * layout.bits // 8
    for rows in range(1, 65):
        plan = plan_packed(layout, rows, device)
        constants = plan.constants
        assert constants.rows == row_bucket(rows, ROW_BUCKETS) >= rows
        assert plan.shared_bytes <= device.shared_bytes_per_block
        assert plan.prefers_shared == plan_packed(layout, 1, device).prefers_shared
        assert plan.grid % (layout.runs if constants.shared_run else 1) == 0
        if rows == 1 and plan.grid == device.num_sms:
            assert plan.shared_bytes > device.shared_bytes_per_block / 2, "two blocks may share a multiprocessor"
        exchanges = constants.shared_run and layout.runs > 1
        assert bool(plan.num_arrivals) == bool(plan.partial_bytes) == (exchanges and not constants.clusters)
        assert bool(plan.fed_bytes) == bool(plan.fed) == (name in FEEDING[device] and rows > 1), rows
        if constants.clusters:
            assert exchanges and plan.grid <= 8 * device.whole_clusters


ODD_DEVICES = [
    Device(0, "", "sm_90", 90, sms, 232_448, 0, False, (13, 0), whole_clusters=clusters)
    for sms, clusters in ((114, 12), (114, 11), (78, 8), (60, 6), (26, 2), (16, 0))
] + [replace(RTX_4090, arch="sm_120", capability=120, num_sms=170)]
"""Parts of GPUs, cards with few clusters, and one with a copy engine and little shared memory."""


@pytest.mark.parametrize(
    ("bits", "group", "zeros"),
    [
        (4, 128, 0), (4, 128, 1), (4, 32, 1), (4, 16, MINIMUMS), (4, 32, MINIMUMS), (8, 128, 0), (8, 16, 0),
        (8, 32, MINIMUMS), (2, 128, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("product", ["qkv", "residual", "gate_up"])
def test_plans_of_any_shape_fit_odd_devices(product: str, bits: int, group: int, zeros: int) -> None:
    sizes = {"zeros": zeros, "head_dim": 128 if product == "qkv" else 0, "bits": bits}
    for device in (*ODD_DEVICES, H200, ORIN, RTX_4090):
        for columns in (*range(128, 8193, 640), 4096, 5632, 7168, 8192, 14336, 16384, 18944):
            for out_features in (1024, 2560, 4096, 4608, 12288):
                layout = layout_of(product, (out_features, columns), group, device, **sizes)
                for rows in ROW_BUCKETS:
                    plan = plan_packed(layout, rows, device)
                    assert plan.shared_bytes <= device.shared_bytes_per_block, (device, columns, out_features, rows)


@pytest.mark.parametrize(("model", "prefers_shared"), [("0.5B", True), ("8B", False)])
def test_all_products_of_a_model_prefer_the_same_memory_in_all_widths_of_codes(
    model: str, prefers_shared: bool
) -> None:
    layouts = {name: make_layout(name, H200) for name in SHAPES if model in name.split()}
    assert {4, 2} <= {layout.bits for layout in layouts.values()}
    preferring = {name for name, layout in layouts.items() if plan_packed(layout, 1, H200).prefers_shared}
    assert preferring == (set(layouts) if prefers_shared else set())


@pytest.mark.parametrize("beside_others", [False, True])
def test_products_between_kernels_that_prefer_shared_memory_prefer_it_too(beside_others: bool) -> None:
    asked = []
    layout = make_layout("8B o", H200)
    weight = PackedWeight(np.zeros(layout.num_bytes, np.uint8), None, layout)
    launch: Any = lambda *_, prefers_shared, **__: asked.append(prefers_shared)  # noqa: E731
    gemm: Any = None
    products = PackedProducts(launch, gemm, {}, H200, prefers_shared=beside_others)
    x = np.zeros((1, layout.in_features), np.uint16)
    left = products.step(StepProduct("residual", (x,), x, None, 0.0, ()), weight, NOTHING)
    assert asked == [beside_others] == [left.prefers_shared]


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_read_first_lies_in_the_weight(name: str) -> None:
    layout = make_layout(name, H200)
    for rows in ROW_BUCKETS:
        first = plan_packed(layout, rows, H200).first_read
        is_several = rows == 32 and layout.in_features > 2048
        assert (first is not None) == ((rows == 1 or is_several) and layout.runs == 1 and layout.bits == 4)
        if first is not None:
            pieces, stride, nbytes = first
            assert pieces * stride == layout.num_bytes and 0 < nbytes <= stride
            assert stride % 16 == nbytes % 16 == 0, "so the copy engine wants it"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ["0.5B down", "uneven o", "permuted o", "EAGLE-3 demo fc", "ternary 0.5B down"])
def test_a_weight_that_comes_early_changes_nothing(cuda: Any, name: str, dtype: DType) -> None:
    launcher, layout = Launcher(cuda, make_case(name, dtype)), make_layout("8B gate_up", H200)
    early = PackedWeight(cuda.array(np.zeros(layout.num_bytes, np.uint8)), None, layout)
    weight = PackedWeight(launcher.weight, launcher.arrays["permutation"], launcher.layout)
    sizes = {"rows": 1 << 20, "partials": 1 << 24, "arrivals": 1 << 14}
    arrays = {f"packed_{name}": cuda.cupy.zeros(size // 4, np.int32) for name, size in sizes.items()}
    products = PackedProducts(cuda.launcher(dtype, pdl=True), None, arrays, launcher.on)
    for rows in (1, 8, 32):
        expected = launcher.run(rows)
        for ahead in (None, early):
            outputs = launcher.outputs(rows)
            launcher.wait()
            given = replace(launcher.product(rows, outputs), x=launcher.arrays["x"][:rows])
            products.step(given, weight, NOTHING, ahead)
            assert np.array_equal(bits(launcher.words(rows, outputs)), bits(expected)), rows


@pytest.mark.gpu
def test_warps_that_ask_for_weights_of_several_rounds_behind_x_wait_for_them_there(cuda: Any) -> None:
    """No plan makes such constants. Warps that ask for weights only behind x must not wait for them before it."""
    launcher = Launcher(cuda, make_case("0.5B gate_up", DType.BFLOAT16))
    constants = plan_packed(launcher.layout, 1, launcher.on).constants
    assert constants.kept_rounds > 1 and launcher.layout.run_slices == 1 and constants.early_warps is None
    expected = bits(launcher.run(1))
    for early_warps in (constants.warps // 2, 1):
        assert np.array_equal(bits(launcher.run(1, early_warps=early_warps)), expected), early_warps


def test_six_tiles_a_multiprocessor_are_one_round_of_whole_rows() -> None:
    layout = make_layout("MiniCPM3 gate_up", H200)
    plan = plan_packed(layout, 1, H200)
    assert layout.runs == 1 and plan.grid * plan.constants.warps == layout.num_tiles
    assert make_layout("0.5B gate_up", H200).runs == 8, "it keeps the sums of its two rounds"


def test_no_two_blocks_of_a_small_product_that_fills_the_device_share_a_multiprocessor() -> None:
    plan = plan_packed(make_layout("0.5B gate_up", H200), 1, H200)
    assert plan.grid == H200.num_sms
    assert plan.constants.smem_bytes * 2 <= H200.shared_bytes_per_block < plan.shared_bytes * 2


def test_two_tiles_of_a_block_go_side_by_side() -> None:
    for name, tiles in (("5-2B qkv", 160), ("5-2B o", 128)):
        layout = make_layout(name, H200)
        plan = plan_packed(layout, 1, H200)
        own = plan.constants
        assert (layout.num_tiles, plan.grid) == (tiles, tiles // 2)
        assert (own.warps, own.kept_rounds, own.early_slots) == (8, 2, 2)
        assert (own.trigger, plan.shared_bytes) == (0, own.smem_bytes)
        assert plan_packed(layout, 1, RTX_4090).constants.kept_rounds == 1 + (name == "5-2B qkv")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
def test_a_copy_for_all_warps_of_a_tile_brings_what_a_copy_for_each_warp_does(cuda: Any, dtype: DType) -> None:
    launcher = Launcher(cuda, make_case("5-2B gate_up", dtype))
    expected = bits(launcher.run(1))
    for tile_copies in (None, True):
        assert np.array_equal(bits(launcher.run(1, tile_copies=tile_copies)), expected), tile_copies


def test_one_copy_brings_a_tile_where_a_block_of_one_row_asks_for_all_its_weights_and_that_was_measured() -> None:
    for name in SHAPES:
        for device, rows in ((H200, 1), (H200, 8), (RTX_4090, 1)):
            constants = plan_packed(make_layout(name, device), rows, device).constants
            copies_tiles = name == "5-2B gate_up" and (device, rows) == (H200, 1)
            assert (constants.tile_copies or False) == copies_tiles, (name, device, rows)
    layout = make_layout("5-2B gate_up", H200)
    assert plan_packed(layout, 1, H200, permuted=True).constants.tile_copies is None, "its rows come prepared"
    few = replace(H200, num_sms=60)
    assert plan_packed(layout, 1, few).constants.tile_copies is None, "its ring has no room for all rounds"


def test_which_product_starts_attention_before_its_wait() -> None:
    """No two of its blocks share a multiprocessor."""
    layout = make_layout("5-2B qkv", H200)
    plan, early = (plan_packed(layout, 1, H200, starts_next=starts) for starts in (False, True))
    assert early.constants == replace(plan.constants, trigger=3) and early.grid == plan.grid
    assert early.constants.smem_bytes < H200.shared_bytes_per_block // 2 < early.shared_bytes
    other = layout_of("qkv", (2560, 2304), 128, H200, head_dim=128)
    for given, rows, device in (
        (layout, 8, H200), (layout, 1, RTX_4090), (other, 1, H200), (make_layout("5-2B o", H200), 1, H200),
    ):  # fmt: skip
        assert plan_packed(given, rows, device, starts_next=True) == plan_packed(given, rows, device)


def test_rows_are_normalised_in_clusters_where_one_round_has_all_tiles_else_once_for_all_blocks() -> None:
    for columns, out_features, in_clusters in ((4096, 4608, True), (4096, 12288, False), (2048, 2560, True)):
        layout = layout_of("qkv", (out_features, columns), 128, H200, zeros=0, head_dim=128, bits=4)
        for device, rows in ((H200, 8), (H200, 1), (RTX_4090, 8)):
            constants = plan_packed(layout, rows, device).constants
            assert constants.clusters == (in_clusters and device == H200 and rows == 8)
            assert constants.trigger == (2 if constants.clusters else 0)
            assert constants.prepared == (rows == 8 and not constants.clusters)


@pytest.mark.parametrize(
    ("name", "in_clusters", "prepared"),
    [
        ("8B o", True, False), ("8B gate_up", False, True), ("8B head", False, True), ("8B down", False, False),
        ("0.5B gate_up", False, True), ("0.5B down", True, False), ("5-2B o", True, False),
        ("MiniCPM3 gate_up", False, True),
    ],
)  # fmt: skip
def test_blocks_do_not_each_turn_8_rows_into_integers(name: str, in_clusters: bool, prepared: bool) -> None:
    constants = plan_packed(make_layout(name, H200), 8, H200).constants
    assert (constants.clusters, constants.prepared) == (in_clusters, prepared)


def test_64_rows_go_to_clusters_of_few_warps_where_these_take_all_tiles() -> None:
    latent_down = layout_of("qkv", (1056, 2560), 128, H200, zeros=0, head_dim=1056, bits=4)
    assert not plan_packed(latent_down, 64, H200).constants.clusters, "a block would normalise three slices"
    for name, in_clusters in (("0.5B qkv", True), ("0.5B down", True), ("5-2B o", False), ("8B o", False)):
        plan = plan_packed(make_layout(name, H200), 64, H200)
        assert plan.constants.clusters == in_clusters and (not in_clusters or plan.block == 8 * 32), name


@pytest.mark.parametrize(
    ("name", "device", "rows", "shared_run"),
    [
        ("5-2B gate_up", H200, 32, False), ("5-2B gate_up", H200, 64, True), ("0.5B gate_up", H200, 64, False),
        ("5-2B qkv", RTX_4090, 16, False), ("5-2B qkv", RTX_4090, 32, True), ("5-2B o", RTX_4090, 8, False),
        ("5-2B o", RTX_4090, 16, True), ("8B o", ORIN, 8, False), ("8B down", RTX_4090, 1, False),
    ],
)  # fmt: skip
def test_a_block_keeps_all_of_x_as_long_as_it_has_room(name: str, device: Device, rows: int, shared_run: bool) -> None:
    assert plan_packed(make_layout(name, device), rows, device).constants.shared_run == shared_run


@pytest.mark.parametrize(
    ("rows", "warps", "stage_slices", "small_chunks"), [(8, 12, 4, 2), (16, 12, 2, 2), (32, 12, 1, 2), (64, 8, 1, 2)]
)
def test_where_lanes_copy_stages_of_x_are_large_and_chunks_of_weights_small(
    rows: int, warps: int, stage_slices: int, small_chunks: int
) -> None:
    constants = plan_packed(make_layout("8B gate_up", RTX_4090), rows, RTX_4090).constants
    assert (constants.warps, constants.stage_slices, constants.small_chunks) == (warps, stage_slices, small_chunks)
    roomy = plan_packed(make_layout("8B gate_up", ORIN), rows, ORIN).constants
    assert (roomy.warps, roomy.small_chunks) == (8, None)


@pytest.mark.parametrize(
    ("name", "rows", "trigger"),
    [
        ("8B down", 16, 0), ("8B down", 32, 2), ("8B down", 64, 1), ("8B o", 32, 0), ("8B gate_up", 32, 2),
        ("8B gate_up", 16, 0), ("0.5B gate_up", 32, 0),
    ],
)  # fmt: skip
def test_when_the_next_kernel_may_start(name: str, rows: int, trigger: int) -> None:
    assert plan_packed(make_layout(name, H200), rows, H200).constants.trigger == trigger


def test_half_of_the_warps_of_a_product_in_clusters_ask_for_weights_early_where_all_would_ask_for_too_many() -> None:
    for name, rows, early in (("8B o", 32, (1, 10)), ("8B o", 16, (0, None)), ("0.5B down", 32, (2, None))):
        constants = plan_packed(make_layout(name, H200), rows, H200).constants
        assert constants.clusters and (constants.early_slots, constants.early_warps) == early, (name, rows)


@pytest.mark.parametrize(
    ("name", "rows", "early_warps", "own_runs"),
    [
        ("ternary 8B gate_up", 1, 8, None), ("ternary gate_up, half of the warps early", 1, 8, None),
        ("ternary 8B down", 1, 8, True), ("ternary 8B o", 1, 16, True), ("ternary 8B down", 8, None, None),
        ("ternary 8B qkv", 1, None, None), ("8B gate_up", 1, None, None), ("8B down", 1, None, None),
        ("8B o", 1, None, None),
    ],
)  # fmt: skip
def test_only_one_row_of_ternary_weights_lets_some_warps_begin_before_others(
    name: str, rows: int, early_warps: int | None, own_runs: bool | None
) -> None:
    constants = plan_packed(make_layout(name, H200), rows, H200).constants
    assert constants.early_slots > 0
    assert (constants.early_warps, constants.own_runs) == (early_warps, own_runs)


def make_layout(name: str, device: Device) -> PackedLayout:
    product, out_features, in_features, head_dim, _, group_size, zeros, _ = SHAPES[name]
    kind = {"zeros": zeros, "head_dim": head_dim, "bits": code_bits_of(name)}
    return layout_of(product, (out_features, in_features), group_size, device, **kind)


SPILLING = {("permuted o in two rounds", 64)}
"""The (product, rows) whose builds spill: 8 bytes, in a product of 256 columns that no model has."""


@dataclass(frozen=True)
class PlanBuild:
    """A packed product to compile for a device, for every number of rows that has its own build."""

    name: str
    device: Device
    arch: str

    def sizes(self) -> Iterator[Any]:
        """Yield the product's compile-time sizes for each number of rows that does not spill."""
        layout = make_layout(self.name, self.device)
        for rows in ROW_BUCKETS:
            if (self.name, rows) not in SPILLING:
                yield plan_packed(layout, rows, self.device).constants


BUILDS = [PlanBuild(name, H200, "sm_90") for name in SHAPES] + [
    PlanBuild(name, *device) for device in ((ORIN, "sm_87"), (RTX_4090, "sm_89"))
    for name in SHAPES if "8B" in name or "MiniCPM3" in name
]
"""The builds whose registers are checked. sm_100 is not among them: there products of 64 rows spill up to 48 bytes if
the warps of a block do not multiply together."""


def tiered(build: PlanBuild) -> Any:
    """Return the pytest parameter of a build: only one product of the 0.5B's shape is in the first tier of tests."""
    marks = () if build.name == "0.5B qkv" else pytest.mark.all
    return pytest.param(build, id=f"{build.name}-{build.arch}", marks=marks)


@pytest.mark.parametrize("build", list(map(tiered, BUILDS)))
def test_every_plan_compiles_without_spills(compiles: Compiles, build: PlanBuild) -> None:
    for sizes in build.sizes():
        log = compiles.module("linear_packed/linear_packed.cu", build.arch, DType.BFLOAT16, sizes).log
        assert "warning" not in log and " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, log


@pytest.mark.parametrize("name", [name for name in SMALL if "wide" not in name])
def test_packing_loses_nothing(name: str) -> None:
    case = make_case(name, DType.BFLOAT16)
    layout = case.layout(H200)
    packed = packed_weight(case, layout)
    assert packed.nbytes == layout.num_bytes
    np.testing.assert_array_equal(unpack_codes(layout, packed), case.arrays["codes"])


@pytest.mark.parametrize("bits", [4, 8])
def test_the_bytes_of_a_unit_are_those_of_the_header(bits: int) -> None:
    """The words of a lane in a packed unit hold the codes that packed_layout.cuh describes."""
    name = "odd head" if bits == 4 else "odd head in 8 bits"
    layout, case = make_layout(name, H200), make_case(name, DType.BFLOAT16)
    codes, packed, mask = case.arrays["codes"].astype(int), packed_weight(case, layout), 2**bits - 1
    for tile, slice_index, lane, word in np.random.default_rng(0).integers(0, (62, 3, 32, bits * 2), (200, 4)):
        token, quarter = divmod(int(lane), 4)
        begin = unit_offsets(layout)[tile, slice_index] + word // 4 * 512 + lane * 16 + word % 4 * 4
        found = int(packed[begin : begin + 4].view(np.uint32)[0])
        step = word if bits == 4 else word // 4 * 2 + word % 4 // 2
        first = slice_index * 128 + step // 2 * 32 + quarter * 8 + step % 2 * 4
        for half in (0, 1) if bits == 4 else (word % 2,):
            row, shift = tile * 16 + half * 8 + token, half * 4 if bits == 4 else 0
            fields = [found >> shift + place & mask for place in (0, 16, 8, 24)]
            assert fields == (codes[row, first : first + 4].tolist() if row < 1003 else [0] * 4)


@pytest.mark.parametrize(("columns", "group_size", "bits"), [(320, 64, 4), (512, 48, 4), (320, 64, 8)])
def test_shapes_that_the_kernels_do_not_take(columns: int, group_size: int, bits: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{bits}-bit head weight"):
        layout_of("head", (64, columns), group_size, H200, bits=bits)


def test_low_bits_of_a_float_are_linear() -> None:
    """The words 0 to 255 read as 16-bit floats are that many times the smallest float; the kernels of experts and
    prompt chunks rely on it."""
    words = np.arange(256, dtype=np.uint16)
    np.testing.assert_array_equal(to_float32(words, DType.BFLOAT16), words * np.float32(2.0**-133))
    np.testing.assert_array_equal(words.view(np.float16).astype(np.float32), words * np.float32(2.0**-24))
