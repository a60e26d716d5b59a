"""The memory plan: arithmetic against known models, no overlap of what lives together, budgets kept."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.byte_sizes import format_bytes
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.errors import ConfigError, MemoryPlanError
from cpmrt.memory.arena import Arena
from cpmrt.memory.plan import ALIGNMENT, check_budget, largest_context, make_plan
from cpmrt.models.decoder import cache_layout, tensor_specs
from cpmrt.models.planning import fit_model, plan_model
from cpmrt.tensor_spec import BufferSpec

GIB = 2**30
SMALL = ModelConfig.from_hf({
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
})  # fmt: skip


@pytest.fixture
def minicpm4_8b(shared_data):
    return ModelConfig.from_hf(json.loads((shared_data / "minicpm4_8b_config.json").read_text()))


def test_minicpm4_8b_sizes(minicpm4_8b):
    plan = plan_model(minicpm4_8b, EngineConfig(), itemsize=2, max_context=32768)
    parameters = sum(spec.num_elements for spec in tensor_specs(minicpm4_8b))
    assert parameters == pytest.approx(8.185e9, rel=1e-3)
    assert plan.kv_bytes_per_token == 32768
    parts = plan.part_bytes
    assert parts["KV pages"] == 32768 * 32768
    assert parts["embedding"] + parts["layers"] + parts["lm head"] == pytest.approx(2 * parameters, rel=1e-4)
    assert sum(parts.values()) == plan.total_bytes
    assert parts["workspace"] < plan.workspace_unshared_bytes


def test_minicpm4_8b_in_24_gib(minicpm4_8b):
    plan = fit_model(minicpm4_8b, EngineConfig(), itemsize=2, budget=24 * GIB)
    assert plan.max_context == 32768 and plan.total_bytes <= 24 * GIB
    tight = fit_model(minicpm4_8b, EngineConfig(), itemsize=2, budget=16 * GIB)
    assert 0 < tight.max_context < 32768 and tight.max_context % 64 == 0
    more = plan_model(minicpm4_8b, EngineConfig(), itemsize=2, max_context=tight.max_context + 64)
    assert tight.total_bytes <= 16 * GIB < more.total_bytes
    with pytest.raises(MemoryPlanError, match=r"does not fit.*layers.*expected at most 8.00 GiB.*4-bit weights"):
        fit_model(minicpm4_8b, EngineConfig(), itemsize=2, budget=8 * GIB)


def test_an_explicit_context_is_kept_or_refused():
    with pytest.raises(MemoryPlanError, match="4096 tokens"):
        fit_model(SMALL, EngineConfig(max_context=4096), itemsize=4, budget=3 * 2**20)
    with pytest.raises(ConfigError, match="beyond the model's positions: expected at most 4096"):
        fit_model(SMALL, EngineConfig(max_context=4097), itemsize=4, budget=GIB)
    assert fit_model(SMALL, EngineConfig(max_context=100), itemsize=4, budget=GIB).max_context == 100


def test_fewer_sequences_are_named_where_no_context_is_short_enough_for_all():
    """Where no context fits for all sequences, the error names a number that fits, and one more does not."""
    for max_context, words, tokens in ((None, "64 tokens of context each", 64), (128, "128 tokens", 128)):
        engine = EngineConfig(max_sequences=64, max_context=max_context)
        with pytest.raises(MemoryPlanError, match=rf"max_sequences \((\d+) fits, with {words}") as caught:
            fit_model(SMALL, engine, itemsize=4, budget=5 * 2**20)
        count = int(caught.value.fix.partition("max_sequences (")[2].split()[0])
        sizes = [
            plan_model(SMALL, EngineConfig(max_sequences=number), itemsize=4, max_context=tokens).total_bytes
            for number in (count, count + 1)
        ]
        assert sizes[0] <= 5 * 2**20 < sizes[1]
    with pytest.raises(MemoryPlanError, match="no context fits"):
        fit_model(SMALL, EngineConfig(max_sequences=64), itemsize=4, budget=2**20)


def test_the_table_names_every_part():
    text = str(plan_model(SMALL, EngineConfig(), itemsize=2, max_context=1000))
    for word in ("embedding", "layers", "lm head", "tables", "KV pages", "1 x 1000 tokens", "workspace", "total"):
        assert word in text


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_buffers_that_live_together_never_overlap(sizes):
    buffers = [BufferSpec(f"b{i}", (n,), min(a, b), max(a, b)) for i, (n, a, b) in enumerate(sizes)]
    plan = make_plan([], [], buffers, cache_layout(SMALL, 64, 1), itemsize=2)
    regions = {region.name: region for region in plan.regions}
    for i, one in enumerate(buffers):
        region = regions[one.name]
        assert region.offset % ALIGNMENT == 0 and region.offset + region.nbytes <= plan.total_bytes
        for other in buffers[:i]:
            if one.first <= other.last and other.first <= one.last:
                apart = regions[other.name]
                assert region.offset + region.nbytes <= apart.offset or apart.offset + apart.nbytes <= region.offset
    alive = max(sum(2 * b.num_elements for b in buffers if b.first <= phase <= b.last) for phase in range(7))
    assert plan.part_bytes["workspace"] >= alive


def test_the_largest_buffers_find_their_places_first():
    """The small buffer lives on the border of two large ones: between them it would cost room."""
    sizes = {"small": (ALIGNMENT, 0, 1), "first": (10 * ALIGNMENT, 1, 2), "second": (10 * ALIGNMENT, 2, 3)}
    buffers = [BufferSpec(name, (size // 2,), first, last) for name, (size, first, last) in sizes.items()]
    plan = make_plan([], [], buffers, cache_layout(SMALL, 64, 1), itemsize=2)
    assert plan.part_bytes["workspace"] == 20 * ALIGNMENT
    assert plan.workspace_unshared_bytes == 21 * ALIGNMENT


def test_a_budget_that_is_just_enough_is_enough():
    plan = plan_model(SMALL, EngineConfig(), itemsize=2, max_context=1000)
    check_budget(plan, plan.total_bytes, lambda: "")
    with pytest.raises(MemoryPlanError, match=re.escape(f", got {format_bytes(plan.total_bytes)}; take less")):
        check_budget(plan, plan.total_bytes - 1, lambda: "take less")

    def build(context):
        return plan_model(SMALL, EngineConfig(), itemsize=2, max_context=context)

    assert largest_context(build, plan.total_bytes, 1000) == 1000


def test_pages_of_a_draft_and_of_its_inner_draft_are_pages_too():
    caches, *drafts = (replace(cache_layout(SMALL, 64, 1), prefix=prefix) for prefix in ("", "draft.", "inner."))
    plan = make_plan([], [], [], caches, itemsize=2, draft_caches=drafts[0], inner_caches=drafts[1])
    arrays = Arena(plan, np.zeros(plan.total_bytes, np.uint8)).arrays()
    own = set(caches.paged(arrays))
    assert own and set(plan.paged(arrays)) == {prefix + name for prefix in ("", "draft.", "inner.") for name in own}


@given(st.integers(0, 2**22), st.integers(1, 4096))
def test_largest_context_is_the_largest(budget, limit):
    def build(context):
        return plan_model(SMALL, EngineConfig(prefill_chunk=8), itemsize=2, max_context=context)

    found = largest_context(build, budget, limit)
    assert found == limit or build(found + 64).total_bytes > budget or found + 64 > limit
    assert found == 0 or build(found).total_bytes <= budget


def test_arena_views_are_the_planned_regions():
    plan = plan_model(SMALL, EngineConfig(), itemsize=4, max_context=128)
    arena = Arena(plan, np.full(plan.total_bytes, 0xFF, np.uint8))
    weight = arena.array("layers.0.qkv")
    assert weight.dtype == np.float32 and weight.shape == (3 * 128, 128) and np.isnan(weight).all()
    weight[:] = 1
    assert np.isnan(arena.array("layers.0.output")).all()
    assert plan_model(SMALL, EngineConfig(), itemsize=2, max_context=128).region("x").dtype == np.uint16
    with pytest.raises(ValueError, match="arena"):
        Arena(plan, np.zeros(plan.total_bytes - 1, np.uint8))


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**31, "2.00 GiB")])
def test_format_bytes(count, text):
    assert format_bytes(count) == text
