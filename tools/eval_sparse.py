"""Measures what sparse attention (InfLLM-v2) loses against dense attention of the same weights.

    python tools/make_demo_model.py --long build/long --minutes 2
    python tools/eval_sparse.py --model build/long --out build/sparse
    python tools/eval_sparse.py --model build/long --out build/sparse --parts mass asked

Parts: statements hidden in held-out text and asked for at its end, by depth and length (`needles`); perplexity and KL
against dense on long held-out text (`text`); the share of the dense attention that lies inside the blocks that are
chosen, all over a text (`mass`) and where a statement is asked for (`asked`), both always on NumPy; how many blocks
neighbouring tokens choose together (`unions`, official settings). Settings: the official ones, CPM.cu's, smaller
budgets. --out gets results.json, to which each call adds, tables.md and needles.png (matplotlib). Runs on a GPU, or
without one on NumPy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from demo_model.retrieval import Statements, Tokens  # noqa: E402
from sparse_evaluation.attention_mass import MassProbe, summary  # noqa: E402
from sparse_evaluation.likelihood import Predictions, divergences, predictions  # noqa: E402
from sparse_evaluation.needles import (  # noqa: E402
    DEPTHS,
    Haystack,
    found,
    found_by_decoding,
    held_out_text,
    logit_chunks,
    make_haystack,
)
from sparse_evaluation.neighbours import ChoiceProbe  # noqa: E402
from sparse_evaluation.neighbours import summary as union_summary  # noqa: E402
from sparse_evaluation.tables import ALWAYS_SPARSE, OFFICIAL, SETTINGS, Setting, plot_needles, tables  # noqa: E402

from cpmrt import LLM  # noqa: E402
from cpmrt.errors import ConfigError, CpmrtError  # noqa: E402
from cpmrt.text.tokenizer import MAX_TOKENIZER_BYTES  # noqa: E402
from cpmrt.weights.model_files import read_file  # noqa: E402
from cpmrt.weights.model_folder import ModelFolder  # noqa: E402

PARTS = ("needles", "text", "mass", "asked", "unions")
LENGTHS = (4096, 8192, 16384, 32768, 65536)
CHUNK = 2048


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder or hub id; 'demo' is the bundled one")
    parser.add_argument("--out", type=Path, default=Path("build/sparse"), help="folder for results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["needles", "text"])
    parser.add_argument("--lengths", type=int, nargs="+", help="of haystacks (default: 4K to 64K, as the model can)")
    parser.add_argument("--haystacks", type=int, default=6, help="of each length")
    parser.add_argument("--per-depth", type=int, default=4, help=f"statements in each of the {DEPTHS} parts of one")
    parser.add_argument("--windows", type=int, default=4, help="pieces of text, as long as the longest haystack")
    parser.add_argument("--stride", type=int, default=4, help="of the text's positions, one in so many is compared")
    parser.add_argument("--mass-length", type=int, default=16384, help="tokens for the parts `mass` and `asked`")
    parser.add_argument("--mass-stride", type=int, default=509, help="one position in so many is looked at")
    parser.add_argument("--executor", choices=("auto", "cuda", "reference"), default="auto")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


class SparseEvaluation:
    """One run of the tool: the text, the statements hidden in it, and the results of each setting."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = options.model
        folder = ModelFolder.open(self.model, weights=False)
        self.config = folder.config
        if self.config.bos_token_id is None or not self.config.eos_token_ids:
            raise ConfigError(options.model, expected="a model with BOS and EOS tokens", actual="none")
        tokenizer = Tokenizer.from_buffer(read_file(folder.path / "tokenizer.json", MAX_TOKENIZER_BYTES))
        self.text = held_out_text(tokenizer, self.config.bos_token_id, self.config.eos_token_ids[0])
        self.lengths = options.lengths or [length for length in LENGTHS if length <= self.config.max_positions]
        self.statements = Statements.of(tokenizer)
        self.haystacks = self._haystacks() if "needles" in options.parts else {}
        self.windows = self.text.windows(options.windows, max(self.lengths)) if "text" in options.parts else []
        self.dense: list[Predictions] = []

    def measure(self) -> Iterator[dict[str, Any]]:
        """Yields results by part: those known so far after every setting, then those of the other parts."""
        needles: dict[str, Any] = {}
        text: dict[str, Any] = {}
        for setting in SETTINGS if self.haystacks or self.windows else ():
            begun = time.perf_counter()
            with self._opened(setting, self.options.executor, max(self.lengths)) as llm:
                if self.haystacks:
                    needles[setting.label] = {"budget": setting.budget, **self._needles(llm)}
                if self.windows:
                    text[setting.label] = self._spans(llm)
            print(f"{setting.label}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
            yield self._labelled(needles, text)
        length = min(self.options.mass_length, self.config.max_positions)
        if "mass" in self.options.parts:
            yield {"mass": self._mass(self.text.windows(1, length)[0], range(0, length, self.options.mass_stride))}
        if "asked" in self.options.parts:
            haystack = self._haystack(length, np.random.default_rng(self.options.seed))
            yield {"asked": self._mass(haystack.token_ids, haystack.answers[:, 0] - 1)}
        if "unions" in self.options.parts:
            yield {"unions": self._unions(OFFICIAL)}

    def _haystack(self, length: int, rng: np.random.Generator) -> Haystack:
        return make_haystack(
            self.text.token_ids, self.statements, length, self.options.per_depth, self.text.bos, rng
        )  # fmt: skip

    def _haystacks(self) -> dict[int, list[Haystack]]:
        rng = np.random.default_rng(self.options.seed)
        return {length: [self._haystack(length, rng) for _ in range(self.options.haystacks)] for length in self.lengths}

    def _needles(self, llm: LLM) -> dict[str, Any]:
        """Returns the shares of statements found, by length and depth, and how many results a decoding run confirms."""
        grid, asked, same = {}, 0, 0
        for length, haystacks in self.haystacks.items():
            hits = [found(llm, haystack) for haystack in haystacks]
            depths = np.concatenate([haystack.depths for haystack in haystacks])
            grid[str(length)] = [float(np.concatenate(hits)[depths == depth].mean()) for depth in range(DEPTHS)]
            asked += len(haystacks)
            pairs = zip(haystacks, hits, strict=True)
            same += sum(found_by_decoding(llm, haystack, 0) == bool(hit[0]) for haystack, hit in pairs)
        return {"grid": grid, "decoded": {"asked": asked, "same": same}}

    def _spans(self, llm: LLM) -> list[dict[str, Any]]:
        """Compares the predictions with those of dense attention, which is the first setting to be measured."""
        own = [predictions(llm, window, self.options.stride) for window in self.windows]
        self.dense = self.dense or own
        edges = [0, *self.lengths]
        return [
            asdict(span) | {"perplexity": float(np.exp(span.loss))}
            for span in divergences(self.windows, self.dense, own, edges)
        ]

    def _labelled(self, needles: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        if needles:
            questions = self.options.haystacks * self.options.per_depth * DEPTHS
            parts["needles"] = {"lengths": self.lengths, "questions": questions, "settings": needles}
        if text:
            facts = {"windows": len(self.windows), "length": max(self.lengths), "provenance": self.text.provenance}
            parts["text"] = facts | {"settings": text}
        return parts

    def _mass(self, token_ids: Tokens, positions: Iterable[int]) -> dict[str, Any]:
        """Measures the share of attention in chosen blocks at some positions of a text, on the NumPy executor."""
        length = len(token_ids)
        labels = {setting.label: config for setting in SETTINGS if (config := setting.config) is not None}
        with self._opened(ALWAYS_SPARSE, "reference", length) as llm:
            probe = MassProbe.attached(llm, list(labels.values()), {int(position) for position in positions})
            for _ in logit_chunks(llm, token_ids.tolist()):
                pass
        found_shares = {label: summary(probe.shares[number]) for number, label in enumerate(labels)}
        return {"length": length, "settings": found_shares}

    def _unions(self, setting: Setting) -> dict[str, Any]:
        """Counts the blocks that neighbours choose together, in the last whole chunk of each length of a text.

        Lengths whose last chunk has rows that leave no blocks out are skipped.
        """
        config = setting.config
        assert config is not None
        window = self.text.windows(1, max(self.lengths))[0].tolist()
        firsts = {length: length // CHUNK * CHUNK - CHUNK for length in self.lengths if length <= len(window)}
        firsts = {length: first for length, first in firsts.items() if first >= 0 and config.leaves_out(first + 1)}
        with self._opened(setting, self.options.executor, len(window)) as llm:
            probe = ChoiceProbe(llm, CHUNK, firsts.values())
            for _ in logit_chunks(llm, window):
                pass
        return {
            str(length): union_summary(probe.choices[first], first + CHUNK - 1, config)
            for length, first in firsts.items()
        }

    def _opened(self, setting: Setting, executor: str, max_context: int) -> LLM:
        return LLM(
            self.model, executor=executor, sparse=setting.sparse, max_context=max_context, prefill_chunk=CHUNK,
            prefix_cache=False,
        )  # fmt: skip


def store(out: Path, facts: dict[str, Any], parts: dict[str, Any]) -> str:
    """Adds results to results.json, writes the tables of all results there, and returns them."""
    path = out / "results.json"
    results = (json.loads(path.read_text()) if path.exists() else {}) | facts | parts
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = "\n\n".join(tables(results)) + "\n"
    (out / "tables.md").write_text(text, encoding="utf-8")
    return text


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool. Exit code: 0 done, 1 an error that a message explains."""
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        evaluation, text = SparseEvaluation(options), ""
        for parts in evaluation.measure():
            text = store(options.out, {"model": options.model}, parts)
        print(text, flush=True)
        if "needles" in options.parts:
            plot_needles(json.loads((options.out / "results.json").read_text())["needles"], options.out / "needles.png")
    except (CpmrtError, OSError, ValueError) as error:
        print(f"eval_sparse.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
