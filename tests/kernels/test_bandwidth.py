"""The read-bandwidth kernel reads every byte once, and the measurement gives back what it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.cuda.bandwidth import BLOCK, TILE_BYTES, num_tiles_within, pci_bus_id, read_bandwidth
from cpmrt.dtypes import DType
from cpmrt.errors import MemoryPlanError

GUARD = 64
POISON = 0x7FFF7FFF


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("grid", "num_tiles"), [(1, 1), (3, 1), (2, 5), (16, 64)])
def test_every_word_is_read_once(cuda: Any, dtype: DType, grid: int, num_tiles: int, pdl: bool) -> None:
    words = np.random.default_rng(num_tiles).integers(0, 2**32, num_tiles * TILE_BYTES // 4, np.uint32)
    num_warps = grid * BLOCK // 32
    out = cuda.array(np.full(num_warps + GUARD, POISON, np.uint32))
    kernel = cuda.kernel("read_bandwidth", dtype)
    kernel(grid, BLOCK, out, cuda.array(words), np.int32(num_tiles), pdl=pdl)
    found = cuda.numpy(out)
    assert np.bitwise_xor.reduce(found[:num_warps]) == np.bitwise_xor.reduce(words)
    assert (found[num_warps:] == POISON).all()


@pytest.mark.gpu
@pytest.mark.alone
def test_the_bandwidth_is_that_of_memory_and_its_buffer_is_freed(cuda: Any) -> None:
    first = read_bandwidth(cuda.device)
    before = cuda.cupy.cuda.runtime.memGetInfo()[0]
    second = read_bandwidth(cuda.device)
    assert cuda.cupy.cuda.runtime.memGetInfo()[0] >= before - (8 << 20)
    assert 20e9 < first < 20e12 and abs(first - second) < 0.1 * first


@pytest.mark.gpu
def test_the_bus_id_is_one(cuda: Any) -> None:
    assert len(pci_bus_id(cuda.device).split(":")) == 3


@pytest.mark.parametrize("grid", [1, 56, 528, 1184])
@pytest.mark.parametrize("num_bytes", [64 << 20, 1 << 30, 3 << 30, 100 << 30])
def test_every_block_reads_as_much_within_the_memory(grid: int, num_bytes: int) -> None:
    num_tiles = num_tiles_within(num_bytes, grid)
    assert num_tiles % grid == 0 and 0 < num_tiles * TILE_BYTES <= min(num_bytes, 2 << 30)
    assert num_tiles * TILE_BYTES > min(num_bytes, 2 << 30) - grid * TILE_BYTES


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(MemoryPlanError, match="no memory to measure the read bandwidth"):
        num_tiles_within(TILE_BYTES * 528 - 1, 528)
