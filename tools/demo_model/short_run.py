"""Trains a model for a few minutes on the bundled model's text and tokenizer, and prints its losses."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.corpus import write_corpus
from demo_model.muon import Optimizers, learning_rate_factor
from demo_model.network import MiniCPM, token_loss
from demo_model.tokenizer import BOS_ID, encode_file
from demo_model.training import RowSampler, evaluation_rows, load_tokens, mean_token_loss

BUNDLED = Path(__file__).resolve().parents[2] / "cpmrt" / "assets" / "demo"


@dataclass(frozen=True)
class ShortPlan:
    """The settings of a run. `learning_rate` is the highest; warm-up and decay are at shares of the time."""

    minutes: float
    seed: int
    learning_rate: float = 0.01
    tokens_per_step: int = 131_072
    row_length: int = 1024
    corpus_stride: int = 2
    warm_up_end: float = 0.05
    decay_start: float = 0.3
    evaluation_rows: int = 256
    log_seconds: float = 5.0


class ShortRun:
    """One run. The folder `work` holds the tokenizer and the text as token files."""

    def __init__(self, plan: ShortPlan, work: Path, device: torch.device) -> None:
        self.work, self._plan, self._device = work, plan, device
        shutil.copyfile(BUNDLED / "tokenizer.json", work / "tokenizer.json")
        begun = time.perf_counter()
        write_corpus(work, plan.corpus_stride)
        self.tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        encode_file(self.tokenizer, work / "train.jsonl", work / "train.bin")
        sizes = encode_file(self.tokenizer, work / "heldout.jsonl", work / "heldout.bin")
        self.bytes_per_token = sizes["bytes"] / sizes["tokens"]
        held_out = load_tokens(work / "heldout.bin")
        self._held_out = evaluation_rows(held_out, plan.row_length, plan.evaluation_rows, device)
        print(f"text: {time.perf_counter() - begun:.1f} s", flush=True)

    def held_out_loss(self, network: MiniCPM) -> float:
        """Returns the loss, in nats a token, on the first windows of held-out text."""
        return mean_token_loss(network, self._held_out)

    def bits_per_byte(self, loss: float) -> float:
        """Converts a loss from nats a token to bits a byte of text."""
        return loss / math.log(2) / self.bytes_per_token

    def train(self, network: MiniCPM) -> None:
        """Trains until the time is over; prints the losses."""
        plan, device = self._plan, self._device
        line_breaks = [token for piece, token in self.tokenizer.get_vocab().items() if not piece.strip("\n")]
        sampler = RowSampler(load_tokens(self.work / "train.bin"), [BOS_ID, *line_breaks], device)
        generator, optimizers = torch.Generator(device).manual_seed(plan.seed), Optimizers(network)
        print(f"before: {self._measured(network)}", flush=True)
        count, steps = max(1, plan.tokens_per_step // plan.row_length), 0
        start = logged = time.perf_counter()
        recent: list[Tensor] = []
        while (progress := (time.perf_counter() - start) / (60 * plan.minutes)) < 1:
            loss = token_loss(network, sampler.rows(count, plan.row_length, generator))
            loss.backward()
            factor = learning_rate_factor(progress, plan.warm_up_end, plan.decay_start, 0.01)
            optimizers.step(plan.learning_rate * factor)
            steps += 1
            recent.append(loss.detach())
            # Steps are queued long before the device is done; at most one may wait, or the run would end too late.
            if len(recent) > 1:
                recent[-2].cpu()
            if (now := time.perf_counter()) - logged > plan.log_seconds:
                print(f"{now - start:6.1f} s  step {steps}  loss {torch.stack(recent).mean():.4f}", flush=True)
                logged, recent = now, recent[-1:]
        print(f"after {steps} steps of {count * plan.row_length:,} tokens: {self._measured(network)}", flush=True)

    def _measured(self, network: MiniCPM) -> str:
        loss = self.held_out_loss(network)
        return f"held-out loss {loss:.4f}, {self.bits_per_byte(loss):.4f} bits a byte"


@contextmanager
def short_run(plan: ShortPlan, device: torch.device) -> Iterator[ShortRun]:
    """Prepares the text in a temporary folder, which is removed at the end, and seeds torch."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(plan.seed)
        yield ShortRun(plan, Path(folder), device)
