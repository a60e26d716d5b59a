"""Answers under a form have the same bits with any draft: real grammars, every kind of draft, alone or with others."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from draft_checkpoint import write_all
from form_cases import LARK_GRAMMARS, REGEXES, schemas
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cpmrt import LLM, SamplingParams
from cpmrt.executor import Decode
from cpmrt.weights.hub import BUNDLED

pytest.importorskip("llguidance")
PROMPT, BRIEF_PROMPT = "Here is the answer: ", "abcabcab"
TREE, CHAIN = {"shapes": [(2, 4, 6)], "adaptive": False}, {"shapes": [(3, 1, 4)], "adaptive": False}
DRAFTS = {
    "eagle2": ("vllm", TREE), "of cpm.cu": ("cpmcu", TREE), "classic": ("classic", CHAIN),
    "frequent tokens": ("frequent", TREE), "eagle3": ("eagle3", TREE), "a small model": ("model", CHAIN),
    "the model itself": ("target", CHAIN),
    "itself, with eagle2": ("target", CHAIN | {"inner": {"draft": "../vllm", "top_k": 4}}),
    "eagle2, or a lookup": ("vllm", TREE | {"lookup": 9}),
    "lookup": ("lookup", {"method": "lookup", "num_passes": 3, "adaptive": False}),
}  # fmt: skip
_POINT = {"type": "object", "properties": {"ab": {"type": "integer", "minimum": 0, "maximum": 21}}, "required": ["ab"]}
FORMS = {
    "an object": {"json_schema": _POINT | {"additionalProperties": False}},
    "a list": {"json_schema": {"type": "array", "items": {"enum": ["ab", "cab", 0, 12]}, "minItems": 2, "maxItems": 9}},
    "an expression": {"regex": "(ab|ba|c[0-2]x?){3,9}"},
    "a grammar": {"grammar": 'start: sum ("=" sum)?\nsum: term ("+" term)*\nterm: /[0-2]{1,2}/ | "[" sum "]"'},
    "choices": {"choices": ["abcab", "abba", "x"]},
}
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "logprobs": {"temperature": 1.0, "logprobs": 2, "min_p": 0.01},
    "a stop string": {"temperature": 1.0, "stop": ("ba", "1,", "+")},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of the target, whose 24 tokens are letters and signs, and of its drafts, each in a folder of its own."""
    root = write_all(tmp_path_factory.mktemp("drafts"))
    texts = ["<s>", "</s>", *'{}[]":,', "Ġ", *"012abcxy=+", "ab", ",Ġ"]
    vocab = {text: number for number, text in enumerate(["<pad>", *texts])}
    library = Tokenizer(models.BPE(vocab, [("a", "b"), (",", "Ġ")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<pad>", "<s>", "</s>"])
    library.save(str(root / "target" / "tokenizer.json"))
    return root


def opened(folder, draft=None, speculate=None, **settings):
    settings |= {"draft": draft, "speculate": speculate} if draft else {}
    return LLM(folder, executor="reference", max_context=256, prefill_chunk=32, **settings)


def brief(forms=FORMS, settings=SETTINGS):
    return [
        SamplingParams(**form, **setting, seed=5 * number + place, max_new_tokens=40)
        for number, form in enumerate(forms.values())
        for place, setting in enumerate(settings.values())
    ]


def answers(llm, params, prompt=BRIEF_PROMPT):
    """Generate one answer after the other; return the tokens, log-probabilities, text and finish reason of each."""
    found = [llm.generate(prompt, one) for one in params]
    return [(answer.token_ids, answer.logprobs, answer.text, answer.finish_reason) for answer in found]


@pytest.fixture(scope="module")
def plain(root):
    with opened(root / "target") as llm:
        return answers(llm, brief())


def test_the_forms_hold(plain):
    for params, (_, _, text, reason) in zip(brief(), plain, strict=True):
        if reason == "stop" and not params.stop:
            if params.json_schema:
                json.loads(text)
            elif params.regex:
                assert re.fullmatch(params.regex, text)
    assert Counter(reason for *_, reason in plain)["stop"] > len(plain) / 2
    assert len({text for *_, text, _ in plain}) > len(plain) / 2


RARE = ("eagle2, or a lookup", "of cpm.cu", "classic", "frequent tokens", "a small model", "itself, with eagle2")


@pytest.mark.parametrize(
    "draft", [pytest.param(name, marks=pytest.mark.all if name in RARE else ()) for name in DRAFTS]
)
def test_a_draft_changes_no_bit(root, plain, draft):
    folder, speculate = DRAFTS[draft]
    steps = Counter()

    def note(step, result):
        steps[type(step).__name__] += len(result.slots[0].token_ids) if result.slots else 0
        steps["certain"] += len(step.certain) if isinstance(step, Decode) else 0

    drafted = folder if folder == "lookup" else str(root / folder)
    with opened(root / "target", drafted, speculate, on_step=note) as llm:
        assert answers(llm, brief()) == plain
    assert steps["Speculate"] and steps["certain"]


@pytest.mark.parametrize(
    "draft", ["eagle2", *(pytest.param(name, marks=pytest.mark.all) for name in ("eagle3", "lookup"))]
)
def test_some_of_several_sequences_have_forms(root, plain, draft):
    """Sequences with and without forms decode together, with a draft, and each gets the tokens that it gets alone."""
    folder, speculate = DRAFTS[draft]
    free = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=15, ignore_eos=True) for seed in range(4)]
    mixed = [one for pair in zip(brief()[::5], free, strict=False) for one in pair] + [brief()[-2]]
    with opened(root / "target", max_sequences=1) as llm:
        alone = [llm.generate(BRIEF_PROMPT, one).token_ids for one in mixed]
    drafted = folder if folder == "lookup" else str(root / folder)
    for most in (2, 5):
        with opened(root / "target", drafted, speculate, max_sequences=most) as llm:
            together = llm.generate([BRIEF_PROMPT] * len(mixed), mixed)
        assert [answer.token_ids for answer in together] == alone


def wishes(num_schemas, regexes, grammars):
    """Return sampling parameters with forms for the bundled model, and the settings of sampling in turn."""
    forms = [{"json_schema": schema} for schema in schemas(num_schemas, seed=4)]
    forms += [{"regex": regex} for regex in regexes] + [{"grammar": grammar} for grammar in grammars]
    settings = [{"temperature": 1.0}, {}, {"temperature": 0.8, "repetition_penalty": 1.1, "logprobs": 1}]
    return [
        SamplingParams(**form, **settings[seed % 3], seed=seed, max_new_tokens=60) for seed, form in enumerate(forms)
    ]


def check_bundled(wanted, drafts):
    with LLM(executor="reference", max_context=256) as llm:
        plain = answers(llm, wanted, PROMPT)
    for settings in drafts:
        with LLM(executor="reference", max_context=256, **settings) as llm:
            assert answers(llm, wanted, PROMPT) == plain, settings


def test_the_bundled_model_and_its_draft():
    check_bundled(wishes(1, REGEXES[3:4], []), [{"draft": "eagle2"}])


@pytest.mark.all
def test_all_forms_with_the_bundled_model():
    """300 schemas, 100 regular expressions and 30 grammars give the same bits with the model's own draft."""
    check_bundled(wishes(300, REGEXES, LARK_GRAMMARS), [{"draft": "eagle2"}])


@pytest.mark.all
def test_other_drafts_with_the_bundled_model():
    itself = {"draft": str(BUNDLED), "speculate": {"num_passes": 3}}
    check_bundled(wishes(30, REGEXES[::9], LARK_GRAMMARS[::6]), [{"draft": "eagle3"}, {"draft": "lookup"}, itself])


def test_forms_of_thoughts_and_loops_with_drafts(root):
    """Tokens stay the same if the thinking budget ends, and the sequence pauses, in any place of a drafted step."""
    params = replace(brief()[6], max_new_tokens=40)
    with opened(root / "target") as plain, opened(root / "target", str(root / "target"), CHAIN) as drafted:
        for budget in range(1, 12, 4):
            paused = replace(params, max_thinking_tokens=budget)
            assert drafted.generate(BRIEF_PROMPT, paused).token_ids == plain.generate(BRIEF_PROMPT, paused).token_ids


def test_a_log_of_drafted_forms_replays(root, tmp_path):
    from cpmrt.engine.step_log import StepLog, read_steps, replay

    path = Path(tmp_path, "steps.jsonl")
    with path.open("w") as file, opened(root / "target", str(root / "eagle3"), TREE, on_step=StepLog(file)) as llm:
        answers(llm, brief()[:8])
    steps = list(read_steps(path))
    with opened(root / "target", str(root / "eagle3"), TREE) as llm:
        found = [result for _, result in replay([step for step, _ in steps], llm.executor)]
    assert found == [result for _, result in steps]
