"""Operands and oracle of the skinny products' tests, whatever their weights are held in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import QkvRest, ResidualRest, StepProduct
from cpmrt.cuda.ops.linear_packed.layout import MINIMUMS, PackedLayout, packed_layout
from cpmrt.cuda.precompile import known_device
from cpmrt.dtypes import DType, from_float32, round_to
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import KVPages, QkvWeights, Rows
from cpmrt.reference.ops import NumpyOps
from cpmrt.tensor_spec import Product, Quantization, TensorSpec

H200, ORIN, RTX_4090 = map(known_device, ("sm_90", "sm_87", "sm_89"))
EPS, SCALE, DIVISOR = 1e-5, 0.37, 2.5
MAX_CONTEXT = 256
UNSTORED = (3, 7)  # rows with slot -1


class Case(Protocol):
    """A product with its operands for 64 rows in `arrays`, by name: float32 that holds values of `dtype`.

    The operand `fatrelu` is the threshold of a gate_up product's activation; without it the activation is SiLU.
    """

    product: str
    dtype: DType
    out_features: int
    head_dim: int
    num_kv_heads: int
    arrays: dict[str, Any]

    @property
    def num_heads(self) -> int: ...


def normals(rng: np.random.Generator, dtype: DType) -> Callable[..., Any]:
    """Return a function that draws normally distributed values of `dtype`, by shape and spread."""

    def normal(*shape: int, spread: float = 1.0) -> Any:
        return round_to(rng.standard_normal(shape, np.float32) * np.float32(spread), dtype)

    return normal


def step_operands(
    rng: np.random.Generator,
    dtype: DType,
    product: str,
    size: tuple[int, int],
    head_dim: int,
    has_bias: bool,
    is_draft: bool = False,
) -> dict[str, Any]:
    """Return all operands but x and the weight, for a weight of `size` (rows, columns).

    A draft's rows are not normalised, and their keys and values are stored at `locations`, not at their positions.
    """
    (out_features, in_features), normal = size, normals(rng, dtype)
    arrays = {
        "norm": round_to(1 + 0.25 * rng.standard_normal(in_features, np.float32), dtype),
        "bias": normal(out_features, spread=0.3) if has_bias else None,
        "residual": normal(64, out_features) if product == "residual" else None,
        "positions": rng.integers(0, MAX_CONTEXT, 64).astype(np.int32),
        "slots": np.arange(64, dtype=np.int32),
        "block_tables": rng.permutation(64 * MAX_CONTEXT // PAGE_SIZE).astype(np.int32).reshape(64, -1),
    }
    arrays["locations"] = rng.integers(0, MAX_CONTEXT, 64).astype(np.int32) if is_draft else None
    if is_draft:
        arrays["norm"] = None
    arrays["slots"][list(UNSTORED)] = -1
    arrays["positions"][UNSTORED[1]] = -1
    if product == "qkv":
        angles = rng.random((MAX_CONTEXT, head_dim // 2), np.float32) * np.float32(6.28)
        arrays["rope"] = np.stack([np.cos(angles), np.sin(angles)])
    return arrays


def oracle(case: Case) -> Any:
    """Return what the product must give, float32 [64, outputs]; a qkv row is q, then the stored k and v."""
    ops, a = NumpyOps(case.dtype), case.arrays
    if case.product == "residual":
        out = a["residual"].copy()
        ops.project_residual(out, a["x"], a["weight"], a["bias"], SCALE)
        return out
    if case.product == "gate_up":
        out = np.empty((64, case.out_features // 2), np.float32)
        ops.gate_up(out, a["x"], a["norm"], a["weight"], EPS, fatrelu=a.get("fatrelu"))
        return out
    if case.product == "head":
        out = np.empty((64, case.out_features), np.float32)
        ops.lm_head(out, a["x"], a["norm"], a["weight"], EPS, DIVISOR)
        return out
    kept = stored_rows(64)
    rows = rows_of(a, kept)
    q = np.empty((62, case.num_heads * case.head_dim), np.float32)
    k_pages = np.zeros((a["block_tables"].size, case.num_kv_heads, PAGE_SIZE, case.head_dim), np.float32)
    v_pages = np.zeros_like(k_pages)
    weights = QkvWeights(a["norm"], a["weight"], a["bias"])
    ops.qkv(q, KVPages(k_pages, v_pages), a["x"][kept], weights, a["rope"], rows, EPS)
    out = np.zeros((64, case.out_features), np.float32)
    out[kept] = np.concatenate([q, stored(k_pages, rows), stored(v_pages, rows)], axis=1)
    return out


class OnDevice:
    """The operands of a case on the device in `arrays`, with outputs for 65 rows that hold NaN before a launch."""

    def __init__(self, cuda: Any, case: Case, *, portable: bool = False):
        self.cuda, self.case, self.on = cuda, case, older(cuda.device) if portable else cuda.device
        as_is = ("positions", "locations", "slots", "block_tables", "rope", "permutation")
        names = ("x", "norm", "bias", "residual", *as_is)
        held = {name: case.arrays.get(name) for name in names}
        self.arrays = {
            name: None if array is None else cuda.array(array, None if name in as_is else case.dtype)
            for name, array in held.items()
        }

    @property
    def stored(self) -> DType:
        return DType.FLOAT32 if self.case.product == "head" else self.case.dtype

    def poisoned(self, rows: int, width: int, dtype: DType | None = None) -> Any:
        nan = np.full((rows, width), np.nan, np.float32)
        return self.cuda.array(nan, None if dtype is DType.FLOAT32 else self.case.dtype)

    def outputs(self, num_rows: int) -> tuple[Any, ...]:
        """Return poisoned outputs for the product of so many rows: q and the pages of K and V, or one matrix.

        The output of a residual product holds the residual in these rows.
        """
        case = self.case
        if case.product == "qkv":
            pages = case.arrays["block_tables"].size, case.num_kv_heads * PAGE_SIZE * case.head_dim
            return self.poisoned(65, case.num_heads * case.head_dim), self.poisoned(*pages), self.poisoned(*pages)
        width = case.out_features // 2 if case.product == "gate_up" else case.out_features
        out = self.poisoned(65, width, self.stored)
        if case.product == "residual":
            out[:num_rows] = self.arrays["residual"][:num_rows]
        return (out,)

    def wait(self) -> None:
        """Wait until the whole device is idle: CuPy works on a stream of its own."""
        self.cuda.cupy.cuda.Device().synchronize()

    def product(self, num_rows: int, outputs: tuple[Any, ...]) -> StepProduct:
        case, d, rows, eps = self.case, self.arrays, np.int32(num_rows), np.float32(EPS)
        width = np.int32(case.out_features // 2 if case.product == "gate_up" else case.out_features)
        tables = d["rope"], d["positions"], d["locations"], d["slots"], d["block_tables"]
        heads = np.int32(case.num_heads if case.head_dim else 0), np.int32(case.num_kv_heads)
        rest: dict[str, tuple[Any, ...]] = {
            "qkv": QkvRest(*tables, rows, *heads, *map(np.int32, (MAX_CONTEXT // PAGE_SIZE, MAX_CONTEXT)), eps),
            "residual": ResidualRest(rows, width, np.float32(SCALE)),
            "gate_up": (rows, width, eps),
            "head": (rows, width, eps, np.float32(DIVISOR)),
        }
        norm = None if case.product == "residual" else d["norm"]
        threshold = case.arrays.get("fatrelu")
        operands = rest[case.product], d["bias"], case.head_dim, threshold
        return StepProduct(case.product, outputs, d["x"], norm, EPS, *operands)

    def words(self, num_rows: int, outputs: tuple[Any, ...]) -> Any:
        """Return the words of the rows, and check that everything else is untouched.

        A qkv row is q, then the stored k and v.
        """
        first, *pages = outputs
        words = self.cuda.numpy(first)
        nan = bits(from_float32(np.full(1, np.nan, np.float32), self.stored))
        assert (bits(words[num_rows:]) == nan).all()
        if not pages:
            return words[:num_rows]
        case, kept = self.case, stored_rows(num_rows)
        shape = case.arrays["block_tables"].size, case.num_kv_heads, PAGE_SIZE, case.head_dim
        k, v = (self.cuda.numpy(page).reshape(shape) for page in pages)
        rows = rows_of(case.arrays, kept)
        out = np.zeros((num_rows, case.out_features), words.dtype)
        out[kept] = np.concatenate([words[kept], stored(k, rows), stored(v, rows)], axis=1)
        for page in (k, v):
            assert (bits(page) != nan).sum() == len(kept) * case.num_kv_heads * case.head_dim
        return out


def stored_rows(num_rows: int) -> list[int]:
    """Return the rows whose keys and values are stored: all but those of UNSTORED."""
    return [row for row in range(num_rows) if row not in UNSTORED]


def rows_of(arrays: dict[str, Any], kept: list[int]) -> Rows:
    """Return the rows `kept` of a case with these `arrays`."""
    locations = None if arrays["locations"] is None else arrays["locations"][kept]
    tokens, tables = np.zeros(len(kept), np.int32), arrays["block_tables"]
    return Rows(tokens, arrays["positions"][kept], arrays["slots"][kept], tables, False, locations)


def stored(pages: Any, rows: Rows) -> Any:
    """Return what `pages` hold at the rows' locations, [T, K * D]."""
    places = rows.positions if rows.locations is None else rows.locations
    found = pages[rows.block_tables[rows.slots, places // PAGE_SIZE], :, places % PAGE_SIZE]
    return found.reshape(len(found), -1)


def bits(words: Any) -> Any:
    """Return `words` as unsigned integers, in which a NaN is equal to itself and -0 differs from 0."""
    return words.view(f"u{words.itemsize}")


def relative_error(out: Any, expected: Any) -> float:
    return float(np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected))


def layout_of(
    product: Product, size: tuple[int, int], group_size: int, device: Device, *,
    zeros: int = 0, head_dim: int = 0, bits: int = 4,
) -> PackedLayout:  # fmt: skip
    """Return the packed layout of a weight of `size` (rows, columns); `zeros` MINIMUMS means blocks of GGUF."""
    quant = Quantization(bits, group_size, symmetric=not zeros, in_blocks=zeros == MINIMUMS)
    return packed_layout(TensorSpec("w", size, (), quant, product, head_dim), device)


def older(device: Device) -> Device:
    """Return the device as one of compute capability 8.6 without clusters, with its own amount of memory."""
    return replace(device, capability=86, whole_clusters=0)


def op_of(product: str) -> str:
    return {"residual": "project_residual", "head": "lm_head"}.get(product, product)
