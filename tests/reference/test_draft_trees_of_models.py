"""The trees that a draft proposes are those of its formulas over the whole text, wherever its rows were computed."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from draft_checkpoint import (
    DRAFT,
    EAGLE3,
    EAGLE_OF_VLLM,
    HEAD_DIM,
    TARGET,
    VOCAB,
    eagle2_tensors,
    eagle3_tensors,
    eagle_of_vllm_tensors,
    target_tensors,
)
from draft_checkpoint import write_folder as write
from reference.plain_eagle import PlainEagle2, PlainEagle3

from cpmrt.config import EngineConfig, Sampling, SpeculationConfig, TreeShape
from cpmrt.errors import UnsupportedModelError
from cpmrt.executor import Admit, Decode, Prefill, Speculate
from cpmrt.models.draft import PREFIX
from cpmrt.reference.assembly import open_executor
from cpmrt.weights.model_folder import ModelFolder

SHAPE = TreeShape(3, 3, 9)
PROMPT = tuple(np.random.default_rng(3).integers(3, VOCAB, 37).tolist())
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 1.7, 4.0, 9.0],
}  # fmt: skip


def open_pair(folder, target, draft, tensors, wish, max_context=128):
    write(folder / "target", target, target_tensors())
    write(folder / "draft", draft, tensors)
    engine = EngineConfig(
        executor="reference", prefill_chunk=16, max_context=max_context, memory_budget=1 << 30,
        draft=str(folder / "draft"), speculation=wish,
    )  # fmt: skip
    return open_executor(ModelFolder.open(folder / "target"), engine)[0]


def expected_paths(draft, text, shape):
    """Return the tokens of every node's path, without the root's, in the order of the nodes."""
    found = []
    frontier = [((), 0.0)]
    for _ in range(shape.num_passes):
        newest = []
        for path, score in frontier:
            logprobs = draft.predict(text, path)
            best = sorted(range(VOCAB), key=lambda token: (-logprobs[token], token))[: shape.top_k]
            newest += [((*path, token), score + logprobs[token]) for token in best]
        frontier = sorted(newest, key=lambda entry: -entry[1])[: shape.top_k]
        found += newest
    return [path for path, _ in sorted(found, key=lambda entry: -entry[1])[: shape.tree_size - 1]]


def proposed_paths(executor, text):
    nodes = executor.proposed(0, SHAPE)
    assert int(nodes.tokens[0]) == text[-1]
    paths = [()]
    for token, parent in zip(nodes.tokens[1:].tolist(), nodes.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def check_trees(executor, plain):
    """Check the proposed trees after a prompt in three chunks, and after steps of both kinds."""
    executor.submit(Admit(0, Sampling(temperature=1.0), 5, 40, ())).wait()
    text = list(PROMPT)
    for start in range(0, len(PROMPT), 16):
        is_last = start + 16 >= len(PROMPT)
        result = executor.submit(Prefill(0, PROMPT[start : start + 16], start, is_last)).wait()
    for step in (Speculate((0,)), Decode((0,)), Decode((0,)), Speculate((0,)), None):
        text += result.slots[0].token_ids
        assert proposed_paths(executor, text) == expected_paths(plain, text, SHAPE)
        if step is not None:
            result = executor.submit(step).wait()


def wish(method, **settings):
    return SpeculationConfig(method, (SHAPE,), **settings)


def test_the_draft_writes_nothing_before_the_second_token(tmp_path):
    """The draft's row for a token reads the state before it, and the first token has none."""
    executor = open_pair(tmp_path, TARGET, DRAFT, eagle2_tensors("vllm"), wish("eagle2"))
    executor.submit(Admit(0, Sampling(), 5, 40, ())).wait()
    for start, num_written in ((0, 15), (16, 31)):
        executor.submit(Prefill(0, PROMPT[start : start + 16], start, False)).wait()
        pages = executor.read_pages(range(executor.limits.num_pages))
        written = {name: pages[name].any(axis=(0, 2, 4)) for name in pages if name.startswith("draft.")}
        assert written and all(np.flatnonzero(each).tolist() == list(range(num_written)) for each in written.values())


@pytest.mark.parametrize("window", [None, 1, 6])
def test_eagle2_under_vllm_names(tmp_path, window):
    """Trees depend on the divisor of the target's head, which decides between branches, and on all prompt chunks."""
    tensors = eagle2_tensors("vllm")
    executor = open_pair(tmp_path, TARGET, DRAFT, tensors, wish("eagle2", window=window))
    plain = PlainEagle2(target_tensors(), TARGET, tensors, DRAFT, 128)
    plain.scale, plain.window = 1.4 / sqrt(32), window or 0
    check_trees(executor, plain)


