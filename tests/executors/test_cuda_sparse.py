"""Sparse models on a GPU: near the reference executor, and the same bits however a text comes about."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from executors.cuda_models import BASE, ROWS, write_model
from executors.reuse_cases import branching, cached, texts

from cpmrt import LLM, SamplingParams

SPARSE = {"init_blocks": 1, "window_size": 64, "topk": 3, "dense_len": -1}
"""Four blocks of 64, one of them chosen by its score: nothing is left out up to 256 tokens."""
LONG = [5 + i * i % 89 for i in range(420)]
GREEDY = SamplingParams(max_new_tokens=70, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=70, temperature=1.0, seed=7, ignore_eos=True)
STRIDES = {"k_pages": 1, "nope_pages": 1, "k1_pages": 16, "k2_pages": 64}
MODELS = ["minicpm", "qwen3", "minicpm_96", "llama_bias"]


@pytest.fixture(scope="module", params=MODELS)
def any_checkpoint(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(request.param), BASE | ROWS[request.param] | {"sparse_config": SPARSE})


@pytest.fixture(scope="module", params=[False, True], ids=["", "nope"])
def checkpoint(request, tmp_path_factory):
    """A sparse model that chooses blocks by keys after RoPE, or by those before it."""
    sparse = {"sparse_config": SPARSE | {"use_nope": request.param}}
    return write_model(tmp_path_factory.mktemp("minicpm"), BASE | ROWS["minicpm"] | sparse)


def open_llm(checkpoint: Any, **settings: Any) -> LLM:
    usual = {"executor": "cuda", "dtype": "float16", "max_context": 1024, "prefill_chunk": 64}
    return LLM(checkpoint, **usual | settings)


def answers(checkpoint: Any, **settings: Any) -> list[Any]:
    with open_llm(checkpoint, **settings) as llm:
        return [llm.generate(LONG, params).token_ids for params in (GREEDY, SAMPLED)]


@pytest.fixture(scope="module")
def plain(checkpoint):
    return answers(checkpoint)


def distances(one: Any, other: Any) -> Any:
    """Return the relative distance of each row of `one` from that of `other`."""
    assert np.isfinite(one).all()
    return np.linalg.norm(one - other, axis=1) / np.linalg.norm(other, axis=1)


@pytest.mark.gpu
@pytest.mark.parametrize("use_nope", [False, True], ids=["", "nope"])
@pytest.mark.parametrize("chunk", [64, 128, 512])
def test_logits_are_those_of_the_reference(any_checkpoint, chunk, use_nope):
    """Logits are near the reference's, but for rows that choose another of nearly equal blocks.

    Dense logits are far away, and so are those of a choice by the other keys.
    """
    sparse, other = {"use_nope": use_nope}, {"use_nope": not use_nope}
    with open_llm(any_checkpoint, executor="reference", sparse=sparse) as reference:
        expected = reference.logits(LONG)
    with open_llm(any_checkpoint, prefill_chunk=chunk, sparse=sparse) as llm:
        found = distances(llm.logits(LONG), expected)
    assert found[:256].max() < 5e-3
    assert np.median(found[256:]) < 5e-3 and np.mean(found[256:] < 1e-2) > 0.8
    for elsewhere in ("off", other):
        with open_llm(any_checkpoint, executor="reference", sparse=elsewhere) as reference:
            assert np.median(distances(reference.logits(LONG), expected)[256:]) > 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"prefill_chunk": 1}, {"prefill_chunk": 50}, {"cuda_graphs": False}, {"dependent_launch": False},
        {"cuda_graphs": False, "dependent_launch": False}, {"max_sequences": 4}, {"max_context": 700},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_do_not_matter(checkpoint, plain, settings):
    assert answers(checkpoint, **settings) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("use_nope", [False, True], ids=["", "nope"])
def test_a_model_on_the_path_of_older_gpus(any_checkpoint, monkeypatch, use_nope):
    sparse = {"use_nope": use_nope}
    with open_llm(any_checkpoint, executor="reference", sparse=sparse) as reference:
        expected = reference.logits(LONG)
    monkeypatch.setenv("CPMRT_PORTABLE", "1")
    for chunk in (64, 256):
        with open_llm(any_checkpoint, prefill_chunk=chunk, sparse=sparse) as llm:
            found = distances(llm.logits(LONG), expected)
        assert found[:256].max() < 5e-3 and np.median(found) < 5e-3, chunk


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [64, 256])
def test_everything_selected_is_dense_to_the_bit(any_checkpoint, chunk):
    """The sparse kernels give the dense bits for a text whose tokens all attend to everything before them."""
    settings = {"prefill_chunk": chunk}
    with (
        open_llm(any_checkpoint, sparse={"topk": 12}, **settings) as llm,
        open_llm(any_checkpoint, sparse="off", **settings) as dense,
    ):
        assert "compressed keys" in llm.plan.part_bytes
        assert np.array_equal(llm.logits(LONG), dense.logits(LONG))
        assert llm.generate(LONG, SAMPLED).token_ids == dense.generate(LONG, SAMPLED).token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [64, 256])
def test_below_dense_len_it_is_dense_to_the_bit_and_above_it_is_not(checkpoint, chunk):
    settings = {"prefill_chunk": chunk}
    with (
        open_llm(checkpoint, sparse={"dense_len": 401}, **settings) as llm,
        open_llm(checkpoint, sparse="off", **settings) as dense,
    ):
        sparse_logits, dense_logits = llm.logits(LONG), dense.logits(LONG)
        before_rope = llm.config.attention.sparse.use_nope
    # A separate kernel keeps keys before RoPE, and q and k are rounded between it and the product. Dense attention
    # rounds them there for many rows only, so small chunks differ.
    if before_rope and chunk == 64:
        assert distances(sparse_logits[:400], dense_logits[:400]).max() < 0.02
    else:
        assert np.array_equal(sparse_logits[:400], dense_logits[:400])
    assert (np.abs(sparse_logits[400:] - dense_logits[400:]).max(axis=1) > 1e-3).all()


@pytest.mark.gpu
def test_sequences_together(checkpoint, plain):
    with open_llm(checkpoint, max_sequences=8) as llm:
        prompts = [LONG, LONG[:250], LONG[:30], LONG[7:], LONG[:193]]
        alone = [llm.generate(prompt, SAMPLED).token_ids for prompt in prompts]
        streams = [llm.stream(prompt, SAMPLED) for prompt in prompts]
        assert [stream.finish().token_ids for stream in streams] == alone
    assert alone[0] == plain[1]


@pytest.mark.gpu
def test_the_prefix_cache_shares_compressed_keys(checkpoint):
    """Cached pages bring their compressed keys; a window over their end takes keys from both sides."""
    tails = ([], [7], [8, 9])
    with open_llm(checkpoint, prefix_cache=False) as llm:
        whole = texts(branching(llm))
        again = [llm.generate([*LONG, *tail], SAMPLED).token_ids for tail in tails]
    with open_llm(checkpoint) as llm:
        assert texts(branching(llm)) == whole
        outs = [llm.generate([*LONG, *tail], SAMPLED) for tail in tails]
    assert texts(outs) == again
    assert cached(outs)[1:] == [384, 384]


@pytest.mark.gpu
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_leaves_what_decoding_leaves(checkpoint, params):
    """Speculation leaves plain decoding's tokens and compressed keys, also of windows that end in accepted paths."""
    found = []
    speculative = {"draft": "lookup", "speculate": {"num_passes": 6, "adaptive": False}}
    for settings in ({}, speculative, speculative | {"cuda_graphs": False}):
        with open_llm(checkpoint, prefix_cache=False, **settings) as llm:
            out = llm.generate(LONG, params)
            arrays = llm.executor._arrays
            pages = {name: arrays[name].get() for name in STRIDES if name in arrays}
            table = arrays["block_tables"].get()[0]
            found.append((out.token_ids, pages, table))
    if params is GREEDY:
        assert out.stats.mean_accept_length > 1.5
    tokens, pages, table = found[0]
    num_written = len(LONG) + len(tokens) - 1  # the last token has no key yet
    for other_tokens, other_pages, other_table in found[1:]:
        assert other_tokens == tokens
        for name in pages:
            one, other = (
                flat(array, order)[:, 1 : num_written // STRIDES[name]]
                for array, order in ((pages[name], table), (other_pages[name], other_table))
            )
            assert one.any(axis=(-1, -2)).all() and np.array_equal(one, other), name


def flat(pages: Any, table: Any) -> Any:
    """Return the slot's entries in order, [layers, entries, K, D].

    `pages` are [layers, P, K, entries, D] or [layers, P, K, D].
    """
    pages = pages[:, table] if pages.ndim == 5 else pages[:, table][:, :, :, None]
    return pages.transpose(0, 1, 3, 2, 4).reshape(len(pages), -1, pages.shape[2], pages.shape[4])
