"""Prefix files on a GPU: pages come back bit by bit through page-locked memory, and answers go on behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors.repeatability_cases import clear_undefined

from cpmrt import LLM, SamplingParams
from cpmrt.errors import PrefixError

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_new_tokens=24, temperature=0, ignore_eos=True)
IDS = np.random.default_rng(1).integers(10, 4000, 1500).tolist()
KEPT = 1472
SETTINGS: dict[str, Any] = {"executor": "cuda", "max_context": 2048, "max_sequences": 2}
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {}, "fp8": {"kv_dtype": "fp8"}, "eagle2": {"draft": "eagle2"}, "eagle3": {"draft": "eagle3"},
    "sparse": {"sparse": {"dense_len": 256, "topk": 8, "window_size": 256}},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_restart_goes_on_behind_the_prefix(case: str, tmp_path: Path) -> None:
    settings, path = SETTINGS | CASES[case], tmp_path / "x.prefix"
    with LLM(**settings) as llm:
        expected = llm.generate(IDS, GREEDY)
        table = llm.engine.cache.acquire((*IDS[:KEPT], 0), KEPT).table  # type: ignore[union-attr]
        pages = llm.executor.read_pages(table)
        assert llm.save_prefix(path, IDS) == KEPT
    assert expected.stats.cached_tokens == 0 and all(array.any() for array in pages.values())
    with LLM(**settings) as llm:
        llm.generate([7] * 300, GREEDY)
        assert llm.load_prefix(path) == KEPT
        found = llm.generate(IDS, GREEDY)
        assert (found.token_ids, found.stats.cached_tokens) == (expected.token_ids, KEPT)
        other = llm.engine.cache.acquire((*IDS[:KEPT], 0), KEPT).table  # type: ignore[union-attr]
        assert other != table
        again = llm.executor.read_pages(other)
        clear_undefined(pages)
        clear_undefined(again)
        for name, array in again.items():
            assert np.array_equal(array, pages[name]), name


def test_an_answer_under_way_is_left_alone(tmp_path: Path) -> None:
    with LLM(**SETTINGS) as llm:
        expected = llm.generate(IDS[:200], GREEDY).token_ids
        with llm.stream(IDS[:200], GREEDY) as stream:
            next(stream)
            llm.save_prefix(tmp_path / "x.prefix", IDS)
            llm.load_prefix(tmp_path / "x.prefix")
            assert stream.finish().token_ids == expected


def test_a_file_of_the_numpy_executor_is_refused(tmp_path: Path) -> None:
    with LLM(executor="reference", max_context=2048) as llm:
        llm.save_prefix(tmp_path / "x.prefix", IDS[:200])
    with LLM(**SETTINGS) as llm, pytest.raises(PrefixError, match="made by another model"):
        llm.load_prefix(tmp_path / "x.prefix")