def test_eagle2_under_cpmcu_names_with_two_layers_and_its_residual_scale(tmp_path):
    tensors, settings = eagle2_tensors("cpmcu", layers=2, bias=True), DRAFT | {"num_hidden_layers": 2}
    executor = open_pair(tmp_path, TARGET, settings, tensors, wish("eagle2", residual_scale="cpmcu"))
    plain = PlainEagle2(target_tensors(), TARGET, tensors, settings, 128)
    plain.stem, plain.layers, plain.scale = "", ("layers.0", "layers.1"), 1.4 / sqrt(3 + 1)
    check_trees(executor, plain)


def test_classic_eagle(tmp_path):
    """A classic EAGLE draft has no norms before fc, none in layer 0, and a bias; the target here is a Llama."""
    llama = {k: v for k, v in TARGET.items() if k not in ("scale_emb", "scale_depth", "dim_model_base")}
    llama |= {"architectures": ["LlamaForCausalLM"]}
    tensors = eagle2_tensors("cpmcu", norms=False, bias=True)
    executor = open_pair(tmp_path, llama, llama | {"num_hidden_layers": 1}, tensors, wish("eagle2"))
    same = llama | {"scale_depth": sqrt(3), "dim_model_base": llama["hidden_size"]}
    plain = PlainEagle2(target_tensors(), same, tensors, same, 128)
    plain.stem, plain.layers, plain.has_norms = "", ("layers.0",), False
    check_trees(executor, plain)


@pytest.mark.parametrize("ids", [None, [9, 4, 21, 5, 6, 17, 23, 3]])
@pytest.mark.parametrize("own_head", [False, True])
def test_a_draft_as_vllm_has_it_uses_its_own_head_if_that_is_another_one(tmp_path, own_head, ids):
    tensors = eagle_of_vllm_tensors(own_head=own_head)
    write(tmp_path / "draft", EAGLE_OF_VLLM, tensors)
    if ids:
        (tmp_path / "draft" / "freq_8.json").write_text(str(ids))
    executor = open_pair(tmp_path, TARGET, EAGLE_OF_VLLM, tensors, wish("eagle2"))
    assert (f"{PREFIX}lm_head" in {spec.name for spec in executor.plan.tensors}) == (own_head or ids is not None)
    heads = target_tensors() | {"lm_head.weight": tensors["lm_head.weight"]}
    plain = PlainEagle2(heads, TARGET, tensors, EAGLE_OF_VLLM, 128)
    plain.scale, plain.kept = 1.4 / sqrt(32), ids
    check_trees(executor, plain)


def test_a_draft_with_another_embedding_is_refused(tmp_path):
    tensors = eagle_of_vllm_tensors()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 1
    with pytest.raises(UnsupportedModelError, match="an embedding of its own: expected that of its target"):
        open_pair(tmp_path, TARGET, EAGLE_OF_VLLM, tensors, wish("eagle2"))


@pytest.mark.parametrize("draft_vocab", [None, 10])
def test_a_head_of_frequent_tokens(tmp_path, draft_vocab):
    tensors, ids = eagle2_tensors("vllm"), [9, 4, 21, 5, 6, 17, 23, 3, 12, 13, 2, 8]
    write(tmp_path / "draft", DRAFT, tensors)
    (tmp_path / "draft" / "freq_12.json").write_text(str(ids))
    executor = open_pair(tmp_path, TARGET, DRAFT, tensors, wish("eagle2", draft_vocab=draft_vocab))
    plain = PlainEagle2(target_tensors(), TARGET, tensors, DRAFT, 128)
    plain.scale, plain.kept = 1.4 / sqrt(32), ids[:draft_vocab]
    check_trees(executor, plain)


def test_a_head_of_frequent_tokens_that_the_draft_names_itself(tmp_path):
    tensors = eagle2_tensors("cpmcu") | {"token_id_remap": np.array([3, 22, 7, 11, 15], np.int32)}
    executor = open_pair(tmp_path, TARGET, DRAFT, tensors, wish("eagle2"))
    plain = PlainEagle2(target_tensors(), TARGET, tensors, DRAFT, 128)
    plain.stem, plain.layers, plain.scale, plain.kept = "", ("layers.0",), 1.4 / sqrt(32), [3, 22, 7, 11, 15]
    check_trees(executor, plain)


