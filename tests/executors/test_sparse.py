"""Sparse models through the engine: chunk sizes, the prefix cache, speculation and batches change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors.reuse_cases import branching, cached, texts
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.errors import ConfigError

SPARSE = {"init_blocks": 1, "window_size": 64, "topk": 3, "dense_len": -1}
"""Four blocks of 64, one of them chosen by its score: nothing is left out up to 256 tokens."""
LONG = [5 + i * i % 89 for i in range(420)]
GREEDY = SamplingParams(max_new_tokens=70, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=70, temperature=1.0, seed=7, ignore_eos=True)
"""Sampling under which every token depends on what was seen; greedy text of random weights soon repeats itself."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sparse"), sparse_config=SPARSE)


def open_llm(checkpoint: Path, **settings: Any) -> LLM:
    return LLM(checkpoint, **{"executor": "reference", "max_context": 1024, "prefill_chunk": 64} | settings)


def answer(checkpoint: Path, prompt: list[int] = LONG, params: SamplingParams = SAMPLED, **settings: Any) -> Any:
    with open_llm(checkpoint, **settings) as llm:
        return llm.generate(prompt, params).token_ids


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Any:
    return answer(checkpoint)


@pytest.mark.parametrize("chunk", [1, 50, 512])
def test_any_chunk_size_gives_the_same_text(checkpoint, plain, chunk):
    assert answer(checkpoint, prefill_chunk=chunk) == plain


def test_prefill_and_decoding_agree(checkpoint):
    """Tokens that are decoded one by one have the log-probabilities that the whole text gives at once."""
    params = SamplingParams(max_new_tokens=70, temperature=1.0, seed=7, logprobs=1, ignore_eos=True)
    with open_llm(checkpoint) as llm:
        out = llm.generate(LONG, params)
        at_once = llm.score([*LONG, *out.token_ids])[-70:]
    assert len(set(out.token_ids)) > 30
    np.testing.assert_allclose([entry.logprob for entry in out.logprobs], at_once, atol=1e-4)


def test_dense_gives_another_text(checkpoint, plain):
    assert answer(checkpoint, sparse="off") != plain
    assert answer(checkpoint, sparse={"topk": 2}) != plain
    assert answer(checkpoint, sparse={"use_nope": True}) != plain


def test_everything_selected_is_dense_to_the_bit(checkpoint):
    """The sparse path gives the dense bits for a text whose tokens all attend to everything before them."""
    wide = {"topk": 12, "window_size": 64}
    with open_llm(checkpoint, sparse=wide) as llm, open_llm(checkpoint, sparse="off") as dense:
        assert "compressed keys" in llm.plan.part_bytes
        assert np.array_equal(llm.logits(LONG), dense.logits(LONG))
        assert llm.generate(LONG, GREEDY).token_ids == dense.generate(LONG, GREEDY).token_ids


def test_below_dense_len_it_is_dense_to_the_bit_and_above_it_is_not(checkpoint):
    with open_llm(checkpoint, sparse={"dense_len": 401}) as llm, open_llm(checkpoint, sparse="off") as dense:
        sparse_logits, dense_logits = llm.logits(LONG), dense.logits(LONG)
    assert np.array_equal(sparse_logits[:400], dense_logits[:400])
    assert (np.abs(sparse_logits[400:] - dense_logits[400:]).max(axis=1) > 1e-3).all()


def test_a_short_context_keeps_no_compressed_keys(checkpoint):
    with open_llm(checkpoint, max_context=192) as llm:
        assert "compressed keys" not in llm.plan.part_bytes
        assert llm.generate(LONG[:100], SamplingParams(max_new_tokens=3)).token_ids


@pytest.mark.parametrize("use_nope", [False, True])
def test_the_prefix_cache_shares_compressed_keys(checkpoint, use_nope):
    """Cached pages bring their compressed keys; a window over their end takes keys from both sides."""
    setting = {"use_nope": use_nope}
    with open_llm(checkpoint, sparse=setting, prefix_cache=False) as llm:
        whole = branching(llm)
        again = [llm.generate([*LONG, *tail], SAMPLED) for tail in ([], [7], [8, 9])]
    with open_llm(checkpoint, sparse=setting) as llm:
        assert texts(branching(llm)) == texts(whole)
        outs = [llm.generate([*LONG, *tail], SAMPLED) for tail in ([], [7], [8, 9])]
    assert texts(outs) == texts(again)
    assert cached(outs)[1:] == [384, 384]


@pytest.mark.parametrize("use_nope", [False, True])
def test_speculation_leaves_what_decoding_leaves(checkpoint, use_nope):
    """Speculation leaves plain decoding's keys over ends of both kinds of windows, in accepted paths too."""
    setting, found = {"use_nope": use_nope}, []
    speculative = {"draft": "lookup", "speculate": {"num_passes": 6, "adaptive": False}}
    for settings in ({}, speculative):
        with open_llm(checkpoint, sparse=setting, prefix_cache=False, **settings) as llm:
            out = llm.generate(LONG, GREEDY)
            names = ("k1_pages", "k2_pages", *(("nope_pages",) if use_nope else ()))
            pages = {name: llm.executor.array(name).copy() for name in names}
            found.append((out.token_ids, pages))
    assert out.stats.mean_accept_length > 2
    (tokens, plain), (drafted, speculated) = found
    assert drafted == tokens
    # The last token's key is not written, and entry 0 is never used.
    num_written = len(LONG) + len(tokens) - 1
    for name, stride in (("k1_pages", 16), ("k2_pages", 64), ("nope_pages", 1)):
        if name in plain:
            entries = [np.moveaxis(pages[name], 2, -2) for pages in (plain, speculated)]
            order = llm.executor.block_tables[0]
            one, other = (array[:, order].reshape(len(array), -1, 2, 32) for array in entries)
            assert np.array_equal(one[:, 1 : num_written // stride], other[:, 1 : num_written // stride])
            assert one[:, 1 : num_written // stride].any(axis=-1).all()


def test_sequences_together(checkpoint, plain):
    with open_llm(checkpoint, max_sequences=3) as llm:
        streams = [llm.stream(prompt, SAMPLED) for prompt in (LONG, LONG[:250], LONG[:30])]
        outs = [stream.finish().token_ids for stream in streams]
    assert outs[0] == plain
    assert outs[1] == answer(checkpoint, LONG[:250])


def test_beyond_the_trained_positions_only_by_wish(tmp_path):
    """A context beyond the trained positions needs the model card's factor lists for it, through hf_overrides."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0 + i for i in range(16)]}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 256, **factors}
    native = {**rope, "long_factor": factors["short_factor"]}
    folder = write_checkpoint(
        tmp_path / "long", sparse_config=SPARSE, max_position_embeddings=256, rope_scaling=native
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"beyond the model's positions.*hf_overrides"):
        open_llm(folder)
    overrides = {"max_position_embeddings": 1024, "rope_scaling": rope}
    assert len(answer(folder, hf_overrides=overrides)) == 70
