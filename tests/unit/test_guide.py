"""The guide of one sequence, asked without an engine: what its steps and the trees of its drafts may sample."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scripted_forms import END, Automaton

from cpmrt.engine.guide import Guide
from cpmrt.errors import FormError, MaskError


class Pairs(Automaton):
    """A grammar that allows the tokens 2n and 2n + 1 behind n tokens."""

    def _following(self, tokens: Sequence[int]) -> list[int]:
        return [2 * len(tokens), 2 * len(tokens) + 1]


def bits_of(*tokens: int) -> bytes:
    """Return the bits of a mask that allows these tokens, as long as those of the matchers here."""
    return sum(1 << token for token in tokens).to_bytes(7, "little")


def test_a_tree_keeps_its_masks_when_the_next_one_is_submitted_before_they_are_asked_for() -> None:
    guide = Guide(Pairs(0), 4)
    first, second = guide.tree_masks(room=20), guide.tree_masks(room=20)
    assert first.of_nodes([9, 0, 7], [-1, 0, 0]) == {0: bits_of(0, 1), 1: bits_of(2, 3)}
    assert guide.take((0, 2), 20, is_drafted=True) == ()
    assert second.of_nodes([9, 5], [-1, 0]) == {0: bits_of(4, 5), 1: bits_of(6, 7)}
    assert guide.failure is None


def test_a_draft_that_its_mask_does_not_allow_is_not_taken() -> None:
    guide = Guide(Pairs(0), 4)
    masks = guide.tree_masks(room=20)
    assert masks.of_nodes([9, 5], [-1, 0]) == {0: bits_of(0, 1)}
    guide.take((5, 2), 20, is_drafted=True)
    assert isinstance(guide.failure, MaskError) and not guide.is_complete


def test_a_token_other_than_the_certain_one_is_not_taken() -> None:
    class Single(Automaton):
        def _following(self, tokens: Sequence[int]) -> list[int]:
            return [3] if len(tokens) < 5 else [3, 4]

    guide = Guide(Single(0), 4)
    _, brought = guide.next_step(guide.num_certain(20, is_known=True))
    assert brought == (3, 3, 3, 3)
    guide.take((3, 4), 20)
    assert isinstance(guide.failure, MaskError)


def test_nodes_behind_the_end_of_an_answer_have_no_masks() -> None:
    ending, full = Guide(Pairs(0), 4, stop_ids=(1,)).tree_masks(room=20), Guide(Pairs(0), 4).tree_masks(room=2)
    tokens, parents = [9, 0, 1, 2], [-1, 0, 0, 1]
    assert ending.of_nodes(tokens, parents).keys() == {0, 1, 3}, "1 ends the answer"
    assert full.of_nodes(tokens, parents).keys() == {0, 1, 2}, "there is room for two tokens"


def test_a_tree_behind_another_has_the_room_that_this_leaves() -> None:
    guide = Guide(Pairs(0), 4)
    first, second = guide.tree_masks(room=4), guide.tree_masks(room=4)
    assert first.of_nodes([9, 0], [-1, 0]).keys() == {0, 1}
    guide.take((0, 2), 4, is_drafted=True)
    assert second.of_nodes([9, 4, 6], [-1, 0, 1]).keys() == {0, 1}


@pytest.mark.parametrize(("max_run", "room", "rest"), [(4, 20, (3, 3)), (4, 2, (3,)), (0, 20, ())])
def test_certain_tokens_that_end_the_answer_come_at_once_unless_all_are_sampled(
    max_run: int, room: int, rest: tuple[int, ...]
) -> None:
    class Ending(Automaton):
        def _following(self, tokens: Sequence[int]) -> list[int]:
            return [3] if len(tokens) < 3 else [END]

    guide = Guide(Ending(0), max_run)
    assert guide.next_mask().bits == bytes([1 << 3])
    assert guide.take((3,), room) == rest
    assert guide.is_complete == (len(rest) == 2)


def test_certain_tokens_of_a_step_that_is_let_go_come_again_in_their_order() -> None:
    class Rising(Automaton):
        def _following(self, tokens: Sequence[int]) -> list[int]:
            return [10 + len(tokens)] if len(tokens) < 5 else [3, 4]

    guide = Guide(Rising(0), 2)
    for _ in range(2):
        assert guide.next_step(guide.num_certain(20, is_known=True))[1] == (10, 11)
        guide.let_go()


def test_a_node_behind_which_nothing_is_allowed_is_cut() -> None:
    masks = Guide(Pairs(0, fails_at=1), 4).tree_masks(room=20)
    assert masks.of_nodes([9, 0], [-1, 0]) == {0: bits_of(0, 1)}


def test_the_failure_of_a_root_ends_the_answer_though_another_tree_follows() -> None:
    guide = Guide(Pairs(0, fails_at=0), 4)
    first, _ = guide.tree_masks(room=20), guide.tree_masks(room=20)
    assert first.of_nodes([9], [-1]) == {0: None}
    guide.take((7,), 20, is_drafted=True)
    assert isinstance(guide.failure, FormError) and "nothing is allowed" in str(guide.failure)
