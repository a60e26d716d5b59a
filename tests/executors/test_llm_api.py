"""The forms of calls and their results: lists of prompts, choices, embeddings, errors for wrong arguments."""

import contextlib
import copy
import os
import pickle
import subprocess
import sys
from itertools import count

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint

import cpmrt
from cpmrt import LLM, SamplingParams
from cpmrt.engine import request_seed
from cpmrt.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    CpmrtError,
    RequestError,
)
from cpmrt.executor import Decode

SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=256)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, executor="reference", max_sequences=3) as made:
        yield made


def test_a_list_of_prompts_is_run_together_and_comes_back_in_order(checkpoint):
    prompts, steps = [f"prompt {number}" for number in range(7)], []
    params = [SamplingParams(max_new_tokens=20 - n, seed=n, temperature=1.0, ignore_eos=True) for n in range(7)]
    with LLM(checkpoint, executor="reference", max_sequences=3, on_step=lambda step, _: steps.append(step)) as llm:
        alone = [llm.generate(prompt, own).token_ids for prompt, own in zip(prompts, params, strict=True)]
        steps.clear()
        together = llm.generate(prompts, params)
        assert [answer.token_ids for answer in together] == alone
        assert max(len(step.slots) for step in steps if isinstance(step, Decode)) == 3
        ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
        again = llm.generate(ids, SAMPLED)
        assert [answer.text for answer in again] == [llm.generate(prompt, SAMPLED).text for prompt in prompts]


def test_a_list_of_conversations(llm):
    chats = [HI, [{"role": "user", "content": "bye"}]]
    answers = llm.chat(chats, SAMPLED, enable_thinking=False)
    expected = [llm.chat(chat, SAMPLED, enable_thinking=False).token_ids for chat in chats]
    assert [answer.token_ids for answer in answers] == expected


def test_progress_is_shown_on_request(llm, capsys):
    llm.generate(["a", "b"], SAMPLED)
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", "b"], SAMPLED, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "2/2" in err and "tok/s" in err


def test_a_bar_that_cannot_be_shown_costs_no_answer(llm, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    closed = open(os.devnull, "w")  # noqa: SIM115
    closed.close()
    for file in (None, closed, open("/dev/full", "w"), open(writer, "w")):  # noqa: SIM115
        monkeypatch.setattr(sys, "stderr", file)
        answers = llm.generate(["a", "b"], SAMPLED, progress=True)
        monkeypatch.undo()
        assert len(answers) == 2
        with contextlib.suppress(AttributeError, OSError):
            file.close()


@pytest.mark.parametrize(("prompts", "params", "says"), [
    (["fine", b"bytes"], None, r"prompts\[1\]: prompt: expected text or a list of token ids, got bytes; decode it"),
    (["fine", ""], SAMPLED, None),
    ([[1, 2], [3, 999]], None, r"prompts\[1\]: prompt: token 1: expected an id in \[0, 259\), got 999"),
    (["a", "b"], [SAMPLED], "params: expected one for all or 2, as prompts, got 1"),
    (["a", "b"], [SAMPLED, {"temperature": 1}], r"prompts\[1\]: params: expected SamplingParams, got dict"),
    ("a", [SAMPLED], "params: expected SamplingParams, got list"),
    (["a", "b" * 300], None, r"prompts\[1\]: the prompt does not fit the context"),
])  # fmt: skip
def test_a_wrong_prompt_of_many_is_named_before_anything_runs(llm, prompts, params, says):
    if says is None:
        assert len(llm.generate(prompts, params)) == 2
        return
    with pytest.raises(RequestError, match=says):
        llm.generate(prompts, params)
    assert llm.shared.is_idle and len(llm.engine.slots.free) == 3


def test_n_answers_have_seeds_of_their_own(llm):
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=7, ignore_eos=True, n=4)
    answer = llm.generate("abc", params)
    assert answer.choices[0] == answer and len(answer.choices) == 4 and len(answer.others) == 3
    for number, choice in enumerate(answer.choices):
        seed = request_seed(7, number) if number else 7
        alone = SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)
        assert choice.token_ids == llm.generate("abc", alone).token_ids
    assert len({choice.token_ids for choice in answer.choices}) == 4
    with pytest.raises(RequestError, match="SamplingParams.n: expected 1 for a stream, got 4"):
        llm.stream("abc", params)


