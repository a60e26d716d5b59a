"""A screened head without a device: its setting, its place in the plan, the heads it pays for, and its statistics."""

from __future__ import annotations

import json
import re
from dataclasses import field, make_dataclass
from typing import Any

import numpy as np
import pytest
from scripted import ScriptedExecutor

from cpmrt import LLM, SamplingParams
from cpmrt.bench.shapes import gptq_config
from cpmrt.bench.work import decode_bytes
from cpmrt.cli.main import main
from cpmrt.config import EngineConfig, ModelConfig, Sampling
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.ops.screened_head import COPY, can_screen
from cpmrt.cuda.precompile import known_device, modules_of
from cpmrt.engine import Engine, Request
from cpmrt.errors import ConfigError, MemoryPlanError
from cpmrt.executor import Decode, ExecutorLimits, SlotResult
from cpmrt.memory.plan import MemoryPlan
from cpmrt.opening import Blueprint
from cpmrt.reference.assembly import ReferenceTarget

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 5001, "max_position_embeddings": 256,
}  # fmt: skip
NARROW = {"hidden_size": 192, "head_dim": 64}
IN_4_BITS = {"quantization_config": gptq_config(128) | {"lm_head": True}, "vocab_size": 5120}
DEVICE = known_device("sm_90")


def blueprint(changes: dict[str, Any] | None = None, **settings: Any) -> Blueprint:
    engine = EngineConfig(dtype="bfloat16", **{"max_context": 128} | settings)
    return Blueprint.of(ModelConfig.from_hf(CONFIG | (changes or {})), engine, CudaTarget(DEVICE))


def has_copy(plan: MemoryPlan | None) -> bool:
    assert plan is not None
    return any(region.name == f"{COPY}.codes" for region in plan.regions)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="lm_head_screen: expected a head in 16 bits, got lm_head_bits=8"):
        EngineConfig(lm_head_screen=True, lm_head_bits=8)
    for value in (1, 0, "auto"):
        with pytest.raises(ConfigError, match=r"lm_head_screen: expected True \| False \| None"):
            EngineConfig(lm_head_screen=value)  # type: ignore[arg-type]
    for plan in (lambda made: made.plan(128), lambda made: made.fit(1 << 40)):
        with pytest.raises(ConfigError, match="lm_head_screen: expected a hidden_size that is a multiple of 128"):
            plan(blueprint(NARROW, lm_head_screen=True))
        with pytest.raises(ConfigError, match="lm_head_screen: expected a head in 16 bits, got one in 4 bits"):
            plan(blueprint(IN_4_BITS, lm_head_screen=True))


def test_a_copy_that_nobody_asked_for_takes_little_of_the_memory() -> None:
    assert EngineConfig().lm_head_screen is None
    for changes in ({}, {"tie_word_embeddings": True}):
        automatic, never, always = (blueprint(changes, lm_head_screen=screen) for screen in (None, False, True))
        screened = always.plan(128)
        enough = 64 * screened.part_bytes["head copy"]
        assert automatic.fit(enough) == screened and not has_copy(automatic.fit(enough - 1))
        assert not has_copy(never.fit(enough)) and has_copy(always.fit(screened.total_bytes))
        assert has_copy(automatic.fit(1 << 40, enough)) and not has_copy(automatic.fit(1 << 40, enough - 1))


