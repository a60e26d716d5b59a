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

from demo_model.batches import RowSampler, evaluation_rows, load_tokens
from demo_model.muon import Optimizers
from demo_model.network import MiniCPM, NetworkConfig, token_loss
from demo_model.tokenizer import BOS_ID

LossFunction = Callable[[MiniCPM, Tensor], Tensor]


@dataclass(frozen=True)
class TrainingPlan:
    """What is run; phases are shares of the wall-clock time, so that the run ends when it should."""

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

    def learning_rate_factor(self, progress: float) -> float:
        """Rises to one, stays, and falls linearly to nothing."""
        rise = min(1.0, progress / self.warm_up_end)
        fall = min(1.0, (1.0 - progress) / (1.0 - self.decay_start))
        return max(0.0, min(rise, fall))


class Batches:
    """Source and conversation rows, mixed in a fixed proportion."""

    def __init__(self, work: Path, plan: TrainingPlan, device: torch.device) -> None:
        tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        vocabulary = tokenizer.get_vocab().items()
        line_breaks = [token for piece, token in vocabulary if not piece.strip("\n")]
        self.sources = RowSampler(load_tokens(work / "train.bin"), [BOS_ID, *line_breaks], device)
        self.conversations = RowSampler(load_tokens(work / "chat.bin"), [BOS_ID], device)
        self.generator = torch.Generator(device).manual_seed(plan.seed)
        self.plan = plan

    def draw(self, length: int) -> Tensor:
        """One step's rows."""
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
        """Lets the device catch up, so that times are true."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, length: int, factor: float) -> Tensor:
        """One optimizer step; returns the loss without waiting for it."""
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
                recent.append(self.step(length, plan.learning_rate_factor(progress)))
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
        """Nats per token on the first held-out windows."""
        rows = evaluation_rows(self.held_out, self.plan.short_length, self.plan.evaluation_rows, self.device)
        return mean_token_loss(self.network, rows)


@torch.no_grad()
def mean_token_loss(network: MiniCPM, rows: Tensor, tokens_at_once: int = 65536) -> float:
    """Nats per token over all rows, in parts that fit the memory."""
    parts = rows.split(max(1, tokens_at_once // rows.shape[1]))
    total = sum(token_loss(network, part, reduction="sum").double() for part in parts)
    return float(total) / (rows.shape[0] * (rows.shape[1] - 1))


def last_losses(log: Path, count: int = 5) -> float:
    """The mean training loss over the last lines of the log."""
    lines = log.read_text(encoding="utf-8").splitlines()[-count:]
    losses = [json.loads(line)["train_loss"] for line in lines]
    return round(float(np.mean(losses)), 4) if losses else math.nan


def library_versions() -> str:
    """What the run used."""
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"tokenizers {tokenizers.__version__}, safetensors {safetensors.__version__}, NumPy {np.__version__}"
    )
