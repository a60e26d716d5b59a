"""Every kernel, collected from the modules that declare and launch them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType

from cpmrt.cuda import bandwidth
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.draft import block as block_kernels
from cpmrt.cuda.draft import inner as chain_kernels
from cpmrt.cuda.draft import kernels as draft_kernels
from cpmrt.cuda.load import random, repack, upload
from cpmrt.cuda.ops import (
    experts,
    gemm,
    kv,
    latent,
    lightning,
    linear,
    products,
    rows,
    screened_head,
    selection,
    slot_states,
)
from cpmrt.cuda.ops.attention import decode, prefill, qkv, selected, tree
from cpmrt.cuda.ops.linear_packed import chunk, ffn_row, row_layers
from cpmrt.cuda.ops.linear_packed import products as packed_products
from cpmrt.cuda.step import kernels as step_kernels

_MODULES = (
    *(random, repack, upload, bandwidth, rows, linear, products, packed_products, chunk),
    *(row_layers, ffn_row, gemm, kv, selection, experts, latent, lightning, slot_states, decode, qkv, tree, selected),
    *(prefill, step_kernels, draft_kernels, block_kernels, chain_kernels, screened_head),
)


def _declared(module: ModuleType) -> Iterator[KernelSpec]:
    """Yield the specs among a module's names: single ones, and the values of mappings."""
    for value in vars(module).values():
        for spec in value.values() if isinstance(value, Mapping) else (value,):
            if isinstance(spec, KernelSpec):
                yield spec


KERNELS: tuple[KernelSpec, ...] = tuple(dict.fromkeys(spec for module in _MODULES for spec in _declared(module)))


def files(arch: str = "") -> tuple[str, ...]:
    """Return the source files that hold a kernel, each once; with `arch`, only those that compile for it."""
    family = arch.rstrip("af")
    return tuple(dict.fromkeys(spec.file for spec in KERNELS if not arch or spec.arch in ("", family)))
