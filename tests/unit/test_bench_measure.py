"""Times and rates that the benchmark measures, on a device and a host whose every delay is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import toy_mixer
from scripted import ScriptedExecutor
from tiny_checkpoint import CONFIG

from cpmrt import LLM
from cpmrt.bench import measure as measuring
from cpmrt.bench.measure import Case, measure
from cpmrt.bench.work import decode_bytes, prefill_flops
from cpmrt.config import ModelConfig, TreeShape
from cpmrt.engine import engine as engine_module
from cpmrt.errors import ContextLengthError, UnsupportedModelError
from cpmrt.executor import Admit, Decode, ExecutorLimits, Prefill, Speculate
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.mixers import MIXERS

MODEL = ModelConfig.from_hf(CONFIG | {"vocab_size": 50})
SUBMIT_S, READ_S, PREFILL_S, DECODE_S = 0.001, 0.0005, 0.25, 0.05


class Clock:
    """A clock that advances only by the times that the device and the host are said to need."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedDevice(ScriptedExecutor):
    """A device that works through its queue by itself: a step begins once it is submitted and its predecessor has
    ended.

    Every fourth decode step screens the head and computes `rescored` tokens exactly, unless that is None.
    """

    def __init__(self, limits: ExecutorLimits, clock: Clock, slow_decode: int, rescored: int | None):
        super().__init__(limits)
        self.clock, self.free_at, self.num_decodes, self.slow_decode = clock, 0.0, 0, slow_decode
        self.rescored = rescored

    def submit(self, step):
        self.clock.now += SUBMIT_S
        cost = {Prefill: PREFILL_S, Decode: DECODE_S, Speculate: DECODE_S}.get(type(step), 0.0)
        self.num_decodes += isinstance(step, Decode)
        if isinstance(step, Decode) and self.num_decodes == self.slow_decode:
            cost *= 10
        self.free_at = max(self.free_at, self.clock.now) + cost
        pending, ends = super().submit(step), self.free_at
        original, number = pending.wait, self.num_decodes

        def is_done():
            if self.clock.now < ends:
                self.clock.now = ends
                return False
            return True

        def wait():
            assert self.clock.now >= ends
            self.clock.now += READ_S if isinstance(step, Decode) else 0.0
            result = original()
            if isinstance(step, Decode) and number % 4 == 0:
                result.num_rescored = self.rescored
            return result

        pending.is_done, pending.wait = is_done, wait
        return pending


@pytest.fixture
def run(monkeypatch):
    """Return a function that measures a case on a timed device and returns the measurement and the device."""
    clock = Clock()
    monkeypatch.setattr(measuring, "perf_counter", clock)
    monkeypatch.setattr(engine_module, "perf_counter", clock)

    def call(
        case, *, run_ahead=4, repeats=2, chunk=8, max_context=256, tree_shapes=(), slow_decode=-1, rescored=None
    ):  # fmt: skip
        limits = ExecutorLimits(max(case.sequences, 1), max_context, chunk, run_ahead, tree_shapes)
        device = TimedDevice(limits, clock, slow_decode, rescored)
        return measure(device, MODEL, case, repeats=repeats, itemsize=2), device

    return call


@pytest.mark.parametrize("run_ahead", [1, 2, 4])
def test_one_sequence(run, run_ahead):
    result, device = run(Case(20, 30), run_ahead=run_ahead)
    # Nothing hides the first two submissions (Admit and the first chunk); run-ahead hides the others.
    exposed = 4 if run_ahead == 1 else 2
    assert result.prefill_s == pytest.approx(3 * PREFILL_S + exposed * SUBMIT_S)
    assert result.first_token_ms == pytest.approx(1e3 * result.prefill_s)
    assert result.prefill_tokens_per_s == pytest.approx(20 / result.prefill_s)
    assert result.prefill_tflops == pytest.approx(prefill_flops(MODEL, 20) / result.prefill_s / 1e12)
    step = DECODE_S + (SUBMIT_S + READ_S if run_ahead == 1 else 0)
    assert result.step_ms_p50 == pytest.approx(1e3 * step)
    assert result.decode_tokens_per_s == pytest.approx(1 / step, rel=1e-3)
    assert len(result.step_ms) == result.num_decoded == 2 * 29
    assert device.most_in_flight == run_ahead


@pytest.mark.parametrize("run_ahead", [1, 2, 4])
def test_the_host_is_charged_for_submitting_and_reading_and_not_for_waiting(run, run_ahead):
    result, _ = run(Case(8, 101), run_ahead=run_ahead)
    assert result.submit_us_per_step == pytest.approx(1e6 * SUBMIT_S)
    assert result.host_us_per_step == pytest.approx(1e6 * (SUBMIT_S + READ_S))
    assert result.host_us_p99 == pytest.approx(result.host_us_per_step)


@pytest.mark.parametrize("run_ahead", [1, 4])
def test_prefill_of_many_leaves_out_the_steps_of_those_already_there(run, run_ahead):
    case = Case(20, 12, sequences=4)
    result, device = run(case, run_ahead=run_ahead, repeats=1)
    interleaved = sum(isinstance(step, Decode) and len(step.slots) < 4 for step in device.steps)
    assert interleaved >= 2 * 9
    assert result.prefill_s == pytest.approx(12 * PREFILL_S, rel=0.05)
    assert result.prefill_tokens_per_s == pytest.approx(80 / result.prefill_s)
    assert len(result.step_ms) >= 11 and result.num_decoded == 4 * len(result.step_ms)
    assert result.decode_tokens_per_s == pytest.approx(4 / DECODE_S, rel=0.1)


