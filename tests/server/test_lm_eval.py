"""lm-evaluation-harness against a server of the bundled model: log-likelihoods, a rolling perplexity, generation."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval[api]")
pytest.importorskip("tenacity", reason="needs lm-eval[api]")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import lm_eval
from lm_eval.tasks import TaskManager

from cpmrt import LLM, SamplingParams

pytestmark = pytest.mark.all

QUESTIONS = [
    {"begin": "import os\nimport", "choices": [" sys\n", " zzz\n"], "answer": 0},
    {"begin": "def f(x):\n    return", "choices": [" in\n", " x\n"], "answer": 1},
    {"begin": "for i in", "choices": [" range(3):\n", " return:\n"], "answer": 0},
    {"begin": "while True:\n    if x is", "choices": [" while:\n", " None:\n"], "answer": 1},
]
CHOICE = {
    "task": "choice", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
    "doc_to_text": "{{begin}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
    "target_delimiter": "", "metric_list": [{"metric": "acc"}],
}  # fmt: skip
ROLLING = {
    "task": "rolling", "dataset_path": "json", "test_split": "test", "output_type": "loglikelihood_rolling",
    "doc_to_text": "", "doc_to_target": "{{begin}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
}  # fmt: skip
GENERATION = {
    "task": "generation", "dataset_path": "json", "test_split": "test", "output_type": "generate_until",
    "doc_to_text": "{{begin}}", "doc_to_target": "s", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="reference", max_context=512, prefill_chunk=64) as model:
        yield model


@pytest.fixture
def evaluate(demo, tmp_path):
    """Return a function that runs a task and returns its results and its samples."""

    def run(task, **options):
        (tmp_path / "test.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        task = task | {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "test.jsonl")}}}
        settings = {"model": "demo", "base_url": f"{demo.url}/v1/completions", "tokenizer_backend": "remote"}
        done = lm_eval.simple_evaluate(
            model="local-completions", model_args=settings | {"max_length": 512} | options, tasks=[task],
            task_manager=TaskManager(include_defaults=False), batch_size=2, log_samples=True, bootstrap_iters=0,
        )  # fmt: skip
        return done["results"][task["task"]], done["samples"][task["task"]]

    return run


def log_likelihood(llm, begin, end):
    """Return the log-likelihood of `end` after `begin`, by the model itself."""
    begun, whole = (llm.tokenizer.encode(text, add_special_tokens=False) for text in (begin, begin + end))
    assert whole[: len(begun)] == begun, "the question is cut between two tokens"
    return float(llm.score(whole)[len(begun) - 1 :].sum())


def test_log_likelihoods_are_those_of_the_model(evaluate, llm):
    results, samples = evaluate(CHOICE)
    right = 0
    for sample in samples:
        question = sample["doc"]
        found = [float(response[0][0]) for response in sample["resps"]]
        expected = [log_likelihood(llm, question["begin"], choice) for choice in question["choices"]]
        np.testing.assert_allclose(found, expected, atol=1e-3)
        right += int(np.argmax(expected)) == question["answer"]
    assert results["acc,none"] == right / len(QUESTIONS)


def test_a_rolling_perplexity(evaluate, llm):
    results, samples = evaluate(ROLLING)
    assert len(samples) == len(QUESTIONS) and 1 < results["byte_perplexity,none"] < 20
    for sample in samples:
        ids = llm.tokenizer.encode(sample["doc"]["begin"], add_special_tokens=False)
        found = float(sample["resps"][0][0])
        assert found == pytest.approx(float(llm.score([llm.tokenizer.bos_token_id, *ids]).sum()), abs=1e-3)


def test_generation(evaluate, llm):
    _, samples = evaluate(GENERATION)
    params = SamplingParams(max_new_tokens=8, temperature=0, stop=("\n", "<|im_end|>"))
    for sample in samples:
        ids = llm.tokenizer.encode(sample["doc"]["begin"], add_special_tokens=False)
        assert sample["resps"][0][0] == llm.generate(ids, params).text
