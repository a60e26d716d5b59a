"""The contract between the state machine and the hardware: steps are data, results are data.

The engine submits steps; an executor carries them out in submission order. After a sequence's last prefill chunk its
running state (last token, position, sampling counters, finished flag) lives with the executor, so a `Decode` names
slots only (and which tokens they may sample), and the engine may submit further steps before it has waited for earlier
ones. A step on a sequence that has finished meanwhile yields no tokens. A list of steps replays on any executor with
the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from cpmrt.config import Sampling, TreeShape

if TYPE_CHECKING:
    from cpmrt.dtypes import F32, Array

MAX_ROWS = 64
"""The most rows of a step, of one token each: sequences that decode together, nodes of a draft tree, rows of logits."""
MAX_CERTAIN = 31
"""The most certain tokens that a slot brings to one step."""


class Mask:
    """The tokens that one row of a step may sample: bit t % 8 of byte t // 8 of `bits` for token t, or None for all.

    Tokens that a row may not sample get the logit -infinity before the rest of the sampling chain. The tokens that a
    row may sample can depend on the token before it, so a step may be submitted while its mask is still empty. The mask
    is filled before anybody waits for the step. `on_fill`, set by an executor that has launched such a step, is then
    called with the bits.
    """

    __slots__ = ("bits", "is_filled", "on_fill")

    def __init__(self, bits: bytes | None = None, *, is_filled: bool = False):
        self.bits, self.is_filled = bits, is_filled
        self.on_fill: Callable[[bytes | None], None] | None = None

    def fill(self, bits: bytes | None) -> None:
        """Set the tokens that the row may sample. Called once."""
        self.bits, self.is_filled = bits, True
        if self.on_fill is not None:
            self.on_fill(bits)
            self.on_fill = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and (self.bits, self.is_filled) == (other.bits, other.is_filled)

    def __repr__(self) -> str:
        if not self.is_filled or self.bits is None:
            return "Mask(all)" if self.is_filled else "Mask()"
        return f"Mask({sum(byte.bit_count() for byte in self.bits)} tokens)"


Path = tuple[int, ...]
"""The tokens from below the root of a drafted tree, which is the last token of its sequence, down to a node."""
MaskFailure = Literal["late", "cut", "nothing"]
"""Why a token could not be sampled under its mask: see `SlotResult`."""


class TreeMasks:
    """The tokens that the nodes of a drafted tree may sample: `bits` maps each node's path to its mask (`Mask.bits`).

    A node whose path is missing in `bits` is cut, as if it had not been drafted; the root is never cut. The drafted
    tokens are known only when the draft has run. Then, while somebody waits for the step, the executor calls
    `of_nodes`, which passes all paths to `find`; `find` returns the masks of those that are left. `prepare` does the
    part of this work that needs no drafted token, while the draft runs.
    `on_let_go`, set by an executor whose step is on its way, is called if nobody needs the step's tokens any more.
    """

    __slots__ = ("bits", "on_let_go", "_find", "_prepare")

    def __init__(
        self,
        bits: Mapping[Path, bytes | None] | None = None,
        find: Callable[[Sequence[Path]], Mapping[Path, bytes | None]] | None = None,
        prepare: Callable[[], None] | None = None,
    ):
        self.bits, self._find, self._prepare = bits, find, prepare
        self.on_let_go: Callable[[], None] | None = None

    def prepare(self) -> None:
        """Do the work that depends on no drafted node, while none is known yet. Only the first call does anything."""
        prepare, self._prepare = self._prepare, None
        if prepare is not None and self.bits is None:
            prepare()

    def of_nodes(self, tokens: Sequence[int], parents: Sequence[int]) -> dict[int, bytes | None]:
        """Return the masks of the nodes that are left (not cut), by the node's number.

        `tokens` has the token of each node, `parents` the number of its parent. Node 0 is the root, and a parent goes
        before its children; a node that does not exist has the parent -1.
        """
        paths: list[Path | None] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            before = paths[parent] if parent >= 0 else None
            paths.append(None if before is None else (*before, int(token)))
        if self.bits is None:
            assert self._find is not None
            self.bits = self._find([path for path in paths if path is not None])
        bits = self.bits
        return {node: bits[path] for node, path in enumerate(paths) if path is not None and path in bits}

    def let_go(self) -> None:
        """Let the step sample anything, as its result does not count. No effect if the masks are known already."""
        if self.bits is None:
            self.bits = {(): None}
            if self.on_let_go is not None:
                self.on_let_go()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeMasks) and self.bits == other.bits

    def __repr__(self) -> str:
        return "TreeMasks()" if self.bits is None else f"TreeMasks({len(self.bits)} nodes)"


@dataclass(frozen=True, slots=True)
class Admit:
    """Take a free slot for a new sequence.

    `max_new_tokens` and `stop_token_ids` are resolved values: the executor finishes the sequence by them alone.
    `seed` is a 64-bit integer, the Philox key of every token of the sequence. `block_table` has the number of the KV
    page for each run of `page_size` positions that the sequence may reach. If it is empty, the slot's table stays as it
    is (before the first table it names the slot's own run of pages). If sequences have a state beside their pages, it
    begins as a copy of `snapshot`, which a `Keep` step wrote, or at zero (None).
    """

    slot: int
    sampling: Sampling
    seed: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    block_table: tuple[int, ...] = ()
    snapshot: int | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """Copy the state of a slot to a snapshot, one of `ExecutorLimits.num_snapshots`, for sequences admitted later."""

    slot: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class Recall:
    """Note tokens whose keys and values are in the slot's pages already.

    They count for the repetition penalty, and a draft that looks text up finds them.
    """

    slot: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run prompt tokens at `position` .. `position + len(token_ids) - 1`; the last chunk samples the first token."""

    slot: int
    token_ids: tuple[int, ...]
    position: int
    is_last: bool
    mask: Mask | None = None
    """The mask of the first token; None: it may be any token."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Generate one more token for each slot. `masks` has a mask for each; it is empty if all may sample any token.

    `certain` has the certain tokens of each slot, which come before the one that is sampled, MAX_CERTAIN at most; it is
    empty if no slot has any. A step has a row for each slot and a row for each certain token. Certain tokens count as
    generated, and leave every state as if they had been sampled one by one, to the bit. The slot's result has them and
    the sampled token behind them; no certain token ends the sequence.
    """

    slots: tuple[int, ...]
    masks: tuple[Mask | None, ...] = ()
    certain: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Speculate:
    """Draft, verify and accept one token or more for each slot. `shape` is an index into `ExecutorLimits.tree_shapes`.

    Any mix of `Decode` and `Speculate` steps gives the same tokens.
    """

    slots: tuple[int, ...]
    shape: int = 0
    masks: TreeMasks | None = None
    """The masks of the nodes, in a step of one slot only; None: nodes may sample any token."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give the slot back; its KV pages may be overwritten. A slot that nobody holds stays as it is."""

    slot: int


Step = Admit | Keep | Recall | Prefill | Decode | Speculate | Release


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log, of the raw logits) at one generated position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with their log-probabilities, best first."""


# Results are not frozen: that makes a dataclass take three times as long to construct, and a step has one for each row.
@dataclass(slots=True)
class SlotResult:
    """The result of one step for one slot. It has no tokens if the sequence had finished before.

    `non_finite`: the logits behind these tokens hold NaN or +infinity, or nothing but -infinity, so that no token could
    be sampled there. `mask_failure` says why no token could be sampled under the mask: it came too "late"; the drafted
    node had been "cut", so that it had none; or it left "nothing", every token that it allows having the logit
    -infinity. In all these cases the executor has finished the sequence, as after an end token.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    non_finite: bool = False
    mask_failure: MaskFailure | None = None


