"""Makes the ternary demo model: the bundled one, continued with weights of -1, 0 or 1 times the scale of their group.

The forward pass multiplies with ternary values, the gradient goes to the full-precision weights as if they had been
used (straight-through estimator), and the ternary values are saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_model.export import write_checkpoint
from demo_model.network import MiniCPM, NetworkConfig, Projection
from demo_model.short_run import BUNDLED, ShortPlan, short_run

SMALLEST_SCALE = 1e-5


@dataclass(frozen=True)
class TernaryPlan(ShortPlan):
    """The settings of a run from the bundled weights; `group_size` is the number of columns that share a scale."""

    learning_rate: float = 0.005
    group_size: int = 128


def ternary(weight: Tensor, group_size: int) -> Tensor:
    """Returns a weight rounded to -1, 0 or 1 times the scale of each group; the scales are rounded to bfloat16."""
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
    """Returns the weights to save, with ternary values in the projections."""
    weights = dict(network.state_dict())
    for name, module in network.named_modules():
        if isinstance(module, TernaryProjection):
            weights[f"{name}.weight"] = ternary(module.weight.detach(), module.group_size)
    return weights


def make_ternary_model(out: Path, plan: TernaryPlan, device: torch.device) -> None:
    """Trains the model and writes its checkpoint folder; intermediate files are removed."""
    with short_run(plan, device) as run:
        weights = load_file(str(BUNDLED / "model.safetensors"))
        network = ternary_network(weights, plan.group_size).to(device)
        run.train(network)
        save_file(saved_weights(network), str(run.work / "weights.safetensors"))
        write_checkpoint(run.work, out, network.config, device)
