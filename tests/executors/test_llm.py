"""The public API on small random checkpoints: text in and out, limits, cancellation, scores, errors."""

import gc
import json
import re
import weakref

import numpy as np
import pytest
from tiny_checkpoint import CONFIG, write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    ContextLengthError,
    CpmrtError,
    MemoryPlanError,
    NoDeviceError,
    RequestError,
    UnsupportedModelError,
)
from cpmrt.executor import Prefill

# The vocabulary is larger than the tokenizer's, as in checkpoints with padded rows, and the context is soon full.
SIZES = {"vocab_size": 300, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), **SIZES)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, executor="reference") as made:
        yield made


SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.0, seed=7, ignore_eos=True)


def test_generate_from_text_and_from_ids_agree(llm):
    text = llm.generate("héllo", SAMPLED)
    ids = llm.generate(llm.tokenizer.encode("héllo"), SAMPLED)
    assert text.token_ids == ids.token_ids and text.text == ids.text
    assert text.finish_reason == "length" and len(text.token_ids) == 20
    assert text.stats.prompt_tokens == len("héllo".encode()) + 1 and text.stats.new_tokens == 20


def test_stream_is_generate_in_pieces(llm):
    pieces = list(llm.stream("abc", SAMPLED))
    whole = llm.generate("abc", SAMPLED)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids


def test_two_streams_in_turns_are_what_they_are_alone(checkpoint):
    other = SamplingParams(max_new_tokens=15, temperature=1.0, seed=8, ignore_eos=True)
    with LLM(checkpoint, executor="reference", max_sequences=2) as llm:
        alone = [llm.generate("one", SAMPLED).token_ids, llm.generate("three", other).token_ids]
        streams = [llm.stream("one", SAMPLED), llm.stream("three", other)]
        together = [[], []]
        for _ in range(25):
            for stream, tokens in zip(streams, together, strict=True):
                tokens.extend(next(stream, None).token_ids if len(tokens) < 15 else ())
        for stream, tokens in zip(streams, together, strict=True):
            tokens.extend(token for piece in stream for token in piece.token_ids)
    assert [tuple(tokens) for tokens in together] == alone


def test_closing_a_stream_cancels_it_and_frees_its_slot(llm):
    with llm.stream("abc", SAMPLED) as stream:
        next(stream)
    assert stream.completion.finish_reason == "cancelled" and len(stream.completion.token_ids) == 1
    assert llm.generate("abc", SAMPLED).finish_reason == "length"


def test_a_stream_that_was_never_read_cancels_too(llm):
    stream = llm.stream("abc", SAMPLED)
    stream.close()
    assert stream.completion.finish_reason == "cancelled"
    assert llm.generate("abc", SAMPLED).finish_reason == "length"


def _append_to(steps):
    return lambda step, _: steps.append(step)


def test_the_prompt_chunks_do_not_show(checkpoint):
    tokens = set()
    for chunk in (1, 3, 512):
        steps = []
        with LLM(checkpoint, executor="reference", prefill_chunk=chunk, on_step=_append_to(steps)) as llm:
            tokens.add(llm.generate("a longer prompt", SAMPLED).token_ids)
        assert max(len(step.token_ids) for step in steps if isinstance(step, Prefill)) == min(chunk, 16)
    assert len(tokens) == 1


def test_end_tokens_and_ignore_eos(llm):
    params = SamplingParams(max_new_tokens=60, temperature=2.0, seed=3, ignore_eos=True)
    free = llm.generate("x", params)
    stop = free.token_ids[5]
    cut = llm.generate("x", SamplingParams(max_new_tokens=60, temperature=2.0, seed=3, ignore_eos=True,
                                           stop_token_ids=(stop,)))  # fmt: skip
    end = free.token_ids.index(stop)
    assert cut.token_ids == free.token_ids[: end + 1] and cut.finish_reason == "stop"
    assert cut.text == llm.tokenizer.decode([1, *llm.tokenizer.encode("x")[1:], *free.token_ids[:end]])[1:]


def test_stop_strings_cut_the_text(llm):
    free = llm.generate("x", SAMPLED)
    stop = free.text[4:7]
    cut = llm.generate("x", SamplingParams(max_new_tokens=20, temperature=1.0, seed=7, ignore_eos=True, stop=stop))
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)] and len(cut.token_ids) < 20