@dataclass(slots=True)
class StepResult:
    """The results of a step, one for each of its slots in order; `Admit`, `Keep`, `Recall` and `Release` have none."""

    slots: tuple[SlotResult, ...] = ()
    num_rescored: int | None = field(default=None, compare=False)
    """The number of tokens whose logits were computed exactly, if the step screened its output head; else None."""


class Pending(Protocol):
    """A submitted step. `wait` blocks until it is done; it may be called again and gives the same result.

    Both methods raise MaskError if nobody has called either for so long that the masks of a drafted tree's nodes, which
    are found during these calls, come too late.
    """

    def is_done(self) -> bool:
        """Whether `wait` would return at once. Raises what `wait` would raise, so that polling it is enough."""
        ...

    def wait(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class StepParts:
    """The seconds of a Speculate step by part: the draft's passes, the target's pass over the tree, everything else."""

    draft_s: float
    verify_s: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """The limits and abilities of an executor, which the engine must respect when it makes steps."""

    max_sequences: int
    """The number of slots, and so the most sequences of a Decode step."""
    max_context: int
    """The most tokens (prompt and generated) of one sequence."""
    prefill_chunk: int
    """The most tokens of one Prefill step."""
    run_ahead: int = 1
    """The most steps that may be in flight at once."""
    tree_shapes: tuple[TreeShape, ...] = ()
    """The shapes of tree that a Speculate step may verify; empty: the executor only decodes."""
    step_seconds: tuple[float, ...] = ()
    """Seconds of a Decode step of one row, then of Speculate steps of each shape, measured at start; empty: unknown."""
    several_seconds: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """Pairs (number of slots, `step_seconds` of such steps), ascending; infinite: the shape does not take so many."""
    step_parts: tuple[StepParts, ...] = ()
    """The parts of the seconds of a Speculate step of each shape; empty: unknown."""
    max_logit_bias: int = 0
    """The most entries of a request's logit_bias; 0: the executor takes none."""
    num_pages: int = 0
    """KV pages that block tables may name, enough for `max_sequences` of `max_context` tokens; 0: tables are fixed."""
    page_size: int = 64
    """Tokens of a KV page."""
    takes_masks: bool = False
    """Whether rows may have a `Mask`."""
    certain_rows: int = 0
    """The most rows of a Decode step to which slots bring certain tokens; 0: they may not bring any."""
    row_sizes: tuple[int, ...] = ()
    """Numbers of rows, ascending; a Decode step costs about as much as one with the next of these. Empty: unknown."""
    max_drafting: tuple[int, ...] = ()
    """The most slots of a Speculate step, for each shape; empty: one."""
    takes_tree_masks: bool = False
    """Whether Speculate steps may have `TreeMasks`."""
    remakes_answers: bool = False
    """Whether prompts are fast enough to compute answers again, as prompts, while nothing else is to be done."""
    num_snapshots: int = 0
    """The number of snapshots that `Keep` may write. 0: sequences have no state beside their pages, so that a prompt
    can go on from any prefix of pages; otherwise only from a prefix whose state was kept."""

    @property
    def num_draft(self) -> int:
        """The most positions past the last token that a step may write to; 0: the executor only decodes."""
        return max((shape.num_reserved for shape in self.tree_shapes), default=0)

    def shapes_for(self, num_slots: int) -> tuple[int, ...]:
        """Return the indices of the shapes whose Speculate steps take `num_slots` slots."""
        most = self.max_drafting or (1,) * len(self.tree_shapes)
        return tuple(shape for shape, at_most in enumerate(most) if num_slots <= at_most)

    def seconds_for(self, num_slots: int) -> tuple[float, ...]:
        """Return the `several_seconds` of the smallest known number that is at least `num_slots`; empty: unknown."""
        return next((seconds for count, seconds in self.several_seconds if num_slots <= count), ())


class Executor(Protocol):
    """Owner of weights, KV pages and running state; carries out steps in order."""

    @property
    def limits(self) -> ExecutorLimits: ...

    def submit(self, step: Step) -> Pending: ...

    def prompt_logits(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        """Yield the logits of every position, chunk after chunk: float32 [chunk, V].

        The prompt runs in a free slot and its pages; `block_table` as in `Admit`.
        """
        ...

    def prompt_states(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        """Yield the outputs of the final norm at every position, float32 [chunk, H], else as `prompt_logits`."""
        ...

    def read_pages(self, pages: Sequence[int]) -> dict[str, Array]:
        """Return what KV pages hold after all steps so far: for each cache a host array [layers, pages, ...].

        A draft's caches are among them.
        """
        ...

    def write_pages(self, pages: Sequence[int], contents: Mapping[str, Array]) -> None:
        """Fill KV pages, which no sequence holds, with what `read_pages` of an executor with the same caches gave."""
        ...

    def close(self) -> None:
        """Free everything; a closed executor refuses steps. May be called again."""
        ...
