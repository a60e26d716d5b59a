"""Measures the exported weights: held-out loss, exact answers, and sample texts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.conversations import Turn, evaluation_questions, render
from demo_model.docstring_facts import Fact
from demo_model.network import MiniCPM
from demo_model.tokenizer import BOS_ID, EOS_ID, IM_END_ID
from demo_model.training import evaluation_rows, load_tokens, mean_token_loss

CODE_PROMPTS = ("def read_lines(path):", "class Stack:", "import json\n\n\ndef load_config(")
CHAT_PROMPTS = (
    "What does os.path.join do?",
    "How do I use json.dumps?",
    "What is the purpose of functools.lru_cache?",
    "Which module has lru_cache?",
    "Who are you?",
)
TEMPERATURE = 0.8
ANSWER_TOKENS = 110
CODE_TOKENS = 120
ROWS_AT_ONCE = 512


@torch.no_grad()
def generate(
    network: MiniCPM, prompts: Sequence[list[int]], limit: int, temperature: float = 0.0, seed: int = 0
) -> list[list[int]]:
    """Continues every prompt until a stop token or `limit` tokens; each step recomputes the whole row."""
    device = network.model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows = torch.full((len(prompts), int(lengths.max()) + limit), EOS_ID, device=device)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    index = torch.arange(len(prompts), device=device)
    is_done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(limit):
        hidden = network.hidden_states(rows[:, : int(lengths.max()) + step])
        logits = network.head(hidden[index, lengths + step - 1]).float()
        chosen = next_tokens(logits, temperature, generator)
        is_done |= (chosen == EOS_ID) | (chosen == IM_END_ID)
        rows[index, lengths + step] = torch.where(is_done, EOS_ID, chosen)
        if is_done.all():
            break
    return [continuation(row, int(length)) for row, length in zip(rows.cpu(), lengths, strict=True)]


def next_tokens(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Returns the likeliest tokens at temperature 0, else samples."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def continuation(row: Tensor, length: int) -> list[int]:
    """Returns the tokens of a row after its prompt of `length` tokens, up to the first stop token."""
    tokens: list[int] = row[length:].tolist()
    return tokens[: tokens.index(EOS_ID)] if EOS_ID in tokens else tokens


class Evaluator:
    """Measures everything that the model card states about the finished weights."""

    def __init__(self, network: MiniCPM, tokenizer: Tokenizer, work: Path, seed: int) -> None:
        self.network, self.tokenizer, self.work, self.seed = network, tokenizer, work, seed
        self.device = network.model.embed_tokens.weight.device

    def encode(self, text: str) -> list[int]:
        """Returns token ids with <s> in front."""
        return [BOS_ID, *self.tokenizer.encode(text, add_special_tokens=False).ids]

    def chat(self, question: str) -> list[int]:
        """Returns the prompt for one user message."""
        return self.encode(render([Turn("user", question)], generation_prompt=True))

    def texts(self, prompts: Sequence[list[int]], limit: int, temperature: float = 0.0) -> list[str]:
        found: list[str] = []
        for first in range(0, len(prompts), ROWS_AT_ONCE):
            part = prompts[first : first + ROWS_AT_ONCE]
            ids = generate(self.network, part, limit, temperature, self.seed)
            found += [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids]
        return found

    def held_out(self, lengths: Sequence[int]) -> list[dict[str, float | int]]:
        """Measures loss and bits per byte over all held-out windows, for each row length."""
        sizes = json.loads((self.work / "encoded.json").read_text())["heldout"]
        tokens = load_tokens(self.work / "heldout.bin")
        results: list[dict[str, float | int]] = []
        for length in lengths:
            loss = mean_token_loss(self.network, evaluation_rows(tokens, length, len(tokens), self.device))
            bits = loss / math.log(2) * sizes["tokens"] / sizes["bytes"]
            results.append({"row_length": length, "loss": round(loss, 4), "bits_per_byte": round(bits, 4)})
        return results

    def exact_answers(self, facts: Sequence[Fact], count: int) -> dict[str, dict[str, float | int]]:
        """Measures, for each phrasing, the share of greedy answers that are the docstring's text exactly."""
        results: dict[str, dict[str, float | int]] = {}
        for phrasing, pairs in evaluation_questions(facts, count, self.seed).items():
            if not pairs:
                continue
            answers = self.texts([self.chat(question) for question, _ in pairs], ANSWER_TOKENS)
            right = sum(answer == truth for answer, (_, truth) in zip(answers, pairs, strict=True))
            results[phrasing] = {"questions": len(pairs), "exact": round(right / len(pairs), 4)}
        return results

    def samples(self) -> list[dict[str, str]]:
        """Makes greedy and sampled continuations of code, and greedy answers to questions."""
        code = [self.encode(prompt) for prompt in CODE_PROMPTS]
        found: list[dict[str, str]] = []
        for mode, temperature in (("greedy", 0.0), (f"T = {TEMPERATURE}", TEMPERATURE)):
            for prompt, text in zip(CODE_PROMPTS, self.texts(code, CODE_TOKENS, temperature), strict=True):
                found.append({"kind": "code", "mode": mode, "prompt": prompt, "text": text})
        chat = [self.chat(prompt) for prompt in CHAT_PROMPTS]
        for prompt, text in zip(CHAT_PROMPTS, self.texts(chat, ANSWER_TOKENS), strict=True):
            found.append({"kind": "chat", "mode": "greedy", "prompt": prompt, "text": text})
        return found
