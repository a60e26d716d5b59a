"""Makes the ternary demo model: the bundled one, continued with weights of -1, 0 or 1 times the scale of their group.

The forward multiplies with ternary values, the gradient goes to the full weights behind them as if they had been used
(straight-through estimator), and the values are what is saved.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.corpus import write_corpus
from demo_model.export import write_checkpoint
from demo_model.muon import Optimizers, learning_rate_factor
from demo_model.network import MiniCPM, NetworkConfig, Projection, token_loss
from demo_model.tokenizer import BOS_ID, encode_file
from demo_model.training import RowSampler, evaluation_rows, load_tokens, mean_token_loss

BUNDLED = Path(__file__).resolve().parents[2] / "cpmrt" / "assets" / "demo"
SMALLEST_SCALE = 1e-5


@dataclass(frozen=True)
class TernaryPlan:
    """A run: its time, its learning rate at its highest, and columns of a group."""

    minutes: float
    seed: int
    learning_rate: float = 0.005
    group_size: int = 128
    tokens_per_step: int = 131_072
    row_length: int = 1024
    corpus_stride: int = 2
    warm_up_end: float = 0.05
    decay_start: float = 0.3
    evaluation_rows: int = 256
    log_seconds: float = 5.0


def ternary(weight: Tensor, group_size: int) -> Tensor:
    """Returns the ternary values of a weight; scales are those that bfloat16 holds."""
    groups = weight.view(weight.shape[0], -1, group_size)
    scale = groups.abs().mean(-1, keepdim=True).clamp_min(SMALLEST_SCALE).bfloat16().float()
    return (scale * (groups / scale).round().clamp(-1, 1)).view_as(weight)


class TernaryProjection(Projection):
    """A projection that multiplies with ternary values and passes their gradient on to its weight."""

    group_size = TernaryPlan.group_size

    def forward(self, x: Tensor) -> Tensor:
        values = self.weight + (ternary(self.weight, self.group_size) - self.weight).detach()
        return F.linear(x, values.to(x.dtype))


def ternary_network(weights: dict[str, Tensor], group_size: int) -> MiniCPM:
    """Returns the bundled network with these weights, its projections ternary."""
    network = MiniCPM(NetworkConfig(), torch.bfloat16)
    network.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    for module in network.modules():
        if isinstance(module, Projection):
            module.__class__ = TernaryProjection
            module.group_size = group_size  # type: ignore[assignment]
    return network


def saved_weights(network: MiniCPM) -> dict[str, Tensor]:
    """Returns the weights as they are used: ternary values in the projections."""
    weights = dict(network.state_dict())
    for name, module in network.named_modules():
        if isinstance(module, TernaryProjection):
            weights[f"{name}.weight"] = ternary(module.weight.detach(), module.group_size)
    return weights


def make_ternary_model(out: Path, plan: TernaryPlan, device: torch.device) -> None:
    """Writes a checkpoint folder; intermediate files are removed."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copyfile(BUNDLED / "tokenizer.json", work / "tokenizer.json")
        begun = time.perf_counter()
        write_corpus(work, plan.corpus_stride)
        tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        for name in ("train", "heldout"):
            encode_file(tokenizer, work / f"{name}.jsonl", work / f"{name}.bin")
        print(f"text: {time.perf_counter() - begun:.1f} s", flush=True)
        torch.manual_seed(plan.seed)
        weights = load_file(str(BUNDLED / "model.safetensors"))
        network = ternary_network(weights, plan.group_size).to(device)
        _train(network, plan, work, tokenizer, device)
        save_file(saved_weights(network), str(work / "weights.safetensors"))
        write_checkpoint(work, out, network.config, device)


def _train(network: MiniCPM, plan: TernaryPlan, work: Path, tokenizer: Tokenizer, device: torch.device) -> None:
    """Trains until the time is over; prints the losses."""
    line_breaks = [token for piece, token in tokenizer.get_vocab().items() if not piece.strip("\n")]
    sampler = RowSampler(load_tokens(work / "train.bin"), [BOS_ID, *line_breaks], device)
    held_out = evaluation_rows(load_tokens(work / "heldout.bin"), plan.row_length, plan.evaluation_rows, device)
    generator, optimizers = torch.Generator(device).manual_seed(plan.seed), Optimizers(network)
    print(f"before: held-out loss {mean_token_loss(network, held_out):.4f}", flush=True)
    start = logged = time.perf_counter()
    recent: list[Tensor] = []
    steps = 0
    while (progress := (time.perf_counter() - start) / (60 * plan.minutes)) < 1:
        loss = token_loss(network, sampler.rows(plan.tokens_per_step // plan.row_length, plan.row_length, generator))
        loss.backward()
        factor = learning_rate_factor(progress, plan.warm_up_end, plan.decay_start, 0.01)
        optimizers.step(plan.learning_rate * factor)
        steps += 1
        recent.append(loss.detach())
        # A step is sent off long before it is over; at most one waits, or the time would be up too late.
        if len(recent) > 1:
            recent[-2].cpu()
        if (now := time.perf_counter()) - logged > plan.log_seconds:
            print(f"{now - start:6.1f} s  step {steps}  loss {torch.stack(recent).mean():.4f}", flush=True)
            logged, recent = now, recent[-1:]
    print(f"after {steps} steps: held-out loss {mean_token_loss(network, held_out):.4f}", flush=True)
