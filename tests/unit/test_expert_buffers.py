"""The memory plan of a mixture of experts: its buffers hold what all launches of steps and chunks take, in any
settings."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod
from typing import Any

import pytest

from cpmrt.bench.shapes import gptq_config, shape_config
from cpmrt.config import EngineConfig, ModelConfig, SpeculationConfig, TreeShape
from cpmrt.cuda import precompile
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops import experts
from cpmrt.cuda.precompile import known_device, modules_of
from cpmrt.memory.plan import MemoryPlan
from cpmrt.opening import Blueprint

SHAPE = shape_config("minicpm-moe-8x2b") | {"num_hidden_layers": 2}
EXPERTS, TOP, HIDDEN, INNER = 8, 2, 2304, 5760
CHUNKS = (1, 33, 63, 64, 65, 200, 512)
LOOKUP = SpeculationConfig(method="lookup", shapes=(TreeShape(8, 1, 9),))
OTHERS: tuple[dict[str, Any], ...] = ({}, {"speculation": LOOKUP}, {"kv_dtype": "fp8"})
STEP_BUFFERS = ("experts", "shares", "experts_inner", "expert_starts", "expert_order", "expert_outputs", "x")


class Sizes:
    """A checker that compares each launch of an expert kernel with the sizes of its arrays, and counts the launches."""

    def __init__(self, device: Device):
        self.device, self.launches = device, Counter[str]()

    def check(self, name: str, grid: Any, args: tuple[Any, ...], smem: int) -> None:
        check = getattr(self, name, None)
        if check is None:
            return
        self.launches[name] += 1
        assert 0 <= smem <= self.device.shared_bytes_per_block
        assert prod(grid if isinstance(grid, tuple) else (grid,)) > 0
        check(*args)

    def route(self, chosen: Any, shares: Any, normed: Any, x: Any, *rest: Any) -> None:
        rows = x.shape[0]
        assert chosen.shape == shares.shape == (rows, TOP) and normed.shape == x.shape == (rows, HIDDEN)

    def experts_gate_up_row(
        self, out: Any, chosen: Any, shares: Any, x: Any, norm: Any, router: Any, weight: Any, *rest: Any
    ) -> None:
        assert out.shape == (1, TOP * INNER) and chosen.shape == shares.shape == (1, TOP)
        assert x.shape == (1, HIDDEN) and norm.shape == (HIDDEN,) and router.shape == (EXPERTS, HIDDEN)

    def experts_row(
        self, x: Any, chosen: Any, shares: Any, words: Any, norm: Any, router: Any, gate_up: Any, down: Any, next: Any,
        next_bytes: Any, *rest: Any
    ) -> None:  # fmt: skip
        assert next_bytes % 16 == 0 and (next is None) == (next_bytes == 0)
        # The stand-in for a packed weight is 1-D with an element per byte, for a matrix 2-D with one per two bytes.
        assert next is None or next_bytes == min(14 << 20, next.size * next.ndim)
        assert words.shape == (2 + TOP * INNER // 2 + TOP * 4 * HIDDEN,)
        assert chosen.shape == shares.shape == (1, TOP) and x.shape == (1, HIDDEN)
        assert norm.shape == (HIDDEN,) and router.shape == (EXPERTS, HIDDEN)

    def group_pairs(self, starts: Any, order: Any, chosen: Any, pairs: Any) -> None:
        assert starts.size == EXPERTS + 1 and order.size >= pairs == chosen.size

    def experts_gate_up(
        self, out: Any, x: Any, weight: Any, chosen: Any, starts: Any, order: Any, pairs: Any, *rest: Any
    ) -> None:
        assert out.size == pairs * INNER and chosen.size == pairs and x.size == pairs // TOP * HIDDEN
        assert (starts is None) == (order is None)
        if starts is not None:
            self.group_pairs(starts, order, chosen, pairs)

    def experts_project(
        self, out: Any, x: Any, weight: Any, chosen: Any, starts: Any, order: Any, pairs: Any, *rest: Any
    ) -> None:
        assert out.size >= pairs * HIDDEN and x.size == pairs * INNER
        self.group_pairs(starts, order, chosen, pairs)

    def combine(self, x: Any, outputs: Any, shares: Any, chosen: Any, rows: Any, *rest: Any) -> None:
        assert x.size == rows * HIDDEN and outputs.size >= rows * TOP * HIDDEN
        assert shares.size == chosen.size == rows * TOP

    def experts_down(self, x: Any, inner: Any, weight: Any, chosen: Any, shares: Any, rows: Any, *rest: Any) -> None:
        assert x.size == rows * HIDDEN and inner.size == rows * TOP * INNER
        assert shares.size == chosen.size == rows * TOP


def launches(monkeypatch: pytest.MonkeyPatch, arch: str, config: ModelConfig, **settings: Any) -> Sizes:
    """Plan a model and check all launches of all forwards of a start on this plan; raises where a buffer is missing."""
    device = known_device(arch)
    sizes = Sizes(device)

    class CheckingLauncher(Launcher):
        def __call__(self, spec: Any, constants: Any, grid: Any, block: int, *args: Any, **options: Any) -> None:
            sizes.check(spec.name, grid, args, options.get("smem", 0))
            super().__call__(spec, constants, grid, block, *args, **options)

    monkeypatch.setattr(precompile, "Launcher", CheckingLauncher)
    blueprint = Blueprint.of(config, EngineConfig(dtype="bfloat16", **settings), CudaTarget(device))
    modules_of(blueprint, device)
    live_apart(blueprint.plan(blueprint.position_limit))
    return sizes


def live_apart(plan: MemoryPlan) -> None:
    """Check that the step buffers which a layer's experts need at the same time do not overlap."""
    spans = sorted((plan.region(name).offset, plan.region(name).nbytes, name) for name in STEP_BUFFERS)
    for (start, size, name), (after, _, other) in zip(spans, spans[1:], strict=False):
        assert start + size <= after, (name, other)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_every_plan_has_the_buffers_of_experts(monkeypatch: pytest.MonkeyPatch, arch: str, bits: int) -> None:
    packed = {"quantization_config": gptq_config()} if bits == 4 else {}
    config = ModelConfig.from_hf(SHAPE | packed)
    for chunk, sequences in product(CHUNKS, (1, 3, 64)):
        for others in OTHERS if arch == "sm_90" else OTHERS[:1]:
            found = launches(monkeypatch, arch, config, prefill_chunk=chunk, max_sequences=sequences, **others).launches
            # In 16 bits the shared memory of the last case holds too little of the weights.
            row = {"experts_gate_up_row", "experts_down"} if (arch, bits) == ("sm_120", 16) else {"experts_row"}
            assert row | {"route", "experts_gate_up"} <= found.keys(), (chunk, sequences, others)
            assert found["group_pairs"] == found["experts_project"] == found["combine"] > 0, (chunk, sequences, others)


def test_a_plan_without_a_buffer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of launches fails when a plan has room for the pairs of 64 rows only and chunks are larger."""
    whole = experts.expert_workspace
    monkeypatch.setattr(experts, "expert_workspace", lambda specs, mlp, hidden, _: whole(specs, mlp, hidden, 64))
    config = ModelConfig.from_hf(SHAPE)
    launches(monkeypatch, "sm_90", config, prefill_chunk=64)
    with pytest.raises(AssertionError):
        launches(monkeypatch, "sm_90", config, prefill_chunk=65)
