"""Answers are free until they begin to call a tool, where the grammar binds, and drafts change none of them."""

from __future__ import annotations

import json
import re
from functools import partial

import jsonschema
import pytest
from tool_model import MARKERS, TOOLS, tool_llm

from cpmrt import LLM, RequestError, SamplingParams
from cpmrt.tool_use.calls import schemas_of
from cpmrt.tool_use.finder import calls_in
from cpmrt.tool_use.formats import HERMES
from cpmrt.tool_use.grammars import grammar_of

pytest.importorskip("llguidance")
PROMPT = "def read_lines(path):"
MESSAGES = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="reference", max_sequences=4, max_context=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def wishes(llm):
    """Free answers, each with parameters whose trigger is a part of it and whose grammar begins with the trigger."""
    made = []
    for seed in range(3):
        shared = {"temperature": 1.0, "seed": seed, "max_new_tokens": 40, "logprobs": seed % 2}
        free = llm.generate(PROMPT, SamplingParams(**shared)).text
        trigger = free[20 + 3 * seed : 22 + 3 * seed]
        if '"' in trigger or "\\" in trigger or "\ufffd" in trigger:
            continue
        grammar = f'start: {json.dumps(trigger)} "{seed}" /[xyz]{{2,9}}/ " end"'
        made.append((free, SamplingParams(**shared, grammar=grammar, grammar_trigger=trigger)))
    return made


def test_a_grammar_binds_from_its_trigger_on(llm, wishes):
    made = wishes
    answers = llm.generate([PROMPT] * len(made), [params for _, params in made])
    assert len(made) > 1
    for (free, params), answer in zip(made, answers, strict=True):
        start = free.index(params.grammar_trigger)
        assert answer.text.startswith(free[:start])
        assert re.fullmatch(r"\d[xyz]{2,9} end", answer.text[start + len(params.grammar_trigger) :])
        assert llm.generate(PROMPT, params).token_ids == answer.token_ids
        assert len(answer.logprobs) == (len(answer.token_ids) if params.logprobs else 0)


@pytest.mark.parametrize("length", [63, 64, 65, 128])
def test_a_grammar_may_refuse_the_first_token_behind_a_full_page(llm, length):
    """A grammar may refuse an answer's first token after a full page; the sequence resumes with no answer token."""
    first = llm.tokenizer.encode("ion", add_special_tokens=False)
    assert len(first) == 1
    params = SamplingParams(
        max_new_tokens=8, temperature=0, logit_bias={first[0]: 100}, ignore_eos=True,
        grammar='start: "io" "1" /[0-9]+/', grammar_trigger="io",
    )  # fmt: skip
    assert re.fullmatch(r"io1\d+", llm.generate([5] * length, params).text)


@pytest.mark.parametrize(("grammar", "max_new_tokens"), [('"ion"', 8), ('"io" "n"', 1), ('"i" /[a-z]{2}/', 2)])
def test_an_answer_ends_where_its_trigger_completes_the_grammar(llm, grammar, max_new_tokens):
    first = llm.tokenizer.encode("ion", add_special_tokens=False)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=0, logit_bias={first[0]: 100}, ignore_eos=True,
        grammar=f"start: {grammar}", grammar_trigger="i",
    )  # fmt: skip
    answer = llm.generate(PROMPT, params)
    assert (answer.text, list(answer.token_ids), answer.finish_reason) == ("ion", first, "stop")


@pytest.mark.parametrize("settings", [
    {"draft": "eagle2"}, pytest.param({"draft": "lookup"}, marks=pytest.mark.all),
    pytest.param({"prefix_cache": False}, marks=pytest.mark.all),
], ids=str)  # fmt: skip
def test_drafts_change_nothing_about_it(llm, wishes, settings):
    made = [params for _, params in wishes]
    alone = [llm.generate(PROMPT, params).token_ids for params in made]
    with LLM(executor="reference", max_context=256, **settings) as other:
        assert [other.generate(PROMPT, params).token_ids for params in made] == alone


