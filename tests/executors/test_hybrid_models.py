"""Models with recurrent states: drafts, chunks, company and reuse change no token and no bit of a state."""

from __future__ import annotations

import numpy as np
import pytest
from executors.hybrid_checkpoint import write_hybrid
from executors.reuse_cases import BRANCHING_CACHED, BRANCHING_CACHED_FAST, branching, cached, texts
from speculation_steps import SETTINGS, beside_a_neighbour, generate, prefill

from cpmrt import LLM
from cpmrt.cli.main import main
from cpmrt.config import EngineConfig, SpeculationConfig, TreeShape
from cpmrt.errors import ConfigError, RequestError, UnsupportedModelError
from cpmrt.executor import Decode, Release, Speculate
from cpmrt.reference.assembly import open_executor
from cpmrt.weights.model_folder import ModelFolder

RANDOM = np.random.default_rng(8)
PROMPTS = [tuple(RANDOM.integers(3, 259, count).tolist()) for count in (1, 63, 150)]
LOOP = tuple([*range(40, 60)] * 8)
CHAINS = (TreeShape.chain(4), TreeShape.chain(1), TreeShape.chain(7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hybrid(tmp_path_factory.mktemp("hybrid"))


def open_with(folder, method=None, shapes=CHAINS, **settings):
    engine = {"executor": "reference", "prefill_chunk": 128, "max_context": 512, "memory_budget": 1 << 30} | settings
    if method is not None:
        engine["speculation"] = SpeculationConfig("model" if method == "itself" else method, shapes=shapes)
        engine["draft"] = {"lookup": None, "model": str(folder / "draft"), "itself": str(folder)}[method]
    return open_executor(ModelFolder.open(folder), EngineConfig(**engine))[0]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.all), "bfloat16"])
@pytest.mark.parametrize("method", ["lookup", "model"])
def test_drafts_change_no_token(folder, method, dtype):
    with_draft, plain = open_with(folder, method, dtype=dtype), open_with(folder, dtype=dtype)
    accepted = []
    for case, prompt in enumerate([*PROMPTS[1:], LOOP]):
        for sampling in (SETTINGS["sampled"], SETTINGS["greedy"]):
            steps = ((0,), (1, 2, "decode"), (2,))[case % 3]
            found, lengths = generate(with_draft, prompt, sampling, steps, count=24)
            assert found == generate(plain, prompt, sampling, count=24)[0]
            accepted += lengths
    assert max(accepted) > 1, "no draft was ever accepted, so nothing was tested"


def test_the_state_behind_accepted_drafts_has_the_bits_of_plain_decoding(folder):
    """The state after accepted drafts has plain decoding's bits wherever chains end, also over a block's border."""
    with_draft, plain = open_with(folder, "lookup", dtype="bfloat16"), open_with(folder, dtype="bfloat16")
    num_tokens, ended, states = 1, 0, dict[int, np.ndarray]()
    prefill(plain, 0, LOOP[:62], SETTINGS["greedy"], count=100)
    for count in range(2, 100):
        plain.submit(Decode((0,))).wait()
        states[count] = plain.array("lightning_states")[:, 0].copy()
    prefill(with_draft, 0, LOOP[:62], SETTINGS["greedy"], count=100)
    while num_tokens < 90:
        (result,) = with_draft.submit(Speculate((0,), 2)).wait().slots
        num_tokens += len(result.token_ids)
        ended += len(result.token_ids) > 1
        np.testing.assert_array_equal(with_draft.array("lightning_states")[:, 0], states[num_tokens])
    assert ended > 3, "nearly no draft was accepted, so nothing was tested"


def test_a_text_is_read_from_its_beginning_whatever_state_its_slot_has(folder):
    executor = open_with(folder)

    def read():
        return np.concatenate(list(executor.prompt_logits(0, PROMPTS[1])))

    alone = read()
    assert np.array_equal(read(), alone), "behind its own text"
    prefill(executor, 0, PROMPTS[2], SETTINGS["greedy"])
    executor.submit(Release(0)).wait()
    assert np.array_equal(read(), alone)


def test_a_neighbour_notices_nothing(folder):
    two = open_with(folder, "lookup", max_sequences=2)
    for steps in (("decode",), (0, 2)):
        own, neighbour = beside_a_neighbour(two, LOOP, PROMPTS[2], steps, 12)
        assert own == generate(open_with(folder), LOOP, SETTINGS["greedy"], count=12)[0]
        assert neighbour == generate(open_with(folder), PROMPTS[2], SETTINGS["greedy"], count=21)[0]


@pytest.fixture(scope="module")
def whole(folder):
    with LLM(folder, executor="reference", max_context=512, prefix_cache=False) as llm:
        return texts(branching(llm))


@pytest.mark.parametrize(
    ("chunk", "reuse", "expected"), [(64, True, BRANCHING_CACHED), (100, "fast", BRANCHING_CACHED_FAST)]
)
def test_conversations_that_branch(folder, whole, chunk, reuse, expected):
    """A text goes on from the last snapshot within an earlier prompt, or within its answer if answers are kept.

    There are snapshots for all page borders of these texts.
    """
    settings = {"prefill_chunk": chunk, "prefix_cache": reuse, "max_sequences": 2}
    with LLM(folder, executor="reference", max_context=512, **settings) as llm:
        outs = branching(llm)
        assert texts(outs) == whole and cached(outs) == expected
        with pytest.raises(RequestError, match="recurrent state cannot be saved"):
            llm.save_prefix("never.prefix", "x" * 200)


def test_a_model_with_states_drafts_for_nobody(folder):
    with pytest.raises(UnsupportedModelError, match="a draft model must have grouped attention"):
        open_with(folder, "itself")


def test_a_chunk_holds_a_block(folder):
    with pytest.raises(ConfigError, match="prefill_chunk is too small"):
        open_with(folder, prefill_chunk=33)


@pytest.mark.parametrize("mixers", [["minicpm4", "lightning-attn", "lightning-attn", "minicpm4"], ["minicpm4"] * 4])
def test_the_quantiser_refuses_by_name_what_it_would_compute_otherwise(tmp_path, capsys, mixers):
    """The quantiser refuses models with gates and states, which its forward lacks: it would see other activations."""
    folder = write_hybrid(tmp_path / "model", mixer_types=mixers)
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--method", "rtn"]) == 1
    assert "layers of this kind cannot be quantised here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
