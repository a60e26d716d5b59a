"""A screened head without a device: its setting, its place in the plan, the heads it pays for, and its statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scripted import ScriptedExecutor

from cpmrt import LLM, SamplingParams
from cpmrt.bench.shapes import gptq_config
from cpmrt.bench.work import decode_bytes
from cpmrt.config import EngineConfig, ModelConfig, Sampling
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.ops.screened_head import COPY, can_screen
from cpmrt.cuda.precompile import known_device, modules_of
from cpmrt.engine import Engine, Request
from cpmrt.errors import ConfigError
from cpmrt.executor import Decode, ExecutorLimits, SlotResult
from cpmrt.opening import Blueprint

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 5001, "max_position_embeddings": 256,
}  # fmt: skip


def blueprint(changes: dict[str, Any] | None = None, **settings: Any) -> Blueprint:
    engine = EngineConfig(dtype="bfloat16", max_context=128, **settings)
    return Blueprint.of(ModelConfig.from_hf(CONFIG | (changes or {})), engine, CudaTarget(known_device("sm_90")))


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="lm_head_screen: expected a head in 16 bits, got lm_head_bits=8"):
        EngineConfig(lm_head_screen=True, lm_head_bits=8)
    with pytest.raises(ConfigError, match="lm_head_screen: expected True"):
        EngineConfig(lm_head_screen=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lm_head_screen: expected a hidden_size that is a multiple of 128"):
        blueprint({"hidden_size": 192, "head_dim": 64}, lm_head_screen=True).plan(128)
    held = {"quantization_config": gptq_config(128) | {"lm_head": True}, "vocab_size": 5120}
    with pytest.raises(ConfigError, match="lm_head_screen: expected a head in 16 bits, got one in 4 bits"):
        blueprint(held, lm_head_screen=True).plan(128)


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
    assert lasting <= screened.part_bytes["tables"] - plain.part_bytes["tables"] <= lasting + 4096


def test_a_start_compiles_its_kernels() -> None:
    for rows, builds in ((1, {1}), (4, {1, 8}), (12, {1, 8, 16}), (64, {1, 8, 16, 32})):
        made = modules_of(blueprint(lm_head_screen=True, max_sequences=rows), known_device("sm_90"))
        files = [file for file, _ in made]
        assert {"screened_head/screen_head.cu", "screened_head/head_rows.cu"} <= set(files)
        assert {sizes["ROWS"] for file, sizes in made if file == "screened_head/rescore.cu"} == builds
    assert not any("screened" in file for file, _ in modules_of(blueprint(), known_device("sm_90")))


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


def test_the_numpy_executor_takes_it_and_computes_the_whole_head() -> None:
    answers = []
    for screen in (False, True):
        with LLM(executor="reference", max_context=64, lm_head_screen=screen) as llm:
            answers.append(llm.generate("def f(", SamplingParams(max_new_tokens=6)))
    assert answers[0].token_ids == answers[1].token_ids and answers[1].stats.screened_steps == 0


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
