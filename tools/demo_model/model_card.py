"""Writes the README of the exported folder from what the other stages measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo_model.conversations import HELD_OUT_PHRASING
from demo_model.corpus import MAX_PACKAGE_BYTES
from demo_model.network import NetworkConfig

CURVE_ROWS = 12


def table(header: list[object], rows: list[list[object]]) -> str:
    """A Markdown table."""
    rule: list[object] = ["---"] * len(header)
    lines = [header, rule, *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def introduction(config: NetworkConfig, parameters: int) -> str:
    """What the model is."""
    return f"""# The demo model of cpmrt

A MiniCPM-style language model of {parameters:,} parameters, small enough to come with the package: it
continues Python code and says what the parts of Python's standard library do. It is made for demonstrations
and tests. It is wrong often, knows nothing but Python, and must not be relied on.

`MiniCPMForCausalLM`: {config.num_hidden_layers} layers, hidden size {config.hidden_size}, feed-forward size \
{config.intermediate_size}, {config.num_attention_heads} query heads and {config.num_key_value_heads} \
key-value heads of size {config.head_dim}, {config.vocab_size} tokens (BPE with byte fallback), \
tied embeddings, {config.max_position_embeddings} positions, bf16. `config.json` holds the scales.

## Licence

The weights and the tokenizer are licensed under Apache-2.0. They were trained only on text whose package
states a permissive licence in its metadata (listed below); files whose head names another kind of licence
were left out.
"""


def training_section(summary: dict[str, Any], encoded: dict[str, Any]) -> str:
    """How it was trained."""
    train, chat = encoded["train"], encoded["chat"]
    minutes = f"{summary['seconds'] / 60:.1f} min, and {summary['compile_seconds']:.0f} s of compilation"
    sources = f"{train['documents']:,} documents, {train['bytes'] / 1e6:.1f} MB"
    bytes_a_token = train["bytes"] / train["tokens"]
    long_rows = f"of these in rows of {summary['long_length']} tokens"
    rows: list[list[object]] = [
        ["date", summary["date"]],
        ["command", f"`{summary['command']}`"],
        ["device", summary["device"]],
        ["training time", minutes],
        ["tokens seen", f"{summary['tokens'] / 1e9:.2f} billion in {summary['steps']:,} steps"],
        [long_rows, f"{summary['long_row_tokens'] / summary['tokens']:.1%}, at the end"],
        ["speed", f"{summary['tokens_per_second'] / 1e6:.2f} million tokens a second"],
        ["sources", f"{sources}, {train['tokens'] / 1e6:.1f} million tokens of {bytes_a_token:.2f} bytes"],
        ["conversations", f"{chat['documents']:,} made from docstrings, {chat['tokens'] / 1e6:.1f} million "
                          f"tokens; {summary['chat_share']:.0%} of every batch"],
        ["optimizer", f"Muon for matrices, AdamW for the rest, learning rate {summary['learning_rate']}, "
                      f"warm-up, stable, linear decay over the last {summary['decay_share']:.0%}"],
        ["libraries", summary["libraries"]],
    ]  # fmt: skip
    return "## Training\n\n" + table(["", ""], rows) + "\n"


def curve_section(log: Path) -> str:
    """The held-out loss over the run."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    measured = [record for record in records if "heldout_loss" in record]
    stride = max(1, len(measured) // CURVE_ROWS)
    rows: list[list[object]] = [
        [record["step"], f"{record['tokens'] / 1e6:.0f}", record["train_loss"], record["heldout_loss"]]
        for record in measured[::-1][::stride][::-1]
    ]
    note = "Training loss includes the conversations, held-out loss does not; both in nats a token.\n"
    return f"{note}\n" + table(["step", "million tokens", "training loss", "held-out loss"], rows) + "\n"


def results_section(results: dict[str, Any], summary: dict[str, Any]) -> str:
    """The measurements on the exported weights."""
    losses: list[list[object]] = [
        [row["row_length"], f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}"]
        for row in results["held_out"]
    ]
    answers: list[list[object]] = [
        [
            phrasing + (" (never trained)" if phrasing == HELD_OUT_PHRASING else ""),
            row["questions"],
            f"{row['exact']:.1%}",
        ]
        for phrasing, row in results["exact_answers"].items()
    ]
    return f"""## Results

Measured on the exported bf16 weights in bf16 arithmetic. The training loss at the end was \
{summary["final_train_loss"]:.4f}.

Held-out documents, about 1 % of all, chosen by a hash of their path:

{table(["row length", "loss (nats a token)", "bits a byte"], losses)}

Greedy answers that equal the docstring's text exactly, over a sample of {results["facts_sampled"]} of \
{results["facts"]} facts:

{table(["question", "asked", "exact"], answers)}
"""


def samples_section(samples: list[dict[str, str]]) -> str:
    """Sample outputs, prompt included."""
    parts = ["## Samples\n"]
    for sample in samples:
        if sample["kind"] == "code":
            parts.append(f"{sample['mode']}:\n\n````python\n{sample['prompt']}{sample['text']}\n````\n")
        else:
            parts.append(f"> {sample['prompt']}\n\n````text\n{sample['text']}\n````\n")
    return "\n".join(parts)


def sources_section(corpus: dict[str, Any]) -> str:
    """The table of what was trained on."""
    rows: list[list[object]] = [
        [row["name"], row["version"], row["licence"], row["files"], f"{row['bytes'] / 1000:.0f}"]
        for row in corpus["sources"]
    ]
    return f"""## Sources

{corpus["bytes"] / 1e6:.1f} MB after cleaning, {corpus["held_out_bytes"] / 1e6:.1f} MB of it held out.
Vendored and generated files, long tables, duplicates, leading licence comments, and what exceeds \
{MAX_PACKAGE_BYTES // 10**6} MB a package were left out.
Not used, because their metadata names no permissive licence: {", ".join(corpus["skipped"]) or "none"}.

{table(["package", "version", "licence as stated", "files", "kB"], rows)}
"""


def write_model_card(work: Path, out: Path, config: NetworkConfig) -> None:
    """Joins the sections into `README.md`."""
    corpus, encoded, summary, results = (
        json.loads((work / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("corpus", "encoded", "summary", "results")
    )
    sections = [
        introduction(config, summary["parameters"]),
        training_section(summary, encoded),
        curve_section(work / "train_log.jsonl"),
        results_section(results, summary),
        samples_section(results["samples"]),
        sources_section(corpus),
    ]
    (out / "README.md").write_text("\n".join(sections), encoding="utf-8")
