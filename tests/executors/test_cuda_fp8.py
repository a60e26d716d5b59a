"""Keys and values in fp8 on a GPU: near the reference, and to the bit however tokens are grouped into steps."""

from dataclasses import replace

import numpy as np
import pytest
from executors.cuda_models import BASE, ROWS, write_model
from executors.reuse_cases import BRANCHING_CACHED, branching, cached, texts
from reference.golden_models import relative

from cpmrt import LLM, SamplingParams

pytestmark = pytest.mark.gpu

SAMPLED = SamplingParams(max_new_tokens=100, temperature=0.9, seed=5, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module", params=["minicpm", "qwen3"])
def checkpoint(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(request.param), BASE | ROWS[request.param])


def open_llm(checkpoint, **settings):
    usual = {"executor": "cuda", "kv_dtype": "fp8", "max_context": 320, "prefill_chunk": 64}
    return LLM(checkpoint, **usual | settings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_those_of_the_reference(checkpoint, dtype):
    with (
        open_llm(checkpoint, dtype=dtype, prefill_chunk=128) as llm,
        open_llm(checkpoint, dtype=dtype, executor="reference") as reference,
        open_llm(checkpoint, dtype=dtype, kv_dtype="auto") as wide,
    ):
        for length in (1, 5, 64, 65, 130, 300):
            ids = np.random.default_rng(length).integers(3, 99, length).tolist()
            actual, expected = llm.logits(ids), reference.logits(ids)
            assert np.isfinite(actual).all(), length
            # A value near a tie may get the next code, which differs by a sixteenth.
            assert relative(actual, expected) < 6e-2, length
            assert length == 1 or not np.array_equal(actual, wide.logits(ids)), length


def test_page_borders_fall_anywhere_in_a_chunk_without_a_trace(checkpoint):
    prompt = [5 + i * i % 89 for i in range(160)]
    with open_llm(checkpoint, prefix_cache=False) as llm:
        whole = llm.generate(prompt, SAMPLED)
    for chunk in (1, 57, 64, 90):
        with open_llm(checkpoint, prefix_cache=False, prefill_chunk=chunk) as llm:
            assert llm.generate(prompt, SAMPLED).logprobs == whole.logprobs, chunk


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}, {"dependent_launch": False}], ids=str)
def test_branching_conversations_bit_by_bit(checkpoint, settings):
    with open_llm(checkpoint, max_context=256, max_sequences=4, prefix_cache=False) as llm:
        whole = texts(branching(llm))
    with open_llm(checkpoint, max_context=256, max_sequences=4, **settings) as llm:
        outs = branching(llm)
    assert texts(outs) == whole and cached(outs) == BRANCHING_CACHED


def test_a_request_gives_the_same_tokens_alone_and_under_load(checkpoint):
    prompts = [list(range(3 + i, 40 + 7 * i)) for i in range(5)]
    with open_llm(checkpoint, max_sequences=8) as llm:
        alone = [llm.generate(prompt, SAMPLED).logprobs for prompt in prompts]
        streams = [llm.stream(prompt, SAMPLED) for prompt in prompts]
        assert [stream.finish().logprobs for stream in streams] == alone


@pytest.mark.parametrize("settings", [{}, {"dtype": "float16"}, {"max_sequences": 3, "prefill_chunk": 512}], ids=str)
def test_the_bundled_model_scores_as_on_the_reference(settings):
    text = "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n" * 12
    with (
        LLM(executor="cuda", kv_dtype="fp8", **settings) as llm,
        LLM(executor="reference", kv_dtype="fp8") as reference,
    ):
        ids = llm.tokenizer.encode(text)
        np.testing.assert_allclose(llm.score(ids).mean(), reference.score(ids).mean(), atol=1e-2)


