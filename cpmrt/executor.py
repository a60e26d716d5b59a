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
"""Rows of a step at most, of one token each: sequences that decode together, nodes of a draft tree, rows of logits."""
MAX_CERTAIN = 31
"""Certain tokens that a slot brings in a step at most."""


class Mask:
    """The tokens that one row of a step may sample: bit t % 8 of byte t // 8 of `bits` for token t, or None for all.

    Tokens that a row may not sample have the logit -infinity, before anything else is done to it. What a row may sample
    can depend on the token before it, so a step may be submitted while its mask is still empty; it is filled before
    anybody waits for the step. `on_fill`, set by an executor that has launched such a step, is called with the bits.
    """

    __slots__ = ("bits", "is_filled", "on_fill")

    def __init__(self, bits: bytes | None = None, *, is_filled: bool = False):
        self.bits, self.is_filled = bits, is_filled
        self.on_fill: Callable[[bytes | None], None] | None = None

    def fill(self, bits: bytes | None) -> None:
        """Say what the row may sample, once."""
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
"""The tokens that lead from the root of a drafted tree, the last token of its sequence, to one of its nodes."""
MaskFailure = Literal["late", "cut", "nothing"]
"""Why a token could not be sampled under its mask: see `SlotResult`."""


class TreeMasks:
    """The tokens that the nodes of a drafted tree may sample: `bits` has those of each (as `Mask.bits`) by its path.

    A node whose path is not there is cut, as if it had not been drafted; the root never is. What is drafted is known
    when the draft has run: while somebody waits for the step, the executor asks (`of_nodes`), and `find` tells what is
    left of all paths. What `find` can do before, `prepare` does while the draft runs.
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
        """Find what depends on no node, while none is known yet. Only the first call does anything."""
        prepare, self._prepare = self._prepare, None
        if prepare is not None and self.bits is None:
            prepare()

    def of_nodes(self, tokens: Sequence[int], parents: Sequence[int]) -> dict[int, bytes | None]:
        """Return by its number what each node that is left may sample.

        Node 0 is the root, and a parent goes before its children; of a node that is not there it is -1.
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
        """Have the step sample anything, once: its result does not count."""
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
    page for each run of `page_size` positions that the sequence may reach; empty: the slot's table stays as it is, at
    first its own run of pages. Where sequences have a state beside their pages, it begins as that of `snapshot`, which
    a `Keep` step wrote; None: at zero.
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
    """Prompt tokens whose keys and values are in the slot's pages already: they only count for the penalties."""

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
    """What the first token may be; None: anything."""


