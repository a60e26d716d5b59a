"""The compile-time constants and the specs of the kernels of a skinny product with packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.ops.linear import OPS
from cpmrt.cuda.ops.linear_packed.layout import LayoutConstants

_Extended = TypeVar("_Extended", bound="LinearPackedConstants")
PREPARE_THREADS = 256
"""Threads of a block of `PREPARE`, which prepares one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPackedConstants(LayoutConstants):
    """Compile-time constants of linear_packed.cu, which explains them; `smem_bytes` is what a block uses."""

    rows: int
    warps: int
    warpgroups: bool
    shared_run: bool
    clusters: bool
    received_apart: bool
    norm: bool
    prepared: bool
    stage_slices: int
    stages: int
    early_slots: int
    feeds: bool
    trigger: int
    kept_rounds: int
    smem_bytes: int
    portable: bool
    fatrelu: int | None = None
    row_pitch: int | None = None
    early_warps: int | None = None
    own_runs: bool | None = None
    ahead: bool | None = None
    small_chunks: int | None = None
    tile_copies: bool | None = None

    def extended(self, kind: type[_Extended], **more: int | None) -> _Extended:
        """Return the constants of a kernel that has those of this product, and `more` of its own or in their place."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return kind(**held | more)


@dataclass(frozen=True, slots=True)
class PrepareConstants:
    """Compile-time constants of prepare_rows.cu, which fix the form of the rows that it writes.

    `row_pitch`: the columns of the rows that it reads, where they are more than `in_features`.
    """

    in_features: int
    rows: int
    scale_group: int
    zeros: int
    warpgroups: bool
    row_pitch: int | None = None


@dataclass(frozen=True, kw_only=True)
class LatentQueriesConstants(LinearPackedConstants):
    """Compile-time constants of the product that makes queries of latent attention.

    Beside those of every packed product: the elements of a latent, of a query's two parts and of a value.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


def _exchange_through_memory(macros: Mapping[str, int]) -> bool:
    """Whether blocks exchange sums through memory and so wait for blocks outside of their cluster."""
    return bool(macros["SHARED_RUN"] and macros["RUNS"] > 1 and not macros["CLUSTERS"])


_FILE = "linear_packed/linear_packed.cu"
LINEAR_PACKED = {
    product: KernelSpec(
        f"linear_packed_{product}", _FILE, op, LinearPackedConstants, hot=True,
        waits_across_blocks=_exchange_through_memory,
    )
    for product, op in OPS.items()
}  # fmt: skip
LATENT_QUERIES = KernelSpec(
    "linear_packed_latent_queries", _FILE, "decode_latent_attention", LatentQueriesConstants, hot=True
)
PREPARE = KernelSpec("prepare_rows", "linear_packed/prepare_rows.cu", "gate_up", PrepareConstants, hot=True)
