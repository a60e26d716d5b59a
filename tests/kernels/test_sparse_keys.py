"""Compressed keys have the bits of the NumPy op, whatever the rows of a step are and after an accepted path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sparse_cases import SMALL, Slots, SparseDevice

from cpmrt.cuda.draft.structs import DRAFT_TREE
from cpmrt.cuda.ops.kv import compress_path
from cpmrt.dtypes import DType, from_float32
from cpmrt.ops import CompressedKeys, KVPages
from cpmrt.reference.sparse_attention import append_compressed

pytestmark = pytest.mark.gpu

KERNELS = ("compress_keys", "compress_path")
DTYPES = [DType.BFLOAT16, DType.FLOAT16]
SHAPES = [(2, 128), (3, 96), (1, 64)]


def empty_device(cuda: Any, slots: Slots, **settings: Any) -> tuple[SparseDevice, Any, Any]:
    """Return a device that has compressed nothing yet, and the compressed keys k1 and k2 that it must have in the
    end."""
    expected = slots.k1, slots.k2
    slots.compress([0] * len(slots.lengths))
    return SparseDevice(cuda, slots, SMALL, **settings), *expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 333])
def test_any_chunks_leave_what_the_whole_text_does(
    cuda: Any, dtype: DType, kv_heads: int, head_dim: int, chunk: int
) -> None:
    """Chunks of any size leave the compressed keys of the whole text: windows begin in one chunk and end in another,
    and a chunk's bucket has padding."""
    slots = Slots(dtype, [70, 333], group=1, kv_heads=kv_heads, head_dim=head_dim)
    slots.compress([0, 333])
    device, *expected = empty_device(cuda, slots, pdl=chunk % 2 == 0)
    for start in range(0, 333, chunk):
        positions = np.arange(start, min(start + chunk, 333))
        padding = [10**9, -1, 15, 127]
        rows = slots.rows([*positions, *padding], [1] * len(positions) + [-1] * 4)
        device.compress(rows, before_rope=chunk == 64)
    device.assert_compressed(*expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_many_slots(cuda: Any, dtype: DType) -> None:
    """Each row compresses only the windows that end at its own position, at every offset within a page."""
    lengths = [*range(1, 258, 3), 31, 32, 63, 64, 127, 128, 191, 192, 256]
    slots = Slots(dtype, lengths, group=1, kv_heads=2, head_dim=64)
    device, *_ = empty_device(cuda, slots)
    k1, k2 = slots.k1.copy(), slots.k2.copy()
    for first in range(0, len(lengths), 40):
        numbers = range(first, min(first + 40, len(lengths)))
        device.compress(slots.rows([lengths[slot] - 1 for slot in numbers], list(numbers)))
        for slot in numbers:
            append_compressed(k1, k2, slots.k_pages, slots.tables[slot], [lengths[slot] - 1], dtype)
    device.assert_compressed(k1, k2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("root", "length"), [(0, 1), (15, 1), (14, 1), (40, 33), (100, 28), (127, 1), (130, 64)])
def test_an_accepted_path_in_every_layer(
    cuda: Any, dtype: DType, kv_heads: int, head_dim: int, root: int, length: int
) -> None:
    layers = [Slots(dtype, [256, 256], group=1, kv_heads=kv_heads, head_dim=head_dim, seed=seed) for seed in range(3)]
    tables = layers[0].tables
    keys = [layer.k_pages for layer in layers]
    for layer in layers:
        layer.tables = tables
        layer.set_tokens(1, *(layer.normal(256, kv_heads, head_dim) for _ in "kv"))
        layer.compress([0, root])
    tree = np.zeros(1, DRAFT_TREE)
    tree["slot"], tree["position"], tree["path_length"] = 1, root, length
    names = ("k1", "k2")
    stacked = {name: np.stack([getattr(layer, name) for layer in layers]) for name in names}
    arrays = {f"{name}_pages": cuda.array(values, dtype) for name, values in stacked.items()}
    arrays |= {"k_pages": cuda.array(np.stack(keys), dtype), "block_tables": cuda.array(tables)}
    if root % 2:  # models that choose blocks by keys before RoPE
        arrays["nope_pages"] = arrays["k_pages"]
        arrays["k_pages"] = cuda.array(np.full(np.stack(keys).shape, np.nan, np.float32), dtype)
    compressed = CompressedKeys(arrays["k1_pages"], arrays["k2_pages"], nope=arrays.get("nope_pages"))
    pages = KVPages(arrays["k_pages"], None, compressed)
    for is_there in (False, True):
        tree["slot"] = 1 if is_there else -1
        compress_path(cuda.launcher(dtype), pages, cuda.array(tree.view(np.uint8)), arrays["block_tables"], 1)
        if is_there:
            for number in range(3):
                path = range(root, root + length)
                append_compressed(*(stacked[name][number] for name in names), keys[number], tables[1], path, dtype)
        for name in names:
            np.testing.assert_array_equal(cuda.numpy(arrays[f"{name}_pages"]), from_float32(stacked[name], dtype))
