"""Options that several commands share. Their defaults are those of the dataclasses that they fill."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

from cpmrt.bench.shapes import blocks_config, draft_configs, gptq_config, ternary_config
from cpmrt.cli.option_values import (
    draft_vocab,
    json_object,
    memory_size,
    prefix_cache,
    sparse_setting,
    text_of_file,
    token_bias,
    token_count,
    token_limit,
)
from cpmrt.cli.parser import UsageError
from cpmrt.config import EngineConfig, SamplingParams
from cpmrt.config.form import FORM_FIELDS
from cpmrt.config.quantization import GROUP_SIZES


class Options(Protocol):
    """A parser, or a group of options of a parser: anything that options can be added to."""

    def add_argument(self, *names: str, **settings: Any) -> Any: ...


# Option -> its arguments for `add_argument`, for options whose default comes from no dataclass.
_OPTIONS: dict[str, dict[str, Any]] = {
    "--revision": {"metavar": "REV", "help": "branch, tag or commit of a hub repository"},
    "--hf-overrides": {
        "type": json_object, "metavar": "JSON", "help": "keys that replace those of config.json",
    },
    "--sparse": {
        "type": sparse_setting, "default": "auto", "metavar": "SETTING",
        "help": "sparse attention: auto (as config.json says), off, or a JSON object of its fields "
        "(default: %(default)s)",
    },
    "--prefix-cache": {
        "type": prefix_cache, "default": True, "metavar": "on|fast|off",
        "help": "reuse what an earlier prompt that began alike has computed (default: on); fast: what its answer has "
        "too, though a prefill would round it a little differently",
    },
    "--no-prefix-cache": {
        "dest": "prefix_cache", "action": "store_false", "help": "the same as --prefix-cache off",
    },
    "--weight-bits": {
        "type": int, "choices": (2, 4, 16), "metavar": "BITS",
        "help": "as if the linear layers were quantised to 4 bits, symmetric, or ternary, in 2 (default: the model's "
        "own)",
    },
    "--group-size": {
        "type": int, "choices": (-1, *GROUP_SIZES), "default": 128, "metavar": "N",
        "help": "with --weight-bits 2 or 4: 32, 64, 128 or -1, a whole row (default: %(default)s)",
    },
    "--block-type": {
        "type": str.upper, "metavar": "TYPE",
        "help": "as if they were blocks of this type of GGUF files, such as Q8_0 or Q4_K_M",
    },
    "--draft-weight-bits": {
        "type": int, "choices": (4, 16), "default": 16, "metavar": "BITS",
        "help": "with --shape: of its drafts (--draft eagle2, eagle3 or dspark), 4 as --weight-bits 4 (default: "
        "%(default)s)",
    },
    "--stop": {"action": "append", "default": [], "metavar": "TEXT", "help": "end before this text; may be repeated"},
    "--stop-token-id": {
        "dest": "stop_token_ids", "action": "append", "default": [], "type": int, "metavar": "ID",
        "help": "end at this token; may be repeated",
    },
    "--logit-bias": {
        "action": "append", "default": [], "type": token_bias, "metavar": "ID:X",
        "help": "add X to the logit of this token; may be repeated",
    },
    "--json-schema": {
        "type": text_of_file, "metavar": "FILE", "help": "have the answer be JSON that this schema allows",
    },
    "--regex": {"metavar": "REGEX", "help": "have the answer match this regular expression"},
    "--grammar": {
        "type": text_of_file, "metavar": "FILE", "help": "have the answer obey this grammar, in Lark's syntax or GBNF",
    },
    "--grammar-trigger": {
        "metavar": "TEXT", "help": "with --grammar: leave the answer free until this text, which begins the grammar",
    },
    "--choices": {"action": "append", "metavar": "TEXT", "help": "allow this answer; may be repeated"},
    "--ignore-eos": {"action": "store_true", "help": "go on past the model's end tokens"},
    "--draft": {
        "metavar": "DRAFT",
        "help": "a folder or hub id, a folder within the model's own (the bundled model has eagle2 and eagle3), or "
        "lookup, which needs no model (default: none)",
    },
    "--speculate": {
        "choices": ("auto", "off"),
        "help": "auto: draft where it pays off; off: leave the draft out (default: auto, but with the numbers of a "
        "tree always that tree)",
    },
}  # fmt: skip
WEIGHT_BITS = ("--weight-bits", "--group-size", "--block-type", "--draft-weight-bits")
"""The options that set how the weights of a model with random weights are quantised."""

# Field of EngineConfig -> (type, metavar, help) of its option, which has the field's name with dashes.
_ENGINE_OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "executor": (str, "NAME", "auto, cuda or reference (NumPy)"),
    "dtype": (str, "TYPE", "of weights, KV and activations: auto (the checkpoint's), bfloat16, float16 or float32"),
    "max_context": (token_count, "TOKENS", "most tokens of prompt and answer together (default: the model's own)"),
    "memory_budget": (memory_size, "SIZE", "most memory to use, such as 8GiB (default: what is free)"),
    "load_format": (str, "FORMAT", "auto, safetensors or dummy (random weights)"),
    "seed": (int, "N", "what the random numbers of every request, and dummy weights, derive from"),
    "prefill_chunk": (token_count, "TOKENS", "most prompt tokens of one step"),
    "max_sequences": (int, "N", "sequences that decode together"),
    "steps_per_launch": (int, "N", "decode steps of one launch on a GPU, which a new request then waits for"),
    "kv_dtype": (str, "TYPE", "of keys and values: auto (as --dtype) or fp8 (8 bits)"),
    "lm_head_bits": (int, "BITS", "round the output head to 8 or 4 bits (default: leave it as it is)"),
    "lm_head_screen": (
        bool, "",
        "read an 8-bit copy of the output head, and of the head itself what a step may choose: faster on a GPU where "
        "the head is in 16 bits, for greedy, top-k and min-p decoding; the same tokens (default: where the copy takes "
        "little of the memory)",
    ),
    "prefix_dir": (str, "FOLDER", "keep what long system messages cost there from one start to the next"),
}  # fmt: skip
_SAMPLING_OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "max_new_tokens": (token_limit, "N", "stop after this many tokens; none: when the context is full"),
    "temperature": (float, "T", "0 is greedy"),
    "top_k": (int, "K", "sample from the K most likely tokens; 0: all"),
    "top_p": (float, "P", "sample from the most likely tokens of this total probability; 0 is greedy"),
    "min_p": (float, "P", "drop tokens less likely than P times the best"),
    "repetition_penalty": (float, "R", "divide the logits of tokens seen before; 1: off"),
    "presence_penalty": (float, "X", "subtract from the logits of tokens generated before"),
    "frequency_penalty": (float, "X", "the same, for each time they were generated"),
    "loop_repeats": (int, "N", "end an answer that repeats itself N times, 128 tokens or more; 0: never"),
    "loop_penalty": (float, "R", "first raise the repetition penalty of such an answer to R; 1: off"),
    "max_thinking_tokens": (int, "N", "close a thought after this many tokens (default: never)"),
}
MODELS_OWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "loop_penalty")
"""Fields of SamplingParams whose default is taken from the model's files."""
# Option -> (key of `speculate`, type, metavar, help).
_DRAFT_OPTIONS: dict[str, tuple[str, Callable[[str], Any], str, str]] = {
    "--draft-iters": ("num_passes", int, "N", "draft passes of a step: the depth of its tree"),
    "--draft-topk": ("top_k", int, "K", "tokens that each pass takes of a node, and nodes that it goes on from"),
    "--tree-size": ("tree_size", int, "N", "drafted tokens that a step verifies, and one"),
    "--draft-lookup": (
        "lookup", int, "N",
        "where the last three tokens came before, verify N tokens that followed them in place of the draft's",
    ),
    "--draft-inner": ("inner", str, "DRAFT", "a draft of the small model that drafts, or lookup"),
    "--draft-window": ("window", token_count, "TOKENS", "that the draft's attention looks back at (default: all)"),
    "--draft-head-bits": ("head_bits", int, "BITS", "round the draft's head to 8 or 4 bits"),
    "--draft-layer-bits": ("layer_bits", int, "BITS", "round the draft's layers to 8 or 4 bits"),
    "--draft-min-confidence": (
        "min_confidence", float, "P", "end a DSpark draft's chain before a token less likely to be accepted than P"
    ),
    "--draft-vocab": (
        "draft_vocab", draft_vocab, "N|FILE",
        "cut the draft's head to the N most frequent tokens of the list that comes with it, or to those of a file that "
        "tools/gen_fr_index.py writes",
    ),
}  # fmt: skip
MODEL_FIELDS = (
    "executor", "dtype", "max_context", "memory_budget", "load_format", "seed", "steps_per_launch", "lm_head_bits",
    "lm_head_screen", "kv_dtype",
)  # fmt: skip
"""Fields of EngineConfig that every command which loads a model has options for."""