@dataclass(frozen=True, slots=True)
class Decode:
    """One more token for each slot. `masks`: of each, or none at all if every slot may sample any token.

    `certain`: the tokens of each slot that come for certain before the one that is sampled, MAX_CERTAIN at most, or
    none at all. A step has a row for each slot and a row for each of these tokens. They count as generated, and leave
    what they would have left had they been sampled one by one, to the bit. The slot's result has them and the token
    behind them; none of them ends the sequence.
    """

    slots: tuple[int, ...]
    masks: tuple[Mask | None, ...] = ()
    certain: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Speculate:
    """Draft, verify and accept: one token or more for each slot. `shape`: which of `ExecutorLimits.tree_shapes`.

    Any mix of `Decode` and `Speculate` steps gives the same tokens.
    """

    slots: tuple[int, ...]
    shape: int = 0
    masks: TreeMasks | None = None
    """What the nodes of a step of one slot may sample; None: anything."""


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
    """What one step produced for one slot: no tokens if the sequence had finished before.

    `non_finite`: the logits behind these tokens hold NaN or +infinity, or nothing but -infinity, so that none could be
    sampled there. `mask_failure`: they could not be sampled under their mask, which was "late"; had been left out, as
    its drafted node had been "cut"; or left "nothing", every token that it allows having the logit -infinity. In all
    these cases the executor has finished the sequence, as after an end token.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    non_finite: bool = False
    mask_failure: MaskFailure | None = None


@dataclass(slots=True)
class StepResult:
    """One entry for each slot of the step, in its order (`Admit`, `Keep`, `Recall` and `Release` have none)."""

    slots: tuple[SlotResult, ...] = ()
    num_rescored: int | None = field(default=None, compare=False)
    """Of a step whose output head was screened, the tokens whose logits were computed exactly; else None."""


class Pending(Protocol):
    """A submitted step. `wait` blocks until it is done; it may be called again and gives the same result.

    It raises MaskError if nobody has asked for so long that the nodes of a drafted tree have no masks in time.
    """

    def is_done(self) -> bool:
        """Whether `wait` would return at once. Asked again and again, it raises what `wait` would raise."""
        ...

    def wait(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where the seconds of a Speculate step go: draft passes, the target's pass over the tree, and everything else."""

    draft_s: float
    verify_s: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What the engine must respect when it makes steps."""

    max_sequences: int
    """Slots; a Decode step has at most this many rows."""
    max_context: int
    """Tokens (prompt and generated) one sequence may hold."""
    prefill_chunk: int
    """Most tokens of one Prefill step."""
    run_ahead: int = 1
    """Steps that may be in flight at once."""
    tree_shapes: tuple[TreeShape, ...] = ()
    """Trees that a Speculate step may verify; none: the executor only decodes."""
    step_seconds: tuple[float, ...] = ()
    """Seconds of a Decode step of one row, then a Speculate step of each shape, measured at start; empty: unknown."""
    several_seconds: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """The same of steps of several slots, for numbers of them in ascending order; infinite: not taken by that shape."""
    step_parts: tuple[StepParts, ...] = ()
    """Where the seconds of a Speculate step of each shape go; empty: unknown."""
    max_logit_bias: int = 0
    """Most entries of a request's logit_bias; 0: the executor has none."""
    num_pages: int = 0
    """KV pages that block tables may name, enough for `max_sequences` of `max_context` tokens; 0: tables are fixed."""
    page_size: int = 64
    """Tokens of a KV page."""
    takes_masks: bool = False
    """Whether rows may have a `Mask`."""
    certain_rows: int = 0
    """Rows of a Decode step at most where slots bring certain tokens; 0: none do."""
    row_sizes: tuple[int, ...] = ()
    """Numbers of rows, ascending: a Decode step costs about as much as one of the next of these. Empty: unknown."""
    max_drafting: tuple[int, ...] = ()
    """Slots of a Speculate step of each shape at most; empty: one."""
    takes_tree_masks: bool = False
    """Whether Speculate steps may have `TreeMasks`."""
    remakes_answers: bool = False
    """Whether prompts are so fast that answers may be computed again, as prompts, while nothing else is to do."""
    num_snapshots: int = 0
    """States that `Keep` may write. 0: a sequence is its pages alone, and every prefix of pages can be resumed;
    otherwise only one whose state was kept."""

    @property
    def num_draft(self) -> int:
        """Positions past the last token that a step may write at; 0: the executor only decodes."""
        return max((shape.num_reserved for shape in self.tree_shapes), default=0)

    def shapes_for(self, num_slots: int) -> tuple[int, ...]:
        """Return the shapes of which a Speculate step takes so many slots."""
        most = self.max_drafting or (1,) * len(self.tree_shapes)
        return tuple(shape for shape, at_most in enumerate(most) if num_slots <= at_most)

    def seconds_for(self, num_slots: int) -> tuple[float, ...]:
        """Return the `several_seconds` of steps of so many slots: of the next number that is known; empty: unknown."""
        return next((seconds for count, seconds in self.several_seconds if num_slots <= count), ())


class Executor(Protocol):
    """Owner of weights, KV pages and running state; carries out steps in order."""

    @property
    def limits(self) -> ExecutorLimits: ...

    def submit(self, step: Step) -> Pending: ...

    def prompt_logits(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        """Logits of every position, chunk after chunk of shape [chunk, V], through the pages of a free slot.

        `block_table` as in `Admit`.
        """
        ...

    def prompt_states(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        """Outputs of the final norm at every position, chunk after chunk of shape [chunk, H]; else as `prompt_logits`.
        """
        ...

    def read_pages(self, pages: Sequence[int]) -> dict[str, Array]:
        """Return what KV pages hold after all steps so far: for each cache an array [layers, pages, ...] of the host.

        A draft's caches are among them.
        """
        ...

    def write_pages(self, pages: Sequence[int], contents: Mapping[str, Array]) -> None:
        """Fill KV pages, which no sequence holds, with what `read_pages` of an executor with the same caches gave."""
        ...

    def close(self) -> None:
        """Free everything; a closed executor refuses steps. May be called again."""
        ...
