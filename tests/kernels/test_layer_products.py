"""layer_products.cu against the kernels of its four products, bit for bit; when products are held back for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from linear_cases import EPS, H200, ORIN, RTX_4090, bits, layout_of, normals, older
from packed_oracle import pack

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import StepProduct
from cpmrt.cuda.ops.linear_packed.layer_products import plan_layer
from cpmrt.cuda.ops.linear_packed.layout import PackedLayout, PackedWeight
from cpmrt.cuda.ops.linear_packed.products import PackedProducts
from cpmrt.dtypes import DType, from_float32, round_to
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import NOTHING
from cpmrt.tensor_spec import Product

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
SCALE, POSITION, PAGES = np.float32(0.31), 70, 4


@dataclass(frozen=True)
class Shape:
    """A layer: its sizes, and the groups of its weights, with zero points or without."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    group_size: int = 128
    zeros: bool = False
    fatrelu: float | None = None

    @property
    def weights(self) -> dict[str, tuple[Product, int, int]]:
        """Product, rows and columns of each weight, in their order."""
        attention = self.heads * self.head_dim
        return {
            "o": ("residual", self.hidden, attention),
            "gate_up": ("gate_up", 2 * self.inner, self.hidden),
            "down": ("residual", self.hidden, self.inner),
            "qkv": ("qkv", attention + 2 * self.kv_heads * self.head_dim, self.hidden),
        }

    def layouts(self, device: Any) -> dict[str, PackedLayout]:
        return {
            name: layout_of(
                product, (rows, columns), self.group_size, device, zeros=self.zeros,
                head_dim=self.head_dim if product == "qkv" else 0,
            )
            for name, (product, rows, columns) in self.weights.items()
        }  # fmt: skip


SHAPES = {
    "demo": Shape(256, 640, 8, 2, 64),
    "0.5B": Shape(1024, 4096, 16, 2, 64),
    "MiniCPM5-1B": Shape(1536, 4608, 16, 2, 128),
    "MiniCPM5-2B": Shape(2048, 6144, 16, 2, 128),
    "S-1B": Shape(1536, 3840, 24, 8, 64, fatrelu=0.01),
}