def add_options(parser: Options, *names: str) -> None:
    for name in names:
        parser.add_argument(name, **_OPTIONS[name])


def add_model_source(parser: Options, *, positional: bool = False) -> None:
    """Add --model, if `positional` also MODEL, and --revision."""
    described = "a folder, .gguf file, Hugging Face id or modelscope:ID, also ID:Q4_K_M; demo, the default, is bundled"
    if positional:
        add_model_argument(parser)
    parser.add_argument("-m", "--model", metavar="MODEL", action=_OneModel, help=described)
    add_options(parser, "--revision")


def add_model_argument(parser: Options) -> None:
    """Add MODEL, for a parser that has --model too."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", action=_OneModel, default=argparse.SUPPRESS, help="the same as --model"
    )


class _OneModel(argparse.Action):
    """Stores the model, given as MODEL or --model; both together are an error unless they are equal.

    The parser raises it at the end: MODEL may be the value of an option that there is not, which is the better error.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if getattr(namespace, self.dest, None) not in (None, values):
            namespace.error = f"the model is given twice: {getattr(namespace, self.dest)} and {values}"
        setattr(namespace, self.dest, values)


def add_engine_options(parser: Options, *names: str) -> None:
    """Add options for these fields of EngineConfig."""
    _add_fields(parser, EngineConfig, {name: _ENGINE_OPTIONS[name] for name in names})


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """Add --draft, --speculate and the options that override the defaults of the draft's method."""
    group = parser.add_argument_group("speculation (faster, the same tokens)")
    add_options(group, "--draft", "--speculate")
    for option, (key, kind, metavar, described) in _DRAFT_OPTIONS.items():
        group.add_argument(option, dest=f"speculate_{key}", type=kind, metavar=metavar, help=described)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add everything that decides how a model is loaded."""
    group = parser.add_argument_group("model")
    add_model_source(group)
    add_engine_options(group, *MODEL_FIELDS)
    add_options(group, "--hf-overrides", "--sparse", "--prefix-cache", "--no-prefix-cache")
    add_draft_options(parser)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of SamplingParams except `logprobs` and `seed`.

    Only commands that can show logprobs have an option for them (`add_logprobs_option`). --seed sets the engine's seed
    instead, so that one value repeats a whole run and the turns of a chat still differ.
    """
    group = parser.add_argument_group("sampling")
    _add_fields(group, SamplingParams, _SAMPLING_OPTIONS)
    add_options(group, "--stop", "--stop-token-id", "--logit-bias", "--ignore-eos")
    add_options(group, *(f"--{name.replace('_', '-')}" for name in FORM_FIELDS), "--grammar-trigger")