def test_score_takes_text(llm):
    np.testing.assert_array_equal(llm.score("héllo"), llm.score(llm.tokenizer.encode("héllo")))
    np.testing.assert_array_equal(llm.logits("a"), llm.logits(np.array(llm.tokenizer.encode("a"))))


def test_embeddings_are_the_final_norm_of_the_plain_forward(llm, checkpoint):
    """Embeddings are the final norm's states, here recovered from logits, which the head makes of them."""
    from safetensors.numpy import load_file

    embedding = load_file(checkpoint / "model.safetensors")
    head = embedding.get("lm_head.weight", embedding["model.embed_tokens.weight"])
    ids = llm.tokenizer.encode("a text of some length")
    states = np.linalg.lstsq(head, llm.logits(ids).T * llm.config.logit_divisor, rcond=None)[0].T
    mean, last = (llm.embed(ids, pooling=pooling, normalize=False) for pooling in ("mean", "last"))
    np.testing.assert_allclose(mean, states.mean(0), atol=1e-3)
    np.testing.assert_allclose(last, states[-1], atol=1e-3)
    assert mean.dtype == np.float32 and mean.shape == (64,)


def test_each_of_several_conversations_may_leave_its_settings_out(llm):
    several = llm.chat([HI, HI], [None, SAMPLED])
    assert [answer.token_ids for answer in several] == [llm.chat(HI, each).token_ids for each in (None, SAMPLED)]


@pytest.mark.parametrize(("wrong", "says"), [
    ([], r"prompts\[1\]: messages: expected a list of at least one message, got \[\]"),
    ([{"role": "robot", "content": ""}], r"prompts\[1\]: messages\[0\]\.role: expected system"),
    ([{"role": "user", "content": "b" * 300}], r"prompts\[1\]: the prompt does not fit the context"),
    ([{"role": "user", "content": "b" * 100}], r"prompts\[1\]: the request does not fit the context"),
])  # fmt: skip
def test_a_wrong_conversation_of_many_is_named(llm, wrong, says):
    with pytest.raises(RequestError, match=f"^{says}"):
        llm.chat([HI, wrong], SamplingParams(max_new_tokens=200))


@pytest.mark.parametrize(("params", "options", "says"), [
    (SamplingParams(stop_token_ids=[999]), {}, "SamplingParams.stop_token_ids: expected ids in"),
    ({"temperature": 1}, {}, "params: expected SamplingParams, got dict"),
    (None, {"enable_thinking": "no"}, "enable_thinking: expected True"),
    (None, {"template_kwargs": {"messages": 1}}, "template_kwargs: messages is an argument of its own"),
    ([SAMPLED, SamplingParams(stop_token_ids=[999])], {}, r"prompts\[1\]: SamplingParams.stop_token_ids: expected"),
])  # fmt: skip
def test_an_error_about_a_setting_for_all_names_no_prompt(llm, params, options, says):
    with pytest.raises(RequestError, match=f"^{says}"):
        llm.chat([HI, HI], params, **options)
    if not options:
        with pytest.raises(RequestError, match=f"^{says}"):
            llm.generate(["a", "b"], params)