@pytest.mark.parametrize(("changes", "settings"), [
    (NARROW, {}), (IN_4_BITS, {}), ({}, {"lm_head_bits": 8}), ({}, {"lm_head_bits": 4}),
    ({"tie_word_embeddings": True}, {"lm_head_bits": 8}),
], ids=str)  # fmt: skip
def test_a_head_that_cannot_be_screened_is_read_whole(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    automatic = blueprint(changes, **settings)
    assert automatic.screened_plan(128) is None and not has_copy(automatic.fit(1 << 40))
    assert modules_of(automatic, DEVICE) == modules_of(blueprint(changes, lm_head_screen=False, **settings), DEVICE)


@pytest.mark.parametrize("asked", [8192, None])
def test_a_copy_that_nobody_asked_for_costs_no_context_and_no_start(asked: int | None) -> None:
    """Where the plan fits only without the copy it is that plan, also where a shorter context would fit beside it."""
    changes = {"max_position_embeddings": 8192, "num_hidden_layers": 4}
    automatic, never = (
        blueprint(changes, max_context=asked, max_sequences=64, lm_head_screen=screen) for screen in (None, False)
    )
    wanted = automatic.screened_plan(8192)
    assert wanted is not None and automatic.fit(wanted.total_bytes) == wanted
    assert 64 * wanted.part_bytes["head copy"] < wanted.total_bytes, "the share decides nothing here"
    plain = automatic.fit(wanted.total_bytes - 1)
    assert not has_copy(plain) and plain.max_context == 8192 and plain == never.fit(wanted.total_bytes - 1)
    if asked is None:
        assert automatic.fit(plain.total_bytes - 1) == never.fit(plain.total_bytes - 1)
    else:
        with pytest.raises(MemoryPlanError, match="does not fit"):
            automatic.fit(plain.total_bytes - 1)


def test_numpy_keeps_no_copy() -> None:
    made = blueprint()
    assert Blueprint.of(made.config, made.settings, ReferenceTarget()).screened_plan(128) is None


def test_a_plan_on_the_command_line_has_the_copy_of_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    def parts(*options: str) -> dict[str, Any]:
        assert main(["plan", "--shape", "minicpm4-8b", "--weight-bits", "4", "--json", *options]) == 0
        record: dict[str, Any] = json.loads(capsys.readouterr().out)
        return record["part_bytes"] | {"largest": record.get("largest_context")}

    large, small = ("--gpu-memory", "24GiB"), ("--gpu-memory", "8GiB")
    assert parts()["head copy"] == parts(*large)["head copy"] == parts(*small, "--lm-head-screen")["head copy"]
    for options in (small, ("--no-lm-head-screen",), (*large, "--no-lm-head-screen"), (*large, "--lm-head-bits", "8")):
        assert "head copy" not in parts(*options)
    assert parts(*small) == parts(*small, "--no-lm-head-screen"), "the copy is no part of the largest context"
    assert main(["plan", "--shape", "minicpm4-8b", "--weight-bits", "4"]) == 0
    assert re.search(r"^head copy +291\.\d\d MiB$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_has_the_copy_and_what_its_kernels_exchange(tied: bool) -> None:
    plain, screened = (
        blueprint({"tie_word_embeddings": tied}, lm_head_screen=screen).plan(128) for screen in (False, True)
    )
    added = {region.name: region.nbytes for region in screened.regions}
    for region in plain.regions:
        added.pop(region.name, None)
    units, unit_bytes = -(-5001 // 16) * 2, 16 * 128 + 16 * 2  # 16 rows x 128 columns each, a run of K here
    assert added[f"{COPY}.codes"] == units * -(-unit_bytes // 128) * 128
    assert added["head_bounds"] == added["screened_logits"] == 4 * 5001
    lasting = sum(added[name] for name in (f"{COPY}.codes", "head_bounds", "screen_counters"))
    assert lasting <= screened.part_bytes["head copy"] <= lasting + 4096 and "head copy" not in plain.part_bytes


def test_a_start_compiles_its_kernels() -> None:
    for rows, builds in ((1, {1}), (4, {1, 8}), (12, {1, 8, 16}), (64, {1, 8, 16, 32})):
        made = modules_of(blueprint(lm_head_screen=True, max_sequences=rows), DEVICE)
        files = [file for file, _ in made]
        assert {"screened_head/screen_head.cu", "screened_head/head_rows.cu"} <= set(files)
        assert {sizes["ROWS"] for file, sizes in made if file == "screened_head/rescore.cu"} == builds
    assert not any("screened" in file for file, _ in modules_of(blueprint(lm_head_screen=False), DEVICE))


@pytest.mark.parametrize("settings", [{}, {"max_sequences": 12}], ids=str)
@pytest.mark.parametrize("arch", ["sm_87", "sm_90"])
def test_kernels_are_compiled_for_either_choice_where_a_start_decides(arch: str, settings: dict[str, Any]) -> None:
    device = known_device(arch)
    automatic, never, always = (
        {(file, frozenset(sizes.items())) for file, sizes in modules_of(made, device)}
        for made in (blueprint(lm_head_screen=screen, **settings) for screen in (None, False, True))
    )
    assert automatic == always > never


@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_a_step_are_those_of_the_copy_and_of_the_rows_behind_it(tied: bool) -> None:
    config = ModelConfig.from_hf(CONFIG | {"tie_word_embeddings": tied})
    whole, screened = decode_bytes(config, 100, 1, 2), decode_bytes(config, 100, 1, 2, mean_rescored=20.5)
    assert whole - screened == 5001 * 256 * 2 - 5001 * (256 + 2 * 2 + 4) - round(20.5 * 512)


@pytest.mark.parametrize(("wish", "pays"), [
    ({}, True),
    ({"temperature": 0.7, "top_k": 50}, True),
    ({"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.1}, True),
    ({"temperature": 0.7, "min_p": 0.1}, True),
    ({"temperature": 0.7, "top_k": 1000}, False),
    ({"temperature": 0.7}, False),
    ({"temperature": 0.7, "top_p": 0.9}, False),
    ({"temperature": 0.7, "top_p": 0.9, "min_p": 0.1}, False),
    ({"repetition_penalty": 1.1}, False),
    ({"presence_penalty": 0.1}, False),
    ({"frequency_penalty": 0.1}, False),
    ({"presence_penalty": 0.5, "frequency_penalty": 0.5}, False),
    ({"logprobs": 1}, False),
    ({"logit_bias": ((1, 2.0),)}, False),
], ids=str)  # fmt: skip
def test_for_whom_it_pays(wish: dict[str, Any], pays: bool) -> None:
    assert can_screen(Sampling(**wish)) == pays


def test_a_new_setting_takes_the_whole_head_until_it_is_known_to_be_screened() -> None:
    newer = make_dataclass("Newer", [("tail_free", float, field(default=1.0))], bases=(Sampling,), frozen=True)
    assert can_screen(newer()) and not can_screen(newer(tail_free=0.9))


def test_the_numpy_executor_takes_it_and_computes_the_whole_head() -> None:
    answers = []
    for screen in (False, True, None):
        with LLM(executor="reference", max_context=64, lm_head_screen=screen) as llm:
            answers.append(llm.generate("def f(", SamplingParams(max_new_tokens=6)))
    assert len({answer.token_ids for answer in answers}) == 1 and answers[1].stats.screened_steps == 0


class Screening(ScriptedExecutor):
    """An executor that screens every second decode step and rescores 10, 12, 14, ... tokens there."""

    def run_one(self) -> None:
        step, pending = self.queue[0]
        super().run_one()
        if isinstance(step, Decode):
            self.count = getattr(self, "count", 8) + 1
            pending.result.num_rescored = self.count + 1 if self.count % 2 else None


def test_stats_count_steps_and_tokens() -> None:
    engine = Engine(Screening(ExecutorLimits(1, 64, 16)))
    sequence = engine.add(Request((1, 2), Sampling(), 0, (), 7))
    results: list[SlotResult] = list(engine.stream(sequence))
    assert sum(len(result.token_ids) for result in results) == 7
    stats = sequence.stats
    assert stats.screened_steps == 3 and stats.mean_rescored == np.mean([10, 12, 14])
    plain = Engine(ScriptedExecutor(ExecutorLimits(1, 64, 16)))
    sequence = plain.add(Request((1, 2), Sampling(), 0, (), 7))
    list(plain.stream(sequence))
    assert (sequence.stats.screened_steps, sequence.stats.mean_rescored) == (0, None)
