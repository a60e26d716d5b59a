"""block.cu against reference/draft_block.py: the rows of a DSpark draft's block, and the tokens chosen from its
logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from speculation_oracle import Running
from tree_device import SLOTS, TARGET_ROW, TreeDevice

from cpmrt.config import TreeShape
from cpmrt.config.draft import Block, DraftConfig
from cpmrt.cuda.draft.block import BlockKernels, block_tables
from cpmrt.dtypes import DType, from_float32
from cpmrt.models.draft import Draft
from cpmrt.models.drafts.dspark import MarkovWeights
from cpmrt.reference.draft_block import choose_block, confidence
from cpmrt.reference.draft_tree import chain_nodes

pytestmark = pytest.mark.gpu

HIDDEN, MASK_TOKEN = 72, 5
LONGEST = 32  # tokens of the longest chain that a draft may have


class BlockDevice:
    """`BlockKernels` on the arrays of a `TreeDevice`, with weights whose sums are exact in any order."""

    def __init__(
        self, cuda: Any, *, vocab: int = 704, rank: int = 32, rows: int = 7, least: float = 0.0, seed: int = 0,
        portable: bool = False, pdl: bool = False, num_trees: int = 1, token_map: list[int] | None = None,
    ):  # fmt: skip
        self.cuda, self.rows, self.vocab = cuda, rows, vocab
        self.tree = TreeDevice(cuda, portable=portable, pdl=pdl)
        config = DraftConfig("dspark", draft_vocab=vocab, block=Block(rows, MASK_TOKEN, rank, True))
        draft = Draft(config, (TreeShape.chain(min(rows, LONGEST)),), min_confidence=least)
        arrays = self.tree.arrays
        for spec in block_tables(draft, num_trees):
            arrays[spec.name] = cuda.array(np.full(spec.shape, 0x55, spec.dtype))
        rng = np.random.default_rng(seed)
        self.token_map = token_map and np.array(token_map, np.int32)
        num_tokens = vocab if token_map is None else max(token_map) + 1
        self.markov = MarkovWeights(
            *(rng.integers(-2, 3, (size, rank)).astype(np.float32) for size in (num_tokens, vocab)),
            rng.integers(-2, 3, (1, HIDDEN + rank)).astype(np.float32) / 8, np.array([0.25], np.float32),
        )  # fmt: skip
        self.logits = rng.integers(-40, 40, (rows, vocab)).astype(np.float32) / 4
        self.states = rng.integers(-2, 3, (rows, HIDDEN)).astype(np.float32) / 2
        parts = (self.markov.first, self.markov.second, self.markov.confidence, self.markov.bias)
        held = MarkovWeights(*map(self._words, parts))
        self.kernels = BlockKernels(self.tree.kernels._launch, draft, arrays, held, self._device(portable))

    def _device(self, portable: bool) -> Any:
        return type("Older", (), {"capability": 80, "is_portable": True}) if portable else self.cuda.device

    def _words(self, values: Any) -> Any:
        return self.cuda.array(from_float32(values, DType.BFLOAT16))

    def check(self, running: Running, least: float, length: int) -> int:
        """Draft one step, check its rows, tokens and nodes against the oracle, and return how many tokens were
        drafted."""
        device, shape, position = self.tree, TreeShape.chain(length), running.position
        device.hold(running)
        device.begin(running)
        self.kernels.block_begin()
        end = min(running.capacity, running.max_context)
        there = [position + row < end and not running.finished for row in range(self.rows)]
        expected = [
            (token, position + row, running.slot, min(position + self.rows, end) - 1) if there[row] else (0, 0, -1, 0)
            for row, token in enumerate([running.tokens[-1], *[MASK_TOKEN] * (self.rows - 1)])
        ]  # fmt: skip
        names = tuple(f"draft_{name}" for name in ("token_ids", "positions", "slots", "reach"))
        assert device.rows(names, self.rows) == expected
        held_map = None if self.token_map is None else self.cuda.array(self.token_map)
        self.kernels.markov_chain(shape, self.cuda.array(self.logits), self._words(self.states), held_map)
        drafted = choose_block(
            self.logits, self.states, running.tokens[-1], min(length, sum(there)), self.markov, least, self.token_map
        )  # fmt: skip
        nodes, tree = chain_nodes(running.tokens[-1], drafted, shape.tree_size), device.tree()
        for name in ("tokens", "parents", "depths"):
            np.testing.assert_array_equal(tree[name][: shape.tree_size], getattr(nodes, name), name)
        assert device.rows(TARGET_ROW, shape.tree_size) == running.node_rows(nodes)
        return len(drafted)


def running_at(position: int, *, capacity: int = 320, finished: bool = False, vocab: int = 90) -> Running:
    tokens = np.random.default_rng(position).integers(0, vocab, position + 1).tolist()
    return Running(position % SLOTS, tokens, capacity=capacity, max_context=320, finished=finished)


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize(("vocab", "rank"), [(704, 32), (130560, 256), (601, 8), (96, 264), (1000, 520)])
def test_a_chain_is_chosen_as_the_definition_says(cuda: Any, vocab: int, rank: int, portable: bool) -> None:
    for seed in range(3):
        device = BlockDevice(cuda, vocab=vocab, rank=rank, seed=seed, portable=portable, pdl=seed == 1)
        for length in (7, 4, 1):
            assert device.check(running_at(40 + seed), 0.0, length) == length


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("vocab", [88, 1024])
def test_a_head_of_frequent_tokens(cuda: Any, vocab: int, portable: bool) -> None:
    token_map = np.random.default_rng(vocab).permutation(3 * vocab)[:vocab].tolist()
    for seed in range(3):
        device = BlockDevice(cuda, vocab=vocab, seed=seed, portable=portable, pdl=seed == 1, token_map=token_map)
        assert device.check(running_at(40 + seed), 0.0, 7) == 7
    device = BlockDevice(cuda, vocab=vocab, token_map=token_map, least=0.4)
    device.check(running_at(40), 0.4, 7)


@pytest.mark.parametrize("rows", [1, 16, 63])
def test_blocks_of_other_sizes(cuda: Any, rows: int) -> None:
    device = BlockDevice(cuda, rows=rows, vocab=352)
    assert device.check(running_at(100), 0.0, min(rows, LONGEST)) == min(rows, LONGEST)


def test_a_chain_ends_before_a_token_of_too_little_confidence(cuda: Any) -> None:
    lengths = set()
    for seed in range(4):
        plain = BlockDevice(cuda, seed=seed)
        root = running_at(33)
        tokens = [root.tokens[-1], *choose_block(plain.logits, plain.states, root.tokens[-1], 7, plain.markov)]
        given = [
            confidence(state, plain.markov.first[token], plain.markov)
            for state, token in zip(plain.states, tokens, strict=False)
        ]
        ordered = np.unique(given)
        for least in (float(pair.mean()) for pair in np.stack([ordered[:-1], ordered[1:]], axis=1)):
            if min(abs(one - least) for one in given) > 1e-3:  # nearer ones could depend on the order of sums
                lengths.add(BlockDevice(cuda, seed=seed, least=least).check(running_at(33), least, 7))
    assert len(lengths) > 3


def test_no_room_and_a_finished_sequence(cuda: Any) -> None:
    device = BlockDevice(cuda)
    assert device.check(running_at(61, capacity=64), 0.0, 7) == 3
    assert device.check(running_at(319), 0.0, 7) == 1
    assert device.check(running_at(50, finished=True), 0.0, 7) == 0


def test_among_equals_the_lower_id_goes_first(cuda: Any) -> None:
    device = BlockDevice(cuda)
    device.logits[:] = 3.0
    device.markov.second[:] = 0
    device.kernels._markov.second.fill(0)
    assert device.check(running_at(12), 0.0, 7) == 7
    assert device.tree.tree()["tokens"][1:8].tolist() == [0] * 7
