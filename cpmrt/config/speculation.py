"""The settings of drafting: the method, and the shapes of the trees that are verified."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from cpmrt.config.integers import checked_bits, checked_integer, integer, is_number
from cpmrt.errors import ConfigError, quoted

MAX_NODES = 64
"""The most nodes of a tree: it is verified in one step of as many rows, with as many bits in an ancestor mask."""
MAX_PASSES = 32
SHAPE_LIMITS = {"num_passes": (1, MAX_PASSES), "top_k": (1, 32), "tree_size": (2, MAX_NODES)}
"""The least and the most of the numbers of a tree, by their names in `TreeShape`."""
MAX_CANDIDATES = 1024
LONGEST_MATCH = 3
"""The most tokens at the end of a text that a lookup compares with earlier ones."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A draft tree: `num_passes` levels below the root, of which `tree_size` nodes (with the root) are verified.

    Each draft pass takes the `top_k` best tokens of every node on the frontier; the `top_k` best of those, by their
    cumulative log-probability, are the next frontier (EAGLE-2, arXiv 2406.16858). With `top_k` 1 the tree is a chain.
    Where `lookup_length` is not 0, and the last three tokens of the text came before in it, a chain of the
    `lookup_length` tokens that followed them there is verified in place of the tree. Raises ConfigError.
    """

    num_passes: int = 2
    top_k: int = 10
    tree_size: int = 12
    lookup_length: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in {**SHAPE_LIMITS, "lookup_length": (0, MAX_NODES - 1)}.items():
            number = checked_integer(f"speculate: {name}", getattr(self, name), low, high)
            object.__setattr__(self, name, number)
        if self.num_candidates > MAX_CANDIDATES:
            raise ConfigError(
                "speculate: too many candidates",
                expected=f"top_k + (num_passes - 1) * top_k^2 at most {MAX_CANDIDATES}",
                actual=self.num_candidates,
                fix="lower top_k or num_passes",
            )
        if self.top_k * (self.num_passes - 1) > MAX_NODES:
            raise ConfigError(
                "speculate: too many drafted rows",
                expected=f"top_k * (num_passes - 1) at most {MAX_NODES}",
                actual=self.top_k * (self.num_passes - 1),
                fix="lower top_k or num_passes",
            )
        if self.tree_size > self.num_candidates + 1:
            raise ConfigError(
                "speculate: tree_size",
                expected=f"at most {self.num_candidates + 1}, the candidates and the root",
                actual=self.tree_size,
            )

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.top_k == 1

    @property
    def num_candidates(self) -> int:
        """Drafted tokens from which the nodes of the tree are chosen."""
        return self.top_k + (self.num_passes - 1) * self.top_k**2

    @property
    def max_emitted(self) -> int:
        """The most tokens that a step gives: the longest path of drafts, and the token sampled at its end."""
        return max(self.tree_depth, self.lookup_length) + 1

    @property
    def tree_depth(self) -> int:
        """Drafted tokens on the longest path of the tree."""
        return min(self.num_passes, self.tree_size - 1)

    @property
    def num_nodes(self) -> int:
        """The most nodes that a step verifies, with the root: those of the tree, or of the chain in its place."""
        return max(self.tree_size, self.lookup_length + 1)

    @property
    def num_reserved(self) -> int:
        """Positions past the root at which a step may write keys and values, in the target's pages or the draft's."""
        return max(self.num_nodes - 1, self.top_k * (self.num_passes - 1))

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """Return the shape of `length` drafted tokens one after another."""
        return cls(length, 1, length + 1)


@dataclass(frozen=True)
class DraftMethod:
    """A way of drafting: the `shapes` that are captured by default, the first of them the default one, and the options
    of `SpeculationConfig` that it has no use for."""

    shapes: tuple[TreeShape, ...]
    foreign: tuple[str, ...]

    @property
    def drafts_chains(self) -> bool:
        """Whether it can draft chains only: its default shapes are chains then."""
        return all(shape.is_chain for shape in self.shapes)


def _chains(*lengths: int) -> tuple[TreeShape, ...]:
    return tuple(TreeShape.chain(length) for length in lengths)


# First the tree of CPM.cu; then one that pays off where each node is costly, as with several sequences in a step, and
# two where drafts are cheaper to verify, or more often right, than usual.
_TREES = (TreeShape(2, 10, 12), TreeShape(3, 3, 6), TreeShape(3, 8, 24), TreeShape(4, 10, 32))
DRAFT_METHODS = {
    "eagle2": DraftMethod(_TREES, ("min_confidence", "inner")),
    "eagle3": DraftMethod(_TREES, ("draft_vocab", "min_confidence", "inner")),
    "dspark": DraftMethod(_chains(7, 4, 2), ("window", "inner")),  # for a block of 7 (`config.dspark`)
    "model": DraftMethod(_chains(3, 5, 8), ("draft_vocab", "window", "min_confidence")),
    "lookup": DraftMethod(
        _chains(5, 3, 8), ("draft_vocab", "window", "head_bits", "min_confidence", "layer_bits", "inner")
    ),
}
"""The ways of drafting by their names."""


def means_nothing(name: str, method: str) -> ConfigError:
    """Return the error for an option that a method has no use for."""
    return ConfigError(f"speculate: {name} means nothing to method {method}", fix="leave it out")


@dataclass(frozen=True)
class InnerDraft:
    """The draft of a small model that is itself a draft: a folder, a hub id or a folder within the small model's own.

    `draft` is None for the method lookup. Every step of the small model has the one shape of `speculation`. Raises
    ConfigError.
    """

    draft: str | None
    speculation: SpeculationConfig

    def __post_init__(self) -> None:
        wish = self.speculation
        if (wish.method == "lookup") != (self.draft is None):
            raise ConfigError("speculate: inner", expected="a draft and its method", actual=quoted(self.draft))
        if len(wish.shapes) != 1:
            raise ConfigError("speculate: inner: shapes", expected="one tree shape", actual=len(wish.shapes))
        if wish.forced_accept is not None:
            raise ConfigError("speculate: inner: simulate_accept", expected="nothing", actual=wish.forced_accept)


@dataclass(frozen=True)
class SpeculationConfig:
    """The settings of drafting that the user asked for; one that is None follows from the draft's own files.

    `shapes` are the trees that are captured, the first of them the default. `is_adaptive` lets the engine choose among
    them and plain decoding. `draft_vocab` cuts the draft's head to frequent tokens (FR-Spec, arXiv 2502.14856): it is
    their number, from the list that comes with the draft, or the path of a list. `window` is the number of tokens that
    the draft's attention looks back at. `head_bits` and `layer_bits` 8 or 4 round the draft's head and layers. With
    `min_confidence` a DSpark draft's chain ends before the first token to which its confidence head gives less. `inner`
    is the draft of a small model that is itself a draft. `forced_accept`, for benchmarks on random weights, is the
    number of tokens that a Speculate step of the first shape gives on average, right or wrong. Raises ConfigError.
    """

    method: str
    shapes: tuple[TreeShape, ...] = (TreeShape(),)
    is_adaptive: bool = True
    draft_vocab: int | str | None = None
    window: int | None = None
    head_bits: int | None = None
    residual_scale: str = "draft"
    """The rule for the residual scale of an EAGLE draft's sublayers: "draft", that of its own config.json, or "cpmcu",
    that of CPM.cu, which counts the target's layers."""
    forced_accept: float | None = None
    min_confidence: float | None = None
    layer_bits: int | None = None
    inner: InnerDraft | None = None

    def __post_init__(self) -> None:
        if self.method not in DRAFT_METHODS:
            raise ConfigError("speculate: method", expected=" | ".join(DRAFT_METHODS), actual=quoted(self.method))
        if not self.shapes:
            raise ConfigError("speculate: shapes", expected="at least one tree shape", actual="none")
        wide = [shape.top_k for shape in self.shapes if shape.top_k != 1]
        if DRAFT_METHODS[self.method].drafts_chains and wide:
            raise ConfigError(f"speculate: method {self.method} drafts chains", expected="top_k 1", actual=wide[0])
        if self.method == "lookup" and any(shape.lookup_length for shape in self.shapes):
            raise ConfigError("speculate: lookup means nothing to method lookup", fix="name a model's draft beside it")
        is_path = isinstance(self.draft_vocab, str) and bool(self.draft_vocab)
        for name, value in (("draft_vocab", None if is_path else self.draft_vocab), ("window", self.window)):
            if value is None:
                continue
            number = integer(value, 1, 2**31 - 1)
            if number is None:
                raise ConfigError(f"speculate: {name}", expected="a positive integer", actual=quoted(value))
            object.__setattr__(self, name, number)
        if self.residual_scale not in ("draft", "cpmcu"):
            raise ConfigError("speculate: residual_scale", expected="draft | cpmcu", actual=quoted(self.residual_scale))
        self._check_draft()
        self._check_forced()
        for name in DRAFT_METHODS[self.method].foreign:
            if getattr(self, name) is not None:
                raise means_nothing(name, self.method)

    def _check_draft(self) -> None:
        for name in ("head_bits", "layer_bits"):
            object.__setattr__(self, name, checked_bits(f"speculate: {name}", getattr(self, name)))
        least = self.min_confidence
        if least is None:
            return
        if not (is_number(least, Real) and 0 <= least <= 1):
            raise ConfigError("speculate: min_confidence", expected="a number in [0, 1]", actual=quoted(least))
        object.__setattr__(self, "min_confidence", float(least))

    def _check_forced(self) -> None:
        accept, most = self.forced_accept, self.shapes[0].max_emitted
        if accept is None:
            return
        if not (is_number(accept, Real) and 1 <= accept <= most):
            raise ConfigError(
                "simulate_accept", expected=f"a number in [1, {most}], what the tree can give", actual=quoted(accept)
            )
        object.__setattr__(self, "forced_accept", float(accept))
