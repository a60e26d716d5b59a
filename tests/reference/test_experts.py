"""The mixture of experts on the NumPy executor: its ops in float64, ties, and bits that depend on nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors.repeatability_cases import accompanied, answer, logits_of, reused_answers, text
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import brute_force
from reference.operands import EPS, Data, Poisoned, check, make_rows
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.cli.main import main
from cpmrt.dtypes import DType
from cpmrt.errors import UnsupportedModelError
from cpmrt.ops import Routing
from cpmrt.quantization.checkpoint_writer import ModelQuantiser
from cpmrt.quantization.grid import GridSettings
from cpmrt.quantization.recipe import Recipe
from cpmrt.reference.experts import choose
from cpmrt.reference.ops import NumpyOps
from cpmrt.weights.model_folder import ModelFolder

DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
SIZES = pytest.mark.parametrize(("num_rows", "experts", "chosen"), [(1, 8, 2), (9, 5, 3), (65, 8, 2), (3, 4, 4)])
HIDDEN, INNER, SCALE = 96, 72, 0.2475


def rows_of(num_rows: int, padded: int = 0, *, is_prefill: bool = False) -> Any:
    slots = np.where(np.arange(num_rows) < num_rows - padded, 0, -1)
    return make_rows(np.arange(num_rows), slots, np.zeros((1, 2), np.int32), is_prefill)


def no_routing(num_rows: int, chosen: int) -> Routing:
    return Routing(np.full((num_rows, chosen), -9, np.int32), np.full((num_rows, chosen), np.nan, np.float32))


def expected_routing(scores: Any, chosen: int) -> tuple[Any, Any]:
    """Return each row's experts, ascending, and shares: the largest softmax values, divided by their sum."""
    experts, shares = [], []
    for row in scores:
        likely = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        best = sorted(sorted(range(len(row)), key=lambda expert: (-likely[expert], expert))[:chosen])
        experts.append(best)
        shares.append(likely[best] / likely[best].sum())
    return np.array(experts), np.array(shares)


@DTYPES
@SIZES
def test_route(dtype: DType, num_rows: int, experts: int, chosen: int) -> None:
    data, routing = Data(dtype), no_routing(num_rows, chosen)
    x, norm, router = data(num_rows, HIDDEN, scale=2.0), data.norm(HIDDEN), data.weight(experts, HIDDEN)
    NumpyOps(dtype).route(routing, x, norm, router, EPS, rows_of(num_rows))
    scores = brute_force.linear(NumpyOps(dtype)._normalised(x, norm, EPS), router)
    best, shares = expected_routing(scores, chosen)
    np.testing.assert_array_equal(routing.experts, best)
    np.testing.assert_allclose(routing.shares, shares, rtol=1e-5)


@given(
    scores=st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 3.0]), min_size=6, max_size=6), min_size=1, max_size=9),
    chosen=st.integers(1, 6),
)
def test_equal_scores_go_to_the_lower_index(scores: list[list[float]], chosen: int) -> None:
    experts, shares = choose(np.array(scores, np.float32), chosen)
    best, expected = expected_routing(np.array(scores), chosen)
    np.testing.assert_array_equal(experts, best)
    np.testing.assert_allclose(shares, expected, rtol=1e-5)


def test_scores_that_are_no_numbers_choose_experts_that_exist() -> None:
    experts, _ = choose(np.array([[np.nan] * 4, [np.nan, 1, np.nan, 2], [np.inf, np.nan, 0, 1]], np.float32), 2)
    np.testing.assert_array_equal(experts, [[0, 1], [1, 3], [0, 3]])


