"""Sampling parameters of a request, defaults that a model recommends, and their combination."""

from __future__ import annotations

import enum
import json
import typing
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.config import Sampling, SamplingDefaults
from cpmrt.config.form import MAX_FORM_BYTES
from cpmrt.config.sampling import LOWEST_TOP_P
from cpmrt.engine import request_seed
from cpmrt.errors import ConfigError, RequestError, quoted
from cpmrt.reference.sampling import keep_mask
from cpmrt.weights.model_folder import ModelFolder

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
SOURCE = "/models/m/generation_config.json"
QWEN = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024}


def defaults_of(generation_config, config=QWEN):
    return SamplingDefaults.of_model(generation_config, config, SOURCE)


def test_what_is_not_given_is_the_models_own():
    own = SamplingDefaults(0.8, 40, 0.9, 0.02, 1.05)
    assert SamplingParams().with_defaults(own) == Sampling(0.8, 40, 0.9, 0.02, 1.05)
    asked = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1)
    assert asked.with_defaults(own) == Sampling(), "explicit values win, those that switch something off too"
    assert SamplingParams(top_p=0.5, logprobs=3).with_defaults(own) == Sampling(0.8, 40, 0.5, 0.02, 1.05, logprobs=3)
    assert SamplingParams().with_defaults() == Sampling(temperature=0.0)


@pytest.mark.parametrize(("given", "expected"), [
    ({"do_sample": True, "temperature": 0.8, "top_p": 0.8}, Sampling(0.8, top_p=0.8)),
    ({"temperature": 0.6, "top_k": 20, "min_p": 0.1}, Sampling(0.6, 20, min_p=0.1)),
    ({"do_sample": True}, Sampling(1.0)),
    ({"top_p": 0.9}, Sampling(1.0, top_p=0.9)),
    ({"do_sample": False, "temperature": 0.8, "top_p": 0.8}, Sampling(0.0)),
    ({"repetition_penalty": 1.05}, Sampling(0.0, repetition_penalty=1.05)),
    ({"do_sample": False, "repetition_penalty": 1.2}, Sampling(0.0, repetition_penalty=1.2)),
    ({"temperature": 1, "top_k": -1, "top_p": None}, Sampling(1.0)),
    ({"eos_token_id": [2, 3]}, Sampling(0.0)),
    (None, Sampling(0.0)),
])  # fmt: skip
def test_generation_config_says_what_the_default_is(given, expected):
    assert SamplingParams().with_defaults(defaults_of(given)) == expected


@pytest.mark.parametrize(("key", "value"), [
    ("temperature", "hot"), ("temperature", -0.5), ("temperature", float("nan")), ("temperature", True),
    ("temperature", 10**400), ("top_p", -0.1), ("top_p", 1.5), ("top_k", 2.5), ("top_k", -2), ("min_p", 2),
    ("repetition_penalty", 0), ("do_sample", "yes"), ("top_p", [0.9]),
])  # fmt: skip
def test_a_bad_default_names_file_key_and_what_was_expected(key, value):
    with pytest.raises(ConfigError) as caught:
        defaults_of({key: value})
    assert caught.value.what == f"{SOURCE}: {key}"
    assert caught.value.expected and quoted(value) in caught.value.actual


MINICPM5 = {"architectures": ["LlamaForCausalLM"], "vocab_size": 130560, "max_position_embeddings": 131072}
MINICPM4 = {"architectures": ["MiniCPMForCausalLM"], "vocab_size": 73448}


@pytest.mark.parametrize(("config", "expected"), [
    (MINICPM5 | {"hidden_size": 2048}, (1.0, 0.95, "MiniCPM5-2B")),
    (MINICPM5 | {"hidden_size": 1536}, (0.9, 0.95, "MiniCPM5-1B")),
    (MINICPM4 | {"hidden_size": 1024, "max_position_embeddings": 32768}, (0.8, 0.8, "MiniCPM4-8B")),
    (MINICPM4 | {"hidden_size": 4096, "max_position_embeddings": 65536}, (0.9, 0.95, "MiniCPM4.1-8B")),
    (
        MINICPM4 | {"max_position_embeddings": 131072, "rope_scaling": {"original_max_position_embeddings": 32768}},
        (0.8, 0.8, "MiniCPM4-8B"),
    ),
    (MINICPM5 | {"hidden_size": 4096}, (0.0, 1.0, "recommends nothing")),
    (MINICPM4 | {"max_position_embeddings": 4096}, (0.0, 1.0, "recommends nothing")),
    ({}, (0.0, 1.0, "recommends nothing")),
])  # fmt: skip
def test_known_models_have_the_values_of_their_cards(config, expected):
    found = defaults_of({"eos_token_id": 2}, config)
    assert (found.temperature, found.top_p) == expected[:2] and expected[2] in found.source
    own = defaults_of({"do_sample": True, "temperature": 0.3}, config)
    assert own.temperature == 0.3, "what the checkpoint ships comes first"


