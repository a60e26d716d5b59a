"""Rows for the kernel `rope_append` over pages in fp8: plain ones, and the nodes of a draft tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpmrt.dtypes import DType, round_to
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import Fp8Pages

HEADS, KV_HEADS, POISON = 6, 2, 2.0**5
MAX_CONTEXT, PAGES = 400, 21


@dataclass
class Store:
    """Rows for `rope_append`, on pages that hold what an earlier sequence left."""

    cuda: Any
    dtype: DType
    head_dim: int

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.head_dim)
        self.shape = (PAGES, KV_HEADS, PAGE_SIZE, self.head_dim)
        self.qkv = random.standard_normal((300, (HEADS + 2 * KV_HEADS) * self.head_dim), np.float32)
        # The magnitudes of tokens differ by up to 10^5; token 128 is all zeros.
        self.qkv = round_to(self.qkv * 10.0 ** random.integers(-3, 3, (300, 1)).astype(np.float32), self.dtype)
        self.qkv[128] = 0
        self.table = random.permutation(PAGES).reshape(3, 7).astype(np.int32)
        angles = np.outer(np.arange(MAX_CONTEXT), 1e4 ** -(np.arange(self.head_dim // 2) / (self.head_dim // 2)))
        self.rope = np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
        self.before = random.integers(0, 256, (2, *self.shape), np.uint8)
        self.codes = [self.cuda.array(codes) for codes in self.before]
        self.scales = [self.cuda.array(np.full(self.shape[:2], POISON, np.float32)) for _ in "kv"]
        self.kernel = self.cuda.kernel("rope_append", self.dtype, HEAD_DIM=self.head_dim, FP8=1)

    def append(self, rows: list[int], positions: list[int], slots: list[int]) -> Any:
        """Store rows of `qkv` at these positions of slots; return the queries, as words of the storage type."""
        return self._launch(self.kernel, self.codes, self.scales, rows, positions, slots, None)

    def append_tree(self, rows: list[int], masks: list[int], slot: int, base: int) -> tuple[Any, list[Fp8Pages]]:
        """Store rows of `qkv` as the nodes of a tree in `slot`, followed by one row of padding.

        Return the queries, and the stored nodes of keys and of values with the padding's entry, which is the last.
        """
        count, cuda = len(rows) + 1, self.cuda
        nodes = [cuda.array(np.full((count, KV_HEADS, self.head_dim), 0x7F, np.uint8)) for _ in "kv"]
        scales = [cuda.array(np.full((count, KV_HEADS), np.nan, np.float32)) for _ in "kv"]
        tree = cuda.array(np.array([*masks, 1], np.uint64)), cuda.array(np.array([base] * len(rows) + [0], np.int32))
        positions = [*(base + mask.bit_count() - 1 for mask in masks), 0]
        kernel = cuda.kernel("rope_append", self.dtype, HEAD_DIM=self.head_dim, FP8=1, TREE=1)
        locations = cuda.array(np.array([*range(base, base + len(rows)), 0], np.int32))
        slots = [slot] * len(rows) + [-1]
        q = self._launch(kernel, nodes, [*self.scales, *scales, *tree], [*rows, rows[0]], positions, slots, locations)
        found = [
            Fp8Pages(None, None, cuda.numpy(codes), cuda.numpy(scale))
            for codes, scale in zip(nodes, scales, strict=True)
        ]
        return q, found

    def _launch(
        self, kernel: Any, targets: Any, scales: Any, rows: list[int], positions: list[int], slots: list[int],
        locations: Any,
    ) -> Any:  # fmt: skip
        qkv = self.cuda.array(self.qkv[rows], self.dtype)
        q = self.cuda.array(np.zeros((len(rows), HEADS * self.head_dim), np.float32), self.dtype)
        places = [self.cuda.array(np.array(values, np.int32)) for values in (positions, slots)]
        lanes = 4 if self.head_dim == 64 else 8
        grid = -(-len(rows) * (HEADS + 2 * KV_HEADS) * lanes // 256)
        numbers = [np.int32(n) for n in (len(rows), HEADS, KV_HEADS, self.table.shape[1], MAX_CONTEXT)]
        kernel(
            grid, 256, q, *targets, None, None, qkv, None, None, None, self.cuda.array(self.rope), places[0], locations,
            places[1], self.cuda.array(self.table), *numbers, np.float32(1e-5), *scales,
        )  # fmt: skip
        return self.cuda.numpy(q)

    def pages(self) -> list[Fp8Pages]:
        parts = zip(self.codes, self.scales, strict=True)
        return [Fp8Pages(self.cuda.numpy(codes), self.cuda.numpy(scales)) for codes, scales in parts]
