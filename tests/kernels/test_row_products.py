"""row_layers.cu against the kernels of its four products, bit for bit; and the conditions for holding products back for
it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layer_cases import SCALE, SHAPES, SMALL_MEMORY, Noted, Shape, Something, on_older, random_weight
from linear_cases import EPS, H200, ORIN, RTX_4090, bits, normals, older

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import QkvRest, ResidualRest, StepProduct
from cpmrt.cuda.ops.linear_packed.layout import PackedLayout, PackedWeight
from cpmrt.cuda.ops.linear_packed.products import PackedProducts
from cpmrt.cuda.ops.linear_packed.row_layers import joins_products, plan_layer
from cpmrt.dtypes import DType
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import NOTHING
from cpmrt.tensor_spec import Quantization, TensorSpec

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
POSITION, PAGES = 70, 4


class Layer:
    """A layer on the device for one row; `run` returns the bits of everything that its four products write."""

    def __init__(self, cuda: Any, shape: Shape, dtype: DType, device: Device):
        self.cuda, self.shape, self.dtype, self.device = cuda, shape, dtype, device
        rng = np.random.default_rng(shape.hidden)
        normal = normals(rng, dtype)
        self.weights, self.norms = {}, {}
        for name, layout in shape.layouts(self.device).items():
            self.weights[name] = PackedWeight(cuda.array(random_weight(rng, layout, dtype)), None, layout)
            self.norms[name] = cuda.array(1 + normal(layout.in_features, spread=0.25), dtype)
        attention = shape.heads * shape.head_dim
        self.x, self.attention = normal(1, shape.hidden), normal(1, attention)
        self.bias = cuda.array(normal(attention + 2 * shape.kv_heads * shape.head_dim, spread=0.3), dtype)
        angles = rng.random((2, PAGES * PAGE_SIZE, shape.head_dim // 2), np.float32)
        self.rope, self.counter = cuda.array(angles), cuda.array(np.zeros(1, np.uint64))
        self.table = cuda.array(rng.permutation(PAGES).astype(np.int32)[None])

    @property
    def layouts(self) -> list[PackedLayout]:
        return [weight.layout for weight in self.weights.values()]

    def run(self, *, together: bool, follows: bool = True, stored: bool = True, pdl: bool = False) -> list[Any]:
        cuda, shape, dtype = self.cuda, self.shape, self.dtype

        def poison(*size: int) -> Any:
            return cuda.array(np.full(size, np.nan, np.float32), dtype)

        x, inner = cuda.array(self.x, dtype), poison(1, shape.inner)
        q = poison(1, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        pages = [poison(PAGES, shape.kv_heads, PAGE_SIZE, shape.head_dim) for _ in range(2)]
        launcher = cuda.launcher(dtype, pdl=pdl)
        arrays = {"packed_counter": self.counter} if together else {}
        products, one = PackedProducts(launcher, None, arrays, self.device), np.int32(1)
        add = ResidualRest(one, np.int32(shape.hidden), SCALE)
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
            rest = QkvRest(self.rope, place, None, slot, self.table, *counts, eps)
            targets = pages if stored else (None, None)
            product = StepProduct("qkv", (q, *targets), x, self.norms["qkv"], EPS, rest, self.bias, shape.head_dim)
            steps.append(("qkv", product))
        for name, product in steps:
            products.step(product, self.weights[name], NOTHING)
        launcher.release()
        return [bits(cuda.numpy(array)) for array in (x, inner, q, *pages)]

    def check(self) -> None:
        """Check that one launch of all products gives the bits of separate launches, several times, with and without
        dependent launches."""
        for options in ({}, {"follows": False}, {"stored": False}):
            alone = self.run(together=False, **options)
            for pdl in (False, True, False):
                for expected, found in zip(alone, self.run(together=True, pdl=pdl, **options), strict=True):
                    assert np.array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "8B"])
def test_together_they_give_the_bits_of_each_alone(cuda: Any, name: str, dtype: DType) -> None:
    layer = Layer(cuda, SHAPES[name], dtype, on_older(cuda))
    if plan_layer(layer.layouts, layer.device) is None:
        pytest.skip("this device launches them one by one")
    layer.check()


@pytest.mark.gpu
def test_a_layer_of_8b_with_rows_that_a_warp_has_whole(cuda: Any) -> None:
    layer = Layer(cuda, SHAPES["8B"], DType.BFLOAT16, on_older(cuda))
    if plan_layer(layer.layouts, layer.device) is None:
        pytest.skip("this device launches them one by one")
    layer.check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "num_sms", "shared_bytes"),
    [("demo", 16, SMALL_MEMORY), ("demo", 9, 80_000), ("heads of 96", 30, 166_912), ("0.5B", 31, SMALL_MEMORY)],
)
def test_fewer_blocks_that_have_more_tiles(cuda: Any, name: str, num_sms: int, shared_bytes: int) -> None:
    if cuda.device.num_sms < num_sms:
        pytest.skip("this device is too small")
    layer = Layer(cuda, SHAPES[name], DType.BFLOAT16, replace(on_older(cuda, shared_bytes), num_sms=num_sms))
    assert plan_layer(layer.layouts, layer.device) is not None
    layer.check()


@pytest.mark.gpu
def test_a_thousand_launches_one_behind_the_other(cuda: Any) -> None:
    layer = Layer(cuda, SHAPES["0.5B"], DType.BFLOAT16, on_older(cuda))
    expected = layer.run(together=True)
    for _ in range(1000):
        layer.run(together=True)
    for before, after in zip(expected, layer.run(together=True), strict=True):
        assert np.array_equal(before, after)


def test_which_layers_are_one_launch() -> None:
    small, large = (replace(older(H200), shared_bytes_per_block=size) for size in (SMALL_MEMORY, 166_912))
    for device in (small, large, RTX_4090):
        for name, shape in SHAPES.items():
            layouts = list(shape.layouts(device).values())
            for count in (3, 4):
                plan = plan_layer(layouts[:count], device)
                assert plan is not None and plan.next == (count == 4), name
                assert plan.smem_bytes <= device.shared_bytes_per_block and plan.grid == device.num_sms
    refused = {
        "sm_90": (SHAPES["8B"], H200), "too many tiles a warp": (SHAPES["8B"], ORIN),
        "too little memory": (SHAPES["8B"], replace(small, shared_bytes_per_block=60_000)),
        "groups of 32": (Shape(1024, 4096, 16, 2, 64, 32), small),
        "8 bits": (Shape(1024, 4096, 16, 2, 64, bits=8), small),
        "zero points": (Shape(1024, 4096, 16, 2, 64, zeros=True), small),
    }  # fmt: skip
    for name, (shape, device) in refused.items():
        assert plan_layer(list(shape.layouts(device).values()), device) is None, name


def test_which_models_have_the_counter() -> None:
    def specs(bits: int | None) -> list[TensorSpec]:
        quant = None if bits is None else Quantization(bits, 128)
        return [TensorSpec("g", (4096, 1024), (), quant, "gate_up"), TensorSpec("n", (1024,), ())]

    assert joins_products(specs(4), RTX_4090) and joins_products(specs(4), older(H200))
    assert not joins_products(specs(None), RTX_4090) and not joins_products(specs(4), H200)


class Layers:
    """The products of one row, launched by a letter for each: o, g(ate_up), d(own), q(kv). O has a bias, Q no norm, D
    another scale. Another model's products (`others`) are launched by the same launcher."""

    def __init__(self, device: Device) -> None:
        shape, self.launcher = SHAPES["demo"], Noted()
        layouts = shape.layouts(device)
        arrays = {"packed_counter": np.zeros(1, np.uint64)}
        self.products, self.others = (PackedProducts(self.launcher, None, arrays, device) for _ in range(2))
        x, inner, attention, norm = (np.zeros((1, size), np.uint16) for size in (256, 640, 512, 256))
        one, eps = np.int32(1), np.float32(EPS)
        add = ResidualRest(one, one, SCALE)
        rest = QkvRest(*(None,) * 5, *(one,) * 5, eps)
        up = StepProduct("gate_up", (inner,), x, norm, EPS, (one, one, eps))
        self.known = {
            "o": (StepProduct("residual", (x,), attention, None, 0.0, add), layouts["o"]),
            "O": (StepProduct("residual", (x,), attention, None, 0.0, add, norm), layouts["o"]),
            "g": (up, layouts["gate_up"]),
            "d": (StepProduct("residual", (x,), inner, None, 0.0, add), layouts["down"]),
            "D": (StepProduct("residual", (x,), inner, None, 0.0, add._replace(scale=eps)), layouts["down"]),
            "q": (StepProduct("qkv", (x, x, x), x, norm, EPS, rest, None, 64), layouts["qkv"]),
            "Q": (StepProduct("qkv", (x, x, x), x, None, EPS, rest, None, 64), layouts["qkv"]),
        }

    def run(self, letters: str) -> list[str]:
        """Launch the products of these letters and return the names of the kernels; a dot launches another kernel, a
        colon an o of another model."""
        for letter in letters:
            if letter == ".":
                self.launcher(Something, {}, 1, 1)
            else:
                products = self.others if letter == ":" else self.products
                product, layout = self.known[letter.replace(":", "o")]
                products.step(product, PackedWeight(product.x, None, layout), NOTHING)
        self.launcher.release()
        names, self.launcher.names = self.launcher.names, []
        return [name.removeprefix("linear_packed_") for name in names]


