"""Sequences that have all become long are decoded by other launches, with the same bits (on a GPU)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executors.cuda_models import BASE, ROWS, write_model
from executors.graph_choices import chosen_graphs
from executors.repeatability_cases import SAMPLED, accompanied, answer, text

from cpmrt import LLM
from cpmrt.ops import ANY_ROWS, RowKind

pytestmark = pytest.mark.gpu

LONGEST = 2048
PARAMS = replace(SAMPLED, max_new_tokens=48)  # enough to overlap, as prompts begin at different times
WIDE = {"head_dim": 128, "num_attention_heads": 2, "max_position_embeddings": LONGEST}


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}, {"steps_per_launch": 4}], ids=str)
def test_company_changes_no_bit_of_a_long_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Eight sequences together give the bits of each alone, also when the shortest one becomes long on the way."""
    monkeypatch.setattr("cpmrt.cuda.step.lengths.SHORT_KEYS", 625)
    folder, used, chosen = write_model(tmp_path, BASE | ROWS["llama"] | WIDE), set[Any](), chosen_graphs(monkeypatch)
    prompts = [text(600 + 190 * number, number, BASE["vocab_size"]) for number in range(8)]

    def opened(**more: Any) -> LLM:
        llm = LLM(folder, executor="cuda", max_context=LONGEST, **settings, **more)
        executor: Any = llm.executor
        used.update(executor._row_kinds.get(8, ()))
        return llm

    with opened() as llm:
        alone = [answer(llm, prompt, PARAMS) for prompt in prompts]
    assert accompanied(opened, prompts, PARAMS) == alone
    assert used <= {RowKind("long"), ANY_ROWS}
    assert {form for form in chosen if form[0] == 8} == {(8, kind, False) for kind in (ANY_ROWS, *used)}