def test_seeds(checkpoint):
    params, runs = SamplingParams(max_new_tokens=12, temperature=1.5), []
    for _ in range(2):
        with LLM(checkpoint, executor="reference", seed=1) as llm:
            runs.append([llm.generate("s", params).token_ids for _ in range(3)])
    assert runs[0] == runs[1] and len(set(runs[0])) == 3, "a program repeats itself; its requests differ"


def test_chat_renders_the_template_with_one_bos(llm):
    ids = llm.chat_prompt([{"role": "user", "content": "hi"}])
    assert llm.tokenizer.decode(ids) == "[user]hi[bot]" and ids[0] == 1 and ids.count(1) == 1
    assert llm.chat([{"role": "user", "content": "hi"}], SAMPLED).token_ids == llm.generate(ids, SAMPLED).token_ids


def test_logits_and_scores_are_those_of_generation(llm):
    prompt = llm.tokenizer.encode("score me")
    params = SamplingParams(max_new_tokens=6, logprobs=3, ignore_eos=True)
    out = llm.generate(prompt, params)
    ids = [*prompt, *out.token_ids]
    logits, scores = llm.logits(ids), llm.score(ids)
    assert logits.shape == (len(ids), 300) and logits.dtype == np.float32
    assert scores.shape == (len(ids) - 1,) and scores.dtype == np.float32
    assert tuple(logits[len(prompt) - 1 : -1].argmax(-1)) == out.token_ids
    np.testing.assert_allclose([entry.logprob for entry in out.logprobs], scores[len(prompt) - 1 :], atol=2e-4)
    for entry, token in zip(out.logprobs, out.token_ids, strict=True):
        assert entry.token_id == token and entry.top[0][0] == token and len(entry.top) == 3
    assert llm.score([5]).shape == (0,)


def test_the_context_may_be_filled_to_the_last_token(checkpoint):
    with LLM(checkpoint, executor="reference", max_context=32) as llm:
        out = llm.generate([5] * 12, SamplingParams(max_new_tokens=20, ignore_eos=True))
        assert len(out.token_ids) == 20
        with pytest.raises(ContextLengthError, match="at most 20 new tokens"):
            llm.generate([5] * 12, SamplingParams(max_new_tokens=21))
        with pytest.raises(ContextLengthError):
            llm.logits([5] * 33)