@pytest.mark.skipif(not DATA.exists(), reason="the released configs are not here")
def test_the_released_config_of_minicpm4_is_known():
    found = defaults_of(None, json.loads((DATA / "minicpm4_8b_config.json").read_text()))
    assert str(found) == "temperature 0.8, top_p 0.8"


@pytest.mark.parametrize(("shipped", "expected"), [
    (None, (1.0, 0.95)), ({"do_sample": True, "temperature": 0.6}, (0.6, 1.0)), ({"do_sample": False}, (0.0, 1.0)),
])  # fmt: skip
def test_the_penalty_of_loops_is_the_cards_whatever_the_checkpoint_ships(shipped, expected):
    found = defaults_of(shipped, MINICPM5 | {"hidden_size": 2048})
    assert (found.temperature, found.top_p, found.loop_penalty) == (*expected, 1.05)
    assert defaults_of(shipped).loop_penalty == 1.0


def test_a_loop_takes_the_models_penalty_unless_one_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(SamplingDefaults, "of_model", lambda *arguments: SamplingDefaults(loop_penalty=1.2))
    with LLM(write_checkpoint(tmp_path), executor="reference") as llm:
        for given, expected in ((None, 1.2), (1, 1.0), (1.5, 1.5)):
            assert llm.request([1], SamplingParams(loop_repeats=4, loop_penalty=given)).loop_penalty == expected


def test_defaults_on_one_line():
    assert str(SamplingDefaults()) == "greedy"
    assert str(SamplingDefaults(0.5)) == "temperature 0.5", "nothing that is off"
    assert str(SamplingDefaults(0.0, 40, 0.5, repetition_penalty=1.1)) == "greedy, repetition penalty 1.1"
    assert str(SamplingDefaults(0.7, 20, 0.9, 0.05, 1.05)) == (
        "temperature 0.7, top_k 20, top_p 0.9, min_p 0.05, repetition penalty 1.05"
    )


def test_a_checkpoints_defaults_reach_the_tokens(tmp_path):
    folder = write_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 1.5, "top_k": 30}))
    assert ModelFolder.open(folder).sampling == SamplingDefaults(1.5, 30, source="generation_config.json")
    explicit = SamplingParams(max_new_tokens=20, temperature=1.5, top_k=30, seed=4, ignore_eos=True)
    with LLM(folder, executor="reference") as llm:
        assert llm.sampling_defaults.temperature == 1.5
        wanted = llm.generate("abc", explicit).token_ids
        assert llm.generate("abc", SamplingParams(max_new_tokens=20, seed=4, ignore_eos=True)).token_ids == wanted
        greedy = SamplingParams(max_new_tokens=20, temperature=0, seed=4, ignore_eos=True)
        found = llm.generate("abc", greedy).token_ids
        assert found != wanted and found == llm.generate("abc", greedy).token_ids


def test_until_the_context_is_full(tmp_path):
    with LLM(write_checkpoint(tmp_path), executor="reference", max_context=40) as llm:
        answer = llm.generate([5] * 10, SamplingParams(max_new_tokens=None, temperature=0, ignore_eos=True))
        assert answer.finish_reason == "length" and len(answer.token_ids) == 30


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.float16(0.5)])
def test_numbers_of_numpy_are_numbers(number):
    params = SamplingParams(
        temperature=number, top_p=number, min_p=number, presence_penalty=number, top_k=np.int64(7), seed=np.uint64(9),
        max_new_tokens=np.int32(5), logprobs=np.int8(2), stop_token_ids=[np.int64(3)],
        logit_bias={np.int64(4): np.float32(1.5)},
    )  # fmt: skip
    assert params == SamplingParams(
        max_new_tokens=5, temperature=0.5, top_p=0.5, min_p=0.5, presence_penalty=0.5, top_k=7, seed=9, logprobs=2,
        stop_token_ids=(3,), logit_bias=((4, 1.5),),
    )  # fmt: skip
    assert type(params.temperature) is float and type(params.top_k) is int and type(params.stop_token_ids[0]) is int
    assert type(params.logit_bias[0][0]) is int


def test_none_is_no_stop_and_no_bias():
    """None means no stop strings, stop tokens or bias, as in vLLM, where it is the default."""
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


@pytest.mark.parametrize("ids", [3, np.array([3]), "3"], ids=str)
def test_ids_that_are_no_list_are_told_so(ids):
    with pytest.raises(RequestError, match="SamplingParams.stop_token_ids: expected a list of ids"):
        SamplingParams(stop_token_ids=ids)


