"""Continues the bundled model with a stretched rotary embedding, on text full of statements and questions about them.

Most steps are short, at positions that reach as far as the long ones; the last take whole contexts. The bundled model
repeats what it read a few hundred tokens ago, so that finding statements again takes it a few hundred steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_model.muon import Optimizers
from demo_model.network import MiniCPM, NetworkConfig
from demo_model.retrieval import RetrievalRows, Statements, retrieval_rows, spread_positions

CONTEXT = 65_536


@dataclass(frozen=True)
class LongPlan:
    """What is run: row lengths, and the share of the time that each has."""

    minutes: float
    seed: int
    learning_rate: float = 0.002
    tokens_per_step: int = CONTEXT
    stages: tuple[tuple[int, float], ...] = ((1024, 0.15), (4096, 0.15), (16384, 0.25), (CONTEXT, 0.45))
    warm_up_end: float = 0.03
    decay_start: float = 0.4
    log_seconds: float = 5.0

    def length_at(self, progress: float) -> int:
        """Of the rows, at a share of the time."""
        end = 0.0
        for length, share in self.stages:
            end += share
            if progress < end:
                return length
        return self.stages[-1][0]

    def learning_rate_at(self, progress: float) -> float:
        """Rises, stays, and falls linearly to nothing."""
        rise = min(1.0, progress / self.warm_up_end)
        fall = min(1.0, (1.0 - progress) / (1.0 - self.decay_start))
        return self.learning_rate * max(0.0, min(rise, fall))


def long_config(stages: tuple[tuple[int, float], ...] = LongPlan.stages) -> NetworkConfig:
    """The bundled model's sizes with the context of the last stage, and a rotary embedding stretched as much."""
    context, bundled = stages[-1][0], NetworkConfig()
    growth = max(1.0, context / bundled.max_position_embeddings)
    return NetworkConfig(max_position_embeddings=context, rope_reach=bundled.rope_reach * growth)


def losses(network: MiniCPM, rows: RetrievalRows, positions: NDArray[np.int64] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Nats a token of the text and of the answers, and the share of answers that greedy decoding gives."""
    device = network.model.embed_tokens.weight.device
    tokens, is_text, is_answer = (_moved(array, device) for array in (rows.tokens, rows.is_text, rows.is_answer))
    at = None if positions is None else _moved(positions, device)
    logits = network.head(network.hidden_states(tokens[:, :-1], at)).float().flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    each = F.cross_entropy(logits, targets, reduction="none")
    is_right = (logits.argmax(-1) == targets).float()
    return _mean(each, is_text), _mean(each, is_answer), _mean(is_right, is_answer)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Of the marked ones; by a product, as picking them would wait for the device."""
    weights = mask.flatten().float()
    return (values * weights).sum() / weights.sum()


def _moved(array: NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class LongTrainer:
    """Holds the network and the log of one run."""

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
        """One optimizer step; returns its losses without waiting for them."""
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
            # A step is sent off long before it is over; at most one waits, or the time would be up too late.
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
        """Losses and right answers over rows of held-out text at their own positions."""
        rng = np.random.default_rng(length)
        found = [
            torch.stack(losses(self.network, retrieval_rows(text, self.statements, 1, length, rng), None))
            for _ in range(count)
        ]
        names = ("text_loss", "answer_loss", "right_tokens")
        return dict(zip(names, torch.stack(found).mean(0).tolist(), strict=True))

    def save(self, path: Path) -> None:
        """The fp32 weights."""
        save_file(self.network.state_dict(), str(path))