@pytest.mark.parametrize(
    ("letters", "kernels"),
    [
        ("q.ogdq.ogd.", "qkv other row_layers other row_layers other"),
        ("ogdqogdq", "row_layers row_layers"),
        ("og.d", "residual gate_up other residual"),
        ("o.gdq", "residual other gate_up residual qkv"),
        ("oogdq", "residual row_layers"),
        ("Ogdq", "residual gate_up residual qkv"),
        ("ogOgdq", "residual gate_up residual gate_up residual qkv"),
        ("ogDq", "residual gate_up residual qkv"),
        ("ogd", "row_layers"),
        ("ogdQ", "row_layers qkv"),
        ("ogdogdq", "row_layers row_layers"),
        ("og:d", "residual gate_up residual residual"),
    ],
)
def test_products_are_held_back_until_all_are_there_or_something_else_comes(letters: str, kernels: str) -> None:
    assert Layers(older(H200)).run(letters) == kernels.split()


def test_where_kernels_begin_early_none_is_held_back() -> None:
    assert Layers(H200).run("ogdq") == ["residual", "gate_up", "residual", "qkv"]


def test_what_is_held_back_is_launched_before_a_recording_and_recorded_within_one() -> None:
    """What is held back is launched before a recording begins and recorded before it ends, also if the recording fails:
    its operands are stand-ins, which must not be launched later."""
    launcher, noted = Launcher(None, Modules("sm_86", DType.BFLOAT16), use_pdl=False), []

    def hold() -> None:
        launcher.hold(lambda: noted.append(launcher.is_recording))

    hold()
    with launcher.recording():
        assert noted == [False]
        hold()
    assert noted == [False, True]
    with pytest.raises(KeyError), launcher.recording():
        hold()
        raise KeyError
    launcher.release()
    assert noted == [False, True, True] and not launcher.is_recording
