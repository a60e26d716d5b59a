"""No kernel reads, before its wait for the preceding kernel, what that kernel may have written: checked in the machine
code.

A parameter that is `const` and `__restrict__` looks like a constant to the compiler, which then may load it early.
decode_attention reads before its wait what is older than the preceding kernel. The preceding kernel must then start
attention only after its own wait, and the page that a step writes must still be read after attention's wait: checked on
a GPU. The kernels that choose blocks read early what is older than the product that made their queries, and
lightning_decode reads early the states, which are older than its product. Weights never change: kernels of latent
attention read their part of them before the wait, past the L1 too, because the compiler moves loads of constants behind
the wait.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_cases import plan_of, workspace
from kernel_builds import constant_sets
from kernel_compiles import Compiles
from slow_writer import SlowWriter
from sparse_cases import Slots, SparseDevice, any_choice

from cpmrt.config import SparseConfig
from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.kernels import KERNELS, files
from cpmrt.cuda.ops.attention.attention import AttentionOps
from cpmrt.cuda.ops.linear import plan_linear
from cpmrt.cuda.precompile import known_device
from cpmrt.dtypes import DType
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import KVPages, Rows, Selection

H200 = known_device("sm_90")
QKV = [(1152, 128, 96), (768, 128, 64), (768, 256, 64), (4608, 4096, 128)]
READ_OLD_DATA_EARLY = tuple(
    f"attention/{name}.cu"
    for name in (
        "decode_attention", "qkv_attention", "linear_qkv_attention", "tree_attention", "selected_attention",
        "select_blocks", "pick_blocks", "latent_attention", "latent_attention_wgmma", "absorb_queries", "merge_latents",
    )
) + ("mixers/lightning_decode.cu", "linear/linear.cu", "linear_packed/linear_packed.cu")
WEIGHTS_READ_EARLY = {
    "attention/absorb_queries.cu": ("128", 8), "attention/merge_latents.cu": ("128", 4),
    "linear_packed/linear_packed.cu": ("64", 8),
}  # fmt: skip
"""The width in bits and the number of a thread's weight loads before the wait, in a file's first build, which has the
sizes of MiniCPM3-4B."""
READ_OLD_KEYS_EARLY = ("coarse_log_sums", "score_blocks")
OLD_KEYS_LOADS = 16
"""The most plain 16-byte loads of old compressed keys per lane, with 128 dimensions. They are plain so that rows share
the keys in the L1."""
BEFORE_ATTENTION = sorted({spec.name for spec in KERNELS if spec.op == "qkv"} - {"compress_keys"})
"""Kernels of the qkv op that attention may follow directly. compress_keys is followed by the kernels that choose
blocks, of which the last one starts attention after its own wait. Latent attention starts early behind two products, of
which the first one starts its successor after its own wait; the second has ROW_PITCH. With TRIGGER 3, for a short row,
attention reads early only what is older than `embed`."""
STARTS_NEXT_LATE = ("pick_blocks", "qkv_attention", "embed")
"""Kernels that start the next kernel only after their own wait. The kernels of q, k, v and attention read early what is
older than `embed`, or than the packed kernel of attention of the layer before."""
STARTS_NEXT_EARLY = ("linear_qkv_attention", "linear_residual", "linear_gate_up")
"""Kernels that start the next kernel before their own wait: with them the weights of a small model's next kernels are
asked for while a row waits. Behind them a kernel reads early only what is older than `embed`."""


def disassembler() -> str:
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = shutil.which("nvdisasm") or next((str(path) for path in wheels.glob("**/bin/nvdisasm")), None)
    if found is None:
        pytest.skip("needs nvdisasm (pip install nvidia-cuda-nvdisasm)")
    return found


@functools.cache
def functions(cubin: Path) -> tuple[tuple[str, list[str], int], ...]:
    """Return the name, the instructions and the index of the first wait (0: there is none) of all functions of a
    cubin."""
    text = subprocess.run([disassembler(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    found = []
    for function in re.split(r"\.section\s+\.text\.", text)[1:]:
        code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", function)
        found.append((function.split(",")[0], code, next((i for i, line in enumerate(code) if "ACQBULK" in line), 0)))
    return tuple(found)


def early_accesses(file: str, cubin: Path) -> list[str]:
    """Return the plain loads and stores before the wait, of all functions, that are not allowed. Copies to shared
    memory do not count.

    Data that may be read early is read past the L1, which marks its loads as strong; loads of the query are plain, and
    only weights are loaded without a place in the L1 (NA).
    Loads of old compressed keys are plain too: at most OLD_KEYS_LOADS of them are allowed.
    """
    wrong = r"\b(STG?|LD|LDG)\."
    if file in READ_OLD_DATA_EARLY:
        wrong = r"\bSTG?\.|\bLDG?\.(?!.*STRONG\.GPU)(?!E\.NA\.)"
    found = []
    for name, code, wait in functions(cubin):
        early = [line for line in code[:wait] if re.search(wrong, line)]
        of_keys = [line for line in early if re.search(r"\bLDG\.E\.128 ", line)]
        has_old_keys = name.rsplit("_", 1)[0] in READ_OLD_KEYS_EARLY and len(of_keys) <= OLD_KEYS_LOADS
        found += [line for line in early if not (has_old_keys and line in of_keys)]
    return found


def builds() -> Iterator[Any]:
    """Yield every file with each set of sizes that it is tested with."""
    for file in files():
        for index, constants in enumerate(constant_sets(file)):
            yield pytest.param(file, constants, id=f"{file}-{index}")


@pytest.mark.all
@pytest.mark.parametrize(("file", "constants"), list(builds()))
def test_every_kernel_waits_before_it_reads(compiles: Compiles, file: str, constants: Mapping[str, int]) -> None:
    cubin = compiles.module(file, "sm_90", DType.BFLOAT16, constants).cubin
    assert not early_accesses(file, cubin)
    for name, code, wait in functions(cubin):
        if name.removesuffix("_bf16") in (*BEFORE_ATTENTION, *STARTS_NEXT_LATE):
            starts_next = [i for i, line in enumerate(code) if "PREEXIT" in line]
            is_early = "ROW_PITCH" in constants or constants.get("TRIGGER") == 3
            assert starts_next and (min(starts_next) < wait) == is_early, f"{name} starts the next one early, or late"
        if name.removesuffix("_bf16") in STARTS_NEXT_EARLY:
            assert min(i for i, line in enumerate(code) if "PREEXIT" in line) < wait, f"{name} starts the next one late"


@pytest.mark.parametrize("file", WEIGHTS_READ_EARLY)
def test_weights_of_latent_attention_are_on_their_way_before_the_wait(compiles: Compiles, file: str) -> None:
    cubin = compiles.module(file, "sm_90", DType.BFLOAT16, next(iter(constant_sets(file)))).cubin
    ((_, code, wait),) = functions(cubin)
    bits, count = WEIGHTS_READ_EARLY[file]
    assert len([line for line in code[:wait] if f"LDG.E.{bits}" in line]) == count


@pytest.mark.parametrize(("rows", "hidden", "head_dim"), QKV)
@pytest.mark.parametrize("num_rows", [1, pytest.param(8, marks=pytest.mark.all), 64])
def test_the_qkv_product_waits_before_it_reads(
    compiles: Compiles, rows: int, hidden: int, head_dim: int, num_rows: int
) -> None:
    constants = plan_linear("qkv", (rows, hidden), num_rows, H200, head_dim=head_dim).constants
    cubin = compiles.module("linear/linear.cu", "sm_90", DType.FLOAT16, constants).cubin
    assert not early_accesses("linear/linear.cu", cubin)


class WriterThenAttention:
    """A slow writer followed by decode_attention, over rows of one slot or of a slot each. Until the writer is done,
    the query and the keys and values at the rows' positions are NaN."""

    num_heads, num_kv_heads, head_dim, max_context = 16, 2, 64, 2048

    def __init__(self, cuda: Any, positions: range, is_tree: bool = False, *, has_own_slots: bool = False):
        self.cuda, self.rows = cuda, len(positions)
        rng = np.random.default_rng(len(positions))
        heads = GroupedAttention(self.num_heads, self.num_kv_heads, self.head_dim)
        self.plan = plan_of(heads, cuda.device, self.max_context)
        self.arrays = workspace(cuda, self.plan)
        of_slot = self.max_context // PAGE_SIZE
        slots = np.arange(self.rows, dtype=np.int32) if has_own_slots else np.zeros(self.rows, np.int32)
        num_pages = of_slot * (slots.max() + 1)
        table = rng.permutation(num_pages).astype(np.int32).reshape(-1, of_slot)
        q = rng.standard_normal((self.rows, self.num_heads * self.head_dim), np.float32)
        pages = rng.standard_normal((2, num_pages, self.num_kv_heads, PAGE_SIZE, self.head_dim), np.float32)
        before = pages.copy()
        for slot, position in zip(slots, positions, strict=True):
            before[:, table[slot, position // PAGE_SIZE], :, position % PAGE_SIZE] = np.nan
        after = [cuda.array(values, DType.BFLOAT16) for values in (q, *pages)]
        stale = [cuda.array(values, DType.BFLOAT16) for values in (np.full_like(q, np.nan), *before)]
        self.inputs = [array.copy() for array in stale]
        self.writer = SlowWriter(cuda, self.inputs, stale, after)
        self.out = cuda.array(np.full_like(q, np.nan), DType.BFLOAT16)
        table, slots = cuda.array(table), cuda.array(slots)
        # A tree in which every third node is a child of the root and the others are children of the node before.
        masks = [1]
        for row in range(1, self.rows):
            masks.append((masks[-1] if row % 3 else 1) | 1 << row)
        base = np.full(self.rows, positions.start, np.int32)
        depths = [mask.bit_count() - 1 for mask in masks]
        places = cuda.array(np.array(base + depths if is_tree else positions, np.int32))
        tree = [cuda.array(values) if is_tree else None for values in (np.array(masks, np.uint64), base)]
        self.step_rows = Rows(None, places, slots, table, False, None, *tree)

    def step(self, *, pdl: bool) -> Any:
        ops = AttentionOps(self.cuda.launcher(DType.BFLOAT16, pdl=pdl), self.plan, self.arrays)
        q, *pages = self.inputs
        self.writer.launch()
        ops.decode_attention(self.out, q, KVPages(*pages), self.step_rows, self.head_dim**-0.5)
        return self.cuda.numpy(self.out, DType.BFLOAT16)


@pytest.mark.gpu
@pytest.mark.parametrize("is_tree", [False, True], ids=["", "tree"])
@pytest.mark.parametrize(
    "positions",
    [range(1), range(1087, 1088), range(1088, 1089), range(2047, 2048), range(100, 108), range(120, 136), range(63)],
    ids=str,
)
def test_attention_sees_what_the_kernel_before_it_writes(cuda: Any, positions: range, is_tree: bool) -> None:
    both = WriterThenAttention(cuda, positions, is_tree)
    expected = both.step(pdl=False)
    assert np.isfinite(expected).all()
    for _ in range(3):
        assert np.array_equal(both.step(pdl=True), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 8, 16, 32, 64])
@pytest.mark.parametrize("first", [0, 1060])
def test_rows_of_many_slots_see_what_the_kernel_before_them_writes(cuda: Any, num_rows: int, first: int) -> None:
    both = WriterThenAttention(cuda, range(first, first + num_rows), has_own_slots=True)
    expected = both.step(pdl=False)
    assert np.isfinite(expected).all()
    for _ in range(3):
        assert np.array_equal(both.step(pdl=True), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 12, 40])
