"""Options that commands share. Their defaults are those of the dataclasses they fill."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn, Protocol

from cpmrt.cli.draft_options import add_draft_options, draft_arguments
from cpmrt.config import EngineConfig, SamplingParams, SparseSetting
from cpmrt.config.engine import parse_bytes
from cpmrt.config.quantization import GROUP_SIZES
from cpmrt.errors import ConfigError


class Options(Protocol):
    """A parser, or a group of its options."""

    def add_argument(self, *names: str, **settings: Any) -> Any: ...


class UsageError(Exception):
    """The command line itself is wrong; the message is one line."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage before it."""

    def __init__(self, **settings: Any):
        # Descriptions are docstrings, laid out already.
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}; see {self.prog} --help")


def memory_size(text: str) -> int:
    """The type of an option in bytes, such as 8GiB."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def json_object(text: str) -> dict[str, Any]:
    """The type of an option that is a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not valid JSON ({error}): {text[:100]!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text[:100]!r}")
    return value


def add_model_source(parser: Options, *, positional: bool = False) -> None:
    """MODEL (or --model) and --revision."""
    described = "a folder or a Hugging Face hub id (default: the bundled model)"
    if positional:
        parser.add_argument("model", metavar="MODEL", nargs="?", help=described)
    else:
        parser.add_argument("-m", "--model", metavar="MODEL", help=described)
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub repository")


def add_hf_overrides(parser: Options) -> None:
    """--hf-overrides."""
    parser.add_argument(
        "--hf-overrides", type=json_object, metavar="JSON", help="keys that replace those of config.json"
    )


def add_sparse(parser: Options) -> None:
    """--sparse."""
    parser.add_argument(
        "--sparse", type=_sparse_setting, default="auto", metavar="SETTING",
        help="sparse attention: auto (as config.json says), off, or a JSON object of its fields (default: %(default)s)",
    )  # fmt: skip


def _sparse_setting(text: str) -> SparseSetting:
    return text if text in ("auto", "off") else json_object(text)


def add_prefix_cache(parser: Options) -> None:
    """--no-prefix-cache."""
    parser.add_argument(
        "--no-prefix-cache", dest="prefix_cache", action="store_false",
        help="compute every prompt whole, also where an earlier one began alike",
    )  # fmt: skip


def add_weight_bits(parser: Options) -> None:
    """--weight-bits and --group-size, for models that are not quantised themselves."""
    parser.add_argument(
        "--weight-bits", type=int, choices=(4, 16), metavar="BITS",
        help="as if the linear layers were quantised to 4 bits, symmetric (default: the model's own)",
    )  # fmt: skip
    parser.add_argument(
        "--group-size", type=int, choices=(-1, *GROUP_SIZES), default=128, metavar="N",
        help="with --weight-bits 4: 32, 64, 128 or -1, a whole row (default: %(default)s)",
    )  # fmt: skip


def overrides_with_weight_bits(args: argparse.Namespace) -> dict[str, Any] | None:
    """--hf-overrides, with the quantisation that --weight-bits asks for."""
    overrides: dict[str, Any] | None = args.hf_overrides
    if args.weight_bits is None:
        return overrides
    return (overrides or {}) | {"quantization_config": _gptq_settings(args) if args.weight_bits == 4 else None}


def add_draft_weight_bits(parser: Options) -> None:
    """--draft-weight-bits."""
    parser.add_argument(
        "--draft-weight-bits", type=int, choices=(4, 16), default=16, metavar="BITS",
        help="with --shape: of its drafts (--draft eagle2 or eagle3), 4 as --weight-bits 4 (default: %(default)s)",
    )  # fmt: skip


def draft_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Keys for the config.json of a shape's drafts. Raises UsageError without --shape."""
    if args.draft_weight_bits == 16:
        return {}
    if not args.shape:
        raise UsageError("--draft-weight-bits needs --shape: a draft of its own folder has its own bits")
    return {"quantization_config": _gptq_settings(args)}


