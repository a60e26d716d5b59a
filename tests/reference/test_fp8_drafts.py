"""Drafts with keys and values in fp8: nodes have the codes of their own path, and no token changes."""

from __future__ import annotations

import numpy as np
import pytest
from draft_checkpoint import VOCAB, write_all
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from reference.test_speculation import DRAFTS, open_with
from speculation_steps import SETTINGS, generate

from cpmrt.ops import Fp8Pages, Rows
from cpmrt.reference.fp8_pages import accept_nodes, store, store_nodes, values_of
from cpmrt.reference.kv_rows import gather_row

KV_HEADS, HEAD_DIM, NUM_PAGES = 2, 8, 4
PROMPTS = [tuple(np.random.default_rng(length).integers(3, VOCAB, length).tolist()) for length in (3, 59, 62, 63, 64)]
"""Prompts of which most end where a tree begins a page, at its root or among its nodes."""
FP8_DRAFTS = ("vllm", "eagle3", "dspark", "itself", "lookup", "vllm or lookup", "model with vllm")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def plain(root):
    executor, known = open_with(root, kv_dtype="fp8"), {}

    def expected(prompt, name):
        if (prompt, name) not in known:
            known[prompt, name] = generate(executor, prompt, SETTINGS[name])[0]
        return known[prompt, name]

    return expected


@pytest.mark.parametrize("draft", FP8_DRAFTS)
def test_tokens_and_logprobs_are_those_of_plain_decoding(root, plain, draft):
    """Tokens and logprobs are those of plain decoding in over 100 pairs of prompts and settings over all drafts."""
    executor, accepted = open_with(root, draft, kv_dtype="fp8"), []
    num_shapes, case = len(executor.limits.tree_shapes), 0
    for prompt in PROMPTS:
        for name, sampling in SETTINGS.items():
            mixed = (*range(num_shapes), "decode") if case % 3 else (case % num_shapes,)
            found, lengths = generate(executor, prompt, sampling, mixed)
            assert found == plain(prompt, name), (len(prompt), name, mixed)
            accepted += lengths
            case += 1
    assert np.mean(accepted) > 1.02, "no draft was ever accepted, so nothing was tested"
    assert set(FP8_DRAFTS) <= set(DRAFTS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("draft", ["vllm", "itself"])
def test_pages_hold_what_plain_decoding_leaves_there(root, draft, dtype):
    """Codes of all positions and scales of all pages are those of plain decoding, over three borders of pages."""
    prompt, count, settings = PROMPTS[1], 140, {"kv_dtype": "fp8", "dtype": dtype}
    without, with_draft = open_with(root, **settings), open_with(root, draft, **settings)
    expected = generate(without, prompt, SETTINGS["greedy"], count=count)[0]
    found, lengths = generate(with_draft, prompt, SETTINGS["greedy"], (0, 1, 2), count=count)
    assert found == expected and max(lengths) > 1
    num_stored = len(prompt) + count - 1
    for part in "kv":
        both = without, with_draft
        arrays = [[executor.array(f"{part}_{name}") for executor in both] for name in ("codes", "scales")]
        rows = (array.swapaxes(2, 3).reshape(len(array), -1, KV_HEADS * HEAD_DIM) for array in arrays[0])
        codes = [of_positions[:, :num_stored] for of_positions in rows]
        np.testing.assert_array_equal(*codes)
        np.testing.assert_array_equal(*(scales[:, : -(-num_stored // 64)] for scales in arrays[1]))
        assert codes[0].any(axis=(0, 2)).all()


@pytest.mark.parametrize("use_nope", [False, True])
def test_a_target_with_sparse_attention(root, use_nope):
    sparse = {"topk": 3, "window_size": 64, "init_blocks": 1, "dense_len": -1, "use_nope": use_nope}
    prompt = tuple(np.random.default_rng(8).integers(3, VOCAB, 350).tolist())
    settings = {"max_context": 512, "prefill_chunk": 128, "sparse": sparse, "kv_dtype": "fp8"}
    without, with_draft = open_with(root, **settings), open_with(root, "itself", **settings)
    expected = generate(without, prompt, SETTINGS["greedy"], count=52)[0]
    found, lengths = generate(with_draft, prompt, SETTINGS["greedy"], (0,), count=52)
    assert found == expected and max(lengths) > 1


def pages_of(seed):
    """Return pages with random codes and scales, as an earlier sequence has left them."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 126, (NUM_PAGES, KV_HEADS, 64, HEAD_DIM), np.uint8)
    nodes, scales = np.empty((64, KV_HEADS, HEAD_DIM), np.uint8), np.empty((64, KV_HEADS), np.float32)
    return Fp8Pages(codes, np.full((NUM_PAGES, KV_HEADS), 8.0, np.float32), nodes, scales)


@given(
    base=st.integers(0, 130),
    parents=st.lists(st.integers(0, 62), min_size=1, max_size=40),
    seed=st.integers(0, 9),
    data=st.data(),
)
@examples(60)
def test_a_node_is_stored_as_if_its_path_had_been_decoded(base, parents, seed, data):
    random, table = np.random.default_rng(seed), np.array([[2, 0, 3, 1]])
    parents = [-1, *(parent % node for node, parent in enumerate(parents, 1))]
    paths = [[0]]
    for node, parent in enumerate(parents[1:], 1):
        paths.append([*paths[parent], node])
    count = len(parents)
    magnitudes = 10.0 ** random.integers(-2, 3, (base + count, 1, 1))
    heads = (random.standard_normal((base + count, KV_HEADS, HEAD_DIM)) * magnitudes).astype(np.float32)
    pages, before = pages_of(seed), np.arange(base)
    store(pages, table[0, before // 64], before % 64, heads[:base])
    positions = np.array([base + len(path) - 1 for path in paths])
    masks = np.array([sum(1 << node for node in path) for path in paths], np.uint64)
    rows = Rows(
        np.zeros(count, np.int64), positions, np.zeros(count, np.int64), table, False, base + np.arange(count), masks,
        np.full(count, base),
    )  # fmt: skip
    store_nodes(pages, rows, heads[base:])
    chosen = data.draw(st.integers(0, count - 1))
    alone, path = pages_of(seed), paths[chosen]
    sequence = np.concatenate([heads[:base], heads[base:][path]])
    for position in range(len(sequence)):
        store(alone, table[0, [position // 64]], np.array([position % 64]), sequence[[position]])
    expected = values_of(alone, table[0]).swapaxes(1, 2).reshape(-1, KV_HEADS, HEAD_DIM)[: len(sequence)]
    np.testing.assert_array_equal(gather_row(pages, rows, chosen, 0).swapaxes(0, 1), expected)
    accept_nodes(pages, table[0], base, path)
    np.testing.assert_array_equal(pages.codes, alone.codes)
    np.testing.assert_array_equal(pages.scales, alone.scales)