def test_everybody_decodes_long_enough_even_behind_long_prompts(run):
    result, _ = run(Case(80, 5, sequences=6), repeats=1)
    assert len(result.step_ms) >= 4 and result.num_decoded == 6 * len(result.step_ms)


def test_a_case_that_just_fits_the_context_runs(run):
    result, _ = run(Case(20, 12, sequences=3), repeats=1, max_context=32)
    assert result.prefill_tokens_per_s > 0


def test_a_case_that_does_not_fit_is_refused(run):
    with pytest.raises(ContextLengthError):
        run(Case(20, 12), max_context=31)


def test_one_new_token_is_prefill_only(run):
    result, _ = run(Case(20, 1))
    assert result.prefill_tokens_per_s > 0 and result.step_ms == [] and result.decode_tokens_per_s == 0


def test_speculative_steps_count_by_their_tokens(run):
    result, _ = run(Case(8, 60), tree_shapes=(TreeShape.chain(3),))
    assert result.num_decoded == 2 * 59 > len(result.step_ms) > 0


def test_the_slowest_step_is_in_the_tail(run):
    result, _ = run(Case(8, 51), repeats=1, slow_decode=80)
    assert result.step_ms_p50 == pytest.approx(1e3 * DECODE_S)
    assert result.step_ms_p99 == pytest.approx(1e4 * DECODE_S)


def test_spans_lie_in_order_and_the_warm_up_is_in_none(run):
    result, device = run(Case(20, 5), repeats=3)
    admissions = sum(isinstance(step, Admit) for step in device.steps)
    assert admissions == 4 and len(result.prefill_spans) == len(result.decode_spans) == 3
    pairs = zip(result.prefill_spans, result.decode_spans, strict=True)
    times = [time for pair in pairs for span in pair for time in span]
    assert times == sorted(times) and times[0] > PREFILL_S


def test_bandwidth_is_of_the_weights_and_the_context(run):
    result, _ = run(Case(8, 101), repeats=1)
    expected = decode_bytes(MODEL, 8 + 51, 1, 2) / DECODE_S / 1e9
    assert result.decode_gb_per_s == pytest.approx(expected, rel=0.01)


def test_bandwidth_of_several_sequences_is_of_the_context_of_each(run):
    result, _ = run(Case(8, 101, sequences=2), repeats=1)
    expected, doubled = (decode_bytes(MODEL, context, 2, 2) for context in (8 + 51, 2 * (8 + 51)))
    assert result.decode_gb_per_s == pytest.approx(expected / DECODE_S / 1e9, rel=0.01)
    assert doubled > 1.05 * expected


def test_bandwidth_counts_the_whole_head_of_each_step_that_reads_it(run):
    """The bandwidth counts the whole head for unscreened steps and only the rescored part for screened ones."""
    result, _ = run(Case(8, 101), repeats=1, rescored=3)
    assert result.mean_rescored == 3
    whole, screened = (decode_bytes(MODEL, 8 + 51, 1, 2, mean_rescored=rescored) for rescored in (None, 3))
    assert result.decode_gb_per_s == pytest.approx((3 * whole + screened) / 4 / DECODE_S / 1e9, rel=1e-3)
    assert abs(whole - screened) > 0.01 * whole


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_step(tied):
    model = ModelConfig.from_hf(CONFIG | {"tie_word_embeddings": tied})
    read = sum(spec.num_elements for spec in tensor_specs(model) if tied or spec.name != "embed_tokens")
    keys_and_values = 3 * 100 * 2 * 2 * 2 * 32  # rows, context, both, layers, heads, head_dim
    assert decode_bytes(model, 100, 3, 2) == 2 * (read + keys_and_values)


def test_operations_of_a_prompt():
    model = ModelConfig.from_hf(CONFIG)
    matrices = 64 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 128
    pairs = sum(range(1, 11))
    expected = 2 * (2 * 10 * matrices + 4 * 4 * 32 * pairs) + 2 * 64 * 259
    assert prefill_flops(model, 10) == expected


def test_the_operations_of_an_unknown_mixer_are_not_guessed(monkeypatch):
    monkeypatch.setitem(MIXERS, toy_mixer.Decaying, lambda: toy_mixer)
    model = ModelConfig.from_hf(CONFIG)
    toys = replace(model, layers=(replace(model.layers[0], mixer=toy_mixer.Decaying(model.hidden_size)),))
    with pytest.raises(UnsupportedModelError, match=r"work of a prompt: .* got Decaying; add .*bench/work\.py"):
        prefill_flops(toys, 10)


def test_the_reference_executor_is_measured():
    with LLM(executor="reference", max_context=64) as llm:
        result = measure(llm.executor, llm.config, Case(16, 4), repeats=1, itemsize=4)
    assert result.prefill_tokens_per_s > 1 and len(result.step_ms) == 3