@DTYPES
@SIZES
@pytest.mark.parametrize("is_prefill", [False, True])
def test_experts(dtype: DType, num_rows: int, experts: int, chosen: int, is_prefill: bool) -> None:
    """The op's rows are those of separate products for each row and each of its experts; padding is left out."""
    data, ops = Data(dtype), NumpyOps(dtype)
    x, norm = data(num_rows, HIDDEN, scale=2.0), data.norm(HIDDEN)
    gate_up, down = data.weight(2 * experts * INNER, HIDDEN), data.weight(experts * HIDDEN, INNER)
    routing = no_routing(num_rows, chosen)
    padded = min(num_rows - 1, 2)
    rows = rows_of(num_rows, padded, is_prefill=is_prefill)
    ops.route(routing, x, norm, data.weight(experts, HIDDEN), EPS, rows)
    assert (routing.experts[num_rows - padded :] == -1).all()
    kept = num_rows - padded
    inner, out = Poisoned(num_rows, chosen * INNER), Poisoned(num_rows, HIDDEN, content=x)
    inner.view[kept:] = 0
    ops.experts_gate_up(inner.view, x, norm, gate_up, EPS, routing, is_prefill=is_prefill)
    normed, halves = brute_force.rms_norm(x, norm, EPS), gate_up.reshape(2, experts, INNER, HIDDEN)
    parts = inner.written().reshape(num_rows, chosen, INNER)
    expected = np.zeros((kept, chosen, INNER))
    for row, place in np.ndindex(kept, chosen):
        gate, up = (half[routing.experts[row, place]].astype(np.float64) @ normed[row] for half in halves)
        expected[row, place] = brute_force.silu(gate) * up
    check("experts_gate_up", dtype, parts[:kept], expected)
    ops.experts_down(out.view, inner.view, down, SCALE, routing, is_prefill=is_prefill)
    added = x.astype(np.float64)
    for row, place in np.ndindex(kept, chosen):
        matrix = down.reshape(experts, HIDDEN, INNER)[routing.experts[row, place]].astype(np.float64)
        added[row] += SCALE * routing.shares[row, place] * (matrix @ parts[row, place])
    check("experts_down", dtype, out.written()[:kept], added[:kept])
    np.testing.assert_array_equal(out.view[kept:], x[kept:])


@settings(max_examples=20)
@given(order=st.permutations(range(40)), count=st.integers(1, 40), is_prefill=st.booleans())
def test_a_row_has_the_same_bits_among_any_others(order: list[int], count: int, is_prefill: bool) -> None:
    data, ops = Data(DType.BFLOAT16), NumpyOps(DType.BFLOAT16)
    x, norm, router = data(40, HIDDEN), data.norm(HIDDEN), data.weight(6, HIDDEN)
    gate_up, down = data.weight(12 * INNER, HIDDEN), data.weight(6 * HIDDEN, INNER)

    def run(x: Any) -> Any:
        routing, inner = no_routing(len(x), 2), np.full((len(x), 2 * INNER), np.nan, np.float32)
        ops.route(routing, x, norm, router, EPS, rows_of(len(x), is_prefill=is_prefill))
        ops.experts_gate_up(inner, x, norm, gate_up, EPS, routing, is_prefill=is_prefill)
        ops.experts_down(x, inner, down, SCALE, routing, is_prefill=is_prefill)
        return x

    taken = order[:count]
    np.testing.assert_array_equal(run(x[taken]), run(x.copy())[taken])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("experts"), num_experts=5, num_experts_per_tok=2)


def test_chunks_reuse_and_company_change_no_bit(checkpoint: Path) -> None:
    def open_llm(**changes: Any) -> LLM:
        return LLM(checkpoint, **{"executor": "reference", "dtype": "bfloat16", "max_context": 512} | changes)

    prompts = [text(150 + 20 * number, number, 90) for number in range(3)]
    whole = logits_of(open_llm, prompts[0], prefill_chunk=512)
    for chunk in (31, 64):
        assert np.array_equal(logits_of(open_llm, prompts[0], prefill_chunk=chunk), whole), chunk
    with open_llm() as llm:
        alone = [answer(llm, prompt) for prompt in prompts]
    assert accompanied(open_llm, prompts) == alone
    assert reused_answers(open_llm, prompts[0], (0, 64)) == alone[:1] * 2


def test_drafts_change_no_token(checkpoint: Path) -> None:
    """No token changes with drafts looked up in the text, or with the target itself as the small model that drafts."""
    params = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5, logprobs=2, ignore_eos=True)
    prompt, found = text(20, 1, 90) * 4, []
    for draft in (None, "lookup", checkpoint):
        with LLM(checkpoint, executor="reference", max_context=256, draft=draft) as llm:
            out = llm.generate(prompt, params)
            found.append((out.token_ids, out.logprobs))
            assert (out.stats.mean_accept_length is not None) == (draft is not None)
    assert found[1:] == found[:1] * 2


def test_quantising_them_is_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="mixture-of-experts"):
        ModelQuantiser(ModelFolder.open(checkpoint), Recipe("rtn", GridSettings()), "gptq", np)


def test_inspect_says_how_many_there_are(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    sizes = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["num_experts", "5"] in sizes and ["experts_per_token", "2"] in sizes
