"""Makes the long model: a share of the demo model's text, training, and a checkpoint folder with what was measured."""

from __future__ import annotations

import datetime
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from demo_model.corpus import write_corpus
from demo_model.export import checkpoint_config, write_checkpoint, write_json
from demo_model.long_training import LongPlan, LongTrainer
from demo_model.model_card import table
from demo_model.retrieval import KEY_WORDS, VALUE_WORDS, Statements
from demo_model.tokenizer import encode_file
from demo_model.training import library_versions

BUNDLED = Path(__file__).resolve().parents[2] / "cpmrt" / "assets" / "demo"
CORPUS_STRIDE = 4
"""One in four documents of the demo model's text: more than the minutes of training take."""
SPARSE_CONFIG = {
    "kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 64, "window_size": 2048, "topk": 64,
    "use_nope": False, "dense_len": 8192,
}  # fmt: skip
"""What the README of MiniCPM4.1-8B tells users to add."""
MEASURED_ROWS = 4


def long_plan(minutes: float, seed: int, learning_rate: float | None, tiny: bool) -> LongPlan:
    """The run that was asked for."""
    rate = learning_rate or LongPlan.learning_rate
    if tiny:
        return LongPlan(minutes, seed, rate, tokens_per_step=1024, stages=((256, 0.5), (512, 0.5)), log_seconds=1)
    return LongPlan(minutes, seed, rate)


def make_long_model(out: Path, plan: LongPlan, device: torch.device) -> None:
    """Writes a checkpoint folder; intermediate files are removed."""
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
    """Tokens of the documents that the demo model was trained on, and of those that it was not."""
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