def _gptq_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The quantization_config of symmetric 4-bit weights in groups of --group-size."""
    return {"quant_method": "gptq", "bits": 4, "group_size": args.group_size, "sym": True, "desc_act": False}


# Option -> (type, metavar, help). The name is the field's, with dashes.
_ENGINE_OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "executor": (str, "NAME", "auto, cuda or reference (NumPy)"),
    "dtype": (str, "TYPE", "of weights, KV and activations: auto (the checkpoint's), bfloat16, float16 or float32"),
    "max_context": (int, "TOKENS", "most tokens of prompt and answer together (default: the model's own)"),
    "memory_budget": (memory_size, "SIZE", "most memory to use, such as 8GiB (default: what is free)"),
    "load_format": (str, "FORMAT", "auto, safetensors or dummy (random weights)"),
    "seed": (int, "N", "of the first request's random numbers, each further one takes the next; and of dummy weights"),
    "prefill_chunk": (int, "TOKENS", "most prompt tokens of one step"),
    "max_sequences": (int, "N", "sequences that decode together"),
    "steps_per_launch": (int, "N", "decode steps of one launch on a GPU, which a new request then waits for"),
    "kv_dtype": (str, "TYPE", "of keys and values: auto (as --dtype) or fp8 (8 bits; without a draft)"),
    "lm_head_bits": (int, "BITS", "round the output head to 8 or 4 bits (default: leave it as it is)"),
}
_SAMPLING_OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "max_new_tokens": (int, "N", "stop after this many tokens"),
    "temperature": (float, "T", "0 is greedy"),
    "top_k": (int, "K", "sample from the K most likely tokens; 0: all"),
    "top_p": (float, "P", "sample from the most likely tokens of this total probability"),
    "min_p": (float, "P", "drop tokens less likely than P times the best"),
    "repetition_penalty": (float, "R", "divide the logits of tokens seen before; 1: off"),
    "presence_penalty": (float, "X", "subtract from the logits of tokens generated before"),
    "frequency_penalty": (float, "X", "the same, for each time they were generated"),
}
_LLM_ENGINE_FIELDS = (
    "executor", "dtype", "max_context", "memory_budget", "load_format", "seed", "steps_per_launch", "lm_head_bits",
    "kv_dtype",
)  # fmt: skip
_LLM_FIELDS = ("model", "revision", "hf_overrides", "sparse", "prefix_cache")
_NOT_FROM_OPTIONS = ("seed",)
"""Left to the engine's seed, so that one --seed repeats a whole run and the turns of a chat still differ."""


def add_engine_options(parser: Options, *names: str) -> None:
    """Options for these fields of EngineConfig."""
    _add_fields(parser, EngineConfig, {name: _ENGINE_OPTIONS[name] for name in names})


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Everything that decides how a model is loaded."""
    group = parser.add_argument_group("model")
    add_model_source(group)
    add_engine_options(group, *_LLM_ENGINE_FIELDS)
    add_hf_overrides(group)
    add_sparse(group)
    add_prefix_cache(group)
    add_draft_options(parser)


def llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM` from the options of `add_model_options`."""
    return {name: getattr(args, name) for name in (*_LLM_FIELDS, *_LLM_ENGINE_FIELDS)} | draft_arguments(args)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """One option for each field of SamplingParams but the seed."""
    group = parser.add_argument_group("sampling")
    _add_fields(group, SamplingParams, _SAMPLING_OPTIONS)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument(
        "--stop-token-id", dest="stop_token_ids", action="append", default=[], type=int, metavar="ID",
        help="end at this token; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--logit-bias", action="append", default=[], type=_token_bias, metavar="ID:X",
        help="add X to the logit of this token; may be repeated",
    )  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end tokens")


def add_logprobs_option(parser: Options) -> None:
    """--logprobs, for commands that can show them."""
    _add_fields(parser, SamplingParams, {"logprobs": (int, "N", "with --json: of each token and the N best")})


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """From the sampling options that the command has. Raises RequestError."""
    names = [field.name for field in fields(SamplingParams) if field.name not in _NOT_FROM_OPTIONS]
    return SamplingParams(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def _token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected TOKEN_ID:NUMBER, got {text[:100]!r}") from None


def _add_fields(parser: Options, owner: Any, options: dict[str, tuple[Callable[[str], Any], str, str]]) -> None:
    defaults = {field.name: field.default for field in fields(owner)}
    for name, (kind, metavar, described) in options.items():
        default = defaults[name]
        shown = described if default is None else f"{described} (default: %(default)s)"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, metavar=metavar, help=shown)