@pytest.mark.parametrize("repeats", [-1, 1, 1001])
def test_once_is_no_loop(repeats):
    for allowed in (0, 2, 1000):
        assert SamplingParams(loop_repeats=allowed).loop_repeats == allowed
    with pytest.raises(RequestError, match=rf"loop_repeats: expected 0 \(off\) or .* 2 to 1000, got {repeats}"):
        SamplingParams(loop_repeats=repeats)


HUGE = 10**5000
"""A number with more digits than Python converts to text."""


@pytest.mark.parametrize("given", [
    {"temperature": HUGE}, {"top_k": HUGE}, {"logit_bias": {HUGE: 1}}, {"logit_bias": {1: HUGE}}, {"logit_bias": HUGE},
    {"stop": HUGE}, {"stop": [HUGE]}, {"stop": {HUGE}}, {"stop_token_ids": HUGE}, {"stop_token_ids": [-HUGE]},
    {"stop_token_ids": [HUGE]}, {"stop_token_ids": {HUGE}}, {"stop_token_ids": [2**31]}, {"ignore_eos": HUGE},
])  # fmt: skip
def test_numbers_without_bounds_are_refused_on_one_line(given):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    (name,) = given
    assert name in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("ask", [
    lambda llm: llm.generate([1, HUGE]),
    lambda llm: llm.embed("a", pooling=HUGE),
    lambda llm: llm.chat([{"role": "user", "content": "a"}], template_kwargs=HUGE),
])  # fmt: skip
def test_arguments_without_bounds_are_refused_on_one_line(ask, tmp_path):
    with LLM(write_checkpoint(tmp_path), executor="reference") as llm, pytest.raises(RequestError) as caught:
        ask(llm)
    assert "an integer of 16610 bits" in str(caught.value)


@pytest.mark.parametrize("given", [np.array(4), np.array([[4, 1]]), object(), [(4, 1), 5], "4:1"])
def test_what_is_no_pairs_of_tokens_and_biases_is_refused(given):
    with pytest.raises(RequestError, match="logit_bias: expected token ids with numbers"):
        SamplingParams(logit_bias=given)


def test_a_mapping_of_any_kind_says_what_is_added_to_logits():
    assert SamplingParams(logit_bias=MappingProxyType({4: 1, 2: -1})).logit_bias == ((2, -1.0), (4, 1.0))


ANYTHING = {"type": "array", "items": {}}


