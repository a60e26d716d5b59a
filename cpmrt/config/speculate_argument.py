"""Reads the arguments `draft` and `speculate` of `LLM` into a `SpeculationConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cpmrt.config.fields import Fields
from cpmrt.config.speculation import (
    DRAFT_METHODS,
    MAX_PASSES,
    SHAPE_LIMITS,
    InnerDraft,
    SpeculationConfig,
    TreeShape,
    means_nothing,
)
from cpmrt.errors import ConfigError, quoted

LOOKUP = "lookup"
"""The name of the draft without a model: it drafts what followed the last tokens where they came before."""
_SHAPE_KEYS = ("num_passes", "top_k", "tree_size")
_KEYS = (
    "method", *_SHAPE_KEYS, "shapes", "lookup", "adaptive", "draft_vocab", "window", "head_bits", "residual_scale",
    "simulate_accept", "min_confidence", "layer_bits", "inner",
)  # fmt: skip


def read_speculation(
    draft: str | None, speculate: object, method_of_draft: Callable[[str | None], str]
) -> SpeculationConfig | None:
    """Return the settings that `LLM(draft=..., speculate=...)` asks for; None for plain decoding.

    `method_of_draft(inner)` returns the method of the inner draft of that name, or (None) of the draft itself, from its
    files; it is only called where there is a draft to load. Without a draft "auto" means no speculation. A `speculate`
    object has what differs from the defaults of the method; if it has the numbers of one tree, drafting is adaptive
    only where the object says so. Raises ConfigError, and the errors of `method_of_draft`.
    """
    if speculate == "off":
        return None
    if speculate != "auto" and not isinstance(speculate, Mapping):
        raise ConfigError("speculate", expected="auto | off | an object", actual=quoted(speculate))
    wishes: Mapping[str, Any] = {} if isinstance(speculate, str) else speculate
    unknown = [quoted(key) for key in wishes if key not in _KEYS]
    if unknown:
        raise ConfigError("speculate: unknown keys", expected=" | ".join(_KEYS), actual=", ".join(unknown)[:200])
    if draft is None and isinstance(speculate, str):
        return None
    fields = Fields(wishes, "speculate")
    method = _method(draft, fields.text("method", None), lambda: method_of_draft(None))
    shapes, is_one = _shapes(fields, method)
    lookup_length = fields.integer("lookup", None)
    if lookup_length is not None:
        shapes = tuple(replace(shape, lookup_length=lookup_length) for shape in shapes)
    vocab = wishes.get("draft_vocab")
    return SpeculationConfig(
        method,
        shapes,
        fields.boolean("adaptive", not is_one),
        str(vocab) if hasattr(vocab, "__fspath__") else vocab,
        wishes.get("window"),
        wishes.get("head_bits"),
        fields.text("residual_scale", "draft"),
        wishes.get("simulate_accept"),
        wishes.get("min_confidence"),
        wishes.get("layer_bits"),
        None if wishes.get("inner") is None else _inner(wishes["inner"], method, method_of_draft),
    )


def named_drafts(draft: str | None, speculate: object) -> tuple[str, ...]:
    """Return the names of the drafts that have files, an inner draft's last; the other settings are not checked."""
    if draft in (None, LOOKUP) or speculate == "off":
        return ()
    wish = speculate.get("inner") if isinstance(speculate, Mapping) else None
    inner = wish.get("draft") if isinstance(wish, Mapping) else wish
    return (str(draft), *(str(name) for name in (inner,) if name not in (None, LOOKUP)))


def _inner(wish: object, method: str, method_of_draft: Callable[[str | None], str]) -> InnerDraft:
    """Return the inner draft that `wish` asks for: its name, or an object with that as `draft` and keys of `speculate`.
    """
    if method != "model":
        raise means_nothing("inner", method)
    given = dict(wish) if isinstance(wish, Mapping) else {"draft": wish}
    draft = given.pop("draft", None)
    name = str(draft) if hasattr(draft, "__fspath__") else draft
    if not isinstance(name, str):
        expected = f"a folder, a hub id or {LOOKUP}, or an object with one of these as draft"
        raise ConfigError("speculate: inner", expected=expected, actual=quoted(wish))
    if foreign := given.keys() & {"inner", "adaptive"}:
        raise ConfigError(f"speculate: inner: {min(foreign)} means nothing to an inner draft", fix="leave it out")
    found = read_speculation(name, given, lambda _: method_of_draft(name))
    assert found is not None
    shapes = found.shapes if "shapes" in given else found.shapes[:1]
    return InnerDraft(None if found.method == LOOKUP else name, replace(found, shapes=shapes, is_adaptive=False))


def _method(draft: str | None, wanted: str | None, method_of_draft: Callable[[], str]) -> str:
    if draft is None and wanted != LOOKUP:
        raise ConfigError(
            "speculate needs a draft", fix=f"name one with draft=..., or draft={LOOKUP!r}, which needs no model"
        )
    found = LOOKUP if draft in (None, LOOKUP) else method_of_draft()
    if wanted not in (None, found):
        raise ConfigError("speculate: method", expected=f"{found}, as the draft is", actual=quoted(wanted))
    return found


def _shapes(fields: Fields, method: str) -> tuple[tuple[TreeShape, ...], bool]:
    """Return the trees, and whether the user gave the numbers of just one."""
    named = [name for name in _SHAPE_KEYS if fields.data.get(name) is not None]
    listed = fields.data.get("shapes")
    if listed is None:
        return ((_one_shape(fields, method),), True) if named else (DRAFT_METHODS[method].shapes, False)
    if named:
        raise ConfigError(f"speculate: shapes and {', '.join(named)} exclude each other")
    if not isinstance(listed, (list, tuple)):
        raise fields.fail("shapes", "a list of [num_passes, top_k, tree_size]")
    return tuple(_listed_shape(fields, entry) for entry in listed), False


def _one_shape(fields: Fields, method: str) -> TreeShape:
    default = DRAFT_METHODS[method].shapes[0]
    size = fields.integer("tree_size", None, *SHAPE_LIMITS["tree_size"])
    if DRAFT_METHODS[method].drafts_chains:
        length = fields.integer("num_passes", None)
        if length is None:
            length = fields.integer("tree_size", default.num_passes + 1, 2, MAX_PASSES + 1) - 1
        return TreeShape(length, fields.integer("top_k", 1), length + 1 if size is None else size)
    passes = fields.integer("num_passes", default.num_passes, *SHAPE_LIMITS["num_passes"])
    top_k = fields.integer("top_k", default.top_k, *SHAPE_LIMITS["top_k"])
    # The tree is smaller than the default one where there are not enough candidates for that.
    candidates = top_k + (passes - 1) * top_k**2
    return TreeShape(passes, top_k, min(default.tree_size, candidates + 1) if size is None else size)


def _listed_shape(fields: Fields, entry: object) -> TreeShape:
    if isinstance(entry, TreeShape):
        return entry
    if not isinstance(entry, (list, tuple)) or len(entry) != 3:
        raise fields.fail("shapes", "a list of [num_passes, top_k, tree_size]")
    return TreeShape(*entry)
