"""Measures what quantisation costs: held-out bits a byte, and how often the likeliest token is still the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np
from demo_model.corpus import is_held_out, is_wanted, read_document, standard_library

from cpmrt import LLM
from cpmrt.dtypes import F32, Array
from cpmrt.log_probabilities import log_softmax


@dataclass(frozen=True)
class HeldOut:
    """Windows of token ids, BOS first, of text that the demo model was not trained on, and a note on that text."""

    windows: tuple[tuple[int, ...], ...]
    bytes_a_token: float
    provenance: str

    @property
    def num_predictions(self) -> int:
        return sum(len(window) - 1 for window in self.windows)


@dataclass(frozen=True)
class Outcome:
    """Negative log-probabilities (`losses`) and likeliest tokens (`choices`) at every predicted token, by window.

    `divergences` are Kullback-Leibler divergences from the exact model's distribution, in nats. `log_probs` [T, V] are
    kept only for the exact model, in half precision.
    """

    losses: Sequence[F32]
    choices: Sequence[Array]
    divergences: Sequence[F32] = ()
    log_probs: Sequence[Array] = ()

    def divergence(self) -> float:
        """Return the mean divergence per token, in nats."""
        return float(np.concatenate(self.divergences).mean(dtype=np.float64))

    def bits_a_byte(self, held_out: HeldOut) -> float:
        return float(np.concatenate(self.losses).mean(dtype=np.float64)) / log(2) / held_out.bytes_a_token

    def perplexity(self) -> float:
        """Return the perplexity per token."""
        return float(np.exp(np.concatenate(self.losses).mean(dtype=np.float64)))

    def extra_bits(self, exact: Outcome, held_out: HeldOut) -> tuple[float, float]:
        """Return the bits a byte above those of `exact`, and their standard error over windows.

    Losses are compared window by window, so that differences between texts cancel out.
    """
        ratio = log(2) * held_out.bytes_a_token
        pairs = zip(self.losses, exact.losses, strict=True)
        differences = np.array([float((ours - theirs).mean()) for ours, theirs in pairs]) / ratio
        return float(differences.mean()), float(differences.std(ddof=1) / len(differences) ** 0.5)

    def agreement(self, exact: Outcome) -> float:
        """Return the share of positions at which greedy decoding would choose the same token after the same text."""
        return float((np.concatenate(self.choices) == np.concatenate(exact.choices)).mean())


def standard_library_texts(held_out: bool) -> list[tuple[str, str]]:
    """Return names and texts of the modules of this Python that the demo model's training left out, or used.

    Its training chose modules by their path alone, so that the same rule holds for any Python version.
    """
    source = standard_library()
    wanted = (path for path in source.paths if is_wanted(Path(path)))
    names = [path for path in wanted if is_held_out(f"{source.name}/{path}") is held_out]
    texts = ((name, read_document(f"{source.root}/{name}")) for name in names)
    return [(name, text) for name, text in texts if text is not None]


def held_out_windows(llm: LLM, num_tokens: int, length: int) -> HeldOut:
    """Return windows of `length` tokens, about `num_tokens` in all, from the beginnings of held-out modules first."""
    if llm.tokenizer is None or llm.config.bos_token_id is None:
        raise ValueError("the model has no tokenizer with a BOS token")
    source, texts = standard_library(), standard_library_texts(held_out=True)
    body, found, num_bytes = length - 1, list[tuple[int, tuple[int, ...]]](), 0
    for _, text in texts:
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        for start in range(0, len(ids) - body + 1, body):
            found.append((start, (llm.config.bos_token_id, *ids[start : start + body])))
    windows = tuple(window for _, window in sorted(found, key=lambda pair: pair[0])[: max(2, num_tokens // body)])
    num_bytes = sum(len(llm.tokenizer.decode(list(window[1:])).encode()) for window in windows)
    provenance = f"{len(texts)} modules of {source.name} {source.version} that training left out"
    return HeldOut(windows, num_bytes / (len(windows) * body), provenance)


def measure(llm: LLM, held_out: HeldOut, exact: Outcome | None = None) -> Outcome:
    """Run the model over every window. Without `exact`, the outcome to compare with, it is the exact model itself."""
    losses, choices, divergences, kept = [], [], [], []
    for number, window in enumerate(held_out.windows):
        logits = llm.logits(window)[:-1]
        following, log_probs = np.array(window[1:]), log_softmax(logits)
        losses.append(-log_probs[np.arange(len(following)), following])
        choices.append(logits.argmax(axis=-1))
        if exact is None:
            kept.append(log_probs.astype(np.float16))
        else:
            others = exact.log_probs[number].astype(np.float32)
            divergences.append((np.exp(others) * (others - log_probs)).sum(axis=-1))
    return Outcome(losses, choices, divergences, kept)
