"""The CUDA executor's memory: nothing is written outside of the plan, read before it is written, or allocated late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from executors.cuda_models import BASE, ROWS, write_model
from reference.quantised_models import CASES, write_quantised

from cpmrt import LLM, SamplingParams
from cpmrt.cuda import assembly
from cpmrt.cuda.load.repack import Destination
from cpmrt.memory.plan import WORKSPACE, MemoryPlan, Region
from cpmrt.opening import Blueprint

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

GUARD_BYTES = 8192
GUARD, NAN = 0xA5, 0xFF  # every 16 and 32-bit float of such bytes is a NaN
FLOATS = (
    "x", "q", "attention", "inner", "normed", "qkv", "gate_up", "logits", "attention_partials", "gemm_workspace",
    "packed_rows", "packed_fed", "packed_partials", "packed_unpacked", "packed_permuted", "packed_permuted_inner",
)  # fmt: skip
QUANTISED = {case.name: case for case in CASES if case.name in ("gptq_v2_act_order", "awq")}
MODELS = ("minicpm_96", "qwen3", "llama_bias", *QUANTISED)
PARAMS = [
    SamplingParams(max_new_tokens=30, ignore_eos=True),
    SamplingParams(max_new_tokens=45, temperature=0.9, top_p=0.9, min_p=0.01, seed=3, ignore_eos=True, logprobs=4),
    SamplingParams(max_new_tokens=20, temperature=1.2, top_k=20, repetition_penalty=1.2, seed=4, ignore_eos=True),
]
PROMPTS = [list(range(3, 50)), [5 + i % 90 for i in range(200)], [7]]


def spread(plan: MemoryPlan) -> MemoryPlan:
    """Return the plan with guards before, between and after its regions.

    Regions of the workspace share memory, so it stays in one piece.
    """
    moved, end, workspace = [], GUARD_BYTES, [region for region in plan.regions if region.part == WORKSPACE]
    for region in plan.regions:
        if region.part != WORKSPACE:
            moved.append(replace(region, offset=end))
            end += -(-region.nbytes // 256) * 256 + GUARD_BYTES
    first, last = min(r.offset for r in workspace), max(r.offset + r.nbytes for r in workspace)
    moved += [replace(region, offset=end + region.offset - first) for region in workspace]
    return replace(plan, regions=tuple(moved), total_bytes=end + -(-(last - first) // 256) * 256 + GUARD_BYTES)


def gaps(plan: MemoryPlan) -> list[tuple[int, int]]:
    """Return (offset, bytes) of all memory between the regions."""
    found, end = [], 0
    for region in sorted(plan.regions, key=lambda region: region.offset):
        if region.offset > end:
            found.append((end, region.offset - end))
        end = max(end, region.offset + region.nbytes)
    return [*found, (end, plan.total_bytes - end)]


def fill(arena: int, offset: int, nbytes: int, value: int) -> None:
    from cupy.cuda import runtime

    runtime.deviceSynchronize()
    runtime.memset(arena + offset, value, nbytes)
    runtime.deviceSynchronize()


def read(arena: int, offset: int, nbytes: int) -> Any:
    from cupy.cuda import runtime

    words = np.empty(nbytes, np.uint8)
    runtime.deviceSynchronize()
    runtime.memcpy(words.ctypes.data, arena + offset, nbytes, runtime.memcpyDeviceToHost)
    return words


class Guarded:
    """Makes models use arenas that `spread` lays out, with guards and poison written before the weights are loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.arena, self.plan = 0, None
        fit, load = Blueprint.fit, assembly.load

        def spread_fit(blueprint: Blueprint, *bytes_there: int) -> MemoryPlan:
            self.plan = spread(fit(blueprint, *bytes_there))
            return self.plan

        def load_between_guards(blueprint: Blueprint, to: Destination) -> None:
            self.arena = to.arena
            for offset, nbytes in gaps(self.plan):
                fill(self.arena, offset, nbytes, GUARD)
            self.poison("k_pages", "v_pages", *FLOATS)
            load(blueprint, to)

        monkeypatch.setattr(Blueprint, "fit", spread_fit)
        monkeypatch.setattr(assembly, "load", load_between_guards)

    def poison(self, *names: str) -> None:
        for region in self.plan.regions:
            if region.name in names:
                fill(self.arena, region.offset, region.nbytes, NAN)

    def region(self, name: str) -> Region:
        return self.plan.region(name)

    def check(self) -> None:
        for offset, nbytes in gaps(self.plan):
            words = read(self.arena, offset, nbytes)
            before = [r.name for r in self.plan.regions if r.offset + r.nbytes == offset]
            assert (words == GUARD).all(), f"{(words != GUARD).sum()} bytes changed after {before} at {offset}"


