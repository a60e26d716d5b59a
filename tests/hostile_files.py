"""Damaged and hostile files of a small checkpoint, each as a change of one good folder.

Values come from a palette of what JSON can hold and no model has: wrong types, huge and tiny numbers, deep nesting.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import Repr
from typing import Any

from tiny_checkpoint import CONFIG, write_checkpoint

HUGE = int("9" * 401)
PALETTE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 0.5, 1.5, 1e-300, 1e-9, 1e12, 1e300, 2**31 - 1, 2**31, 10**19, HUGE, float("nan"),
    float("inf"), "", "x", "9" * 100_000, [], [1], [1e-308] * 16, [HUGE] * 16, [[[]]], {}, {"a": 1},
)  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {
        "factor": 4.0, "attention_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "truncate": True,
    },
    "longrope": {
        "factor": 4.0, "attention_factor": 1.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
    },
}  # fmt: skip
MORE_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "hidden_act", "attention_bias", "layer_types", "quantization_config", "sparse_config",
    "partial_rotary_factor", "model_type", "dtype",
)  # fmt: skip
WEIGHTS, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True)
class Damage:
    """One change of a good folder; `name` says what it is."""

    name: str
    apply: Callable[[Path], None]


def write_good(folder: Path) -> Path:
    """Write the folder that the changes are made to: a tiny model with every file that a folder may have."""
    write_checkpoint(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    (folder / "model.safetensors").rename(folder / WEIGHTS)
    raw = (folder / WEIGHTS).read_bytes()
    names = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    index = {"weight_map": {name: WEIGHTS for name in names if name != "__metadata__"}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def damages() -> Iterator[Damage]:
    """Yield every change, always the same ones in the same order."""
    yield from _config_values()
    yield from _rope_values()
    yield from _tokenizers()
    yield from _links()
    for file, count in (("config.json", 60), ("tokenizer.json", 300), (INDEX, 60)):
        for seed in range(count):
            yield Damage(f"{file}: random change {seed}", partial(_random_change, file, seed))
    for seed in range(150):
        yield Damage(f"safetensors header: random change {seed}", partial(_random_header, seed))
    for file in (*JSON_FILES, WEIGHTS, INDEX):
        for seed in range(8):
            yield Damage(f"{file}: damaged bytes {seed}", partial(_damaged_bytes, file, seed))


def _config_values() -> Iterator[Damage]:
    for key in (*CONFIG, *MORE_KEYS):
        for value in PALETTE:
            yield Damage(f"config.json: {key} = {_short(value)}", partial(_merge, "config.json", {key: value}))
    for size in (2**20, 2**31 - 1):
        yield Damage(f"a context of {size}", partial(_merge, "config.json", {"max_position_embeddings": size}))


def _rope_values() -> Iterator[Damage]:
    for kind, fields in ROPES.items():
        for key in (*fields, "rope_theta", "original_max_position_embeddings"):
            for value in (*PALETTE, 1.0):
                rope = {"rope_type": kind, **fields, key: value}
                name = f"config.json: {kind} with {key} = {_short(value)}"
                yield Damage(name, partial(_merge, "config.json", {"rope_scaling": rope}))
    for head_dim in (2, 4):
        rope = {"rope_type": "dynamic", "factor": 2.0}
        change = {"rope_scaling": rope, "head_dim": head_dim}
        yield Damage(f"config.json: dynamic with head_dim {head_dim}", partial(_merge, "config.json", change))


def _tokenizers() -> Iterator[Damage]:
    big = "x" * 8_000_000
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}
    slow = ("(a+)+$", "(a|a)*$", "(?:a*)*b", "a*a*a*a*a*a*b", "(a|b|ab)*c", "((a{1,9}){1,9}){1,9}c", "(", "[", "\\")
    spaces = {"type": "ByteLevel", "add_prefix_space": True}
    template = [{"SpecialToken": {"id": "<none>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [2**33], "tokens": ["<s>"]}}
    values: list[tuple[str, Any]] = [
        ("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": big}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": ""}, "content": big}),
        ("normalizer", {"type": "Sequence", "normalizers": [replace] * 12}),
        ("normalizer", {"type": "Prepend", "prepend": big * 25}),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFKD"}, replace] * 6}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAEAAAAAAAAAAAAA////fwAA"}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "?"}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [spaces] * 30}),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "xx", "prepend_scheme": "always"}),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
        ("post_processor", {"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": {}}),
        ("post_processor", {"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": special}),
        ("post_processor", {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 2**40]}),
        ("post_processor", {"type": "Sequence", "processors": [{"type": "ByteLevel"}] * 100_000}),
        ("decoder", {"type": "Strip", "content": "x", "start": 2**40, "stop": 2**40}),
        ("decoder", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": big}),
        ("decoder", {"type": "Sequence", "decoders": [{"type": "Fuse"}, replace] * 12}),
        ("decoder", {"type": "WordPiece", "prefix": big, "cleanup": True}),
        ("added_tokens", [{"id": 300, "content": big, "special": True, "normalized": True}]),
        ("added_tokens", [{"id": i, "content": f"<{i}>", "special": i % 2 == 0} for i in range(259, 9000)]),
        ("truncation", {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 99}),
        ("padding", {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "x"}),
        ("model", {"type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0]], "byte_fallback": False}),
        ("model", {"type": "Unigram", "unk_id": 0, "vocab": [], "byte_fallback": True}),
        ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0], ["a", 1e308], ["aa", -1e308]]}),
        ("model", {"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": big,
                   "max_input_chars_per_word": 100, "vocab": {"a": 0}}),
        ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}),
        ("model", {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}),
        ("model", {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": [["a", "c"]]}),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": big}),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [], "end_of_word_suffix": big}),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 7.0}),
    ]  # fmt: skip
    for pattern in slow:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        values.append(("pre_tokenizer", split))
        values.append(("normalizer", {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}))
    deep: Any = {"type": "NFC"}
    for _ in range(150):
        deep = {"type": "Sequence", "normalizers": [deep]}
    values.append(("normalizer", deep))
    for key, value in values:
        yield Damage(f"tokenizer.json: {key} = {_short(value)}", partial(_merge, "tokenizer.json", {key: value}))


def _links() -> Iterator[Damage]:
    targets = ("nowhere", "/dev/null", "/dev/zero", "/proc/self/mem", "/etc/passwd", "..", ".", "loop")
    for file in (*JSON_FILES, "chat_template.jinja", WEIGHTS, INDEX):
        for target in targets:
            yield Damage(f"{file} -> {target}", partial(_link, file, target))


def _link(file: str, target: str, folder: Path) -> None:
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to(file if target == "loop" else target)


def _merge(file: str, changes: dict[str, Any], folder: Path) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | changes))


def _random_change(file: str, seed: int, folder: Path) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(_changed(content, random.Random(seed))))


def _random_header(seed: int, folder: Path) -> None:
    path = folder / WEIGHTS
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps(_changed(json.loads(raw[8 : 8 + length]), random.Random(seed))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def _changed(content: Any, draw: random.Random) -> Any:
    """Replace, remove or repeat one random part of a JSON value."""
    places = list(_places(content))
    parent, key = draw.choice(places)
    kind = draw.randrange(4)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif kind == 2:
        other, place = draw.choice(places)
        parent[key] = json.loads(json.dumps(other[place]))
    else:
        parent[key] = draw.choice(PALETTE)
    return content


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of a container and a key in it, for all nested containers; long containers give only some keys."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys[:: max(1, len(keys) // 20)]:
        yield value, key
        yield from _places(value[key])


def _damaged_bytes(file: str, seed: int, folder: Path) -> None:
    draw, raw = random.Random(seed), bytearray((folder / file).read_bytes())
    for _ in range(draw.randrange(1, 8)):
        raw[draw.randrange(min(len(raw), 5000))] = draw.randrange(256)
    if seed % 3 == 0:
        del raw[draw.randrange(len(raw)) :]
    (folder / file).write_bytes(bytes(raw))


def _short(value: Any) -> str:
    """Return a value as text, with long strings cut: some would take all the memory that the loader may use."""
    return _SHORT.repr(value)


class _Short(Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Return an integer in full, as Repr would shorten it."""
        return repr(x)


_SHORT = _Short()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlist, _SHORT.maxdict = 100, 100, 20, 20