class Layer:
    """One row of a layer on the device; `run` gives the bits of all that its four products write."""

    def __init__(self, cuda: Any, shape: Shape, dtype: DType, device: Device | None = None):
        self.cuda, self.shape, self.dtype, self.device = cuda, shape, dtype, device or cuda.device
        rng = np.random.default_rng(shape.hidden)
        normal = normals(rng, dtype)
        self.weights, self.norms = {}, {}
        for name, layout in shape.layouts(self.device).items():
            rows, columns = layout.out_features, layout.in_features
            codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
            groups = rows, columns // layout.scale_group
            spread = np.float32(0.2 * columns**-0.5)
            scales = round_to((0.5 + rng.random(groups, np.float32)) * spread, dtype)
            zeros = rng.integers(0, 17, groups).astype(np.float32) if shape.zeros else None
            words = [None if values is None else from_float32(values, dtype) for values in (scales, zeros)]
            self.weights[name] = PackedWeight(cuda.array(pack(layout, codes, *words)), None, layout)
            self.norms[name] = cuda.array(1 + normal(columns, spread=0.25), dtype)
        self.x, self.attention = normal(1, shape.hidden), normal(1, shape.heads * shape.head_dim)
        angles = rng.random((2, PAGES * PAGE_SIZE, shape.head_dim // 2), np.float32)
        self.rope, self.counter = cuda.array(angles), cuda.array(np.zeros(1, np.uint64))
        self.table = cuda.array(rng.permutation(PAGES).astype(np.int32)[None])

    @property
    def layouts(self) -> list[PackedLayout]:
        return [weight.layout for weight in self.weights.values()]

    def run(self, *, together: bool, follows: bool = True, pdl: bool = False) -> list[Any]:
        cuda, shape, dtype = self.cuda, self.shape, self.dtype

        def poison(*size: int) -> Any:
            return cuda.array(np.full(size, np.nan, np.float32), dtype)

        x, inner, q = cuda.array(self.x, dtype), poison(1, shape.inner), poison(1, shape.heads * shape.head_dim)
        pages = [poison(PAGES, shape.kv_heads, PAGE_SIZE, shape.head_dim) for _ in range(2)]
        launcher = cuda.launcher(dtype, pdl=pdl)
        arrays = {"packed_counter": self.counter} if together else {}
        products, one = PackedProducts(launcher, None, arrays, self.device), np.int32(1)
        add = (None, one, np.int32(shape.hidden), SCALE)
        attention = cuda.array(self.attention, dtype)
        place, slot = (cuda.array(np.array([value], np.int32)) for value in (POSITION, 0))
        counts = map(np.int32, (1, shape.heads, shape.kv_heads, PAGES, PAGES * PAGE_SIZE))
        eps = np.float32(EPS)
        sizes = one, np.int32(shape.inner), eps
        steps = [
            ("o", StepProduct("residual", (x,), attention, None, 0.0, add)),
            ("gate_up", StepProduct("gate_up", (inner,), x, self.norms["gate_up"], EPS, sizes, fatrelu=shape.fatrelu)),
            ("down", StepProduct("residual", (x,), inner, None, 0.0, add)),
        ]
        if follows:
            rest = None, self.rope, place, None, slot, self.table, *counts, eps
            product = StepProduct("qkv", (q, *pages), x, self.norms["qkv"], EPS, rest, shape.head_dim)
            steps.append(("qkv", product))
        for name, product in steps:
            products.step(product, self.weights[name], NOTHING)
        launcher.release()
        return [bits(cuda.numpy(array)) for array in (x, inner, q, *pages)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("name", SHAPES)
def test_together_they_give_the_bits_of_each_alone(cuda: Any, name: str, portable: bool, dtype: DType) -> None:
    layer = Layer(cuda, SHAPES[name], dtype, older(cuda.device) if portable else None)
    if plan_layer(layer.layouts, layer.device) is None:
        pytest.skip("this device launches them one by one")
    check_bits(layer)


@pytest.mark.gpu
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize(("name", "num_sms"), [("demo", 16), ("demo", 24)])
def test_blocks_with_several_tiles_of_a_weight(
    cuda: Any, name: str, num_sms: int, portable: bool, late: bool
) -> None:
    device = replace(older(cuda.device) if portable else cuda.device, num_sms=num_sms, whole_clusters=0)
    layer = Layer(cuda, SHAPES[name], DType.BFLOAT16, device)
    plan = plan_layer(layer.layouts, device)
    if plan is None or cuda.device.num_sms < num_sms:
        pytest.skip("this device is too small")
    if late:  # just too little memory for all weights at once
        layer.device = replace(device, shared_bytes_per_block=plan.smem_bytes - 16)
        plan = plan_layer(layer.layouts, layer.device)
    assert plan is not None and plan.late == late
    check_bits(layer)


def check_bits(layer: Layer) -> None:
    alone = {follows: layer.run(together=False, follows=follows) for follows in (True, False)}
    for pdl in (False, True):
        for follows in (True, False, True, True):
            for expected, found in zip(alone[follows], layer.run(together=True, follows=follows, pdl=pdl), strict=True):
                assert np.array_equal(found, expected)


@pytest.mark.gpu
def test_a_thousand_launches_one_behind_the_other(cuda: Any) -> None:
    layer = Layer(cuda, SHAPES["0.5B"], DType.BFLOAT16)
    expected = layer.run(together=True)
    for _ in range(1000):
        layer.run(together=True, pdl=True)
    for before, after in zip(expected, layer.run(together=True), strict=True):
        assert np.array_equal(before, after)


def test_layers_whose_weights_fit_are_planned_and_others_are_not() -> None:
    for name, shape in SHAPES.items():
        layouts = list(shape.layouts(H200).values())
        for count in (3, 4):
            plan = plan_layer(layouts[:count], H200)
            assert plan is not None and plan.next == (count == 4), name
            assert plan.smem_bytes <= H200.shared_bytes_per_block
            assert not plan.late
            assert plan.grid <= min(H200.num_sms, layouts[1].num_tiles)
    for device, names in ((ORIN, {"demo"}), (RTX_4090, {"demo", "0.5B", "S-1B"})):
        fitting = {name for name, shape in SHAPES.items() if plan_layer([*shape.layouts(device).values()], device)}
        assert fitting == names, device.name
    late = plan_layer(list(Shape(2560, 6144, 40, 4, 64).layouts(H200).values()), H200)
    assert late is not None and late.late
    refused = {
        "too large": Shape(4096, 16384, 32, 2, 128), "heads of 96": Shape(512, 1408, 8, 4, 96),
        "groups of 32": Shape(1024, 4096, 16, 2, 64, 32), "zero points": Shape(1024, 4096, 16, 2, 64, zeros=True),
    }  # fmt: skip
    for name, shape in refused.items():
        assert plan_layer(list(shape.layouts(H200).values()), H200) is None, name
    mixed = [*SHAPES["0.5B"].layouts(H200).values()]
    mixed[2] = layout_of("residual", (1024, 4096), 32, H200)
    assert plan_layer(mixed, H200) is None


class Noted(Launcher):
    """Writes down the names of what is launched."""

    is_recording = True

    def __init__(self) -> None:
        super().__init__(None, Modules("sm_90", DType.BFLOAT16), use_pdl=False)
        self.names: list[str] = []

    def __call__(self, spec: Any, *args: Any, **options: Any) -> None:
        self.release()
        self.names.append(spec.name)


class Layers:
    """The products of one row, launched by a name for each: o, g, d, q, of the same stream; O has a bias, Q no norm."""

    def __init__(self) -> None:
        shape, self.launcher = SHAPES["demo"], Noted()
        layouts = shape.layouts(H200)
        self.products = PackedProducts(self.launcher, None, {"packed_counter": np.zeros(1, np.uint64)}, H200)
        x, inner, attention, norm = (np.zeros((1, size), np.uint16) for size in (256, 640, 512, 256))
        one, eps = np.int32(1), np.float32(EPS)
        add, add_bias = (None, one, one, SCALE), (norm, one, one, SCALE)
        rest = (*(None,) * 6, *(one,) * 5, eps)
        self.known = {
            "o": (StepProduct("residual", (x,), attention, None, 0.0, add), layouts["o"]),
            "O": (StepProduct("residual", (x,), attention, None, 0.0, add_bias), layouts["o"]),
            "g": (StepProduct("gate_up", (inner,), x, norm, EPS, (one, one, eps)), layouts["gate_up"]),
            "d": (StepProduct("residual", (x,), inner, None, 0.0, add), layouts["down"]),
            "q": (StepProduct("qkv", (x, x, x), x, norm, EPS, rest, 64), layouts["qkv"]),
            "Q": (StepProduct("qkv", (x, x, x), x, None, EPS, rest, 64), layouts["qkv"]),
        }

    def run(self, letters: str) -> list[str]:
        """The kernels of products with these letters; a dot is something else."""
        for letter in letters:
            if letter == ".":
                self.launcher(Something, {}, 1, 1)
            else:
                product, layout = self.known[letter]
                self.products.step(product, PackedWeight(product.x, None, layout), NOTHING)
        self.launcher.release()
        names, self.launcher.names = self.launcher.names, []
        return [name.removeprefix("linear_packed_") for name in names]


class Something:
    """Any other kernel."""

    name = "other"


@pytest.mark.parametrize(
    ("letters", "kernels"),
    [
        ("q.ogdq.ogd.", "qkv other layer_products other layer_products other"),
        ("ogdqogdq", "layer_products layer_products"),
        ("og.d", "residual gate_up other residual"),
        ("o.gdq", "residual other gate_up residual qkv"),
        ("oo", "residual residual"),
        ("Ogdq", "residual gate_up residual qkv"),
        ("ogO", "residual gate_up residual"),
        ("ogd", "layer_products"),
        ("ogdQ", "layer_products qkv"),
    ],
)
def test_products_are_held_back_until_all_are_there_or_something_else_comes(letters: str, kernels: str) -> None:
    assert Layers().run(letters) == kernels.split()