def test_an_answer_without_the_trigger_is_the_free_one(llm):
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=20)
    bound = SamplingParams(
        temperature=1.0, seed=3, max_new_tokens=20, grammar='start: "@@@@" /x+/', grammar_trigger="@@@@"
    )
    assert llm.generate(PROMPT, bound).token_ids == llm.generate(PROMPT, params).token_ids


def pieces(llm, text):
    """Return tokens of a text cut at every third character, as a model may sample but its tokenizer does not give."""
    parts = [text[at : at + 3] for at in range(0, len(text), 3)]
    return [token for part in parts for token in llm.tokenizer.encode(part, add_special_tokens=False)]


def bound_at(trigger, tokens):
    for number, token in enumerate(tokens, 1):
        bound = trigger.push(token)
        if bound is not None:
            return number, bound
    return None


@pytest.mark.parametrize("family", MARKERS)
def test_calls_bind_where_they_begin(family, tmp_path):
    """With tools and the choice "auto" the grammar binds where a call begins, in the format of each family."""
    with tool_llm(tmp_path / "model", family) as llm:
        params = llm.maker.calling(SamplingParams(), TOOLS, ())
        assert params.grammar_trigger == MARKERS[family] and params.form is not None
        for text, opens in (("Let me see. ", b""), ("a tool would help</think>", b"</think>")):
            make = llm.maker.forms.grammars.trigger(params.form, opens)
            begun = text + "\n" + MARKERS[family]
            for tokens in (llm.tokenizer.encode(begun, add_special_tokens=False), pieces(llm, begun)):
                number, bound = bound_at(make(), tokens)
                assert number == len(tokens) and bound.is_kept
                rest = list(bound.matcher.forced())
                bound.matcher.accept(rest)
                assert bound.matcher.allowed() is not None and rest, "the form goes on behind the marker"
        inside = llm.tokenizer.encode(f"I may write {MARKERS[family]} or not", add_special_tokens=False)
        assert bound_at(llm.maker.forms.grammars.trigger(params.form, b"</think>")(), inside) is None


@pytest.mark.parametrize("before", ["", "\n ", "\n" * 40])
@pytest.mark.parametrize("thought", [("<think>", "</think>"), ("<|thought_start|>", "</think><|thought_end|>")])
def test_a_thought_that_the_answer_begins_with_may_say_the_trigger(llm, thought, before):
    """A thought at an answer's beginning may say the trigger; its markers are several tokens here."""
    params = SamplingParams(grammar='start: "<t>" "x"', grammar_trigger="<t>")
    opening, closing = thought
    begun = f"{before}{opening}I may write <t> or not"
    for tokens_of in (partial(llm.tokenizer.encode, add_special_tokens=False), partial(pieces, llm)):
        trigger = llm.maker.forms.grammars.trigger(params.form)()
        assert bound_at(trigger, tokens_of(begun)) is None
        assert bound_at(trigger, tokens_of(f"{closing} so: ")) is None
        assert bound_at(trigger, tokens_of("<t>")) is not None
        for free in (f"{before}<thin", f"a {opening}", f"{before}<", ""):
            assert bound_at(llm.maker.forms.grammars.trigger(params.form)(), tokens_of(f"{free} <t>")) is not None


def test_a_trigger_may_be_the_marker_of_a_thought(llm):
    params = SamplingParams(grammar='start: "<think>" "x"', grammar_trigger="<think>")
    trigger = llm.maker.forms.grammars.trigger(params.form)()
    assert bound_at(trigger, llm.tokenizer.encode("<think>", add_special_tokens=False)) is not None


