"""Makes the long demo model: a checkpoint folder with a README of the measurements.

The bundled model is trained further with a stretched rotary embedding, on text full of statements and questions about
them (`retrieval`). Most steps have short rows, whose positions are spread over the whole context; the last have rows
of a whole context. The bundled model can repeat text from a few hundred tokens back, so that it learns to find
statements again within a few hundred steps.
"""

from __future__ import annotations

import datetime
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.corpus import write_corpus
from demo_model.export import checkpoint_config, table, write_checkpoint, write_json
from demo_model.muon import Optimizers, learning_rate_factor
from demo_model.network import MiniCPM, NetworkConfig
from demo_model.retrieval import KEY_WORDS, VALUE_WORDS, RetrievalRows, Statements, retrieval_rows, spread_positions
from demo_model.tokenizer import encode_file
from demo_model.training import library_versions

CONTEXT = 65_536
BUNDLED = Path(__file__).resolve().parents[2] / "cpmrt" / "assets" / "demo"
CORPUS_STRIDE = 4
"""The part of the demo model's documents that is used, one in 4: more than training reads in its minutes."""
SPARSE_CONFIG = {
    "kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 64, "window_size": 2048, "topk": 64,
    "use_nope": False, "dense_len": 8192,
}  # fmt: skip
"""The settings that the README of MiniCPM4.1-8B tells users to add."""
MEASURED_ROWS = 4


@dataclass(frozen=True)
class LongPlan:
    """A run: its time, its learning rate, and `stages` of (row length, share of the time)."""

    minutes: float
    seed: int
    learning_rate: float = 0.002
    tokens_per_step: int = CONTEXT
    stages: tuple[tuple[int, float], ...] = ((1024, 0.15), (4096, 0.15), (16384, 0.25), (CONTEXT, 0.45))
    warm_up_end: float = 0.03
    decay_start: float = 0.4
    log_seconds: float = 5.0

    def length_at(self, progress: float) -> int:
        """Returns the length of the rows when a share `progress` of the time is over."""
        end = 0.0
        for length, share in self.stages:
            end += share
            if progress < end:
                return length
        return self.stages[-1][0]

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate * learning_rate_factor(progress, self.warm_up_end, self.decay_start)


def long_plan(minutes: float, seed: int, learning_rate: float | None, tiny: bool) -> LongPlan:
    rate = learning_rate or LongPlan.learning_rate
    if tiny:
        return LongPlan(minutes, seed, rate, tokens_per_step=1024, stages=((256, 0.5), (512, 0.5)), log_seconds=1)
    return LongPlan(minutes, seed, rate)


def long_config(stages: tuple[tuple[int, float], ...] = LongPlan.stages) -> NetworkConfig:
    """Returns the bundled model's config with the context of the last stage, and a rotary embedding stretched to it."""
    context, bundled = stages[-1][0], NetworkConfig()
    growth = max(1.0, context / bundled.max_position_embeddings)
    return NetworkConfig(max_position_embeddings=context, rope_reach=bundled.rope_reach * growth)


