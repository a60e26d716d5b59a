"""Decode steps launch fewer kernels if enough is known of their rows, with the same bits (on a GPU)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executors.cuda_models import BASE, ROWS, write_model
from executors.graph_choices import chosen_graphs
from executors.repeatability_cases import SAMPLED, accompanied, answer, text

from cpmrt import LLM, SamplingParams
from cpmrt.ops import ANY_ROWS, SHORT_KEYS, RowKind

pytestmark = pytest.mark.gpu

SPARSE = {"init_blocks": 1, "window_size": 64, "topk": 3, "dense_len": -1}
"""Settings of sparse attention under which rows of more than 256 tokens choose blocks."""
PARAMS = replace(SAMPLED, temperature=1.0, max_new_tokens=250)
WIDE = {"head_dim": 128, "max_position_embeddings": 4096}
"""Settings of heads whose attention is a separate launch."""
INSIDE, DENSE, BOTH = RowKind(is_inside=True), RowKind(is_dense=True), RowKind(is_inside=True, is_dense=True)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
SETTINGS: list[dict[str, Any]] = [
    {}, {"cuda_graphs": False}, {"steps_per_launch": 4}, {"kv_dtype": "fp8"}, {"sparse": {"use_nope": True}},
    {"load_format": "dummy", "hf_overrides": {"quantization_config": GPTQ}},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path, BASE | ROWS["minicpm"] | {"intermediate_size": 256, "sparse_config": SPARSE})


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    return chosen_graphs(monkeypatch)


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"executor": "cuda", "max_context": 1024, "prefix_cache": False} | settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("is_portable", [False, True])
def test_one_row(
    folder: Path, graphs: list[Any], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], is_portable: bool
) -> None:
    """A row alone ends a window at each multiple of 16 tokens, and chooses blocks from 257 tokens on."""
    from cpmrt.cuda.step.lengths import Lengths

    monkeypatch.setenv("CPMRT_PORTABLE", str(int(is_portable)))
    prompt = text(230, 1, BASE["vocab_size"])
    with opened(folder, **settings) as llm:
        found = answer(llm, prompt, PARAMS)
        kinds = [BOTH] * 9 + [ANY_ROWS] + [BOTH] * 15 + [ANY_ROWS] + [INSIDE] * 15 + [ANY_ROWS, INSIDE]
        assert graphs[: len(kinds)] == [(1, kind, False) for kind in kinds]
        with monkeypatch.context() as wrong:
            wrong.setattr(Lengths, "are", lambda self, kind, *_: kind in (BOTH, ANY_ROWS))
            assert answer(llm, prompt, PARAMS) != found, "nothing depends on the choice"
            wrong.setattr(Lengths, "are", lambda self, kind, *_: kind == ANY_ROWS)
            answer(llm, prompt[::-1], PARAMS)  # leaves other keys
            wrong.setattr(Lengths, "are", lambda self, kind, *_: kind in (INSIDE, ANY_ROWS))
            assert answer(llm, prompt, PARAMS) != found, "nothing depends on compressed keys"
        monkeypatch.setattr(Lengths, "are", lambda self, kind, *_: kind == ANY_ROWS)
        graphs.clear()
        assert answer(llm, prompt, PARAMS) == found and set(graphs) == {(1, ANY_ROWS, False)}


@pytest.mark.parametrize("settings", [
    {}, {"cuda_graphs": False}, {"steps_per_launch": 4}, {"kv_dtype": "fp8"}, {"sparse": SPARSE | {"dense_len": 3000}},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("is_portable", [False, True])
def test_one_row_that_grows_long(
    tmp_path: Path, graphs: list[Any], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], is_portable: bool
) -> None:
    """A row gives the same bits when it grows long; with clusters there is a graph for one of at most 2,048 keys."""
    from cpmrt.cuda.step.lengths import Lengths

    monkeypatch.setenv("CPMRT_PORTABLE", str(int(is_portable)))
    config, prompt = BASE | ROWS["minicpm"] | WIDE, text(SHORT_KEYS - 9, 1, BASE["vocab_size"])
    params, is_sparse = replace(PARAMS, max_new_tokens=24), "sparse" in settings
    with opened(write_model(tmp_path / "model", config), max_context=4096, **settings) as llm:
        executor: Any = llm.executor
        found, other = answer(llm, prompt, params), BOTH if is_sparse else ANY_ROWS
        short = replace(other, length="short") if executor.device.capability >= 90 else other
        last = ANY_ROWS if is_sparse else short  # there a window of compressed keys ends
        assert graphs[:15] == [(1, kind, False) for kind in [short] * 8 + [last] + [other] * 6]
        monkeypatch.setattr(Lengths, "are", lambda self, kind, *_: kind == ANY_ROWS)
        answer(llm, prompt[::-1], params)  # leaves other keys
        graphs.clear()
        assert answer(llm, prompt, params) == found and set(graphs) == {(1, ANY_ROWS, False)}


@pytest.mark.parametrize("settings", [
    {"lm_head_screen": False}, {"dtype": "float16"}, {"cuda_graphs": False}, {"steps_per_launch": 4},
    {"lm_head_screen": True}, {"kv_dtype": "fp8"},
], ids=str)  # fmt: skip
def test_one_row_of_a_model_whose_layer_is_two_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """A short row takes two launches a layer where keys have 16 bits, and has the bits of a launch for each op."""
    from cpmrt.cuda.build.launcher import Launcher
    from cpmrt.cuda.step.lengths import Lengths

    launched, launch = set[str](), Launcher.__call__

    def spied(self: Launcher, spec: Any, *args: Any, **options: Any) -> None:
        launched.add(spec.name)
        launch(self, spec, *args, **options)

    monkeypatch.setattr(Launcher, "__call__", spied)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 3}
    quantised = {"quantization_config": GPTQ | {"group_size": 128}}
    settings = {"load_format": "dummy", "hf_overrides": quantised, "max_context": 2048} | settings
    prompt, params = text(230, 1, BASE["vocab_size"]), replace(PARAMS, max_new_tokens=100)
    with opened(write_model(tmp_path, BASE | ROWS["minicpm"] | WIDE | {"head_dim": 64} | sizes), **settings) as llm:
        executor: Any = llm.executor
        if not executor.device.has_wide_clusters or executor.device.num_sms < 128:
            pytest.skip("no clusters of sixteen blocks, or too few multiprocessors")
        found = answer(llm, prompt, params)
        assert ("ffn_row" in launched) == ("kv_dtype" not in settings)
        monkeypatch.setattr(Lengths, "are", lambda self, kind, *_: kind == ANY_ROWS)
        answer(llm, prompt[::-1], params)  # leaves other keys
        assert answer(llm, prompt, params) == found


@pytest.mark.parametrize("wish", [{"regex": "[a-z ]{40,60}"}, {}], ids=str)
def test_a_row_under_a_form_or_a_screen_that_grows_long(
    graphs: list[Any], monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any]
) -> None:
    """Steps under a form or with a screened head choose their graphs as other steps do, with the same bits."""
    from cpmrt.cuda.step.lengths import Lengths
    from cpmrt.cuda.step.masks import MaskedGraphs

    masked, run_decode = list[RowKind](), MaskedGraphs.run_decode

    def spied(self: MaskedGraphs, num_rows: int, kind: RowKind) -> None:
        masked.append(kind)
        run_decode(self, num_rows, kind)

    monkeypatch.setattr(MaskedGraphs, "run_decode", spied)
    settings: dict[str, Any] = {"executor": "cuda", "max_context": 4096, "prefix_cache": False}
    with LLM(**settings, lm_head_screen=not wish) as llm:
        params = SamplingParams(max_new_tokens=24, ignore_eos=not wish, logprobs=2 if wish else 0, **wish)
        prompt = text(SHORT_KEYS - 9, 1, llm.config.vocab_size)
        found = answer(llm, prompt, params)
        kinds = {kind for _, kind, is_screened in graphs if is_screened} | set(masked)
        executor: Any = llm.executor
        assert kinds == set(executor._row_kinds[1]) and bool(masked) == bool(wish)
        monkeypatch.setattr(Lengths, "are", lambda self, kind, *_: kind == ANY_ROWS)
        answer(llm, prompt[::-1], params)  # leaves other keys
        masked.clear()
        assert answer(llm, prompt, params) == found and set(masked) <= {ANY_ROWS}


@pytest.mark.parametrize("settings", [{}, {"draft": "lookup"}], ids=str)
def test_several_rows(folder: Path, graphs: list[Any], settings: dict[str, Any]) -> None:
    """Several rows give the same bits while all of them are dense, then only some, then none."""
    prompts = [text(100 + 30 * number, number, BASE["vocab_size"]) for number in range(4)]
    with opened(folder, **settings) as llm:
        alone = [answer(llm, prompt, PARAMS) for prompt in prompts]
    graphs.clear()
    assert accompanied(lambda **more: opened(folder, **settings, **more), prompts, PARAMS) == alone
    assert settings or {(4, kind, False) for kind in (DENSE, ANY_ROWS)} <= set(graphs)


def chosen_trees(monkeypatch: pytest.MonkeyPatch) -> list[RowKind]:
    """Return a list that fills with the row kind of each tree from now on."""
    from cpmrt.cuda.draft.speculation import Speculation  # this module needs CuPy

    kinds, real = list[RowKind](), Speculation.speculate

    def spied(self: Speculation, graphs: Any, step: Any, num_logprobs: Any, kind: RowKind, **more: Any) -> Any:
        kinds.append(kind)
        return real(self, graphs, step, num_logprobs, kind, **more)

    monkeypatch.setattr(Speculation, "speculate", spied)
    return kinds


def test_trees(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree's nodes are launched as dense rows only while its deepest nodes are certainly dense."""
    kinds = chosen_trees(monkeypatch)
    prompt = text(200, 1, BASE["vocab_size"])
    with opened(folder) as llm:
        plain = answer(llm, prompt, PARAMS)
    for shapes in ([(3, 1, 4)], [(5, 1, 6)]):
        kinds.clear()
        with opened(folder, draft="lookup", speculate={"shapes": shapes, "adaptive": False}) as llm:
            assert answer(llm, prompt, PARAMS) == plain
        assert set(kinds) == {DENSE, ANY_ROWS} and kinds[0] == DENSE and kinds[-1] == ANY_ROWS


@pytest.mark.parametrize("wish", [{"regex": "[a-z ]{100,120}"}, {}], ids=str)
def test_trees_under_a_form_or_a_screen(monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any]) -> None:
    kinds, shapes = chosen_trees(monkeypatch), {"shapes": [(3, 1, 4)], "adaptive": False}
    settings: dict[str, Any] = {"executor": "cuda", "max_context": 1024, "sparse": SPARSE}
    params = SamplingParams(max_new_tokens=80, ignore_eos=not wish, logprobs=2 if wish else 0, **wish)
    with LLM(**settings, lm_head_screen=False) as llm:
        prompt = text(220, 1, llm.config.vocab_size)
        plain = answer(llm, prompt, params)
    with LLM(**settings, draft="lookup", speculate=shapes, lm_head_screen=not wish) as llm:
        assert answer(llm, prompt, params) == plain
        assert wish or llm.generate(prompt, params).stats.screened_steps
    assert set(kinds) == {DENSE, ANY_ROWS}