def test_drafts_leave_the_pages_of_plain_decoding(checkpoint):
    """Drafts leave plain decoding's codes and scales in all pages, for a repeating text over three page borders."""
    prompt, found = [5 + i * i % 89 for i in range(30)] * 2, []
    wishes = {"shapes": [(5, 1, 6)], "adaptive": False}
    for settings in ({}, {"draft": "lookup", "speculate": wishes}, {"draft": str(checkpoint), "speculate": wishes}):
        with open_llm(checkpoint, prefix_cache=False, **settings) as llm:
            answer = llm.generate(prompt, replace(SAMPLED, temperature=0.0, max_new_tokens=150))
            arrays, count = llm.executor._arrays, len(prompt) + len(answer.token_ids) - 1
            table = arrays["block_tables"].get()[0, : -(-count // 64)]
            parts = [arrays[f"{part}_{name}"].get()[:, table] for part in "kv" for name in ("codes", "scales")]
        num_layers, _, num_heads, _, head_dim = parts[0].shape
        codes = [part.swapaxes(2, 3).reshape(num_layers, -1, num_heads, head_dim)[:, :count] for part in parts[::2]]
        found.append((answer.token_ids, *codes, *parts[1::2]))
    assert answer.stats.mean_accept_length > 1.5 and count > 192
    for other in found[1:]:
        assert other[0] == found[0][0]
        for actual, expected in zip(other[1:], found[0][1:], strict=True):
            np.testing.assert_array_equal(actual, expected)


# ---- sparse attention ----

SPARSE = {"init_blocks": 1, "window_size": 64, "topk": 3, "dense_len": -1}
"""Four blocks of 64, one of them chosen by its score: nothing is left out up to 256 tokens."""
LONG = [5 + i * i % 89 for i in range(420)]


@pytest.fixture(scope="module", params=[False, True], ids=["", "nope"])
def sparse_checkpoint(request, tmp_path_factory):
    sparse = {"sparse_config": SPARSE | {"use_nope": request.param}}
    return write_model(tmp_path_factory.mktemp("sparse"), BASE | ROWS["minicpm"] | sparse)


@pytest.mark.parametrize("chunk", [64, 512])
def test_sparse_logits_are_those_of_the_reference(sparse_checkpoint, chunk):
    """Sparse logits are near the reference's, but for rows that choose another of nearly equal blocks.

    Dense logits are far away.
    """
    settings = {"dtype": "float16", "max_context": 1024}
    with open_llm(sparse_checkpoint, executor="reference", **settings) as reference:
        expected = reference.logits(LONG)
    with open_llm(sparse_checkpoint, executor="reference", sparse="off", **settings) as reference:
        dense = reference.logits(LONG)
    with open_llm(sparse_checkpoint, prefill_chunk=chunk, **settings) as llm:
        actual = llm.logits(LONG)
    assert np.isfinite(actual).all()
    found, apart = ([relative(*rows) for rows in zip(logits, expected, strict=True)] for logits in (actual, dense))
    assert np.median(found[256:]) < np.median(apart[256:]) / 2
    assert max(found[:256]) < 6e-2 and np.median(found[256:]) < 3e-2


@pytest.mark.parametrize("settings", [{}, {"dtype": "float16"}, {"cuda_graphs": False}], ids=str)
def test_sparse_drafts_change_no_token(sparse_checkpoint, settings):
    """Drafts change no token of a repeating text, in which blocks are left out from the first new token on."""
    prompt, wishes = LONG[:40] * 9, {"shapes": [(5, 1, 6), (3, 1, 4)], "adaptive": False}
    with open_llm(sparse_checkpoint, max_context=1024, **settings) as llm:
        plain = [llm.generate(prompt, params).logprobs for params in (SAMPLED, replace(SAMPLED, temperature=0.0))]
    for draft in ("lookup", str(sparse_checkpoint)):
        with open_llm(sparse_checkpoint, max_context=1024, draft=draft, speculate=wishes, **settings) as llm:
            found = [llm.generate(prompt, params) for params in (SAMPLED, replace(SAMPLED, temperature=0.0))]
        assert [answer.logprobs for answer in found] == plain, draft
        assert max(answer.stats.mean_accept_length for answer in found) > 1, draft


@pytest.mark.parametrize("settings", [{"prefill_chunk": 1}, {"prefill_chunk": 50}, {"cuda_graphs": False}], ids=str)
def test_sparse_settings_that_do_not_matter(sparse_checkpoint, settings):
    with open_llm(sparse_checkpoint, max_context=1024) as llm:
        plain = llm.generate(LONG, SAMPLED).logprobs
    with open_llm(sparse_checkpoint, **{"max_context": 1024} | settings) as llm:
        assert llm.generate(LONG, SAMPLED).logprobs == plain