def add_logprobs_option(parser: Options) -> None:
    """Add --logprobs, for commands that can show them."""
    _add_fields(parser, SamplingParams, {"logprobs": (int, "N", "with --json: of each token and the N best")})


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling that the options ask for. Raises RequestError."""
    names = [field.name for field in fields(SamplingParams) if field.name != "seed"]
    return SamplingParams(**_given(args, *names))


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the settings that the options ask for. Raises ConfigError."""
    return EngineConfig(**_given(args, *_ENGINE_OPTIONS))


def llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `LLM` that the options ask for."""
    return _given(args, "model", "revision", "hf_overrides", "sparse", "prefix_cache", *_ENGINE_OPTIONS) | (
        draft_arguments(args)
    )


def draft_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `LLM` about speculation."""
    given = _given(args, *(f"speculate_{key}" for key, *_ in _DRAFT_OPTIONS.values()))
    wishes = {name.removeprefix("speculate_"): value for name, value in given.items() if value is not None}
    if wishes and args.speculate == "auto":
        wishes["adaptive"] = True
    return {"draft": args.draft, "speculate": "off" if args.speculate == "off" else wishes or "auto"}


def setting_options() -> dict[str, str]:
    """Return the option that fills each setting, by the name that errors give to the setting.

    That is an argument of `LLM`, `SamplingParams.FIELD`, or `speculate: KEY`.
    """
    others = ("hf_overrides", "sparse", "prefix_cache", "draft", "simulate_accept", "revision")
    sampling = [f"SamplingParams.{field.name}" for field in fields(SamplingParams)]
    names = (*_ENGINE_OPTIONS, *others, *sampling)
    options = {name: f"--{name.rpartition('.')[2].replace('_', '-')}" for name in names}
    options["SamplingParams.stop_token_ids"] = "--stop-token-id"
    options["speculate: lookup_length"] = "--draft-lookup"  # what a tree calls the key `lookup`
    return options | {f"speculate: {key}": option for option, (key, *_) in _DRAFT_OPTIONS.items()}


