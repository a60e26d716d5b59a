"""Options of speculative decoding, as arguments of `LLM`."""

from __future__ import annotations

import argparse
from typing import Any

# Option -> (key of `speculate`, metavar, help).
_WISHES: dict[str, tuple[str, str, str]] = {
    "--draft-iters": ("num_passes", "N", "draft passes of a step: the depth of its tree"),
    "--draft-topk": ("top_k", "K", "tokens that each pass takes of a node, and nodes that it goes on from"),
    "--tree-size": ("tree_size", "N", "drafted tokens that a step verifies, and one"),
    "--draft-window": ("window", "TOKENS", "that the draft's attention looks back at (default: all)"),
    "--draft-head-bits": ("head_bits", "BITS", "round the draft's head to 8 or 4 bits"),
}


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """--draft, --speculate and what differs from the method's defaults."""
    group = parser.add_argument_group("speculation (faster, the same tokens)")
    group.add_argument(
        "--draft", metavar="DRAFT",
        help="a folder or hub id, a folder within the model's own (the bundled model has eagle2 and eagle3), or "
        "lookup, which needs no model (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--speculate", choices=("auto", "off"),
        help="auto: draft where it pays off; off: leave the draft out (default: auto, but with the numbers of a tree "
        "always that tree)",
    )  # fmt: skip
    for option, (key, metavar, described) in _WISHES.items():
        group.add_argument(option, dest=_dest(key), type=int, metavar=metavar, help=described)
    group.add_argument(
        "--draft-vocab", dest=_dest("draft_vocab"), type=_vocab, metavar="N|FILE",
        help="cut the draft's head to the N most frequent tokens of the list that comes with it, or to those of a file "
        "that tools/gen_fr_index.py writes",
    )  # fmt: skip


def draft_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM` from the options of `add_draft_options`."""
    wishes = {key: getattr(args, _dest(key)) for key in (*(key for key, _, _ in _WISHES.values()), "draft_vocab")}
    wishes = {key: value for key, value in wishes.items() if value is not None}
    if wishes and args.speculate == "auto":
        wishes["adaptive"] = True
    speculate = "off" if args.speculate == "off" else wishes or "auto"
    return {"draft": args.draft, "speculate": speculate}


def _dest(key: str) -> str:
    return f"speculate_{key}"


def _vocab(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text
