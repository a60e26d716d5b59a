"""Makes the rows to train on: text that the target itself writes, continuing prompts from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cpmrt.errors import ConfigError, RequestError
from cpmrt.quantization.calibration import read_texts
from cpmrt.text import Tokenizer
from draft_training.target import Target

PROMPT_STRIDE = 512


def prompt_windows(path: Path, tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Returns at most `count` prompts of at most `length` tokens, BOS first.

    Prompts begin at the start of every document and after every `PROMPT_STRIDE` tokens of it.
    """
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    windows: list[list[int]] = []
    for text in read_texts(path):
        try:
            ids = tokenizer.encode(text, add_special_tokens=False)
        except RequestError:
            continue
        last = max(1, len(ids) - length)
        windows += [bos + ids[start : start + length - len(bos)] for start in range(0, last, PROMPT_STRIDE) if ids]
        if len(windows) >= count:
            break
    if not windows:
        raise ConfigError(f"{path} holds no text", expected="at least one document")
    return windows[:count]


class PromptPool:
    """The prompts of several sources, each of which gets an equal share of the rows."""

    def __init__(self, sources: Sequence[Sequence[list[int]]], device: torch.device) -> None:
        prompts = [prompt for source in sources for prompt in source]
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        width = int(self.lengths.max())
        self.tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device)
        counts = torch.tensor([len(source) for source in sources], device=device)
        self.counts, self.first = counts, counts.cumsum(0) - counts

    def draw(self, sources: Tensor, generator: torch.Generator) -> Tensor:
        """Returns the indices of random prompts, one of each of these sources."""
        uniform = torch.rand(sources.shape, generator=generator, device=sources.device, dtype=torch.float64)
        return self.first[sources] + (uniform * self.counts[sources]).long()


@dataclass(frozen=True)
class Generated:
    """Generated rows: tokens [B, L], which of them the target chose (not a prompt) [B, L], and sources of rows [B]."""

    tokens: Tensor
    is_chosen: Tensor
    sources: Tensor


@torch.no_grad()
def generate(
    target: Target, pool: PromptPool, temperatures: Tensor, length: int, generator: torch.Generator
) -> Generated:
    """Generates a row for each of `temperatures` [B] (0: greedy). After an end token it goes on with another prompt."""
    rows, device = len(temperatures), target.device
    sources = torch.arange(rows, device=device) % len(pool.counts)
    stops = torch.tensor(target.config.eos_token_ids, device=device)
    tokens = torch.empty(rows, length, dtype=torch.long, device=device)
    is_chosen = torch.empty(rows, length, dtype=torch.bool, device=device)
    cache = target.new_cache(rows, length)
    prompts, offsets = pool.draw(sources, generator), torch.zeros(rows, dtype=torch.long, device=device)
    sampled = torch.zeros(rows, dtype=torch.long, device=device)
    for position in range(length):
        is_free = offsets >= pool.lengths[prompts]
        given = pool.tokens[prompts, offsets.clamp(max=pool.tokens.shape[1] - 1)]
        tokens[:, position] = current = torch.where(is_free, sampled, given)
        is_chosen[:, position] = is_free
        is_over = is_free & torch.isin(current, stops)
        prompts = torch.where(is_over, pool.draw(sources, generator), prompts)
        offsets = torch.where(is_over, 0, offsets + 1)
        logits = target.logits(target.step(current, position, cache)).float()
        sampled = (logits + temperatures[:, None] * gumbel(logits, generator)).argmax(-1)
    return Generated(tokens, is_chosen, sources)


def gumbel(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draws Gumbel noise, with which the argmax of logits plus noise is a sample."""
    noise = torch.empty_like(like).exponential_(generator=generator)
    return -noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_()


def mixed_temperatures(rows: int, greedy_share: float, generator: torch.Generator) -> Tensor:
    """Draws temperatures: 0 for a share of the rows, between 0.7 and 1 for the others."""
    device = generator.device
    warm = 0.7 + 0.3 * torch.rand(rows, generator=generator, device=device)
    return torch.where(torch.rand(rows, generator=generator, device=device) < greedy_share, 0.0, warm)
