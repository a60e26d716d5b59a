"""The bundled model through the public API: it writes Python, answers, streams whole characters, fast and small."""

import ast
import json
import os
import subprocess
import sys
import time

import pytest
from timing import slowness

from cpmrt import LLM, SamplingParams
from cpmrt.weights.hub import BUNDLED


@pytest.fixture(scope="module")
def demo():
    with LLM() as llm:
        yield llm


def returning_function(text):
    """Return the first complete function in `text` if it has several statements and a return, else None."""
    lines = text.splitlines()
    for end in range(len(lines), 1, -1):
        try:
            tree = ast.parse("\n".join(lines[:end]))
        except SyntaxError:
            continue
        function = next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)
        returns = function is not None and any(isinstance(node, ast.Return) for node in ast.walk(function))
        return function if returns and len(function.body) >= 2 else None
    return None


def test_it_writes_functions_that_parse_and_return(demo):
    """At least 4 of 12 samples are functions that parse and return.

    Which ones depends on the last bits of the logits, and so on the machine: on three machines 7 to 9 were.
    """
    prompt = "def read_lines(path):"
    params = [SamplingParams(max_new_tokens=128, temperature=0.6, top_p=0.95, seed=seed) for seed in range(12)]
    answers = demo.generate([prompt] * len(params), params)
    functions = [returning_function(prompt + answer.text) for answer in answers]
    assert sum(function is not None and function.name == "read_lines" for function in functions) >= 4


def test_sampled_text_differs_by_seed_and_repeats_by_seed(demo):
    texts = [
        demo.generate("import os\n", SamplingParams(max_new_tokens=40, temperature=0.8, top_p=0.95, seed=seed)).text
        for seed in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize(("question", "words"), [
    ("What does os.path.join do?", "Join two or more pathname components"),
    ("Explain json.dumps.", "Serialize ``obj`` to a JSON formatted"),
    ("Who are you?", "demo model of cpmrt"),
])  # fmt: skip
def test_chat_says_what_is_true(demo, question, words):
    out = demo.chat([{"role": "user", "content": question}], SamplingParams(max_new_tokens=80))
    assert words in out.text and out.finish_reason == "stop"
    assert out.token_ids[-1] in demo.config.eos_token_ids and "<|im_end|>" not in out.text


def test_conversations_have_one_bos(demo):
    ids = demo.chat_prompt([{"role": "user", "content": "hi"}])
    assert ids[0] == demo.tokenizer.bos_token_id and ids.count(demo.tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("text", ["你好，世界", "🧑‍🚀🚀", "naïve café\r\n\tend"])
def test_characters_outside_the_training_text_survive(demo, text):
    ids = demo.tokenizer.encode(text)
    assert demo.tokenizer.decode(ids) == text
    out = demo.generate(f'greeting = "{text}"\nprint(', SamplingParams(max_new_tokens=8, temperature=2.0, seed=3))
    assert out.text == out.text.encode().decode()


def test_scores_prefer_python_to_noise(demo):
    code = demo.tokenizer.encode("for line in lines:\n    print(line)\n")
    noise = demo.tokenizer.encode("line lines print for in\n ( : ) line\n")
    assert demo.score(code).mean() > demo.score(noise).mean() + 1


@pytest.mark.all
def test_the_whole_context_can_be_used(demo):
    prompt = demo.tokenizer.encode("import os\n" * 2000)[: demo.max_context - 4]
    out = demo.generate(prompt, SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(out.token_ids) == 4 and demo.max_context == 4096


def test_the_bundle_is_small():
    assert sum(file.stat().st_size for file in BUNDLED.iterdir()) <= 16_000_000


MEASURE = """
import json, re
from cpmrt import LLM, SamplingParams
llm = LLM()
llm.generate("warm up", SamplingParams(max_new_tokens=4))
rates = [llm.generate("def main():", SamplingParams(max_new_tokens=64, ignore_eos=True)).stats.decode_tokens_per_s
         for _ in range(3)]
llm.generate([5] * 2000, SamplingParams(max_new_tokens=1))
# Of this program alone: getrusage would count what its parent held when it forked.
peak_kib = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(json.dumps([max(rates), peak_kib / 1024]))
"""


@pytest.mark.all
@pytest.mark.alone
def test_speed_and_memory():
    """The model makes at least 25 tokens a second, as `cpmrt generate` measures them, in under 400 MB."""
    before = slowness(time.perf_counter)
    # A fresh process, so that neither pytest's memory nor its other tests' arrays count.
    run = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, env=os.environ)
    tokens_per_s, peak_mib = json.loads(run.stdout)
    slow = max(before, slowness(time.perf_counter))  # a slow machine may make fewer
    assert tokens_per_s >= 25 / slow and peak_mib < 400, (tokens_per_s, peak_mib, slow)