def test_a_token_that_goes_wrong_behind_the_marker_is_taken_back(llm):
    """The last token of "<tool_call>" is taken back if it says more than the grammar allows."""
    grammar = grammar_of(HERMES, schemas_of(TOOLS), llm.tokenizer, one_call=True)
    form = SamplingParams(grammar=grammar, grammar_trigger=HERMES.start).form
    trigger = llm.maker.forms.grammars.trigger(form)()
    tokenizer = llm.tokenizer
    wrong = next(
        token for token in range(llm.config.vocab_size)
        if tokenizer.written_bytes(token).startswith(b">") and tokenizer.written_bytes(token)[1:2] not in (b"", b"\n")
    )  # fmt: skip
    tokens = tokenizer.encode("Yes <tool_call", add_special_tokens=False)
    number, bound = bound_at(trigger, [*tokens, wrong])
    assert number == len(tokens) + 1 and not bound.is_kept
    with pytest.raises(Exception, match="form"):
        bound.matcher.fork().accept([wrong])
    assert bytes(b for t in bound.matcher.forced() for b in tokenizer.written_bytes(t)).startswith(b">\n{")


def test_tools_that_no_grammar_can_have_leave_the_answer_free(llm, monkeypatch):
    odd = [{"type": "function", "function": {"name": 'a"b', "parameters": {}}}]
    unsupported = [{"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}]
    params = SamplingParams()
    assert llm.maker.calling(params, odd, ()) is params and llm.maker.calling(params, unsupported, ()) is params
    with pytest.raises(RequestError):
        llm.maker.calling(params, odd, ('a"b',))
    monkeypatch.setattr("cpmrt.job_maker.missing_packages", lambda extra: ["llguidance"])
    assert llm.maker.calling(params, TOOLS, ()) is params


@pytest.mark.parametrize("grammar, trigger", [(None, "x"), ("start: /x/", ""), ("start: /x/", "x\ud800")])
def test_a_trigger_is_a_text_beside_a_grammar(grammar, trigger):
    with pytest.raises(RequestError, match="grammar_trigger"):
        SamplingParams(grammar=grammar, grammar_trigger=trigger)


@pytest.mark.parametrize("grammar, trigger", [
    ('start: "ANSWER"', "("), ('start: "("', "(x"), ('start: "x(" "y"', "("), ('start: "</s>" "x"', "<s>"),
    ('start: <[{end}]> "x"', "<s>"),
])  # fmt: skip
def test_a_grammar_that_does_not_begin_with_its_trigger_is_refused(llm, grammar, trigger):
    params = SamplingParams(grammar=grammar.format(end=llm.tokenizer.token_id("</s>")), grammar_trigger=trigger)
    with pytest.raises(RequestError, match="grammar_trigger: expected a text with which the grammar begins") as caught:
        llm.generate(PROMPT, params)
    assert repr(trigger) in str(caught.value)


@pytest.mark.parametrize("grammar, trigger", [
    ('start: <[{end}]> "x"', "</s>"), ('start: "a" <[{end}]> " x" "y"', "a</s> x"), ('start: "</s>" "x"', "</s>"),
    ("start: /[a-z]+/", "abc"), ("root ::= [a-z]+", "abc"),
])  # fmt: skip
def test_a_trigger_may_hold_special_tokens_and_parts_of_terminals(llm, grammar, trigger):
    params = SamplingParams(
        max_new_tokens=2, grammar=grammar.format(end=llm.tokenizer.token_id("</s>")), grammar_trigger=trigger
    )
    assert llm.generate(PROMPT, params).finish_reason == "length"


def test_calls_of_a_model_that_may_call_validate(tmp_path):
    """Calls validate in every answer that ends; the trigger is a letter that this model writes anyway."""
    with tool_llm(tmp_path / "model", "hermes") as llm:
        grammar = grammar_of(HERMES, schemas_of(TOOLS), llm.tokenizer, one_call=True).replace(
            'start: call', 'start: "e" call'
        )
        made = 0
        for seed in range(4):
            params = SamplingParams(
                temperature=1.0, seed=seed, max_new_tokens=200, grammar=grammar, grammar_trigger="e"
            )
            answer = llm.chat(MESSAGES, params)
            calls = calls_in(answer.text, schemas_of(TOOLS))
            if answer.finish_reason == "stop" and calls:
                made += 1
                jsonschema.validate(json.loads(calls[0].arguments), schemas_of(TOOLS)[calls[0].name])
        assert made > 1