@pytest.mark.parametrize("window", [None, 9])
def test_eagle3(tmp_path, window):
    tensors = eagle3_tensors()
    executor = open_pair(tmp_path, TARGET, EAGLE3, tensors, wish("eagle3", window=window))
    plain = PlainEagle3(target_tensors(), TARGET, tensors, EAGLE3, 128)
    plain.kept, plain.window = (np.arange(18) + tensors["d2t"]).tolist(), window or 0
    check_trees(executor, plain)


@pytest.mark.parametrize("max_context", [64, 128])
def test_eagle3_behind_a_target_with_longrope(tmp_path, max_context):
    """A draft without a rotary embedding of its own has the target's, with the same list and the same factor."""
    rope = {"rope_scaling": LONGROPE, "max_position_embeddings": 256}
    assert len(LONGROPE["long_factor"]) == HEAD_DIM // 2
    target, tensors = TARGET | rope, eagle3_tensors()
    silent = {key: value for key, value in EAGLE3.items() if key != "max_position_embeddings"}
    executor = open_pair(tmp_path, target, silent, tensors, wish("eagle3"), max_context)
    plain = PlainEagle3(target_tensors(), target, tensors, EAGLE3 | rope, max_context)
    plain.kept = (np.arange(18) + tensors["d2t"]).tolist()
    check_trees(executor, plain)


def test_a_rotary_embedding_of_its_own(tmp_path):
    tensors = eagle3_tensors()
    executor = open_pair(tmp_path, TARGET, EAGLE3 | {"rope_theta": 300.0}, tensors, wish("eagle3"))
    plain = PlainEagle3(target_tensors(), TARGET, tensors, EAGLE3 | {"rope_theta": 300.0}, 128)
    plain.kept = (np.arange(18) + tensors["d2t"]).tolist()
    check_trees(executor, plain)


def test_many_waiting_tokens_do_not_shift_the_draft(tmp_path):
    """After 70 plain steps, some of whose tokens the draft has seen meanwhile, trees must be right."""
    tensors = eagle3_tensors()
    executor = open_pair(tmp_path, TARGET, EAGLE3, tensors, wish("eagle3"), max_context=192)
    plain = PlainEagle3(target_tensors(), TARGET, tensors, EAGLE3, 192)
    plain.kept = (np.arange(18) + tensors["d2t"]).tolist()
    executor.submit(Admit(0, Sampling(temperature=1.0), 5, 99, ())).wait()
    text = [*PROMPT[:7], *executor.submit(Prefill(0, PROMPT[:7], 0, True)).wait().slots[0].token_ids]
    for _ in range(70):
        text += executor.submit(Decode((0,))).wait().slots[0].token_ids
    assert proposed_paths(executor, text) == expected_paths(plain, text, SHAPE)


@pytest.mark.parametrize("method", ["eagle2", "eagle3"])
def test_states_of_an_accepted_path_that_leaves_out_nodes(tmp_path, method):
    """A path's states are gathered from rows that later steps overwrite; the next tree shows whether one was lost."""
    config, tensors, plain_of = (
        (DRAFT, eagle2_tensors("vllm"), PlainEagle2) if method == "eagle2" else (EAGLE3, eagle3_tensors(), PlainEagle3)
    )
    executor = open_pair(tmp_path, TARGET, config, tensors, wish(method), max_context=192)
    plain, paths = plain_of(target_tensors(), TARGET, tensors, config, 192), []
    if method == "eagle2":
        plain.scale = 1.4 / sqrt(32)
    else:
        plain.kept = (np.arange(18) + tensors["d2t"]).tolist()
    executor.submit(Admit(0, Sampling(temperature=1.0), 8, 150, ())).wait()
    text = [*PROMPT[:9], *executor.submit(Prefill(0, PROMPT[:9], 0, True)).wait().slots[0].token_ids]
    while sum(path != list(range(len(path))) for path in paths) < 4:
        nodes, given = executor.proposed(0, SHAPE), executor.submit(Speculate((0,))).wait().slots[0].token_ids
        text, path = [*text, *given], [0]
        for token in given[:-1]:
            path.append(int(np.flatnonzero((nodes.parents == path[-1]) & (nodes.tokens == token))[0]))
        paths.append(path)
        if len(path) > 1:
            assert proposed_paths(executor, text) == expected_paths(plain, text, SHAPE)