def test_a_wrong_text_of_many_to_embed_is_named(llm):
    with pytest.raises(RequestError, match=r"^prompts\[2\]: the prompt does not fit the context"):
        llm.embed(["a", "b", "c" * 300])
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt: token 0: expected an id"):
        llm.embed([[1], [-1]])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_do_not_depend_on_chunks_and_have_length_one(llm, checkpoint, pooling):
    texts = ["one", "another text, which is longer", "one"]
    vectors = llm.embed(texts, pooling=pooling)
    assert vectors.shape == (3, 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(vectors[0], vectors[2])
    with LLM(checkpoint, executor="reference", prefill_chunk=3) as chunked:
        for text, vector in zip(texts, vectors, strict=True):
            np.testing.assert_allclose(chunked.embed(text, pooling=pooling), vector, atol=1e-5)


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda llm: llm.embed("a", pooling="max"), RequestError, "pooling: expected mean | last, got 'max'"),
    (lambda llm: llm.embed(""[:0].encode()), RequestError, "got bytes"),
    (lambda llm: llm.embed([["a"]]), RequestError, "token 0"),
    (lambda llm: llm.score([]), RequestError, "the prompt is empty"),
    (lambda llm: llm.generate([]), RequestError, "the prompt is empty: expected at least one token, got 0"),
    (lambda llm: llm.chat([]), RequestError, "messages: expected a list of at least one message"),
    (lambda llm: llm.score(["a", "b"]), RequestError, "an id in .* got 'a'; pass one prompt; generate and embed"),
    (lambda llm: llm.generate(np.array(["a", "b"])), RequestError, "got 'a'; .* generate and embed take a list"),
    (lambda llm: llm.embed("a", normalize="no"), RequestError, r"normalize: expected True \| False, got 'no'"),
    (lambda llm: llm.chat(HI, allow_special_tokens="false"), RequestError, "allow_special_tokens: expected True"),
    (lambda llm: llm.chat(HI, enable_thinking="yes"), RequestError, "enable_thinking: expected True"),
    (lambda llm: llm.chat(HI, template_kwargs={"x": {1}}), RequestError, "^template_kwargs.x: expected JSON"),
    (lambda llm: llm.chat_prompt(HI, add_generation_prompt="false"), RequestError,
     "add_generation_prompt: expected True"),
    (lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[3, 10**6])), RequestError,
     r"SamplingParams.stop_token_ids: expected ids in \[0, \d+\), got 1000000"),
    (lambda llm: llm.stream("a", SamplingParams(logit_bias={10**6: 2.0})), RequestError,
     r"SamplingParams.logit_bias: expected ids in \[0, \d+\), got 1000000"),
    (lambda llm: llm.score("x" * 300), ContextLengthError, "at most 256"),
    (lambda llm: llm.generate(b"abc"), RequestError, r"got bytes; decode it: prompt.decode\(\)"),
    (lambda llm: llm.generate(np.array([[1, 2]])), RequestError, r"token 0: .* got \[1, 2\]; pass one prompt"),
    (lambda llm: llm.score([[1, 2]]), RequestError, r"token 0: .* got \[1, 2\]; pass one prompt"),
    (lambda llm: llm.stream([np.array([1, 2])]), RequestError, "token 0: .*; pass one prompt"),
    (lambda llm: llm.generate(bytearray(b"abc")), RequestError, "got bytearray"),
    (lambda llm: llm.chat([HI, HI], [SAMPLED, {"temperature": 1}]), RequestError,
     r"prompts\[1\]: params: expected SamplingParams, got dict"),
    (lambda llm: llm.chat(HI, template_kwargs="x"), RequestError, "template_kwargs: expected a dict"),
    (lambda llm: llm.chat(HI, template_kwargs={"tools": []}), RequestError, "pass tools=..."),
    (lambda llm: llm.chat(HI, enable_thinkin=True), ArgumentError,
     "LLM.chat: there is no argument 'enable_thinkin'; did you mean enable_thinking?"),
    (lambda llm: llm.chat(HI, max_new_tokens=4), ArgumentError, r"pass params=SamplingParams\(max_new_tokens=...\)"),
    (lambda llm: llm.chat(HI, stream=True), ArgumentError, r"use llm.stream\(prompt\)"),
    (lambda llm: llm.generate("a", temperature=9), ArgumentError, r"SamplingParams\(temperature=...\)"),
    (lambda llm: llm.generate("a", parms=SAMPLED), ArgumentError, "did you mean params?"),
    (lambda llm: llm.generate("a", max_tokens=9), ArgumentError, r"SamplingParams\(max_new_tokens=...\)"),
    (lambda llm: llm.stream("a", progress=True), ArgumentError, "expected params, prompt"),
    (lambda llm: llm.save_prefix(file="f", prompt="a"), ArgumentError,
     "LLM.save_prefix: there is no argument 'file': expected path, prompt"),
    (lambda llm: llm.save_prefix("f", promt="a"), ArgumentError, "did you mean prompt?"),
    (lambda llm: llm.load_prefix(pth="f"), ArgumentError, "did you mean path?"),
    (lambda llm: llm.request("a", parms=SAMPLED), ArgumentError, "did you mean params?"),
    (lambda llm: LLM(max_model_len=5), ArgumentError, "did you mean max_context?"),
    (lambda llm: LLM(excutor="reference"), ArgumentError,
     "LLM: there is no argument 'excutor'; did you mean executor?"),
    (lambda llm: SamplingParams(max_tokens=5), ArgumentError, "did you mean max_new_tokens?"),
    (lambda llm: SamplingParams(guided_json={}), ArgumentError, "did you mean json_schema?"),
    (lambda llm: SamplingParams(guided_choice=["a"]), ArgumentError, "did you mean choices?"),
    (lambda llm: SamplingParams(num_return_sequences=2), ArgumentError, "did you mean n?"),
    (lambda llm: SamplingParams(prompt_logprobs=1), ArgumentError, r"use llm.score\(prompt\)"),
    (lambda llm: SamplingParams(do_sample=False), ArgumentError, "temperature=0"),
    (lambda llm: SamplingParams(min_tokens=5), ArgumentError, "'min_tokens'; .*ignore_eos=True"),
    (lambda llm: SamplingParams(min_new_tokens=5), ArgumentError, "'min_new_tokens'; .*ignore_eos=True"),
    (lambda llm: SamplingParams(allowed_token_ids=[5]), ArgumentError, "choices=, regex= or grammar="),
    (lambda llm: SamplingParams(length_penalty=1.0), ArgumentError, "leave it out: there is no beam search"),
    (lambda llm: SamplingParams(structured_outputs={}), ArgumentError, "json_schema=, regex=, grammar= or choices="),
    (lambda llm: LLM(n_gpu_layers=-1), ArgumentError, "leave it out"),
    (lambda llm: LLM(trust_remote_code=True), ArgumentError, "leave it out"),
    (lambda llm: LLM(tensor_parallel_size=2), ArgumentError, "a process for each"),
    (lambda llm: LLM(n_batch=64), ArgumentError, "did you mean prefill_chunk?"),
    (lambda llm: LLM(sampling_params=1), ArgumentError, "pass it to generate, stream or chat"),
    (lambda llm: LLM(params=1), ArgumentError, "pass it to generate, stream or chat"),
    (lambda llm: LLM(n_threads=4), ArgumentError, "'n_threads': expected cuda_graphs"),
    (lambda llm: SamplingParams(max_completion_tokens=1), ArgumentError, "did you mean max_new_tokens?"),
    (lambda llm: SamplingParams(temprature=5), ArgumentError, "did you mean temperature?"),
    (lambda llm: SamplingParams(n=0), RequestError, "SamplingParams.n"),
    (lambda llm: SamplingParams(max_new_tokens=2**31), RequestError, "from 1 to 2147483647, or none for as many"),
    (lambda llm: SamplingParams(logit_bias=1), RequestError, "token ids with numbers .* got 1"),
    (lambda llm: LLM(5), ConfigError, "model: expected a folder or a hub id, got 5"),
    (lambda llm: LLM(b"folder"), ConfigError, "model: expected a folder or a hub id"),
    (lambda llm: LLM(executor=3), ConfigError, "executor"),
    (lambda llm: LLM(dtype=None), ConfigError, r"^dtype: expected auto \| float32 \| .* got None"),
    (lambda llm: LLM(draft=3), ConfigError, "draft"),
    (lambda llm: LLM(draft=""), CheckpointError, "draft '': expected an existing folder or a hub id"),
    (lambda llm: LLM(draft="/absent"), CheckpointError, "draft '/absent': expected an existing folder or a hub id"),
    (lambda llm: LLM(draft="./absent/one"), CheckpointError, "draft './absent/one': expected an existing folder"),
    (lambda llm: LLM(draft="x" * 300), CheckpointError, "draft 'x.*': expected an existing folder or a hub id"),
    (lambda llm: LLM(memory_budget="5 TB"), ConfigError, "^memory_budget: expected a size such as 8GiB"),
    (lambda llm: LLM(on_step=7), ConfigError, "on_step: expected a function of a step and its result, got 7"),
    (lambda llm: LLM(cuda_graphs="no"), ConfigError, r"cuda_graphs: expected True \| False, got 'no'"),
    (lambda llm: pickle.dumps(llm), CpmrtError, "an LLM cannot be pickled or copied"),
    (lambda llm: copy.copy(llm), CpmrtError, "an LLM cannot be pickled or copied"),
    (lambda llm: pickle.dumps(llm.stream("a")), CpmrtError, "a stream cannot be pickled or copied"),
    (lambda llm: copy.copy(llm.stream("a")), CpmrtError, "a stream cannot be pickled or copied"),
    (lambda llm: llm.chat([{"role": "bot", "content": "hi"}]), RequestError, r"messages\[0\].role"),
], ids=count())  # fmt: skip
def test_a_mistake_is_one_line_that_says_what_to_change(llm, call, error, says):
    with pytest.raises(error, match=says) as caught:
        call(llm)
    assert isinstance(caught.value, CpmrtError) and "\n" not in str(caught.value)
    assert isinstance(caught.value, TypeError) == (error is ArgumentError)


