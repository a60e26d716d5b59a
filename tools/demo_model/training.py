"""The training loop: packed rows, bf16 arithmetic over fp32 weights, warm-up, stable and decay phases."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.muon import Optimizers, learning_rate_factor
from demo_model.network import MiniCPM, NetworkConfig, token_loss
from demo_model.tokenizer import BOS_ID

LossFunction = Callable[[MiniCPM, Tensor], Tensor]


@dataclass(frozen=True)
class TrainingPlan:
    """The settings of a run. Its phases are shares of the wall-clock time, so that it ends after `minutes`."""

    minutes: float
    seed: int
    learning_rate: float = 0.01
    tokens_per_step: int = 262_144
    short_length: int = 1024
    long_length: int = 4096
    chat_share: float = 0.15
    warm_up_end: float = 0.015
    decay_start: float = 0.55
    long_start: float = 0.81
    log_steps: int = 50
    evaluation_steps: int = 500
    evaluation_rows: int = 512


def load_tokens(path: Path) -> np.ndarray:
    """Reads a token file as int32, the narrowest type that torch can index with everywhere."""
    return np.fromfile(path, dtype=np.uint16).astype(np.int32)


class RowSampler:
    """Draws rows of text with random starts, with replacement.

    Every row begins with <s>, as every prompt does. A start is a token after one of `openings`: the beginning of a
    document, or of a line that is not indented.
    """

    def __init__(self, tokens: np.ndarray, openings: list[int], device: torch.device) -> None:
        starts = np.flatnonzero(np.isin(tokens, openings)) + 1
        self.tokens = torch.from_numpy(tokens).to(device)
        self.starts = torch.from_numpy(starts).to(device)

    def rows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Returns token rows (count, length + 1): `length` inputs and, shifted by one, their targets."""
        device = self.tokens.device
        last = len(self.tokens) - length
        offsets = torch.randint(last, (count,), generator=generator, device=device)
        index = torch.searchsorted(self.starts, offsets).clamp_(max=len(self.starts) - 1)
        starts = self.starts[index].clamp_(max=last)
        body = self.tokens[starts[:, None] + torch.arange(length, device=device)].long()
        return torch.cat((torch.full((count, 1), BOS_ID, device=device), body), dim=1)


