"""Whole answers with a DSpark draft are those without: stop strings, penalties, log-probabilities, several at a time.

The draft's Markov head knows which byte follows which in the texts that the target writes, so that much is accepted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from draft_checkpoint import DSPARK, write_folder
from tiny_checkpoint import CONFIG, write_checkpoint

from cpmrt import LLM, SamplingParams

PROMPTS = ("abc", "one two one two one")
RANK = 128
GREEDY = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=30, temperature=0.3, ignore_eos=True, seed=5)
SETTINGS = {
    "greedy": GREEDY,
    "log-probabilities": replace(GREEDY, logprobs=3),
    "penalties": replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1),
    "sampled": SAMPLED,
    "filtered": replace(SAMPLED, temperature=0.9, top_p=0.9, top_k=40, min_p=0.02),
    "three answers": replace(SAMPLED, n=3, logprobs=1),
    "a form": replace(GREEDY, regex="[a-z ]{10,30}[.]"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain(checkpoint):
    with LLM(str(checkpoint), executor="reference", max_sequences=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def draft(plain, tmp_path_factory):
    texts = [plain.generate(prompt, params).token_ids for prompt in PROMPTS for params in (GREEDY, SAMPLED)]
    return write_folder(tmp_path_factory.mktemp("draft"), *bigram_draft(texts))


@pytest.fixture(scope="module")
def drafted(checkpoint, draft):
    with LLM(str(checkpoint), executor="reference", max_sequences=3, draft=draft) as llm:
        yield llm


def bigram_draft(texts):
    """Return the config.json and tensors of a draft whose Markov head prefers what followed a token in these texts."""
    random, hidden, vocab = np.random.default_rng(8), CONFIG["hidden_size"], CONFIG["vocab_size"]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    layers = {"num_hidden_layers": 1, "target_layer_ids": [0], "num_target_layers": CONFIG["num_hidden_layers"]}
    config = DSPARK | {name: CONFIG[name] for name in names} | layers | {"block_size": 6, "markov_rank": RANK}
    q, kv = (CONFIG[name] * CONFIG["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    inner = CONFIG["intermediate_size"]
    shapes = {
        "fc": (hidden, hidden), "layers.0.self_attn.q_proj": (q, hidden), "layers.0.self_attn.k_proj": (kv, hidden),
        "layers.0.self_attn.v_proj": (kv, hidden), "layers.0.self_attn.o_proj": (hidden, q),
        "layers.0.mlp.gate_proj": (inner, hidden), "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors = {f"{name}.weight": random.standard_normal(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    for name in ("hidden_norm", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        tensors[f"{name}.weight"] = np.ones(hidden)
    for part in "qk":
        tensors[f"layers.0.self_attn.{part}_norm.weight"] = np.ones(CONFIG["head_dim"])
    codes = random.standard_normal((vocab, RANK)) * RANK**-0.5
    follows = np.zeros((vocab, vocab))
    for text in texts:
        np.add.at(follows, (text[1:], text[:-1]), 1)
    tensors["markov_head.markov_w1.weight"] = codes
    tensors["markov_head.markov_w2.weight"] = 30 * np.minimum(follows, 3) / 3 @ codes
    return config, {name: array.astype(np.float32) for name, array in tensors.items()}


def told(answer):
    """Return tokens, text, finish reason and log-probabilities of an answer, without its timings and counts."""
    return [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in (answer.choices or (answer,))]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_answer_is_the_same(plain, drafted, name):
    for prompt in PROMPTS:
        expected, found = (llm.generate(prompt, SETTINGS[name]) for llm in (plain, drafted))
        assert told(found) == told(expected)


def test_much_is_accepted(drafted):
    lengths = [drafted.generate(prompt, GREEDY).stats.mean_accept_length for prompt in PROMPTS]
    assert max(lengths) > 2, lengths


def test_a_stop_string_ends_a_path_where_it_ends_plain_decoding(plain, drafted):
    for prompt in PROMPTS:
        text = plain.generate(prompt, GREEDY).text
        for stop in sorted({text[at : at + size] for at, size in ((3, 1), (10, 2), (20, 4))}):
            params = replace(GREEDY, stop=(stop,), logprobs=1)
            assert told(drafted.generate(prompt, params)) == told(plain.generate(prompt, params))


def test_several_at_a_time(plain, drafted):
    params = [GREEDY, SETTINGS["penalties"]]
    expected, found = ([told(answer) for answer in llm.generate(list(PROMPTS), params)] for llm in (plain, drafted))
    assert found == expected


@pytest.mark.parametrize("wish", [{"num_passes": 3}, {"lookup": 6}, {"head_bits": 4, "layer_bits": 8}], ids=str)
def test_with_other_settings_of_the_draft(checkpoint, plain, draft, wish):
    with LLM(str(checkpoint), executor="reference", draft=draft, speculate=wish) as llm:
        for prompt, params in zip(PROMPTS, (GREEDY, SAMPLED), strict=True):
            assert told(llm.generate(prompt, params)) == told(plain.generate(prompt, params))
