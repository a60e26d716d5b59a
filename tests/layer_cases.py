"""Layers of several sizes for the tests of kernels that take a whole layer, or all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from linear_cases import layout_of, older
from packed_oracle import unit_offsets

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear_packed.layout import PackedLayout
from cpmrt.dtypes import DType, from_float32
from cpmrt.tensor_spec import Product

SCALE = np.float32(0.31)
SMALL_MEMORY = 101376
"""Bytes of shared memory per block on a device whose multiprocessors have little."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer and the quantisation of its weights: group size, zero points or none, bits."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    group_size: int = 128
    zeros: bool = False
    fatrelu: float | None = None
    bits: int = 4

    @property
    def weights(self) -> dict[str, tuple[Product, int, int]]:
        """The product, rows and columns of each weight by name, in the order of their use."""
        attention = self.heads * self.head_dim
        return {
            "o": ("residual", self.hidden, attention),
            "gate_up": ("gate_up", 2 * self.inner, self.hidden),
            "down": ("residual", self.hidden, self.inner),
            "qkv": ("qkv", attention + 2 * self.kv_heads * self.head_dim, self.hidden),
        }

    def layouts(self, device: Device) -> dict[str, PackedLayout]:
        return {
            name: layout_of(
                product, (rows, columns), self.group_size, device, zeros=self.zeros, bits=self.bits,
                head_dim=self.head_dim if product == "qkv" else 0,
            )
            for name, (product, rows, columns) in self.weights.items()
        }  # fmt: skip


SHAPES = {
    "demo": Shape(256, 640, 8, 2, 64),
    "one slice": Shape(128, 256, 2, 1, 64),
    "heads of 96": Shape(512, 1408, 8, 4, 96),
    "0.5B": Shape(1024, 4096, 16, 2, 64),
    "MiniCPM5-2B": Shape(2048, 6144, 16, 2, 128),
    "S-1B": Shape(1536, 3840, 24, 8, 64, fatrelu=0.01),
    "runs of three and eleven": Shape(3072, 11264, 24, 8, 128),
    "8B": Shape(4096, 16384, 32, 2, 128),
}


def random_weight(rng: np.random.Generator, layout: PackedLayout, dtype: DType) -> Any:
    """Return a packed weight whose codes are random bytes, with scales that keep its products near one."""
    packed = rng.integers(0, 256, layout.num_bytes, np.uint8)
    of_unit = np.arange(layout.code_bytes, layout.unit_bytes)
    places = unit_offsets(layout).ravel()[:, None] + of_unit
    spread = np.float32(0.2 * layout.in_features**-0.5)
    scales = (0.5 + rng.random((len(places), places.shape[1] // 2), np.float32)) * spread
    packed[places] = np.ascontiguousarray(from_float32(scales, dtype)).view(np.uint8)
    return packed


class Noted(Launcher):
    """A launcher that launches nothing but keeps the kernels' names in `names`."""

    is_recording = True

    def __init__(self) -> None:
        super().__init__(None, Modules("sm_90", DType.BFLOAT16), use_pdl=False)
        self.names: list[str] = []

    def __call__(self, spec: Any, *args: Any, **options: Any) -> None:
        self.release()
        self.names.append(spec.name)


class Something:
    """The spec of some other kernel."""

    name = "other"


def on_older(cuda: Any, shared_bytes: int = SMALL_MEMORY) -> Device:
    """Return the device as one of compute capability 8.6, with at most `shared_bytes` of shared memory per block."""
    return replace(older(cuda.device), shared_bytes_per_block=min(shared_bytes, cuda.device.shared_bytes_per_block))
