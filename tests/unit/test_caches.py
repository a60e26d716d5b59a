"""Caches as data: the arrays of a made-up model with every kind of cache, and what is found in them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cpmrt.errors import ConfigError
from cpmrt.memory.caches import PAGE_SIZE, CacheLayout, CacheSpec, pages_for
from cpmrt.memory.plan import largest_context

KEYS = CacheSpec("keys", (2, PAGE_SIZE, 8))
CODES = CacheSpec("codes", (PAGE_SIZE, 4), np.uint8, on_accept="recompute", part="indices")
SCALES = CacheSpec("scales", (2,), np.float32)
STATE = CacheSpec("state", (3, 5), np.float32, "slot", "restore", part="states")
ROWS = CacheSpec("rows", (7,), None, "chain", None, part="states")
LAYERS = ((KEYS, SCALES), (STATE, ROWS), (KEYS, SCALES, CODES), (STATE, ROWS))


def layout(**changes):
    return CacheLayout(LAYERS, max_context=2 * PAGE_SIZE + 1, max_sequences=2, **changes)


def test_layers_that_keep_a_cache_share_an_array():
    assert {spec.name: shape for spec, shape in layout(chain_rows=9).arrays()} == {
        "keys": (2, 6, 2, PAGE_SIZE, 8), "scales": (2, 6, 2), "codes": (1, 6, PAGE_SIZE, 4), "state": (2, 2, 3, 5),
        "rows": (2, 9, 7),
    }  # fmt: skip
    assert "rows" not in layout().specs, "nothing drafts"
    assert (pages_for(0), pages_for(1), pages_for(PAGE_SIZE), pages_for(PAGE_SIZE + 1)) == (0, 1, 1, 2)


def test_a_layer_has_its_own_part_of_each_array():
    arrays = {f"draft.{name}": [f"{name}{index}" for index in range(2)] for name in layout(chain_rows=1).specs}
    of_layer = layout(prefix="draft.", chain_rows=1).of_layer
    assert of_layer(0, arrays) == {"keys": "keys0", "scales": "scales0"}
    assert of_layer(2, arrays) == {"keys": "keys1", "scales": "scales1", "codes": "codes0"}
    assert of_layer(3, arrays) == {"state": "state1", "rows": "rows1"}
    assert layout(prefix="draft.").of_layer(3, arrays) == {"state": "state1"}


def test_states_have_four_snapshots_for_each_slot():
    caches = layout(prefix="draft.")
    assert list(caches.snapshots()) == [("state.snapshots", STATE, (2, 8, 3, 5))]
    assert caches.states({"draft.state": 1, "draft.state.snapshots": 2, "draft.keys": 3}) == [(1, 2)]
    assert caches.has_state and caches.num_snapshots == 8
    plain = CacheLayout(LAYERS[:1], max_context=64, max_sequences=2)
    assert not plain.has_state and plain.num_snapshots == 0 and not list(plain.snapshots())


def test_pages_and_rows_that_move_are_found_by_name():
    caches = layout(prefix="draft.", chain_rows=1)
    arrays = {f"draft.{name}": number for number, name in enumerate(("keys", "scales", "codes", "state", "rows"))}
    assert caches.paged(arrays) == {"draft.keys": 0, "draft.scales": 1, "draft.codes": 2}
    assert caches.moved(arrays) == [0, 1]


def test_bytes_of_a_token_are_those_of_keys_and_values():
    assert layout(chain_rows=9).bytes_per_token(2) == 2 * (2 * 8 * 2), "two layers; no scales, codes or states"
    assert CacheSpec("keys", (2, PAGE_SIZE, 8), np.uint8).bytes_per_token(2) == 2 * 8
    assert CacheSpec("latent", (PAGE_SIZE, 8)).bytes_per_token(2) == 2 * 8
    for spec in (CacheSpec("scales", (64,), np.float32), CacheSpec("state", (PAGE_SIZE, 8), scope="slot")):
        assert spec.bytes_per_token(2) == 0


def test_every_slot_begins_with_pages_of_its_own():
    caches = layout()
    assert caches.block_tables() == [[0, 1, 2], [3, 4, 5]]
    for table in caches.block_tables() + [[], [5, 0]]:
        caches.check_table(table)
    for table, words in (([0, 1, 2, 3], "at most 3 pages, got 4"), ([3, 6], "0 to 5"), ([0, -1], "got -1 to 0")):
        with pytest.raises(ConfigError, match=f"block table: expected .*{words}"):
            caches.check_table(table)


def test_a_draft_needs_caches_that_can_follow_it():
    CacheLayout(LAYERS[:1], 64, 1).check_draft(has_chains_only=False)
    layout().check_draft(has_chains_only=True)
    with pytest.raises(ConfigError, match="draft trees cannot be used with the cache state"):
        layout().check_draft(has_chains_only=False)
    with pytest.raises(ConfigError, match="a draft cannot be used with the cache rows"):
        layout(chain_rows=1).check_draft(has_chains_only=True)


def test_layers_agree_about_a_cache():
    with pytest.raises(ValueError, match="layers disagree about the cache keys"):
        _ = CacheLayout(((KEYS,), (CacheSpec("keys", (1,)),)), 64, 1).specs


def test_the_largest_context_is_found_among_all_numbers_of_pages():
    for limit in range(1, 5 * PAGE_SIZE):
        for pages in range(6):
            found = largest_context(lambda context: SimpleNamespace(total_bytes=context), pages * PAGE_SIZE, limit)
            assert found == (limit if limit <= pages * PAGE_SIZE else pages * PAGE_SIZE)
