"""Answers under schemas, regular expressions and grammars, from the bundled model in NumPy, against other parsers."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from threading import Event
from time import perf_counter, sleep
from typing import Literal

import jsonschema
import lark
import numpy as np
import pytest
from form_cases import LARK_GRAMMARS, REGEXES, schemas
from timing import slowness

from cpmrt import LLM, BusyError, FormError, RequestError, SamplingParams
from cpmrt.config import Sampling
from cpmrt.grammar import grammars
from cpmrt.grammar.mask_threads import MaskThreads
from cpmrt.reference.sampling import masked, sample

pytest.importorskip("llguidance")
PROMPT = "Here is the answer: "


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="reference", max_sequences=16, max_context=512) as llm:
        yield llm


def check_schemas(llm, wanted):
    """Check that answers that have ended validate, and that every tenth is the same alone and among 16."""
    params = [
        SamplingParams(json_schema=schema, temperature=1.0, seed=number, max_new_tokens=160)
        for number, schema in enumerate(wanted)
    ]
    together = llm.generate([PROMPT] * len(wanted), params)
    for number, (schema, answer) in enumerate(zip(wanted, together, strict=True)):
        assert answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), schema, jsonschema.Draft202012Validator)
        if number % 10 == 0:
            assert llm.generate(PROMPT, params[number]).token_ids == answer.token_ids
    ended = sum(answer.finish_reason == "stop" for answer in together)
    assert ended > 0.9 * len(wanted), f"{ended} of {len(wanted)} answers have ended"


def test_answers_validate_against_their_schemas(llm):
    check_schemas(llm, schemas(11))


@pytest.mark.all
def test_answers_validate_against_300_schemas(llm):
    check_schemas(llm, schemas(300, seed=1))


def answers_to(llm, field, forms):
    shared = {"temperature": 1.0, "max_new_tokens": 60}
    params = [SamplingParams(**{field: form}, **shared, seed=seed) for seed, form in enumerate(forms)]
    return zip(forms, llm.generate([PROMPT] * len(forms), params), strict=True)


def check_regexes(llm, regexes):
    for regex, answer in answers_to(llm, "regex", regexes):
        assert answer.finish_reason == "stop" and re.fullmatch(regex, answer.text), (regex, answer.text)


def check_grammars(llm, grammars):
    ended = 0
    for grammar, answer in answers_to(llm, "grammar", grammars):
        if answer.finish_reason == "stop":
            lark.Lark(grammar, parser="earley", ambiguity="resolve", lexer="dynamic").parse(answer.text)
            ended += 1
    assert ended >= len(grammars) / 2


def test_answers_match_their_regular_expressions(llm):
    check_regexes(llm, REGEXES[::6])


@pytest.mark.all
def test_answers_match_100_regular_expressions(llm):
    assert len(set(REGEXES)) == 100
    check_regexes(llm, REGEXES)


def test_answers_parse_under_their_grammars(llm):
    check_grammars(llm, LARK_GRAMMARS[::15])


@pytest.mark.all
def test_answers_parse_under_30_grammars(llm):
    assert len(set(LARK_GRAMMARS)) == 30
    check_grammars(llm, LARK_GRAMMARS)


def test_choices_are_taken_as_they_are(llm):
    choices = ["yes", "no", 'a "quoted" one\n', "größer", "yes or no", "\x7f"]
    answers = [llm.generate(PROMPT, SamplingParams(choices=choices, temperature=2.0, seed=seed)) for seed in range(12)]
    assert {answer.text for answer in answers} <= set(choices)
    assert len({answer.text for answer in answers}) > 1 and all(each.finish_reason == "stop" for each in answers)


@pytest.mark.parametrize("logprobs", [0, 1])
@pytest.mark.parametrize("form", [
    {"choices": ["<|im_end|>"]}, {"regex": "a<s>[bc]"}, {"json_schema": {"const": "x</s>y<unk>"}},
    {"grammar": 'root ::= "so: <|im_start|>" "!"'},
])  # fmt: skip
def test_names_of_special_tokens_are_spelled_out(llm, form, logprobs):
    """Certain text that is a special token's name is spelled out, though the tokenizer would make that token of it."""
    answer = llm.generate(PROMPT, SamplingParams(**form, logprobs=logprobs))
    text = r"<\|im_end\|>|a<s>[bc]|\"x</s>y<unk>\"|so: <\|im_start\|>!"
    assert re.fullmatch(text, answer.text) and answer.finish_reason == "stop"
    assert not llm.tokenizer.special_ids.intersection(answer.token_ids)


