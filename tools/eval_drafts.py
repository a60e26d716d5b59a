"""Measures drafting on real text: tokens a step and accept rates by depth, for each draft and tree.

    python tools/eval_drafts.py
    python tools/eval_drafts.py --model FOLDER --draft DRAFT --shape 2,10,12 --text held-out.jsonl --json out.json

The model continues prompts without a draft, then with each one, greedily and sampled with fixed seeds; tokens that
differ are an error. Without --text the prompts come from what the bundled model was not trained on: functions and
docstrings of this Python's own sources, edits of such functions, and questions. A second table shows what smaller heads
cost an EAGLE-2 draft: cut to frequent tokens (FR-Spec), or in fewer bits. With --inner another one shows the passes of
a small model that drafts, alone and with that draft of its own. Runs on a GPU, or without one on NumPy.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from draft_evaluation.measurement import (  # noqa: E402
    Outcome,
    Variant,
    draft_table,
    head_table,
    measure,
    pass_table,
    plain_tokens,
    records,
    shape_label,
)
from draft_evaluation.prompts import FrequentTokens, Prompts, file_prompts, frequent_tokens, held_out_prompts  # noqa: E402

from cpmrt import LLM  # noqa: E402
from cpmrt.config.speculate_argument import LOOKUP  # noqa: E402
from cpmrt.config.speculation import DRAFT_METHODS, TreeShape  # noqa: E402
from cpmrt.errors import ConfigError, CpmrtError  # noqa: E402
from cpmrt.weights.draft_folder import method_of  # noqa: E402
from cpmrt.weights.model_folder import ModelFolder  # noqa: E402

TEMPERATURES = (0.0, 1.0)
SHAPES = (TreeShape(2, 10, 12), TreeShape(4, 10, 32), TreeShape.chain(5))
BUNDLED_DRAFTS = ("eagle2", "eagle3", LOOKUP)
HEAD_BITS = (8, 4)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder or hub id; 'demo' is the bundled one")
    parser.add_argument("--draft", action="append", help="as LLM takes it; repeatable (default: all of the demo's)")
    parser.add_argument(
        "--shape", action="append", type=_shape, metavar="PASSES,TOPK,SIZE",
        help="tree; repeatable. Drafts of chains take those with TOPK 1, or their own default",
    )  # fmt: skip
    parser.add_argument(
        "--lookup", type=_count, metavar="N", action="append", default=[],
        help="also each draft with layers beside a lookup of N tokens; repeatable",
    )
    parser.add_argument(
        "--inner", metavar="DRAFT", action="append", default=[],
        help="also each small model with this draft of its own, or lookup (NumPy only); repeatable",
    )  # fmt: skip
    parser.add_argument("--layer-bits", type=int, choices=HEAD_BITS, help="round the drafts' layers")
    parser.add_argument("--text", type=Path, action="append", help="prompts: .jsonl, text or a folder; repeatable")
    parser.add_argument("--prompts", type=_count, default=10, help="of each text")
    parser.add_argument("--prompt-length", type=_count, default=32, help="tokens of a prompt out of a text")
    parser.add_argument("--tokens", type=_count, default=40, help="that follow a prompt, at most")
    parser.add_argument(
        "--head-vocab", type=int, nargs="*", metavar="N",
        help="frequent tokens that an EAGLE-2 head is cut to (default: an eighth, a quarter, half of all)",
    )  # fmt: skip
    parser.add_argument("--head-bits", type=int, nargs="*", choices=HEAD_BITS, default=list(HEAD_BITS))
    parser.add_argument(
        "--frequent-text", type=Path, action="append", default=[],
        help="text to count tokens in; repeatable (default: sources of this Python that the demo was trained on)",
    )  # fmt: skip
    parser.add_argument("--executor", choices=("auto", "cuda", "reference"), default="auto")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"expected a number of at least 2, got {text!r}")
    return int(text)


def _shape(text: str) -> TreeShape:
    try:
        num_passes, top_k, tree_size = map(int, text.split(","))
        return TreeShape(num_passes, top_k, tree_size)
    except (ValueError, ConfigError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


class DraftEvaluation:
    """One run of the tool: the prompts, the model's own answers to them, and the drafts."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.model = options.model
        self.folder = ModelFolder.open(self.model, weights=False)
        names = options.draft or (BUNDLED_DRAFTS if self.folder.is_bundled else (LOOKUP,))
        self.methods = {name: name if name == LOOKUP else method_of(name, self.folder.path) for name in names}
        self.shapes: tuple[TreeShape, ...] = tuple(options.shape or SHAPES)
        self.indices = self._indices(work) if "eagle2" in self.methods.values() else []
        with LLM(self.model, executor=options.executor, prefix_cache=False) as llm:
            self.executor = type(llm.executor).__name__
            self.texts = self._prompts(llm)
            self.plain = plain_tokens(llm, self.texts, TEMPERATURES, options.tokens)

    def report(self) -> Iterator[str]:
        """Yields the report as parts of Markdown, each as soon as it is measured; writes --json at the end."""
        yield self._settings()
        outcomes = [
            self._measured(Variant(name, shape, layer_bits=self.options.layer_bits))
            for name in self.methods for shape in self._shapes_of(name)
        ]
        yield "\n".join(draft_table(outcomes))
        first = {outcome.variant.draft: outcome for outcome in reversed(outcomes)}
        for name in (name for name, method in self.methods.items() if method == "eagle2"):
            heads = [self._measured(variant) for variant in self._head_variants(first[name].variant)]
            yield f"The head of {name}, {shape_label(first[name].variant.shape)}:"
            yield "\n".join(head_table([first[name], *heads]))
            outcomes += heads
        for name in (name for name, method in self.methods.items() if method == "model" and self.options.inner):
            alone = [outcome for outcome in outcomes if outcome.variant.draft == name]
            variants = [replace(one.variant, inner=inner) for one in alone for inner in self.options.inner]
            nested = [self._measured(variant) for variant in variants]
            yield f"Tokens and passes of {name}, a step:"
            yield "\n".join(pass_table([*alone, *nested]))
            outcomes += nested
        if self.options.json is not None:
            facts = {"model": self.options.model, "executor": self.executor, "settings": self._settings()}
            results = [entry for outcome in outcomes for entry in records(outcome)]
            self.options.json.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n", encoding="utf-8")

    def _prompts(self, llm: LLM) -> dict[str, Prompts]:
        count, length = self.options.prompts, self.options.prompt_length
        if not self.options.text:
            return held_out_prompts(llm, count, length)
        named = {path.stem: path for path in self.options.text}
        if len(named) < len(self.options.text):
            raise ConfigError("--text", expected="files of different names", actual=", ".join(map(str, named)))
        return {name: file_prompts(llm, path, count, length) for name, path in named.items()}

    def _indices(self, work: Path) -> list[FrequentTokens]:
        vocab_size, sizes = self.folder.config.vocab_size, self.options.head_vocab
        if sizes is None:
            sizes = [vocab_size // 8, vocab_size // 4, vocab_size // 2]
        return frequent_tokens(self.options.model, self.options.frequent_text, sizes, vocab_size, work)

    def _settings(self) -> str:
        texts = [f"{name} ({len(prompts)} prompts, {self._said(name)} tokens)" for name, prompts in self.texts.items()]
        return f"{self.options.model} on {self.executor}: {', '.join(texts)}. Cells: tokens a step: accept rates in %."

    def _said(self, name: str) -> str:
        return " and ".join(str(sum(map(len, self.plain[name, temperature]))) for temperature in TEMPERATURES)

    def _shapes_of(self, name: str) -> Sequence[TreeShape]:
        method, shapes = self.methods[name], self.shapes
        if DRAFT_METHODS[method].drafts_chains:
            shapes = tuple(shape for shape in shapes if shape.top_k == 1) or DRAFT_METHODS[method].shapes[:1]
        lengths = [] if method == LOOKUP else self.options.lookup
        return [*shapes, *(replace(shape, lookup_length=length) for length in lengths for shape in shapes)]

    def _head_variants(self, full: Variant) -> list[Variant]:
        cut = [replace(full, index=index) for index in self.indices]
        return cut + [replace(full, head_bits=bits) for bits in self.options.head_bits]

    def _measured(self, variant: Variant) -> Outcome:
        begun = time.perf_counter()
        with LLM(self.model, executor=self.options.executor, prefix_cache=False, **variant.arguments()) as llm:
            outcome = measure(llm, variant, self.texts, self.plain, self.options.tokens)
        print(f"{variant}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        return outcome


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool. Exit code: 0 done, 1 an error that a message explains."""
    options = parse_arguments(arguments)
    try:
        with tempfile.TemporaryDirectory() as work:
            for part in DraftEvaluation(options, Path(work)).report():
                print(f"{part}\n", flush=True)
    except (CpmrtError, OSError) as error:
        print(f"eval_drafts.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