@pytest.mark.parametrize("sparse", [SparseConfig(1, 1024, 81, 0), SparseConfig(1, 64, 12, 0)], ids=str)
def test_attention_waits_for_the_lists_of_blocks(cuda: Any, sparse: SparseConfig, count: int) -> None:
    """Attention reads the lists of chosen blocks after its wait; only blocks that every row looks at are read before.
    Until the writer is done the lists name other blocks."""
    slots = Slots(DType.BFLOAT16, [8000], group=16, kv_heads=2, head_dim=128)
    rows = slots.rows(8000 - count + np.arange(count), np.zeros(count))
    q, blocks = slots.queries(count), any_choice(slots.rng, rows, 2, sparse)
    device = SparseDevice(cuda, slots, sparse, pdl=True)
    expected = device.attend(q, rows, blocks)
    query, wanted, held = cuda.array(q, slots.dtype), cuda.array(blocks), device.rows(rows)
    lists, wrong = (cuda.array(np.zeros_like(blocks)) for _ in range(2))
    writer = SlowWriter(cuda, [lists], [wrong], [wanted])
    for _ in range(3):
        out = cuda.array(np.full_like(q, np.nan), slots.dtype)
        writer.launch()
        device.ops.decode_attention(
            out, query, device.kv, held, slots.scale, selection=Selection(lists, sparse)
        )
        assert np.array_equal(cuda.numpy(out, slots.dtype), expected)