def evaluation_rows(tokens: np.ndarray, length: int, limit: int, device: torch.device) -> Tensor:
    """Returns consecutive windows, each with <s> in front, in which every token is predicted exactly once."""
    count = min(limit, len(tokens) // length)
    body = torch.from_numpy(tokens[: count * length].reshape(count, length)).to(device).long()
    return torch.cat((torch.full((count, 1), BOS_ID, device=device), body), dim=1)


class Batches:
    """Draws source and conversation rows, mixed in a fixed proportion."""

    def __init__(self, work: Path, plan: TrainingPlan, device: torch.device) -> None:
        tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        vocabulary = tokenizer.get_vocab().items()
        line_breaks = [token for piece, token in vocabulary if not piece.strip("\n")]
        self.sources = RowSampler(load_tokens(work / "train.bin"), [BOS_ID, *line_breaks], device)
        self.conversations = RowSampler(load_tokens(work / "chat.bin"), [BOS_ID], device)
        self.generator = torch.Generator(device).manual_seed(plan.seed)
        self.plan = plan

    def draw(self, length: int) -> Tensor:
        count = self.plan.tokens_per_step // length
        chat = max(1, round(self.plan.chat_share * count))
        parts = (
            self.sources.rows(count - chat, length, self.generator),
            self.conversations.rows(chat, length, self.generator),
        )
        return torch.cat(parts)


class Trainer:
    """Holds the network, its two optimizers and the log of one run."""

    def __init__(self, config: NetworkConfig, plan: TrainingPlan, work: Path, device: torch.device) -> None:
        torch.manual_seed(plan.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        self.plan, self.work, self.device = plan, work, device
        self.network = MiniCPM(config, torch.bfloat16).to(device)
        self.optimizers = Optimizers(self.network)
        self.batches = Batches(work, plan, device)
        self.held_out = load_tokens(work / "heldout.bin")
        is_compiled = device.type == "cuda"
        self.loss: LossFunction = torch.compile(token_loss, dynamic=False) if is_compiled else token_loss

    def compile_shapes(self) -> None:
        """Compiles for both row lengths before the clock starts."""
        for length in (self.plan.short_length, self.plan.long_length):
            self.loss(self.network, self.batches.draw(length)).backward()
            self.network.zero_grad()
        self.wait()

    def wait(self) -> None:
        """Waits until the device is done, so that times are true."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, length: int, factor: float) -> Tensor:
        """Makes one optimizer step and returns the loss without waiting for it."""
        loss = self.loss(self.network, self.batches.draw(length))
        loss.backward()
        self.optimizers.step(self.plan.learning_rate * factor)
        return loss.detach()

    def run(self) -> dict[str, float | int | str]:
        """Trains until the time is over, saves fp32 weights and returns the summary."""
        plan = self.plan
        begun = time.perf_counter()
        self.compile_shapes()
        compile_seconds = time.perf_counter() - begun
        start = time.perf_counter()
        steps = tokens = long_tokens = 0
        recent: list[Tensor] = []
        with open(self.work / "train_log.jsonl", "w", encoding="utf-8", buffering=1) as log:
            while (progress := (time.perf_counter() - start) / (60 * plan.minutes)) < 1:
                length = plan.long_length if progress >= plan.long_start else plan.short_length
                recent.append(self.step(length, learning_rate_factor(progress, plan.warm_up_end, plan.decay_start)))
                steps += 1
                tokens += plan.tokens_per_step
                long_tokens += plan.tokens_per_step if length == plan.long_length else 0
                if steps % plan.log_steps == 0:
                    record: dict[str, float] = {"step": steps, "tokens": tokens, "row_length": length}
                    record["train_loss"] = round(torch.stack(recent).mean().item(), 4)
                    recent.clear()
                    record["seconds"] = round(time.perf_counter() - start, 1)
                    if steps % plan.evaluation_steps == 0:
                        record["heldout_loss"] = round(self.held_out_loss(), 4)
                    print(json.dumps(record), file=log)
            self.wait()
        seconds = time.perf_counter() - start
        save_file(self.network.state_dict(), str(self.work / "weights.safetensors"))
        return {
            "steps": steps,
            "tokens": tokens,
            "long_row_tokens": long_tokens,
            "seconds": round(seconds, 1),
            "compile_seconds": round(compile_seconds, 1),
            "tokens_per_second": round(tokens / seconds),
            "learning_rate": plan.learning_rate,
            "chat_share": plan.chat_share,
            "decay_share": round(1 - plan.decay_start, 2),
            "long_length": plan.long_length,
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "final_train_loss": last_losses(self.work / "train_log.jsonl"),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
            "libraries": library_versions(),
        }

    def held_out_loss(self) -> float:
        """Returns nats per token on the first held-out windows."""
        rows = evaluation_rows(self.held_out, self.plan.short_length, self.plan.evaluation_rows, self.device)
        return mean_token_loss(self.network, rows)


@torch.no_grad()
def mean_token_loss(network: MiniCPM, rows: Tensor, tokens_at_once: int = 65536) -> float:
    """Returns nats per token over all rows, computed in parts that fit the memory."""
    parts = rows.split(max(1, tokens_at_once // rows.shape[1]))
    total = sum(token_loss(network, part, reduction="sum").double() for part in parts)
    return float(total) / (rows.shape[0] * (rows.shape[1] - 1))


def last_losses(log: Path, count: int = 5) -> float:
    """Returns the mean training loss over the last lines of the log."""
    lines = log.read_text(encoding="utf-8").splitlines()[-count:]
    losses = [json.loads(line)["train_loss"] for line in lines]
    return round(float(np.mean(losses)), 4) if losses else math.nan


def library_versions() -> str:
    """Returns the versions of Python and of the libraries, as text."""
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"tokenizers {tokenizers.__version__}, safetensors {safetensors.__version__}, NumPy {np.__version__}"
    )