def test_dummy_weights_need_neither_weights_nor_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | SIZES))
    with LLM(tmp_path, executor="reference", load_format="dummy", dtype="bfloat16") as llm:
        assert len(llm.generate([3, 4], SamplingParams(max_new_tokens=5, ignore_eos=True)).token_ids) == 5
        for call in (lambda: llm.generate("text"), lambda: llm.generate([3], SamplingParams(stop="x"))):
            with pytest.raises(RequestError, match="token"):
                call()
        with pytest.raises(RequestError, match="chat template"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_overrides_reach_the_config(checkpoint):
    with LLM(checkpoint, executor="reference", hf_overrides={"eos_token_id": 9, "max_position_embeddings": 64}) as llm:
        assert llm.config.eos_token_ids == (9,) and llm.max_context == 64


@pytest.mark.parametrize(("key", "hint"), [
    ("rope_scalling", "; did you mean rope_scaling?"), ("max_position_embedding", "; did you mean max_position_embed"),
    ("colour", "for this model"),
])  # fmt: skip
def test_overrides_that_change_nothing_are_told(checkpoint, key, hint):
    with pytest.warns(UserWarning, match=re.escape(f"hf_overrides: '{key}' changes nothing")) as caught:
        LLM(checkpoint, executor="reference", hf_overrides={"eos_token_id": 9, key: 5}).close()
    assert len(caught) == 1 and hint in str(caught[0].message)
    assert caught[0].filename == __file__, "the line that called cpmrt"


def test_overrides_may_be_numbers_of_numpy(checkpoint):
    overrides = {
        "eos_token_id": [np.int32(9)], "max_position_embeddings": np.int64(64), "rope_theta": np.float32(500),
    }  # fmt: skip
    with LLM(checkpoint, executor="reference", hf_overrides=overrides) as llm:
        config = llm.config
        assert (config.eos_token_ids, llm.max_context, config.rope.theta) == ((9,), 64, 500)
        found = (config.eos_token_ids[0], config.max_position_embeddings, llm.max_context, config.rope.theta)
        assert [type(value) for value in found] == [int, int, int, float]


def test_closed_models_refuse(checkpoint):
    llm = LLM(checkpoint, executor="reference")
    llm.close()
    llm.close()
    with pytest.raises(ClosedError, match="closed"):
        llm.generate([1, 2])


@pytest.mark.parametrize(("settings", "is_closed"), [({}, True), ({"draft": "lookup"}, True), ({}, False)])
def test_memory_is_free_at_once(checkpoint, tmp_path, settings, is_closed):
    """A model's memory is free at once when it is closed or dropped, without a garbage collection."""
    gc.disable()
    try:
        llm = LLM(checkpoint, executor="reference", prefix_dir=tmp_path, **settings)
        llm.generate([1, 2, 1, 2, 1], SamplingParams(max_new_tokens=4))
        arena = weakref.ref(llm.executor.array("norm").base)
        if is_closed:
            llm.close()
        else:
            del llm
        assert arena() is None
    finally:
        gc.enable()


def test_a_process_with_too_little_memory_says_so(checkpoint, monkeypatch):
    monkeypatch.setattr("cpmrt.reference.assembly.available_bytes", lambda: 100 << 20)
    with pytest.raises(MemoryPlanError, match=r"expected more than 256.00 MiB, got 100.00 MiB; .*ulimit"):
        LLM(checkpoint, executor="reference")
    LLM(checkpoint, executor="reference", memory_budget="64MiB").close()


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"executor": "cuda"}, NoDeviceError, "reference"),
    ({"executor": "auto"}, NoDeviceError, "reference"),
    ({"executor": "reference", "max_context": 257}, ConfigError, "at most 256"),
    ({"executor": "reference", "memory_budget": 1000}, MemoryPlanError, "does not fit"),
    ({"executor": "reference", "memory_budget": "1KiB"}, MemoryPlanError, "at most 1.00 KiB"),
    ({"executor": "reference", "memory_budget": "lots"}, ConfigError, "a size such as 8GiB"),
    ({"executor": "reference", "hf_overrides": {"vocab_size": 301}}, CheckpointError, "embed_tokens"),
    ({"executor": "reference", "hf_overrides": {"num_hidden_layers": 3}}, CheckpointError, "missing"),
    ({"executor": "reference", "hf_overrides": {"num_hidden_layers": 1}}, CheckpointError, "unexpected"),
    ({"executor": "reference", "hf_overrides": {"tie_word_embeddings": False}}, CheckpointError, "lm_head"),
    ({"executor": "reference", "hf_overrides": {"quantization_config": {"quant_method": "fp8"}}},
     UnsupportedModelError, "fp8"),
    ({"executor": "reference", "hf_overrides": {"quantization_config": {"quant_method": "gptq"}}},
     ConfigError, "quantization_config: bits"),
    ({"executor": "reference", "lm_head_bits": 3}, ConfigError, "lm_head_bits"),
    ({"executor": "reference", "kv_dtype": "e5m2"}, ConfigError, "kv_dtype: expected auto | fp8"),
    ({"executor": "reference", "hf_overrides": "x"}, ConfigError, "hf_overrides"),
])  # fmt: skip
def test_a_wrong_setting_is_a_clear_error(no_gpu, checkpoint, arguments, error, words):
    with pytest.raises(error, match=words):
        LLM(checkpoint, **arguments)


@pytest.mark.parametrize("prompt", ["", [], [300], [-1], [1.5], [None], [True], None, 5, "\ud800"])
def test_a_wrong_prompt_is_a_clear_error(llm, prompt):
    if prompt == "":
        assert llm.generate(prompt, SAMPLED).stats.prompt_tokens == 1, "BOS alone"
        return
    with pytest.raises(CpmrtError):
        llm.generate(prompt, SAMPLED)


def test_unknown_arguments_are_refused(checkpoint):
    with pytest.raises(TypeError, match="tensor_parallel.*expected"):
        LLM(checkpoint, tensor_parallel=2)
    with pytest.raises(RequestError, match="SamplingParams"):
        LLM(checkpoint, executor="reference").generate("x", {"temperature": 1})