def overrides_with_weight_bits(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return --hf-overrides with the quantisation that --weight-bits or --block-type asks for. Raises UsageError."""
    overrides: dict[str, Any] | None = args.hf_overrides
    has_groups = args.weight_bits in (2, 4) or args.draft_weight_bits == 4
    if args.group_size != _OPTIONS["--group-size"]["default"] and not has_groups:
        raise UsageError("--group-size needs --weight-bits 2 or 4")
    if args.block_type is not None and args.weight_bits is not None:
        raise UsageError("--block-type and --weight-bits exclude each other")
    if args.block_type is not None:
        return (overrides or {}) | {"quantization_config": blocks_config(args.block_type)}
    if args.weight_bits is None:
        return overrides
    made = {2: ternary_config, 4: gptq_config}.get(args.weight_bits)
    return (overrides or {}) | {"quantization_config": made and made(args.group_size)}


def draft_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keys that --draft-weight-bits changes in the config.json of a shape's drafts.

    Raises UsageError if it is given without --shape or without one of the shape's drafts.
    """
    if args.draft_weight_bits == 16:
        return {}
    if not args.shape:
        raise UsageError("--draft-weight-bits needs --shape: a draft of its own folder has its own bits")
    if args.draft not in draft_configs(args.shape):
        raise UsageError("--draft-weight-bits needs --draft eagle2, eagle3 or dspark")
    return {"quantization_config": gptq_config(args.group_size)}


def check_one_source(args: argparse.Namespace, command: str) -> None:
    if args.shape and args.model:
        raise UsageError(f"MODEL and --shape exclude each other; see cpmrt {command} --help")


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the values of these arguments by name, leaving out those that the command has no option for."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _add_fields(parser: Options, owner: Any, options: dict[str, tuple[Callable[[str], Any], str, str]]) -> None:
    """Add an option for each of these fields of the dataclass `owner`; for a bool, one that turns it on and one off."""
    defaults = {field.name: field.default for field in fields(owner)}
    for name, (kind, metavar, described) in options.items():
        option, default = f"--{name.replace('_', '-')}", defaults[name]
        if kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default, help=described)
            continue
        shown = described if default is None else f"{described} (default: %(default)s)"
        if name in MODELS_OWN:
            shown = f"{described} (default: the model's own)"
        parser.add_argument(option, type=kind, default=default, metavar=metavar, help=shown)
