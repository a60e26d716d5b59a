"""Writes the checkpoint folder: bf16 weights, configuration, tokenizer, and a README with the measurements."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from demo_model.conversations import HELD_OUT_PHRASING
from demo_model.corpus import MAX_PACKAGE_BYTES
from demo_model.network import MiniCPM, NetworkConfig
from demo_model.tokenizer import BOS_ID, EOS_ID, IM_END_ID, tokenizer_config

MAX_FOLDER_BYTES = 16_000_000
CURVE_ROWS = 12
SPECIAL_IDS = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID], "pad_token_id": EOS_ID}
GENERATION_CONFIG = SPECIAL_IDS | {"do_sample": False}


def checkpoint_config(config: NetworkConfig) -> dict[str, object]:
    """Returns the contents of `config.json`, in MiniCPM's fields."""
    factors, sizes = config.rope_factors, asdict(config)
    del sizes["rope_reach"]
    return {
        "architectures": [config.architecture],
        "model_type": config.model_type,
        **sizes,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "original_max_position_embeddings": config.max_position_embeddings,
        },
        "mup_denominator": config.num_hidden_layers,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "use_cache": True,
        **SPECIAL_IDS,
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Writes readable JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checkpoint(work: Path, out: Path, config: NetworkConfig, device: torch.device) -> MiniCPM:
    """Writes the checkpoint into `out`; returns the network with the weights rounded to bf16, as they were written."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.bfloat16() for name, tensor in load_file(str(work / "weights.safetensors")).items()
    }
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    shutil.copyfile(work / "tokenizer.json", out / "tokenizer.json")
    write_json(out / "config.json", checkpoint_config(config))
    write_json(out / "generation_config.json", GENERATION_CONFIG)
    write_json(out / "tokenizer_config.json", tokenizer_config(config.max_position_embeddings))
    network = MiniCPM(config, torch.bfloat16)
    network.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return network.to(device).eval()


def check_folder_size(out: Path) -> int:
    """Returns the folder's size in bytes. Raises ValueError if it is too large to bundle."""
    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    if size > MAX_FOLDER_BYTES:
        raise ValueError(f"{out} holds {size} bytes, more than {MAX_FOLDER_BYTES}: make the network smaller")
    return size


def table(header: list[object], rows: list[list[object]]) -> str:
    rule: list[object] = ["---"] * len(header)
    lines = [header, rule, *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def introduction(config: NetworkConfig, parameters: int) -> str:
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
    parts = ["## Samples\n"]
    for sample in samples:
        if sample["kind"] == "code":
            parts.append(f"{sample['mode']}:\n\n````python\n{sample['prompt']}{sample['text']}\n````\n")
        else:
            parts.append(f"> {sample['prompt']}\n\n````text\n{sample['text']}\n````\n")
    return "\n".join(parts)


def sources_section(corpus: dict[str, Any]) -> str:
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
    """Writes `README.md` from what the other stages measured."""
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
