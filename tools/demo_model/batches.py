"""Draws training rows from token files that lie whole on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo_model.tokenizer import BOS_ID


def load_tokens(path: Path) -> np.ndarray:
    """A token file as int32, the narrowest type that torch can index with everywhere."""
    return np.fromfile(path, dtype=np.uint16).astype(np.int32)


class RowSampler:
    """Rows of <s> and the text after a random allowed start, drawn with replacement.

    Every row begins with <s>, as every prompt does. A start is the first token after one of `openings`: the
    beginning of a document, or of a line that is not indented.
    """

    def __init__(self, tokens: np.ndarray, openings: list[int], device: torch.device) -> None:
        starts = np.flatnonzero(np.isin(tokens, openings)) + 1
        self.tokens = torch.from_numpy(tokens).to(device)
        self.starts = torch.from_numpy(starts).to(device)

    def rows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Token rows (count, length + 1): `length` inputs and, shifted by one, their targets."""
        device = self.tokens.device
        last = len(self.tokens) - length
        offsets = torch.randint(last, (count,), generator=generator, device=device)
        index = torch.searchsorted(self.starts, offsets).clamp_(max=len(self.starts) - 1)
        starts = self.starts[index].clamp_(max=last)
        body = self.tokens[starts[:, None] + torch.arange(length, device=device)].long()
        return torch.cat((torch.full((count, 1), BOS_ID, device=device), body), dim=1)


def evaluation_rows(tokens: np.ndarray, length: int, limit: int, device: torch.device) -> Tensor:
    """Consecutive windows, each with <s> in front, in which every token is predicted exactly once."""
    count = min(limit, len(tokens) // length)
    body = torch.from_numpy(tokens[: count * length].reshape(count, length)).to(device).long()
    return torch.cat((torch.full((count, 1), BOS_ID, device=device), body), dim=1)