def test_a_grammar_may_ask_for_a_special_token_itself(llm):
    """A special token that a grammar asks for between texts is that single token."""
    answer = llm.generate(PROMPT, SamplingParams(grammar='start: "ab" <|im_start|> "cd" /[xy]/'))
    assert re.fullmatch("abcd[xy]", answer.text) and llm.tokenizer.token_id("<|im_start|>") in answer.token_ids


@pytest.mark.parametrize(("grammar", "text"), [
    (r'root ::= "\u00e9ab" [\u00c0-\u024f]', "éab[\u00c0-\u024f]"),
    (r'root ::= "\U0001F600\u2028"', "\U0001f600\u2028"),
    (r"root ::= [\U0001F600-\U0001F64F]", "[\U0001f600-\U0001f64f]"),
    (r'root ::= "\\u00e9\[" [\u005d\[]', r"\\u00e9\[[\]\[]"),
])  # fmt: skip
def test_escape_sequences_of_gbnf_stand_for_their_characters(llm, grammar, text):
    answer = llm.generate(PROMPT, SamplingParams(grammar=grammar))
    assert re.fullmatch(text, answer.text) and answer.finish_reason == "stop"


@pytest.mark.parametrize(("grammar", "text"), [
    ('root ::= start "x" start\nstart ::= "ab"', "abxab"),
    ('root ::= "\\"start " [start]  # start\nstart ::= "x"', r'"start [start]'),
    ('start ::= "a" start0\nstart0 ::= "b"\nroot ::= start | "start0"', "ab|start0"),
    ('root ::= start-up\nstart-up ::= "a"', "a"),
])  # fmt: skip
def test_a_rule_of_gbnf_may_be_named_start(llm, grammar, text):
    answer = llm.generate(PROMPT, SamplingParams(grammar=grammar))
    assert re.fullmatch(text, answer.text) and answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "grammar", ['?start: a\na: "x"', '!start: "x"', "start[max_tokens=1]: /x/", 'start: "x" // y ::= z']
)
def test_a_grammar_without_rules_of_gbnf_is_one_of_lark(llm, grammar):
    assert llm.generate(PROMPT, SamplingParams(grammar=grammar)).text == "x"


def test_everything_that_samples_respects_the_form(llm):
    params = SamplingParams(
        regex="[abc]{1,30}", temperature=1.3, seed=3, top_k=40, min_p=0.01, repetition_penalty=1.2,
        presence_penalty=0.5, frequency_penalty=0.3, logit_bias={300: 50.0}, logprobs=3, n=3, ignore_eos=True,
    )  # fmt: skip
    answers = llm.generate(PROMPT, params).choices
    assert len({answer.text for answer in answers}) == 3
    for answer in answers:
        assert re.fullmatch(params.regex, answer.text) and answer.finish_reason == "stop"
        assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)


def test_log_probabilities_are_those_of_raw_logits(llm):
    answer = llm.generate(PROMPT, SamplingParams(choices=["qqq", "zzz"], logprobs=1))
    ids = llm.tokenizer.encode(PROMPT)
    raw = llm.score([*ids, *answer.token_ids])[len(ids) - 1 :]
    np.testing.assert_allclose([entry.logprob for entry in answer.logprobs], raw, rtol=0.01, atol=0.02)
    assert answer.logprobs[0].top[0][1] > answer.logprobs[0].logprob, "the best token is not one of the form"


