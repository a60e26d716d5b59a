"""row_layers.cu with attention: all layers of a step of one row in one launch, bit for bit as the kernels of their
ops."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from layer_cases import SCALE, SHAPES, Noted, Shape, Something, on_older, random_weight
from linear_cases import EPS, H200, bits, normals, older

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.build.source import read_source
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention import Operands
from cpmrt.cuda.ops.attention.attention import step_launch
from cpmrt.cuda.ops.attention.decode import DECODE_ATTENTION, AttentionScratch, DecodePlan, attend_rows
from cpmrt.cuda.ops.linear import QkvRest, ResidualRest, StepProduct
from cpmrt.cuda.ops.linear_packed.held_layers import OPERANDS, SHARED
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight
from cpmrt.cuda.ops.linear_packed.products import PackedProducts
from cpmrt.cuda.ops.linear_packed.row_layers import MOST_LAYERS
from cpmrt.dtypes import DType, to_float32
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import ANY_ROWS, NOTHING, Fp8Pages, KVPages, RowKind, Rows

PAGES, LAYERS = 40, 3
POSITIONS = (0, 63, 64, 255, 256, 700, 1087, 2500)


def heads_of(shape: Shape) -> GroupedAttention:
    return GroupedAttention(shape.heads, shape.kv_heads, shape.head_dim)


class Stack:
    """A stack of layers on the device for one row; `run` returns the bits of everything that they write."""

    def __init__(self, cuda: Any, shape: Shape, dtype: DType, device: Device):
        self.cuda, self.shape, self.dtype, self.device = cuda, shape, dtype, device
        rng = np.random.default_rng(shape.hidden)
        self.normal = normals(rng, dtype)
        self.layouts = shape.layouts(device)
        self.plan = DecodePlan.of(heads_of(shape), device, PAGES * PAGE_SIZE)
        self.layers = [self.weights(rng) for _ in range(LAYERS)]
        self.norms = [self.of_widths(1.0, 0.25) for _ in range(LAYERS)]
        attention = shape.heads * shape.head_dim
        self.x, self.q = self.normal(1, shape.hidden), self.normal(1, attention)
        pages = (2, PAGES, shape.kv_heads, PAGE_SIZE, shape.head_dim)
        self.pages = [self.normal(*pages) for _ in range(LAYERS + 1)]
        bias = [self.normal(self.layouts["qkv"].out_features, spread=0.3) for _ in range(LAYERS)]
        self.biases = [cuda.array(values, dtype) for values in bias]
        self.rope = cuda.array(rng.random((2, PAGES * PAGE_SIZE, shape.head_dim // 2), np.float32))
        self.table = rng.permutation(PAGES).astype(np.int32)
        self.counter = cuda.array(np.zeros(1, np.uint64))
        self.tables = [cuda.array(np.zeros(spec.shape, spec.dtype)) for spec in self.plan.tables]

    def weights(self, rng: np.random.Generator) -> dict[str, PackedWeight]:
        return {
            name: PackedWeight(self.cuda.array(random_weight(rng, layout, self.dtype)), None, layout)
            for name, layout in self.layouts.items()
        }

    def of_widths(self, mean: float, spread: float) -> dict[str, Any]:
        """Return for each product a random vector as wide as its input rows."""
        return {
            name: self.cuda.array(mean + self.normal(layout.in_features, spread=spread), self.dtype)
            for name, layout in self.layouts.items()
        }

    def filled(self, layer: int, position: int) -> list[Any]:
        """Return a layer's pages of k and v, NaN after the row's position and, except in the first layer, also at
        it."""
        found = []
        for pages in self.pages[layer]:
            pages = pages.copy()
            known = position + (layer == 0)
            for place, page in enumerate(self.table):
                pages[page, :, max(0, known - place * PAGE_SIZE) :] = np.nan
            found.append(self.cuda.array(pages, self.dtype))
        return found

    def run(self, position: int, *, together: bool, slot: int = 0, ends: str = "down", pdl: bool = False) -> list[Any]:
        """Run the layers for a row at a position and return the words that they write; the last layer has no qkv
        product behind it unless `ends` is "qkv"."""
        cuda, shape, dtype = self.cuda, self.shape, self.dtype
        launcher = cuda.launcher(dtype, pdl=pdl)
        partials, arrivals = self.tables
        partials.fill(np.nan)
        arrays, scratch = {"packed_counter": self.counter}, AttentionScratch(partials, arrivals)
        products = PackedProducts(launcher, None, arrays if together else {}, self.device)
        x, q = cuda.array(self.x, dtype), cuda.array(self.q, dtype)
        out, inner = (cuda.array(np.full((1, size), np.nan, np.float32), dtype) for size in (q.shape[1], shape.inner))
        pages = [self.filled(layer, position) for layer in range(LAYERS + 1)]
        place, slots = (cuda.array(np.array([value], np.int32)) for value in (position, slot))
        table = cuda.array(self.table[None])
        rows = Rows(place, place, slots, table, False, kind=RowKind("short"))
        one, eps = np.int32(1), np.float32(EPS)
        counts = (one, *map(np.int32, (shape.heads, shape.kv_heads, PAGES, PAGES * PAGE_SIZE)))
        add, sizes = ResidualRest(one, np.int32(shape.hidden), SCALE), (one, np.int32(shape.inner), eps)
        for layer, (weights, norms) in enumerate(zip(self.layers, self.norms, strict=True)):
            given = Operands(out, q, KVPages(*pages[layer], None), rows, shape.head_dim**-0.5)
            launch = step_launch(self.plan, 1, is_tree=False)
            attend = partial(attend_rows, launcher, launch, scratch, given)
            held = products.held_layers
            if held is None or not held.takes_attention(given, self.plan, scratch, attend):
                attend()
            up = StepProduct("gate_up", (inner,), x, norms["gate_up"], EPS, sizes, fatrelu=shape.fatrelu)
            steps = [
                ("o", StepProduct("residual", (x,), out, None, 0.0, add)), ("gate_up", up),
                ("down", StepProduct("residual", (x,), inner, None, 0.0, add)),
            ]  # fmt: skip
            if layer + 1 < LAYERS or ends == "qkv":
                rest, outputs = QkvRest(self.rope, place, None, slots, table, *counts, eps), (q, *pages[layer + 1])
                bias, head_dim = self.biases[layer], shape.head_dim
                product = StepProduct("qkv", outputs, x, norms["qkv"], EPS, rest, bias, head_dim)
                steps.append(("qkv", product))
            for name, product in steps:
                products.step(product, weights[name], NOTHING)
        launcher.release()
        return [bits(cuda.numpy(array)) for array in (x, q, out, inner, *sum(pages, []))]

    def check(self, position: int, **options: Any) -> None:
        alone = self.run(position, together=False, **options)
        assert all(np.isfinite(to_float32(array, self.dtype)).all() for array in alone[:4])
        for pdl in (False, True):
            for expected, found in zip(alone, self.run(position, together=True, pdl=pdl, **options), strict=True):
                assert np.array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "8B"])
def test_together_the_layers_give_the_bits_of_each_op_alone(cuda: Any, name: str) -> None:
    stack = Stack(cuda, SHAPES[name], DType.BFLOAT16, on_older(cuda))
    for position in POSITIONS:
        stack.check(position)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"slot": -1}, {"ends": "qkv"}, {"slot": -1, "ends": "qkv"}], ids=["padding", "qkv", "both"]
)
def test_padding_and_a_product_behind_the_last_layer(cuda: Any, options: dict[str, Any]) -> None:
    Stack(cuda, SHAPES["0.5B"], DType.FLOAT16, on_older(cuda)).check(300, **options)


@pytest.mark.gpu
def test_layers_of_8b(cuda: Any) -> None:
    stack = Stack(cuda, SHAPES["8B"], DType.BFLOAT16, on_older(cuda))
    for position in (5, 1087, 2500):
        stack.check(position)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "num_sms"), [("demo", 9), ("S-1B", 50), ("0.5B", 31)])
def test_fewer_blocks_that_have_several_runs(cuda: Any, name: str, num_sms: int) -> None:
    if cuda.device.num_sms < num_sms:
        pytest.skip("this device is too small")
    stack = Stack(cuda, SHAPES[name], DType.BFLOAT16, replace(on_older(cuda), num_sms=num_sms))
    for position in POSITIONS:
        stack.check(position)


@pytest.mark.gpu
def test_hundreds_of_launches_one_behind_the_other(cuda: Any) -> None:
    stack = Stack(cuda, SHAPES["0.5B"], DType.BFLOAT16, on_older(cuda))
    expected = stack.run(1087, together=True)
    for _ in range(300):
        stack.run(1087, together=True)
    for before, after in zip(expected, stack.run(1087, together=True), strict=True):
        assert np.array_equal(before, after)


class Ops:
    """The ops of one row's layers, launched by a letter for each: a(ttention), o, g(ate_up), d(own) and q(kv).

    Variants of attention: A over pages that no q has written, R of another row, L of a long row, F over fp8 pages. O is
    an o with a bias; q has a bias and positions, Q has neither.
    """

    def __init__(self, device: Device, head_dim: int = 64):
        shape, self.launcher = SHAPES["demo"] if head_dim == 64 else SHAPES["heads of 96"], Noted()
        layouts, heads = shape.layouts(device), heads_of(shape)
        self.plan, self.fp8_plan = (DecodePlan.of(heads, device, 4096, is_fp8=is_fp8) for is_fp8 in (False, True))
        self.products = PackedProducts(self.launcher, None, {"packed_counter": np.zeros(1, np.uint64)}, device)
        widths = shape.hidden, shape.inner, heads.q_size, heads.q_size
        x, inner, out, q = (np.zeros((1, width), np.uint16) for width in widths)
        pages = [np.zeros((count, heads.num_kv_heads, PAGE_SIZE, head_dim), np.uint16) for count in (2, 2, 3)]
        place, table, one, eps = np.zeros(1, np.int32), np.zeros((1, 2), np.int32), np.int32(1), np.float32(EPS)
        rows, norm = Rows(place, place, place, table, False, kind=RowKind("short")), np.zeros(shape.hidden, np.uint16)
        kv, scale = KVPages(pages[0], pages[1], None), head_dim**-0.5
        fp8 = Fp8Pages(*(np.zeros(1, np.uint8) for _ in range(4)))
        self.attention = {
            "a": Operands(out, q, kv, rows, scale),
            "A": Operands(out, q, replace(kv, k=pages[2]), rows, scale),
            "R": Operands(out, q, kv, replace(rows, positions=np.zeros((1, 1), np.int32)), scale),
            "L": Operands(out, q, kv, replace(rows, kind=ANY_ROWS), scale),
            "F": Operands(out, q, replace(kv, k=fp8), rows, scale),
        }
        add = ResidualRest(one, np.int32(shape.hidden), SCALE)
        counts = (one, *map(np.int32, (heads.num_heads, heads.num_kv_heads, 2, 128)))
        rope = np.zeros((2, 128, head_dim // 2), np.float32)
        rest = QkvRest(rope, place, None, place, table, *counts, eps)
        plain = QkvRest(*(None,) * 5, *counts, eps)
        self.known = {
            "o": (StepProduct("residual", (x,), out, None, 0.0, add), layouts["o"]),
            "O": (StepProduct("residual", (x,), out, None, 0.0, add, norm), layouts["o"]),
            "g": (StepProduct("gate_up", (inner,), x, norm, EPS, (one, one, eps)), layouts["gate_up"]),
            "d": (StepProduct("residual", (x,), inner, None, 0.0, add), layouts["down"]),
            "q": (StepProduct("qkv", (q, *pages[:2]), x, norm, EPS, rest, norm, head_dim), layouts["qkv"]),
            "Q": (StepProduct("qkv", (q, None, None), x, norm, EPS, plain, None, head_dim), layouts["qkv"]),
        }

    def run(self, letters: str) -> list[str]:
        for letter in letters:
            if letter == ".":
                self.launcher(Something, {}, 1, 1)
            elif letter in self.attention:
                attend = partial(self.launcher, DECODE_ATTENTION, {}, 1, 1)
                plan = self.fp8_plan if letter == "F" else self.plan
                held, given = self.products.held_layers, self.attention[letter]
                if not held.takes_attention(given, plan, AttentionScratch(), attend):
                    attend()
            else:
                product, layout = self.known[letter]
                self.products.step(product, PackedWeight(product.x, None, layout), NOTHING)
        self.launcher.release()
        names, self.launcher.names = self.launcher.names, []
        short = {"decode_attention": "attend"}
        return [short.get(name, name.removeprefix("linear_packed_")) for name in names]


@pytest.mark.parametrize(
    ("letters", "kernels"),
    [
        ("q.aogdqaogdqaogd.", "qkv other row_layers other"),
        ("aogd", "row_layers"),
        ("aogdq", "row_layers"),
        ("aogdq" * 54 + "aogd", "row_layers row_layers"),
        ("aogdqaog.d", "row_layers attend residual gate_up other residual"),
        ("a.ogdq", "attend other row_layers"),
        ("aog.dq", "attend residual gate_up other residual qkv"),
        ("aogdqAogd", "row_layers row_layers"),
        ("aogdqRogd", "row_layers row_layers"),
        ("Fogdq", "attend row_layers"),
        ("LogdqLogd", "row_layers"),
        ("aOgdq", "attend residual gate_up residual qkv"),
        ("aogdQaogd", "row_layers qkv row_layers"),
        ("aogdaogd", "row_layers row_layers"),
        ("aaogd", "attend row_layers"),
    ],
)
def test_layers_are_held_back_as_long_as_one_follows_another(letters: str, kernels: str) -> None:
    assert Ops(older(H200)).run(letters) == kernels.split()


def test_heads_that_the_kernel_does_not_take_are_attended_to_alone() -> None:
    assert Ops(older(H200), head_dim=96).run("aogdqaogd") == ["attend", "row_layers"] * 2


def test_operands_of_all_layers_fit_into_the_parameters_of_a_launch() -> None:
    """The operands of the most layers of a launch fit into its parameters, 4,096 bytes before CUDA 12.1; this limit and
    the structs are those of the kernel."""
    source = read_source("linear_packed/row_layers.cu")
    text = b"".join((source.text, *source.headers.values())).decode()
    assert f"kMostLayers = ATTENDS ? {MOST_LAYERS} : 1;" in text
    for name, layout in (("Shared", SHARED), ("LayerOperands", OPERANDS)):
        body = re.search(rf"struct {name} {{\n(.*?)\n}};", text, re.DOTALL).group(1)
        declared = re.findall(r"(\w+)(?=[,;])", body)
        assert tuple(declared) == layout.names
    assert SHARED.itemsize + 16 + MOST_LAYERS * OPERANDS.itemsize <= 4096