def generate(llm: LLM) -> list[Any]:
    """Run every kind of step and return what it gives.

    These are several sequences together, one in a slot that was used before, and prompt logits.
    """
    streams = [llm.stream(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    found = [stream.finish() for stream in streams]
    with llm.stream(PROMPTS[1], PARAMS[0]) as cancelled:
        next(cancelled)
    found.append(llm.generate(PROMPTS[2], PARAMS[1]))
    logits = llm.logits(PROMPTS[1])
    return [*((done.token_ids, [entry.logprob for entry in done.logprobs or ()]) for done in found), logits.tobytes()]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in QUANTISED:
        return write_quantised(QUANTISED[request.param], folder, 1)
    return write_model(folder, BASE | ROWS[request.param])


# The prefix cache is off: pages that were poisoned must not be reused.
SETTINGS = {
    "executor": "cuda", "prefill_chunk": 128, "max_sequences": 3, "max_context": 256, "prefix_cache": False,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("portable", ["", "1"], ids=["", "portable"])
def test_guards_stay_and_poison_does_not_show(
    folder: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, portable: str
) -> None:
    monkeypatch.setenv("CPMRT_PORTABLE", portable)
    with LLM(folder, dtype=dtype, **SETTINGS) as llm:
        expected = generate(llm)
    guarded = Guarded(monkeypatch)
    with LLM(folder, dtype=dtype, **SETTINGS) as llm:
        guarded.check()
        assert generate(llm) == expected
        guarded.check()
        guarded.poison("k_pages", "v_pages", *FLOATS)
        assert generate(llm) == expected, "a step reads what it has not written"
        guarded.check()


def test_a_write_past_a_region_would_be_seen(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded(monkeypatch)
    with LLM(folder, **SETTINGS):
        for name in ("embed_tokens", "k_pages", "block_tables"):
            region = guarded.region(name)
            fill(guarded.arena, region.offset + region.nbytes, 1, 0)
            with pytest.raises(AssertionError, match=rf"1 bytes changed after \['{name}'\]"):
                guarded.check()
            fill(guarded.arena, region.offset + region.nbytes, 1, GUARD)


@contextmanager
def counted_allocations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count every allocation of device and page-locked memory that goes through CuPy or the bindings."""
    import cupy
    from cuda.bindings import driver

    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in ("malloc", "mallocAsync", "mallocManaged", "hostAlloc", "hostRegister"):
        count(cupy.cuda.runtime, name)
    for name in ("Alloc", "AllocAsync", "AllocHost", "AllocManaged", "HostAlloc", "HostRegister", "Create"):
        count(driver, f"cuMem{name}")
    pool, pinned = cupy.get_default_memory_pool(), cupy.cuda.PinnedMemoryPool()

    def from_pool(nbytes: int) -> Any:
        calls["pool"] += 1
        return pool.malloc(nbytes)

    def from_pinned(nbytes: int) -> Any:
        calls["pinned"] += 1
        return pinned.malloc(nbytes)

    cupy.cuda.set_allocator(from_pool)
    cupy.cuda.set_pinned_memory_allocator(from_pinned)
    try:
        yield calls
    finally:
        cupy.cuda.set_allocator(pool.malloc)
        cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)
        monkeypatch.undo()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_nothing_is_allocated_after_the_start(folder: Any, monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    import cupy

    with LLM(folder, cuda_graphs=graphs, **SETTINGS) as llm:
        free = cupy.cuda.runtime.memGetInfo()[0]
        with counted_allocations(monkeypatch) as calls:
            first = generate(llm)
            assert cupy.cuda.runtime.memGetInfo()[0] == free
            assert generate(llm) == first
        assert not calls, dict(calls)
        assert cupy.cuda.runtime.memGetInfo()[0] == free


def test_the_count_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from cpmrt.cuda.driver.host_memory import HostBuffer

    with counted_allocations(monkeypatch) as calls:
        cupy.zeros(10)
        with HostBuffer(64):
            pass
        assert calls["pool"] == 1 and calls["hostAlloc"] == 1
