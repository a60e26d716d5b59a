"""The program of `cpmrt train-draft`: generates the target's text, trains the draft and measures its acceptance."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draft_training.acceptance import AcceptCounts, TreeDrafter, measure
from draft_training.draft import Draft, Eagle, make_eagle
from draft_training.dspark import BlockDrafter, DSpark
from draft_training.files import (
    DraftConfig,
    check_taps,
    check_target_layers,
    default_taps,
    default_target_layers,
    read_draft,
    residual_scale,
    write_draft,
)
from draft_training.generation import Generated, PromptPool, generate, mixed_temperatures, prompt_windows
from draft_training.target import Target
from draft_training.training import DraftPlan, DraftTrainer, frequent_tokens, rarest_token

from cpmrt.config.speculation import TreeShape
from cpmrt.dtypes import Array
from cpmrt.errors import ConfigError
from cpmrt.text import Tokenizer
from cpmrt.weights.model_folder import ModelFolder

CHAIN, TREE = TreeShape.chain(5), TreeShape(2, 10, 12)
MEASURED_LENGTH = 256


def draft_config(options: argparse.Namespace, folder: ModelFolder) -> DraftConfig:
    """Returns the draft's sizes by the options and the target. Raises ConfigError."""
    target, attention, taps, vocab = folder.config, folder.config.attention, (), folder.config.vocab_size
    scale, block = residual_scale(folder), {}
    if options.method == "eagle3":
        taps = check_taps(tuple(options.taps or default_taps(target.num_layers)), target.num_layers)
        vocab = min(vocab, options.draft_vocab or vocab)
    elif options.method == "dspark":
        layers = tuple(options.target_layers or default_target_layers(target.num_layers))
        taps, scale = tuple(layer + 1 for layer in check_target_layers(layers, target.num_layers)), 1.0
        block = {"num_layers": options.layers, "block_size": options.block_size, "markov_rank": options.markov_rank}
        if options.block_size >= options.length:
            what = f"less than a row's length, {options.length}"
            raise ConfigError("block size", expected=what, actual=options.block_size)
    return DraftConfig(
        options.method, target.hidden_size, options.intermediate or target.mlp.intermediate_size,
        options.heads or attention.num_heads, options.kv_heads or attention.num_kv_heads, attention.head_dim, vocab,
        target.rms_norm_eps, scale, taps, **block,
    )  # fmt: skip


