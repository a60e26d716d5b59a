"""The optimizer Muon: momentum with orthogonalised matrix updates, for all matrices of one shape at once.

Update size follows Liu et al., "Muon is Scalable for LLM Training" (2025), so that AdamW's learning rate and
weight decay carry over.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz coefficients of Jordan et al. (2024): steep at zero, singular values end near one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
UPDATE_RMS = 0.2


def orthogonalised(matrices: Tensor) -> Tensor:
    """Returns each matrix of a batch (count, m, n) with its singular values moved to about one."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


class Muon:
    """The optimizer; `step` takes the learning rate, since the schedule changes it every time."""

    def __init__(self, matrices: Iterable[Tensor], momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        self.groups = list(by_shape.values())
        self.buffers = [torch.zeros_like(torch.stack(group)) for group in self.groups]
        self.momentum = momentum
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Applies one Nesterov update from the gradients and clears them."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            buffer.lerp_(gradients, 1 - self.momentum)
            update = orthogonalised(gradients.lerp(buffer, self.momentum))
            size = learning_rate * UPDATE_RMS * math.sqrt(max(group[0].shape))
            torch._foreach_mul_(group, 1 - learning_rate * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-size)
            for matrix in group:
                matrix.grad = None


def learning_rate_factor(progress: float, warm_up_end: float, decay_start: float, first: float = 0.0) -> float:
    """Returns the factor of the learning rate at a share of the run: it rises to one, stays and falls to zero.

    It rises and falls linearly. The rise begins as if `first` of the run were over, so that even the first of few steps
    has a learning rate.
    """
    return max(0.0, min(1.0, (progress + first) / warm_up_end, (1.0 - progress) / (1.0 - decay_start)))


class Optimizers:
    """Muon for the matrices of a network, AdamW for its norms and its embedding."""

    def __init__(self, network: nn.Module) -> None:
        parameters = dict(network.named_parameters())
        matrices = [p for name, p in parameters.items() if p.dim() == 2 and "embed_tokens" not in name]
        self.others = [p for name, p in parameters.items() if p.dim() == 1 or "embed_tokens" in name]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(self.others, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True)

    def step(self, learning_rate: float) -> None:
        """Applies one update from the gradients and clears them."""
        nn.utils.clip_grad_norm_(self.others, 1.0)
        self.adam.param_groups[0]["lr"] = learning_rate
        self.adam.step()
        self.adam.zero_grad()
        self.muon.step(learning_rate)