def losses(network: MiniCPM, rows: RetrievalRows, positions: NDArray[np.int64] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the losses on text and on answers, in nats a token, and the share of answer tokens that are likeliest."""
    device = network.model.embed_tokens.weight.device
    tokens, is_text, is_answer = (_moved(array, device) for array in (rows.tokens, rows.is_text, rows.is_answer))
    at = None if positions is None else _moved(positions, device)
    logits = network.head(network.hidden_states(tokens[:, :-1], at)).float().flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    each = F.cross_entropy(logits, targets, reduction="none")
    is_right = (logits.argmax(-1) == targets).float()
    return _mean(each, is_text), _mean(each, is_answer), _mean(is_right, is_answer)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean of the values in `mask`, by a product: to index with the mask would wait for the device."""
    weights = mask.flatten().float()
    return (values * weights).sum() / weights.sum()


def _moved(array: NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class LongTrainer:
    """Trains the long model by a plan, and measures it."""

    def __init__(
        self, bundled: Path, statements: Statements, text: NDArray[np.uint16], plan: LongPlan, device: torch.device
    ) -> None:
        self.plan, self.statements, self.text, self.device = plan, statements, text, device
        self.rng = np.random.default_rng(plan.seed)
        self.network = MiniCPM(long_config(plan.stages), torch.bfloat16).to(device)
        weights = load_file(str(bundled / "model.safetensors"))
        self.network.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        self.optimizers = Optimizers(self.network)
        self.steps = {length: 0 for length, _ in plan.stages}

    def step(self, progress: float) -> Tensor:
        """Makes one optimizer step and returns its losses without waiting for them."""
        length = self.plan.length_at(progress)
        count = max(1, self.plan.tokens_per_step // length)
        rows = retrieval_rows(self.text, self.statements, count, length, self.rng)
        positions = spread_positions(length, self.network.config.max_position_embeddings, self.rng)
        text, answer, is_right = losses(self.network, rows, positions)
        (text + answer).backward()
        self.optimizers.step(self.plan.learning_rate_at(progress))
        self.steps[length] += 1
        return torch.stack([text.detach(), answer.detach(), is_right])

    def run(self) -> None:
        """Trains until the time is over; prints the mean losses every few seconds."""
        start = logged = time.perf_counter()
        recent: list[Tensor] = []
        while (progress := (time.perf_counter() - start) / (60 * self.plan.minutes)) < 1:
            recent.append(self.step(progress))
            # Steps are queued long before the device is done; at most one may wait, or the run would end too late.
            if len(recent) > 1:
                recent[-2].cpu()
            if (now := time.perf_counter()) - logged > self.plan.log_seconds:
                text, answer, right = torch.stack(recent).mean(0).tolist()
                length, steps = self.plan.length_at(progress), sum(self.steps.values())
                print(
                    f"{now - start:6.1f} s  step {steps}  rows of {length}  text {text:.4f}  answers {answer:.4f}  "
                    f"right {right:.1%}", flush=True,
                )  # fmt: skip
                logged, recent = now, recent[-1:]

    @torch.no_grad()
    def measure(self, text: NDArray[np.uint16], length: int, count: int) -> dict[str, float]:
        """Measures losses and right answers over rows of held-out text, at consecutive positions."""
        rng = np.random.default_rng(length)
        found = [
            torch.stack(losses(self.network, retrieval_rows(text, self.statements, 1, length, rng), None))
            for _ in range(count)
        ]
        names = ("text_loss", "answer_loss", "right_tokens")
        return dict(zip(names, torch.stack(found).mean(0).tolist(), strict=True))

    def save(self, path: Path) -> None:
        save_file(self.network.state_dict(), str(path))


def make_long_model(out: Path, plan: LongPlan, device: torch.device) -> None:
    """Trains the model, measures it and writes its checkpoint folder; intermediate files are removed."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
        shutil.copyfile(BUNDLED / "tokenizer.json", work / "tokenizer.json")
        begun = time.perf_counter()
        train, held_out = _encoded(work, tokenizer, 40 if plan.tokens_per_step < 4096 else CORPUS_STRIDE)
        print(f"text: {len(train):,} tokens, {time.perf_counter() - begun:.1f} s", flush=True)
        torch.manual_seed(plan.seed)
        trainer = LongTrainer(BUNDLED, Statements.of(tokenizer), train, plan, device)
        trainer.run()
        trainer.save(work / "weights.safetensors")
        config = trainer.network.config
        trainer.network = write_checkpoint(work, out, config, device)
    write_json(out / "config.json", checkpoint_config(config) | {"sparse_config": SPARSE_CONFIG})
    measured = {
        length: trainer.measure(held_out, length, MEASURED_ROWS) for length, _ in plan.stages if length < len(held_out)
    }
    print(json.dumps(measured), flush=True)
    _write_card(out, trainer, measured, len(train))


def _encoded(work: Path, tokenizer: Tokenizer, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of documents that the demo model was trained on, and of those held out."""
    write_corpus(work, stride)
    for name in ("train", "heldout"):
        encode_file(tokenizer, work / f"{name}.jsonl", work / f"{name}.bin")
    return np.fromfile(work / "train.bin", np.uint16), np.fromfile(work / "heldout.bin", np.uint16)


def _write_card(out: Path, trainer: LongTrainer, measured: dict[int, dict[str, float]], num_tokens: int) -> None:
    plan = trainer.plan
    device = torch.cuda.get_device_name() if trainer.device.type == "cuda" else "CPU"
    stages: list[list[object]] = [[length, steps] for length, steps in trainer.steps.items()]
    rows: list[list[object]] = [
        [length, *(f"{values[name]:.4f}" for name in ("text_loss", "answer_loss", "right_tokens"))]
        for length, values in measured.items()
    ]
    text = f"""# The long demo model of cpmrt

The bundled demo model, continued for {plan.minutes:g} min to contexts of \
{trainer.network.config.max_position_embeddings:,} tokens by `python {" ".join(sys.argv)}` on \
{datetime.date.today().isoformat()} ({device}; {library_versions()}). It is made to measure what sparse attention \
loses, with `tools/eval_sparse.py`, and for nothing else.

{num_tokens:,} tokens of the demo model's own training text, in which lines of {KEY_WORDS} random words as a key and \
{VALUE_WORDS} as a value were hidden and asked for later on; {plan.tokens_per_step:,} tokens a step, learning rate \
{plan.learning_rate:g}. Licence and sources are those of the demo model.

{table(["row length", "steps"], stages)}

Held-out text, bf16, dense attention; losses in nats a token, right: greedy tokens of the answers.

{table(["row length", "text", "answers", "right"], rows)}
"""
    (out / "README.md").write_text(text, encoding="utf-8")