class DraftMaker:
    """One run of the tool: the target, the text that it writes, and the draft."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begun = options, time.perf_counter()
        self.folder = ModelFolder.open(options.model)
        self.config = draft_config(options, self.folder)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.target = Target(self.folder, self.device, dtype, options.length + 1)
        self.tokenizer = Tokenizer.open(self.folder.path, vocab_size=self.folder.config.vocab_size)
        torch.manual_seed(options.seed)

    def say(self, **facts: object) -> None:
        """Prints a line of JSON with the time since the start."""
        print(json.dumps({"at": round(time.perf_counter() - self.begun, 1), **facts}), flush=True)

    def pool(self, paths: list[Path]) -> PromptPool:
        count, length = self.options.prompts, self.options.prompt_length
        return PromptPool([prompt_windows(path, self.tokenizer, count, length) for path in paths], self.device)

    def training_rows(self) -> torch.Tensor:
        """Returns the rows to train on, tokens [N, L + 1], read from --generated if that file exists."""
        options = self.options
        if options.generated is not None and options.generated.exists():
            return torch.from_numpy(np.load(options.generated)).to(self.device)
        if not options.text:
            raise ConfigError("no text to train on", fix="--text FILE")
        pool, generator = self.pool(options.text), torch.Generator(self.device).manual_seed(options.seed)
        parts = []
        for first in range(0, options.rows, options.rows_at_once):
            count = min(options.rows_at_once, options.rows - first)
            temperatures = mixed_temperatures(count, options.greedy_share, generator)
            written = generate(self.target, pool, temperatures, options.length + 1, generator)
            parts.append(written.tokens.int())
        tokens = torch.cat(parts)
        self.say(generated=tokens.numel())
        if options.generated is not None:
            np.save(options.generated, tokens.cpu().numpy())
        return tokens

    def train(self) -> dict[str, object]:
        """Trains the draft, writes its folder and returns the summary."""
        options, tokens = self.options, self.training_rows()
        draft, names = self.resumed() if options.resume else self.begun_with(tokens)
        token_ids = None if names is None else torch.from_numpy(names).to(self.device)
        if token_ids is not None:
            covered = torch.isin(tokens.long(), token_ids).float().mean().item()
            self.say(draft_vocab=len(token_ids), covered=round(covered, 4))
        plan = DraftPlan(
            options.minutes, options.steps, options.batch, options.seed, **_given(options),
        )  # fmt: skip
        summary = DraftTrainer(draft, tokens, token_ids, plan).run(lambda facts: self.say(**facts))
        write_draft(options.out / draft.config.method, draft.config, self.folder, draft.tensors(), names)
        return {"parameters": sum(p.numel() for p in draft.parameters()), **summary}

    def begun_with(self, tokens: torch.Tensor) -> tuple[Draft, Array | None]:
        """Makes a new draft, and the target ids of its head's rows: the most frequent in `tokens`, None for all."""
        config, names = self.config, None
        if config.method == "eagle3":
            target = self.folder.config
            ids = frequent_tokens(tokens, target.vocab_size, config.vocab_size, target.eos_token_ids)
            names = ids.cpu().numpy()
        elif config.method == "dspark":
            config = replace(config, mask_token_id=rarest_token(tokens, config.vocab_size))
        return make_draft(config, self.target, names), names

    def resumed(self) -> tuple[Draft, Array | None]:
        """Reads the draft in OUT/METHOD, and the target ids of its head's rows (None if the head has all tokens)."""
        config, tensors, names = read_draft(self.options.out / self.config.method)
        draft = make_draft(config, self.target, names)
        draft.load(tensors)
        return draft, names

    def measure(self) -> str:
        """Returns the table of measured accept lengths of the draft in OUT/METHOD."""
        options = self.options
        draft, names = self.resumed()
        token_ids = None if names is None else torch.from_numpy(names).to(self.device)
        pool, generator = self.pool(options.held_out), torch.Generator(self.device).manual_seed(options.seed + 1)
        depth = draft.config.block_size or CHAIN.num_passes
        depths = " | ".join(f"depth {place + 1}" for place in range(depth))
        drafters = drafters_of(draft, token_ids)
        shapes = " | ".join(_title(drafter.shape) for drafter in drafters)
        lines = [f"| text | T | {shapes} | {depths} |", "|" + " --- |" * (2 + len(drafters) + depth)]
        for temperature in (0.0, 1.0):
            rows = options.measured_rows * len(options.held_out)
            temperatures = torch.full((rows,), temperature, device=self.device)
            length = min(options.length, MEASURED_LENGTH)
            text: Generated = generate(self.target, pool, temperatures, length + 1, generator)
            found = [measure(drafter, text) for drafter in drafters]
            lines += [_row(*row) for row in zip(options.held_out, repeat(temperature), zip(*found, strict=True))]
        return "\n".join(lines)


def make_draft(config: DraftConfig, target: Target, token_ids: Array | None) -> Draft:
    """Makes a draft on the target's device. `token_ids` are the target ids of the rows of an EAGLE-3 head."""
    if config.method == "dspark":
        return DSpark(config, target).to(target.device)
    return make_eagle(config, target, token_ids)


def drafters_of(draft: Draft, token_ids: torch.Tensor | None) -> list[TreeDrafter | BlockDrafter]:
    """Returns the drafters to measure a draft with, one for each shape; the last one drafts chains."""
    if isinstance(draft, DSpark):
        return [BlockDrafter(draft, TreeShape.chain(draft.config.block_size))]
    assert isinstance(draft, Eagle)
    return [TreeDrafter(draft, token_ids, shape) for shape in (TREE, CHAIN)]


def _title(shape: TreeShape) -> str:
    if shape.is_chain:
        return f"chain of {shape.num_passes}"
    return f"tree {shape.num_passes}, {shape.top_k}, {shape.tree_size}"


def _row(path: Path, temperature: float, counts: tuple[AcceptCounts, ...]) -> str:
    rates = " | ".join(f"{rate:.0%}" for rate in counts[-1].rates())
    lengths = " | ".join(f"{count.mean_length:.2f}" for count in counts)
    return f"| {path.stem} | {temperature:g} | {lengths} | {rates} |"


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of DraftPlan that the command line sets."""
    wishes = {
        "num_passes": options.passes, "learning_rate": options.learning_rate, "hidden_weight": options.hidden_weight,
        "num_roots": options.blocks,
    }  # fmt: skip
    return {name: value for name, value in wishes.items() if value is not None}


def run(options: argparse.Namespace) -> None:
    """Trains and measures as the options of `cpmrt train-draft` say. Raises CpmrtError."""
    maker = DraftMaker(options)
    if options.steps:
        maker.say(**maker.train())
    if options.held_out:
        print(maker.measure(), flush=True)
    maker.say(done=str(options.out / options.method))