@pytest.mark.parametrize(("hint", "expected"), [
    (typing.List, ANYTHING), (typing.Set, ANYTHING), (typing.Sequence, ANYTHING), (list, ANYTHING),  # noqa: UP006
    (typing.Dict, {"type": "object", "additionalProperties": {}}),  # noqa: UP006
    (dict[str, list], {"type": "object", "additionalProperties": ANYTHING}),
    (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
])  # fmt: skip
def test_fields_of_a_dataclass_may_leave_out_what_is_in_them(hint, expected):
    schema = json.loads(SamplingParams(json_schema=make_dataclass("D", [("a", hint)])).json_schema)
    assert schema["properties"] == {"a": expected}


def test_fields_of_a_dataclass_are_required_unless_they_have_a_default():
    unit = enum.Enum("Unit", {"CELSIUS": "c", "KELVIN": "k"})
    rest = [("days", int, 3), ("tags", list[str], field(default_factory=list))]
    schema = json.loads(SamplingParams(json_schema=make_dataclass("D", [("unit", unit), *rest])).json_schema)
    assert schema["required"] == ["unit"] and list(schema["properties"]) == ["unit", "days", "tags"]
    assert schema["properties"]["unit"] == {"enum": ["c", "k"]}


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar", "choices"])
def test_a_form_has_a_limit(kind):
    around = {"json_schema": ('{"title": "', '"}'), "choices": ('["', '"]')}.get(kind, ("", ""))
    for surplus in (0, 1):
        inner = "a" * (MAX_FORM_BYTES - len("".join(around)) + surplus)
        form = {kind: [inner] if kind == "choices" else inner.join(around)}
        if surplus:
            with pytest.raises(RequestError, match=f"SamplingParams.{kind}: expected at most 262144 bytes, got 262145"):
                SamplingParams(**form)
        else:
            assert len(SamplingParams(**form).form.text) == MAX_FORM_BYTES


@pytest.mark.parametrize("form", [{"regex": 3}, {"regex": ""}, {"grammar": b"x"}, {"grammar": ""}])
def test_a_form_is_a_text(form):
    with pytest.raises(RequestError, match=f"SamplingParams.{next(iter(form))}: expected a text that is not empty"):
        SamplingParams(**form)


@dataclass
class Tree:
    left: Tree


class Unsaid:
    """A class whose schema cannot be made, like pydantic models that JSON cannot express."""

    @classmethod
    def model_json_schema(cls):
        raise LookupError("no schema\nof this")


@pytest.mark.parametrize("schema", [
    make_dataclass("D", [("a", "Nowhere")]), make_dataclass("D", [("a", dict[int, int])]),
    make_dataclass("D", [("a", tuple)]), make_dataclass("D", [])(), int, Unsaid,
], ids=["unknown name", "numbers as keys", "tuple", "no class", "no dataclass", "pydantic"])  # fmt: skip
def test_a_type_without_a_schema_is_refused_on_one_line(schema):
    with pytest.raises(RequestError, match="SamplingParams.json_schema: expected a JSON schema") as caught:
        SamplingParams(json_schema=schema)
    assert "\n" not in str(caught.value)


def test_a_dataclass_that_holds_itself_is_named():
    with pytest.raises(RequestError, match="got the recursive dataclass Tree"):
        SamplingParams(json_schema=Tree)


@pytest.mark.parametrize(("schema", "kind"), [
    ({"type": "object", "required": {"id"}}, "set"), ({"enum": {"DE", "US"}}, "set"), ({"type": int}, "type"),
    ({"properties": {"a": object()}}, "object"),
])  # fmt: skip
def test_a_schema_with_what_is_no_json_is_refused(schema, kind):
    with pytest.raises(RequestError, match=rf"got one that JSON cannot express \(Object of type {kind} is not JSON"):
        SamplingParams(json_schema=schema)


@pytest.mark.parametrize("choices", [[], (), [""], ["yes", 1], "yes", {"yes"}])
def test_choices_are_texts_and_there_is_one(choices):
    with pytest.raises(RequestError, match="choices: expected a list of one text or more, none empty, got"):
        SamplingParams(choices=choices)


def test_a_set_is_taken_in_one_order():
    asked = SamplingParams(stop={"b", "a", "c"}, stop_token_ids={10, 9, 2**30})
    assert (asked.stop, asked.stop_token_ids) == (("a", "b", "c"), (9, 10, 2**30))


@pytest.mark.parametrize("top_p", [0, 0.0, 1e-300, 1e-10])
def test_a_top_p_that_only_the_best_token_can_reach_is_greedy(top_p):
    own = SamplingDefaults(temperature=0.8, top_k=40)
    assert SamplingParams(top_p=top_p).with_defaults(own) == Sampling(0.0, top_k=40)
    assert SamplingParams().with_defaults(defaults_of({"top_p": top_p})) == Sampling(0.0)
    assert SamplingParams(top_p=1e-9, temperature=0.5).with_defaults() == Sampling(0.5, top_p=1e-9)
    with pytest.raises(RequestError, match=r"top_p: expected a number in \[0, 1\], got -1e-10"):
        SamplingParams(top_p=-1e-10)


def test_the_sampler_keeps_the_best_token_alone_for_the_lowest_top_p():
    """The bound below which a top_p is greedy changes no answer: above it the filter keeps as little."""
    logits = np.zeros(1_000_000, np.float32)
    logits[7] = 1e-3  # hardly better than a million others
    assert np.flatnonzero(keep_mask(logits, Sampling(1.0, top_p=LOWEST_TOP_P))).tolist() == [7]


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1e-38, 1e-31])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature):
    assert SamplingParams(temperature=temperature).with_defaults().temperature == 0
    assert Sampling(temperature=temperature).temperature == 0
    assert Sampling(temperature=1e-3).temperature == 1e-3


def test_seeds_of_requests_do_not_overlap():
    seeds = {request_seed(seed, number) for seed in range(-50, 50) for number in range(200)}
    assert len(seeds) == 100 * 200 and not seeds & set(range(10_000))
    assert all(0 <= seed < 2**64 for seed in seeds)
    bits = np.array([[seed >> bit & 1 for bit in range(64)] for seed in seeds])
    assert np.abs(bits.mean(0) - 0.5).max() < 6 * 0.5 / np.sqrt(len(seeds))


def test_the_mix_is_that_of_splitmix64():
    """Seeds are mixed as in splitmix64: they equal the published generator's first outputs for state 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    golden = 0x9E3779B97F4A7C15
    base = published[0]  # the result for seed 0
    assert request_seed(0, -base) == published[0]
    assert [request_seed(0, step * golden - base) for step in range(3)] == published


def test_runs_with_other_seeds_share_no_request(tmp_path):
    folder, params = write_checkpoint(tmp_path), SamplingParams(max_new_tokens=12, temperature=2.0, ignore_eos=True)
    texts = []
    for seed in (0, 1):
        with LLM(folder, executor="reference", seed=seed) as llm:
            texts += [llm.generate("s", params).token_ids for _ in range(4)]
    with LLM(folder, executor="reference") as llm:
        for seed in range(4):
            explicit = SamplingParams(max_new_tokens=12, temperature=2.0, ignore_eos=True, seed=seed)
            texts.append(llm.generate("s", explicit).token_ids)
    assert len(set(texts)) == 12