def test_a_short_limit_ends_inside_the_form(llm):
    answer = llm.generate(PROMPT, SamplingParams(json_schema={"type": "array", "minItems": 9}, max_new_tokens=3))
    assert answer.finish_reason == "length" and len(answer.token_ids) == 3


def test_a_thought_comes_before_the_form(llm):
    """A form binds only after the thought that the prompt opens, which the budget ends with the marker."""
    params = SamplingParams(choices=["qqq", "zzz"], max_thinking_tokens=9, max_new_tokens=80, temperature=1.0)
    free, marker, answer = llm.generate("Well: <think>", params).text.partition("</think>")
    assert marker and answer.strip() in params.choices and answer.startswith("\n\n")
    ids = llm.tokenizer.encode("Well: <think>")
    unbound = llm.generate(ids, SamplingParams(max_new_tokens=9, temperature=1.0, seed=0)).text
    bound = llm.generate(ids, SamplingParams(max_new_tokens=9, temperature=1.0, seed=0, choices=["qqq"])).text
    assert bound == unbound, "a thought is free"
    assert free.strip() and "qqq" not in free


def test_a_pause_inside_the_form_goes_on_with_it(llm):
    """A form goes on after a pause, which a thinking budget causes when it runs out, even with no thought open."""
    params = SamplingParams(json_schema=schemas(9)[2], temperature=1.0, seed=5, max_new_tokens=120)
    whole = llm.generate(PROMPT, params)
    assert whole.finish_reason == "stop"
    for budget in range(1, min(len(whole.token_ids), 24), 9):
        paused = llm.generate(PROMPT, replace(params, max_thinking_tokens=budget))
        jsonschema.validate(json.loads(paused.text), json.loads(params.json_schema))


