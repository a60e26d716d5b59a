"""Limits of tree shapes and of a user's speculation settings."""

from __future__ import annotations

import pytest

from cpmrt.config import SpeculationConfig, TreeShape
from cpmrt.errors import ConfigError


def test_the_default_tree_is_cpm_cus():
    shape = TreeShape()
    assert (shape.num_passes, shape.top_k, shape.tree_size) == (2, 10, 12)
    assert (shape.num_candidates, shape.max_emitted, shape.num_reserved) == (110, 3, 11)


def test_a_chain():
    shape = TreeShape.chain(5)
    assert (shape.num_candidates, shape.tree_size, shape.max_emitted, shape.num_reserved) == (5, 6, 6, 5)


def test_rows_of_the_draft_may_reach_further_than_the_tree():
    assert TreeShape(4, 10, 32).num_reserved == 31
    assert TreeShape(4, 10, 12).num_reserved == 30


def test_a_lookup_beside_a_tree_may_reach_further_than_it():
    shape = TreeShape(2, 10, 12, 15)
    assert (shape.tree_depth, shape.max_emitted, shape.num_nodes, shape.num_reserved) == (2, 16, 16, 15)
    shape = TreeShape(4, 10, 32, 3)
    assert (shape.tree_depth, shape.max_emitted, shape.num_nodes, shape.num_reserved) == (4, 5, 32, 31)
    assert TreeShape(9, 2, 3).tree_depth == 2


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 1, 2), "num_passes"),
        ((1, 33, 2), "top_k"),
        ((2, 10, 65), "tree_size"),
        ((2, 10, 1), "tree_size"),
        ((2, 2, 8), "the candidates and the root"),
        ((3, 32, 12), "too many candidates"),
        ((9, 9, 12), "drafted rows"),
        ((2, 10, 12.0), "tree_size"),
        ((True, 10, 12), "num_passes"),
        ((2, 10, 12, 64), "lookup_length"),
        ((2, 10, 12, -1), "lookup_length"),
    ],
)
def test_a_tree_that_cannot_be(numbers, message):
    with pytest.raises(ConfigError, match=message):
        TreeShape(*numbers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "medusa"}, "method"),
        ({"method": "eagle2", "shapes": ()}, "at least one"),
        ({"method": "lookup"}, "chains"),
        ({"method": "lookup", "shapes": (TreeShape(3, 1, 4, 5),)}, "lookup means nothing to method lookup"),
        ({"method": "model"}, "chains"),
        ({"method": "eagle2", "draft_vocab": 0}, "draft_vocab"),
        ({"method": "eagle2", "window": 1.5}, "window"),
        ({"method": "eagle2", "head_bits": 3}, "head_bits"),
    ],
)
def test_a_wish_that_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        SpeculationConfig(**fields)