def test_template_variables_reach_the_template(tmp_path):
    folder = write_checkpoint(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}|{{ mood }}|{{ enable_thinking }}|")
    with LLM(folder, executor="reference") as llm:
        for extra, thinking in (({"mood": "x", "enable_thinking": 0}, None), ({"mood": "x"}, False)):
            ids = llm.chat_prompt(HI, template_kwargs=extra, enable_thinking=thinking)
            assert llm.tokenizer.decode(ids) == "hi|x|False|"


def test_its_warnings_can_be_told_from_others(checkpoint):
    with pytest.warns(cpmrt.CpmrtWarning, match="hf_overrides: 'rope_thetta'"):
        LLM(checkpoint, executor="reference", hf_overrides={"rope_thetta": 1e6}).close()


def test_what_the_package_shows(llm):
    assert set(dir(cpmrt)) == set(cpmrt.__all__) > {"LLM", "AsyncLLM", "CpmrtError", "RequestError"}
    assert all(getattr(cpmrt, name) is not None for name in cpmrt.__all__)
    errors = [each for each in (getattr(cpmrt, name) for name in cpmrt.__all__) if isinstance(each, type)]
    assert sum(issubclass(each, CpmrtError) for each in errors) == 1 + len(_all_errors(CpmrtError))
    assert repr(llm).startswith("LLM('/") and repr(llm).endswith(
        "executor='reference', max_context=256, max_sequences=3)"
    )
    with pytest.raises(AttributeError, match="no attribute 'llama'"):
        cpmrt.llama  # noqa: B018


def _all_errors(kind):
    """Return all subclasses of `kind` in cpmrt.errors, where the errors for users are defined."""
    found = {each for each in kind.__subclasses__() if each.__module__ == "cpmrt.errors"}
    return found.union(*(_all_errors(each) for each in found))


def test_help_shows_signatures_and_examples():
    program = "import cpmrt, pydoc; print(pydoc.plain(pydoc.render_doc(cpmrt.LLM)))"
    text = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    for part in ("max_sequences: 'int' = 1", ">>> llm.generate(", "vectors = llm.embed(", "progress: 'bool' = False"):
        assert part in text