@pytest.mark.parametrize(("others", "text", "is_taken"), [
    (True, '{"a": 1, "b": 2, "b": 2}', True), (True, '{"a": 1, "b": 2, "a": 1}', False),
    (True, '{"a": 1, "a": 1}', False), (True, '{"a": 1, "\\u0061": 2}', True),
    (False, '{"a": 1}', True), (False, '{"a": 1, "a": 1}', False), (False, '{"a": 1, "\\u0061": 1}', False),
])  # fmt: skip
def test_only_names_that_are_not_fixed_come_twice(llm, others, text, is_taken):
    """An escape makes a fixed name another text, which counts as a further name."""
    schema = {"properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2} if others else False}
    matcher = llm.maker.request(PROMPT, SamplingParams(json_schema={"type": "object"} | schema)).matcher()
    with nullcontext() if is_taken else pytest.raises(FormError):
        matcher.accept(llm.maker.forms.grammars._vocabulary.spelled(text))


def test_classes_are_schemas(llm):
    @dataclass
    class Place:
        name: Literal["here", "there"]
        height: int | None = None

    answer = llm.generate(PROMPT, SamplingParams(json_schema=Place, temperature=1.0, max_new_tokens=60))
    assert Place(**json.loads(answer.text)).name in ("here", "there")


def test_models_of_pydantic_are_schemas(llm):
    pydantic = pytest.importorskip("pydantic")

    class Trip(pydantic.BaseModel):
        days: int = pydantic.Field(ge=1, le=9)
        unit: Literal["celsius", "kelvin"]

    answer = llm.generate(PROMPT, SamplingParams(json_schema=Trip, temperature=1.0, max_new_tokens=60))
    assert 1 <= Trip.model_validate_json(answer.text).days <= 9


def test_a_prompt_that_is_cached_begins_its_form_anew(llm):
    """Two forms after one cached prompt, each asked twice, give the tokens that they give without a cache."""
    prompt = "To whom it may concern: " * 12 + PROMPT
    forms = [{"json_schema": schemas(3, seed=6)[2]}, {"regex": "[a-z]{4,9}-[0-9]{2}"}] * 2
    params = [SamplingParams(**form, temperature=1.0, seed=5, max_new_tokens=60) for form in forms]
    found = [llm.generate(prompt, one) for one in params]
    assert all(answer.stats.cached_tokens > 64 for answer in found[1:])
    with LLM(executor="reference", max_context=512, prefix_cache=False) as own:
        assert [own.generate(prompt, one).token_ids for one in params] == [answer.token_ids for answer in found]


def test_certain_tokens_save_steps(llm):
    """Certain tokens save at least a quarter of the steps of a tool call with three arguments."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"const": "get_current_weather"},
            "arguments": {
                "type": "object",
                "properties": {
                    "location": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]},
                    "num_days": {"type": "integer", "minimum": 1, "maximum": 14},
                },
                "required": ["location", "unit", "num_days"], "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"], "additionalProperties": False,
    }  # fmt: skip
    steps = []
    with LLM(executor="reference", max_context=512, on_step=lambda step, result: steps.append(result)) as own:
        answer = own.generate(PROMPT, SamplingParams(json_schema=schema, temperature=1.0, max_new_tokens=100))
    assert answer.finish_reason == "stop"
    with_tokens = [result for result in steps if result.slots and result.slots[0].token_ids]
    assert len(with_tokens) <= 0.75 * len(answer.token_ids), (len(with_tokens), len(answer.token_ids))


@pytest.mark.parametrize("count", [1, 7, 300])
def test_masked_sampling_is_renormalised_sampling(count):
    """Sampling under a mask follows the renormalised probabilities: a chi-square test over 4000 seeds."""
    draw = np.random.default_rng(count)
    logits = draw.normal(0, 2, 1000).astype(np.float32)
    allowed = np.zeros(1000, bool)
    allowed[draw.choice(1000, count, replace=False)] = True
    bits = np.packbits(allowed, bitorder="little").tobytes()
    unseen, params = np.zeros(1000, bool), Sampling(temperature=1.3)
    found = [sample(masked(logits, bits), params, seed, 5, unseen, unseen.astype(int)) for seed in range(4000)]
    weights = np.where(allowed, np.exp(logits / 1.3), 0)
    expected = 4000 * weights / weights.sum()
    counts = np.bincount(found, minlength=1000)
    assert not counts[~allowed].any()
    likely = expected > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = max(int(likely.sum()) - 1, 0)
    assert chi_square <= degrees + 4 * np.sqrt(2 * degrees) + 1e-9


HOSTILE = {
    "unclosed group": {"regex": "("},
    "look-ahead": {"regex": "(?=a)b"},
    "deep nesting": {"json_schema": '{"items":' * 400 + "{}" + "}" * 400},
    "nothing matches": {"json_schema": {"type": "string", "pattern": "^a$", "minLength": 5}},
    "unknown type": {"json_schema": {"type": "wrong"}},
    "unsupported keyword": {"json_schema": {"type": "array", "uniqueItems": True}},
    "itself": {"json_schema": {"$ref": "#"}},
    "a product of alternatives": {
        "json_schema": {
            "allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(6)]} for i in range(12)]
        }
    },
    "a terminal that doubles": {
        "grammar": "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "x"'
    },
    "no grammar": {"grammar": "x"},
    "GBNF without a rule": {"grammar": "root ::= x"},
    "GBNF without a root": {"grammar": 'top ::= "a"'},
    "GBNF whose names become one": {"grammar": 'root ::= a-b | a_b\na-b ::= "x"\na_b ::= "y"'},
    "GBNF that ends in a backslash": {"grammar": 'root ::= "a" \\'},
    "an expression that matches nothing": {"regex": "[^\\s\\S]"},
    "too long": {"regex": "a" * 300_000},
}


@pytest.mark.parametrize("form", HOSTILE.values(), ids=HOSTILE)
def test_hostile_forms_are_refused(llm, form):
    begun = perf_counter()
    with pytest.raises(RequestError, match="SamplingParams") as caught:
        llm.generate(PROMPT, SamplingParams(**form))
    assert perf_counter() - begun < 4
    assert "\n" not in str(caught.value) and "NoExtensionBias" not in str(caught.value)


@pytest.mark.parametrize(
    ("regex", "says"), [("(", "unclosed group"), ("a{3", "repetition"), ("[z-a]", "invalid character class range")]
)
def test_a_wrong_regex_is_told_what_is_wrong(llm, regex, says):
    with pytest.raises(RequestError) as caught:
        llm.generate(PROMPT, SamplingParams(regex=regex))
    assert says in str(caught.value) and "got " + caught.value.actual in str(caught.value)
    assert "invalid regex" not in str(caught.value) and "|" not in str(caught.value)


def test_a_form_that_becomes_too_complex_ends_its_answer(llm):
    """A form that compiles, but whose next tokens cannot be found in time, ends its answer with an error."""
    other = llm.generate(PROMPT, SamplingParams(max_new_tokens=5))
    begun = perf_counter()
    with pytest.raises((FormError, RequestError), match="too many|too complex"):
        llm.generate(PROMPT, SamplingParams(regex="(" * 50 + "a" + "{1,50})" * 50))
    assert perf_counter() - begun < 4
    assert llm.generate(PROMPT, SamplingParams(max_new_tokens=5)).token_ids == other.token_ids


def test_masks_at_the_same_time_change_no_answer_and_no_error(llm, monkeypatch):
    """When one of sixteen answers becomes too complex, the others are what they are alone."""
    forms = [{"regex": f"[a-z ]{{{20 + number},60}}"} for number in range(9)]
    forms += [{"json_schema": schema} for schema in schemas(6, seed=3)]
    wanted = [SamplingParams(**form, temperature=1.0, max_new_tokens=40, seed=seed) for seed, form in enumerate(forms)]
    alone = [llm.generate(PROMPT, params) for params in wanted]
    failing = SamplingParams(regex="((a|b|c){1,60}x?){3,60}", temperature=1.0)
    monkeypatch.setattr(grammars, "default_num_threads", lambda: 3)
    monkeypatch.setitem(grammars._LIMITS, "step_lexer_fuel", 5000)
    rows, masks = [], MaskThreads.masks
    monkeypatch.setattr(MaskThreads, "masks", lambda self, found: rows.append(len(found)) or masks(self, found))
    with LLM(executor="reference", max_sequences=16, max_context=512) as own:
        for params in wanted:
            own.maker.forms.grammars.matcher(params.form, grammars.Thought())
        failed = own.stream(PROMPT, failing)
        streams = [own.stream(PROMPT, params) for params in wanted]
        with pytest.raises(FormError, match="cannot be followed"):
            failed.finish()
        assert failed.completion.token_ids, "its first mask, which it has alone, was there"
        assert [stream.finish().token_ids for stream in streams] == [answer.token_ids for answer in alone]
    assert max(rows) > 8


def test_a_slow_form_holds_nobody_up(llm):
    """Another thread gets answers while a form compiles for about a second: sixteen letters in any order."""
    slow = {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnop"]}
    llm.generate(PROMPT, SamplingParams(max_new_tokens=2))
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(llm.generate, PROMPT, SamplingParams(json_schema=slow))
        answers = 0
        while not compiling.done():
            llm.generate(PROMPT, SamplingParams(max_new_tokens=2))
            answers += 1
        assert isinstance(compiling.exception(), RequestError)
    assert answers > 3


def test_compiling_ends_at_its_limit(llm, monkeypatch):
    """Threads give up waiting for two compilations that hang, and a third one is not begun."""
    released = Event()
    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 0.05)
    monkeypatch.setattr(grammars.Grammars, "_compile", lambda self, form: released.wait(10))
    own = grammars.Grammars(llm.tokenizer, llm.tokenizer.eos_token_ids)
    for number, problem in enumerate(("was not compiled within", "was not compiled within", "other grammars")):
        with pytest.raises(RequestError, match=problem) as caught:
            own.matcher(SamplingParams(regex=f"a{number}").form, grammars.Thought())
        assert isinstance(caught.value, BusyError) == (number == 2)
    released.set()


def test_many_threads_that_ask_for_one_form_at_a_time_wait_for_few_compilations(llm, monkeypatch):
    """All get it within the limit, though only two can compile at a time, and it takes a good part of the limit."""
    own, compiled = grammars.Grammars(llm.tokenizer, llm.tokenizer.eos_token_ids), []
    compile_form = grammars.Grammars._compile

    def slow(self, form):
        compiled.append(form)
        sleep(0.5)
        return compile_form(self, form)

    own.prepare()
    monkeypatch.setattr(grammars.Grammars, "_compile", slow)
    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 3.0)
    form = SamplingParams(regex="many").form
    with ThreadPoolExecutor(16) as pool:
        for asked in [pool.submit(own.matcher, form) for _ in range(16)]:
            asked.result()
    assert len(compiled) <= 2


def test_a_form_that_took_too_long_is_there_when_it_is_asked_for_again(llm, monkeypatch):
    own, released = grammars.Grammars(llm.tokenizer, llm.tokenizer.eos_token_ids), Event()
    compile_form = grammars.Grammars._compile

    def slow(self, form):
        released.wait(10)
        return compile_form(self, form)

    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 0.05)
    monkeypatch.setattr(grammars.Grammars, "_compile", slow)
    form = SamplingParams(regex="late").form
    with pytest.raises(RequestError, match="was not compiled within"):
        own.matcher(form)
    released.set()
    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 2.0)
    turns = [own._compiling.acquire(timeout=10) for _ in range(2)]  # until the thread that compiles has ended
    assert all(turns)
    own.matcher(form)


def test_a_thread_that_cannot_begin_keeps_no_other_form_from_being_compiled(llm, monkeypatch):
    own = grammars.Grammars(llm.tokenizer, llm.tokenizer.eos_token_ids)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(grammars.Thread, "start", refuse)
        for number in range(3):
            with pytest.raises(RuntimeError, match="can't start"):
                own.matcher(SamplingParams(regex=f"a{number}").form)
    own.matcher(SamplingParams(regex="b").form)


def test_a_form_is_compiled_once(llm, monkeypatch):
    """Compiled forms and the errors of wrong ones are kept; the least recently used is dropped first."""
    own, compiled = grammars.Grammars(llm.tokenizer, llm.tokenizer.eos_token_ids), []
    compile_form = grammars.Grammars._compile

    def noted(self, form):
        compiled.append(form)
        return compile_form(self, form)

    monkeypatch.setattr(grammars.Grammars, "_compile", noted)
    monkeypatch.setattr(grammars, "MAX_KEPT", 2)

    def ask(regex):
        own.matcher(SamplingParams(regex=regex).form, grammars.Thought())()

    for regex in ("a", "b", "a", "c", "a"):
        ask(regex)
    assert [form.text for form in compiled] == ["a", "b", "c"]
    ask("b")
    for _ in range(2):
        with pytest.raises(RequestError, match="unclosed group"):
            ask("(")
    assert [form.text for form in compiled] == ["a", "b", "c", "b", "("]


def test_without_the_package_the_error_names_it(llm, monkeypatch):
    monkeypatch.setattr(grammars, "missing_packages", lambda extra: ["llguidance"])
    with pytest.raises(RequestError, match="llguidance.*pip install"):
        llm.generate(PROMPT, SamplingParams(regex="never compiled before"))


def test_the_first_mask_of_a_new_schema_is_soon_there(llm):
    """From a new schema to the mask of the first token the median time is at most 15 ms, more on a slow machine."""
    maker = llm.maker
    maker.forms.grammars.prepare()
    times = []
    for schema in schemas(40, seed=9):
        form = SamplingParams(json_schema=schema).form
        begun = perf_counter()
        maker.forms.grammars.matcher(form, grammars.Thought())().allowed()
        times.append(perf_counter() - begun)
    assert sorted(times)[20] < 0.015 * slowness(perf_counter)
