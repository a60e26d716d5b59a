"""Measures what a form costs: decoding under a schema against free decoding, the first mask, and the steps it saves.

    python tools/eval_forms.py
    python tools/eval_forms.py --shape minicpm4-8b --tokenizer tokenizer.json
    python tools/eval_forms.py --shape minicpm4-8b --tokenizer tokenizer.json --sequences 32
    python tools/eval_forms.py --shape minicpm4-8b --tokenizer tokenizer.json --draft eagle2 --simulate-accept 2.5

Without a shape it takes the bundled model. A shape has random weights in 4 bits; its tokenizer must have the shape's
vocabulary. A draft's tokens are random too, and what few of them are accepted depends on the form: with
`--simulate-accept` draft steps give as many tokens in the mean under every form, as far as it allows what is drafted.
`any` and `strings` allow nearly every token, so nearly every node has a mask; `text` does not allow half of what such a
draft gives, so its steps give fewer tokens. Without simulation steps are counted. `--repeats 1
--tokens 100` ends within seconds of the model's start.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from form_cases import schemas  # noqa: E402

from cpmrt import LLM, SamplingParams  # noqa: E402
from cpmrt.bench.shapes import SHAPES, config_folder, draft_configs, gptq_config, shape_config  # noqa: E402
from cpmrt.errors import CpmrtError  # noqa: E402
from cpmrt.executor import Step, StepResult  # noqa: E402
from cpmrt.grammar import Thought  # noqa: E402

PROMPT = [5, 6, 7, 8]
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40}, "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
    },
    "required": ["name", "id", "kind"], "additionalProperties": False,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "free": {},
    "any": {"regex": r"(.|\n)+"},
    "text": {"regex": "[a-zA-Z ,.0-9]+"},
    "schema": {"json_schema": {"type": "array", "minItems": 400, "items": _ITEM}},
    "strings": {"json_schema": {"type": "array", "minItems": 400, "items": {"type": "string"}}},
}
_PLAIN, _DRAFTED = ("free", "text", "schema"), ("free", "any", "text", "strings")
_TREE = {"num_passes": 2, "top_k": 10, "tree_size": 12}
TOOL_CALL = {
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


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each figure. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", type=Path, help="the tokenizer.json of a shape")
    parser.add_argument("--sequences", type=int, default=1, help="how many decode together")
    parser.add_argument("--draft", choices=("eagle2", "eagle3", "lookup"))
    parser.add_argument("--simulate-accept", type=float, metavar="TOKENS", help="that a draft step gives in the mean")
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--forms", nargs="+", choices=FORMS, help="the first is what the others are compared with")
    parser.add_argument("--executor", default="auto")
    wish = parser.parse_args(arguments)
    if wish.shape and not wish.tokenizer:
        parser.error("--shape wants --tokenizer")
    counts = Counter[str]()

    def note(step: Step, result: StepResult) -> None:
        counts[type(step).__name__] += 1

    try:
        with _model(wish) as (model, draft):
            settings = {"executor": wish.executor, "max_context": 2048, "max_sequences": wish.sequences}
            source = {"load_format": "dummy"} if wish.shape else {}
            begun = perf_counter()
            with LLM(model, on_step=note, **source, **settings, **_drafting(draft, wish)) as llm:
                print(f"ready after {perf_counter() - begun:.1f} s", flush=True)
                _report(llm, counts, wish)
    except CpmrtError as error:
        print(f"eval_forms.py: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def _model(wish: argparse.Namespace) -> Iterator[tuple[str | None, str | None]]:
    """Yield the model and the draft, as LLM takes them."""
    if wish.shape is None:
        yield None, wish.draft
        return
    config = shape_config(wish.shape) | {"quantization_config": gptq_config()}
    with config_folder(config, draft_configs(wish.shape)) as folder:
        shutil.copy(wish.tokenizer, Path(folder, "tokenizer.json"))
        yield folder, wish.draft if wish.draft in (None, "lookup") else str(Path(folder, wish.draft))


def _drafting(draft: str | None, wish: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `LLM` about drafts. A draft with layers gets one tree, so that few kernels are built."""
    if draft is None:
        return {}
    speculate = {"adaptive": False} | (_TREE if wish.draft != "lookup" else {})
    if wish.simulate_accept is not None:
        speculate["simulate_accept"] = wish.simulate_accept
    return {"draft": draft, "speculate": speculate}


def _report(llm: LLM, counts: Counter[str], wish: argparse.Namespace) -> None:
    name = f"{wish.shape or 'demo'}, {wish.sequences} together, draft {wish.draft or 'none'}"
    if wish.sequences == 1 and wish.draft is None:
        _first_masks(llm)
        _saved_steps(llm, counts)
    free = 0.0
    for form in wish.forms or (_DRAFTED if wish.draft else _PLAIN):
        rate, unit, step = _best_rate(llm, counts, FORMS[form], wish)
        free = free or rate
        print(f"{name}, {form}: {rate:.1f} {unit}, {rate / free:.3f} of free; {step}", flush=True)


def _best_rate(
    llm: LLM, counts: Counter[str], fields: dict[str, Any], wish: argparse.Namespace
) -> tuple[float, str, str]:
    """Return the rate of the fastest run, its unit, and a text on the tokens and time of its mean step.

    The rate is in tokens a second, or in steps if accepted drafts are left to chance (no --simulate-accept).
    """
    runs, counts_steps = [], wish.draft is not None and wish.simulate_accept is None
    for repeat in range(wish.repeats):
        counts.clear()
        shared = SamplingParams(**fields, temperature=1.0, max_new_tokens=wish.tokens, ignore_eos=True)
        params = [replace(shared, seed=100 * repeat + number) for number in range(wish.sequences)]
        answers = llm.generate([PROMPT] * wish.sequences, params)
        seconds = max(answer.stats.decode_s for answer in answers)
        steps = counts["Speculate"] + counts["Decode"]
        tokens = sum(len(answer.token_ids) - 1 for answer in answers)
        step = f"{tokens / steps:.2f} tokens and {1e3 * seconds / steps:.3f} ms a step"
        runs.append(((steps if counts_steps else tokens) / seconds, "steps/s" if counts_steps else "tok/s", step))
    return max(runs)


def _first_masks(llm: LLM) -> None:
    """Print the time from a schema to the mask of its first token, for 300 schemas, after the vocabulary was read."""
    grammars, times = llm.maker.forms.grammars, []
    grammars.prepare()
    for schema in schemas(300, seed=1):
        form = SamplingParams(json_schema=schema).form
        assert form is not None
        begun = perf_counter()
        grammars.matcher(form, Thought())().allowed()
        times.append(1e3 * (perf_counter() - begun))
    figures = f"median {median(times):.1f} ms, 90 % within {quantiles(times, n=10)[-1]:.1f}"
    print(f"first mask of 300 schemas, {llm.config.vocab_size} tokens: {figures}")


def _saved_steps(llm: LLM, counts: Counter[str]) -> None:
    """Print the share of plain decoding's steps that certain tokens save in a tool call."""
    tokens = steps = 0
    for seed in range(10):
        counts.clear()
        params = SamplingParams(json_schema=TOOL_CALL, temperature=1.0, seed=seed, max_new_tokens=200)
        tokens += len(llm.generate(PROMPT, params).token_ids)
        steps += counts["Prefill"] + counts["Decode"]
    saved = f"{1 - steps / tokens:.0%} of the steps saved"
    print(f"a tool call, mean of 10: {tokens / 10:.1f} tokens in {steps / 10:.1f} steps, {saved}")


if __name__ == "__main__":
    sys.exit(main())
