"""The prefix cache: the pool's counts of pages, what later sequences find again, and that their text is never wrong."""

import io
from collections import Counter

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scripted import ScriptedExecutor, plain_continuation

from cpmrt.cli.arguments import add_model_options, llm_arguments
from cpmrt.cli.parser import Parser
from cpmrt.config import Sampling, TreeShape
from cpmrt.engine import Engine, Request
from cpmrt.engine.loan import borrowed_slot
from cpmrt.engine.page_pool import PagePool
from cpmrt.engine.prefix_cache import PrefixCache
from cpmrt.engine.step_log import StepLog, read_steps, replay
from cpmrt.executor import Admit, ExecutorLimits, Keep, Prefill, Recall, Speculate

SIZE = 4


def ask(prompt, *, new=6, seed=0, **sampling):
    return Request(tuple(prompt), Sampling(**sampling), seed, (), new)


def tokens_of(engine, seq):
    return [token for result in engine.stream(seq) for token in result.token_ids]


class PagedExecutor(ScriptedExecutor):
    """An executor that keeps tokens in pages and checks at each step that no other sequence has written to the step's
    pages."""

    def __init__(self, limits, draft_seed=0):
        super().__init__(limits, draft_seed)
        self.pages = [[None] * limits.page_size for _ in range(limits.num_pages)]
        self.recalled = {}
        self.states, self.snapshots = {}, [None] * limits.num_snapshots

    def place(self, table, position):
        return self.pages[table[position // self.limits.page_size]], position % self.limits.page_size

    def read(self, table, count):
        return [page[offset] for page, offset in (self.place(table, position) for position in range(count))]

    def scribble(self, running, count):
        """Write drafted tokens after the sequence's last right token."""
        table = running.admit.block_table
        for position in range(len(running.tokens), len(running.tokens) + count):
            if not running.finished and position < len(table) * self.limits.page_size:
                page, offset = self.place(table, position)
                page[offset] = "drafted"

    def _run(self, step):
        if isinstance(step, Admit):
            assert len(set(step.block_table)) == len(step.block_table)
            self.recalled[step.slot] = []
            self.states[step.slot] = [] if step.snapshot is None else self.snapshots[step.snapshot]
        if isinstance(step, Keep):
            running = self.running[step.slot]
            self.snapshots[step.snapshot] = running.tokens[: len(running.tokens) - running.ready]
            return []
        if isinstance(step, Recall):
            self.recalled[step.slot] += step.token_ids
            return []
        slots = getattr(step, "slots", (step.slot,) if isinstance(step, Prefill) else ())
        for slot in slots:
            running = self.running[slot]
            if isinstance(step, Prefill) and not running.tokens:
                running.tokens = self.read(running.admit.block_table, step.position)
                assert not self.snapshots or running.tokens == self.states[slot]
            written = len(running.tokens) - running.ready
            assert self.read(running.admit.block_table, written) == running.tokens[:written]
        if isinstance(step, Speculate):
            for slot in step.slots:
                self.scribble(self.running[slot], self.limits.tree_shapes[step.shape].num_reserved)
        result = super()._run(step)
        for slot in slots:
            running = self.running[slot]
            for position in range(len(running.tokens) - running.ready):
                page, offset = self.place(running.admit.block_table, position)
                page[offset] = running.tokens[position]
        return result


def paged_limits(max_sequences=2, max_context=32, **others):
    pages = max_sequences * -(-max_context // SIZE)
    return ExecutorLimits(max_sequences, max_context, num_pages=pages, page_size=SIZE, **others)


LIMITS = st.builds(
    paged_limits,
    max_sequences=st.integers(1, 4),
    prefill_chunk=st.integers(1, 9),
    run_ahead=st.integers(1, 4),
    tree_shapes=st.sampled_from([(), (), (TreeShape.chain(3),), (TreeShape(4, 10, 12),)]),
    num_snapshots=st.sampled_from([0, 0, 1, 3]),
)
# Few tokens, so that prompts begin alike, branch and come again.
PROMPTS = st.lists(st.sampled_from([7, 8]), min_size=1, max_size=20)


@examples(60)
@given(
    LIMITS, st.lists(st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 3)), min_size=2, max_size=14),
    st.sampled_from([True, True, "fast"]),
)  # fmt: skip
def test_every_sequence_gets_its_own_text_under_pressure(limits, wanted, reuse):
    executor = PagedExecutor(limits)
    engine, history = Engine(executor, prefix_cache=reuse), []
    for prompt, new, action in wanted:
        if action == 1 and history and len(history[-1]) < 20:
            prompt = [*history[-1], *prompt][:20]  # the next turn of a conversation
        seq = engine.add(ask(prompt, new=new))
        if action == 2:  # cancelled on the way
            stream = engine.stream(seq)
            next(stream, None)
            stream.close()
            continue
        others = [engine.add(ask(prompt[:n], new=new)) for n in range(1, len(prompt), 6)] if action == 3 else []
        for one in (seq, *others):
            expected = plain_continuation(one.request.prompt_ids, 0, new, set())
            assert tokens_of(engine, one) == expected
        history.append([*prompt, *seq.token_ids])
    assert engine.cache.pool.num_held == 0, "every page is returned"
    while executor.queue:
        executor.run_one()


@pytest.mark.parametrize(("reuse", "cached"), [("fast", 16), (True, 8)])
def test_the_next_turn_prefills_what_is_new_and_the_answer_unless_that_is_kept(reuse, cached):
    executor = PagedExecutor(paged_limits(prefill_chunk=16))
    engine = Engine(executor, prefix_cache=reuse)
    first = engine.add(ask(range(10), new=7))
    conversation = [*range(10), *tokens_of(engine, first), 30, 31, 32]
    executor.steps.clear()
    second = engine.add(ask(conversation, new=3))
    assert tokens_of(engine, second) == plain_continuation(conversation, 0, 3, set())
    # 16 of the 17 tokens of the first turn are written: the last one was never computed with. 10 are its prompt.
    new = 20 - cached
    chunks = [(step.position, len(step.token_ids)) for step in executor.steps if isinstance(step, Prefill)]
    assert chunks == [(cached, new)]
    stats = second.stats
    assert (stats.cached_tokens, stats.prompt_tokens) == (cached, 20)
    assert stats.prefill_tokens_per_s == pytest.approx(new / stats.prefill_s)


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_the_last_prompt_token_is_always_computed(length, cached):
    engine = Engine(PagedExecutor(paged_limits(prefill_chunk=16)))
    for expected in (0, cached):
        seq = engine.add(ask(range(length), new=1))
        assert tokens_of(engine, seq) == plain_continuation(range(length), 0, 1, set())
        assert seq.num_cached == expected


def test_a_prompt_is_shared_while_its_first_sequence_still_runs():
    engine = Engine(PagedExecutor(paged_limits(prefill_chunk=16)))
    first = engine.stream(engine.add(ask(range(9), new=12)))
    next(first)
    second = engine.add(ask(range(9), new=4))
    assert tokens_of(engine, second) == plain_continuation(range(9), 0, 4, set()) and second.num_cached == 8
    assert engine.cache.pool.num_held == 6
    first.close()


def test_a_cancelled_sequence_leaves_what_is_written():
    engine = Engine(PagedExecutor(paged_limits(prefill_chunk=4, run_ahead=3)))
    seq = engine.add(ask(range(20)))
    for _ in range(3):  # the first one reads that the sequence was admitted
        engine.advance()
    engine.finish(seq, "cancelled")
    assert engine.cache.pool.num_held == 0
    while not engine.is_idle:  # chunks that were in flight, whose pages may be another's by now
        engine.advance()
    assert engine.cache.pool.num_cached == 2
    again = engine.add(ask(range(20)))
    assert tokens_of(engine, again) == plain_continuation(range(20), 0, 6, set())
    assert again.num_cached == 8, "two chunks were known to be done"


@pytest.mark.parametrize(("penalty", "recalled"), [(1.0, []), (1.3, list(range(8)))])
def test_cached_tokens_count_for_the_repetition_penalty(penalty, recalled):
    executor = PagedExecutor(paged_limits(prefill_chunk=3))
    engine = Engine(executor)
    for expected in ([], recalled):
        seq = engine.add(ask(range(9), repetition_penalty=penalty))
        tokens_of(engine, seq)
        assert executor.recalled[seq.slot] == expected
    assert all(len(step.token_ids) <= 3 for step in executor.steps if isinstance(step, Recall))


def test_cached_tokens_count_for_a_draft():
    executor = PagedExecutor(paged_limits(prefill_chunk=3, tree_shapes=(TreeShape.chain(3),)))
    engine = Engine(executor)
    for expected in ([], list(range(8))):
        seq = engine.add(ask(range(9)))
        tokens_of(engine, seq)
        assert executor.recalled[seq.slot] == expected


@pytest.mark.parametrize(("length", "again", "longer"), [(4, 0, 0), (5, 4, 4), (8, 4, 4), (14, 12, 12)])
def test_a_state_is_kept_at_the_last_border_within_a_prompt(length, again, longer):
    executor = PagedExecutor(paged_limits(prefill_chunk=16, run_ahead=3, num_snapshots=2))
    engine = Engine(executor)
    for count, expected in ((length, 0), (length, again), (length + 4, longer), (length + 1, length // SIZE * SIZE)):
        seq = engine.add(ask(range(count), new=3))
        assert tokens_of(engine, seq) == plain_continuation(range(count), 0, 3, set())
        assert seq.num_cached == expected
    assert sum(isinstance(step, Keep) for step in executor.steps) > 0


def test_a_state_is_kept_where_a_prompt_parts_from_an_earlier_one():
    """Two prompts show what they share, which the third then need not compute; with one snapshot only the end
    of a prompt counts."""
    shared, cached = list(range(9)), dict[int, list[int]]()
    for count in (1, 2, 3):
        executor = PagedExecutor(paged_limits(max_context=40, prefill_chunk=16, num_snapshots=count))
        engine, cached[count] = Engine(executor), []
        for own in (range(30, 39), range(40, 49), range(50, 59), range(50, 62)):
            seq = engine.add(ask([*shared, *own], new=3))
            assert tokens_of(engine, seq) == plain_continuation([*shared, *own], 0, 3, set())
            cached[count].append(seq.num_cached)
    assert cached == {1: [0, 0, 0, 16], 2: [0, 0, 8, 16], 3: [0, 0, 8, 16]}


def test_what_was_generated_is_not_resumed_where_there_is_a_state():
    engine = Engine(PagedExecutor(paged_limits(prefill_chunk=16, num_snapshots=2)))
    first = engine.add(ask(range(6), new=12))
    second = engine.add(ask([*range(6), *tokens_of(engine, first), 30]))
    tokens_of(engine, second)
    assert second.num_cached == 4 and engine.cache.pool.num_cached == 4


@pytest.mark.parametrize(("new", "cached"), [(2, 4), (3, 8), (12, 16)])
@pytest.mark.parametrize("run_ahead", [1, 3])
def test_the_state_within_an_answer_is_kept_with_its_pages(new, cached, run_ahead):
    """The state is kept at the last page border that the answer reaches, unless it crosses another within the steps
    ahead."""
    executor = PagedExecutor(paged_limits(prefill_chunk=16, num_snapshots=4, run_ahead=run_ahead))
    engine = Engine(executor, prefix_cache="fast")
    first = engine.add(ask(range(6), new=new))
    conversation = [*range(6), *tokens_of(engine, first), 30]
    second = engine.add(ask(conversation, new=3))
    assert tokens_of(engine, second) == plain_continuation(conversation, 0, 3, set())
    assert second.num_cached == cached


def test_a_border_that_an_ended_answer_did_not_reach_is_not_resumed():
    """A page border is not resumed if the answer stopped before it while the step that would reach it was in flight."""
    executor = PagedExecutor(paged_limits(prefill_chunk=16, num_snapshots=4, run_ahead=4))
    engine = Engine(executor, prefix_cache="fast")
    expected = plain_continuation(range(6), 0, 12, set())
    stop = expected[1]
    first = engine.add(Request(tuple(range(6)), Sampling(), 0, (stop,), 12))
    answer = tokens_of(engine, first)
    assert answer == expected[: expected.index(stop) + 1] and any(isinstance(step, Keep) for step in executor.steps)
    second = engine.add(ask([*range(6), *answer, 30, 31], new=3))
    tokens_of(engine, second)
    assert second.num_cached == 4


def test_the_snapshot_used_least_recently_goes_first():
    engine, cached = Engine(PagedExecutor(paged_limits(prefill_chunk=16, num_snapshots=2))), []
    for first in (0, 10, 0, 20, 0, 10):
        seq = engine.add(ask(range(first, first + 6), new=1))
        tokens_of(engine, seq)
        cached.append(seq.num_cached)
    assert cached == [0, 0, 4, 0, 4, 0]


def test_pages_that_are_dropped_take_their_snapshot_with_them():
    """When one long prompt takes all pages, the snapshot of a dropped prompt goes too and is found no more."""
    engine = Engine(PagedExecutor(paged_limits(max_sequences=1, prefill_chunk=16, num_snapshots=3)))
    for prompt, expected in ((range(6), 0), (range(40, 70), 0), (range(6), 0), (range(6), 4)):
        seq = engine.add(ask(prompt, new=2))
        tokens_of(engine, seq)
        assert seq.num_cached == expected


def test_the_snapshot_of_a_dropped_page_is_used_again_before_that_of_another():
    cache = PrefixCache(num_pages=6, page_size=SIZE, num_snapshots=2)
    texts = range(5), range(10, 15)
    held = [cache.acquire(text, 5) for text in texts]
    for one, text in zip(held, texts, strict=True):
        cache.keep(one, text, 5)
    for one in reversed(held):
        cache.release(one)
    cache.release(cache.acquire(range(20, 25), 5 * SIZE))  # takes the page of 10.. and a snapshot
    assert [cache.acquire(text, 5).num_cached for text in texts] == [4, 0]


def test_the_state_within_an_answer_takes_one_snapshot_however_long_the_answer_is():
    cache = PrefixCache(num_pages=8, page_size=SIZE, num_snapshots=2)
    held = cache.acquire((1, 2), 5 * SIZE)
    assert len({cache.snapshot_within_answer(held, border) for border in (4, 8, 12)}) == 1
    cache.release(held)
    assert len(cache.acquire(range(5), 5).borders) == len(cache.acquire(range(10, 15), 5).borders) == 1


def test_a_sequence_that_ends_before_its_border_gives_the_snapshot_back():
    cache = PrefixCache(num_pages=4, page_size=SIZE, num_snapshots=1)
    cache.release(cache.acquire(range(5), 5))
    assert cache.acquire(range(10, 15), 5).borders == {4: 0}


def test_without_the_cache_every_prompt_is_computed():
    engine = Engine(PagedExecutor(paged_limits(prefill_chunk=16)), prefix_cache=False)
    for _ in range(5):
        seq = engine.add(ask(range(20)))
        assert tokens_of(engine, seq) == plain_continuation(range(20), 0, 6, set()) and seq.num_cached == 0
    assert (engine.cache.pool.num_held, engine.cache.pool.num_cached) == (0, 0)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ([], True),
        (["--no-prefix-cache"], False),
        (["--prefix-cache", "off"], False),
        (["--prefix-cache", "on"], True),
        (["--prefix-cache", "fast"], "fast"),
    ],
)
def test_the_option_of_the_command_line(options, value):
    parser = Parser()
    add_model_options(parser)
    assert llm_arguments(parser.parse_args(options))["prefix_cache"] == value


def test_fixed_tables_reuse_nothing():
    executor = ScriptedExecutor(ExecutorLimits(1, 64, 16))
    engine = Engine(executor)
    for _ in range(2):
        assert tokens_of(engine, engine.add(ask(range(20)))) == plain_continuation(range(20), 0, 6, set())
    assert all(step.block_table == () for step in executor.steps if isinstance(step, Admit))


def test_a_borrowed_slot_has_pages_of_its_own():
    engine = Engine(PagedExecutor(paged_limits(max_sequences=2, prefill_chunk=16)))
    stream = engine.stream(engine.add(ask(range(9), new=12)))
    next(stream)
    (running,) = engine.running
    with borrowed_slot(engine, 32) as (slot, table):
        assert slot != running.slot and len(table) == 8 and not {*table} & {*running.pages.table}
        assert engine.cache.pool.num_held == 8 + 6
    stream.close()
    assert engine.cache.pool.num_held == 0 and sorted(engine.slots.free) == [0, 1]


def test_a_log_with_block_tables_replays(tmp_path):
    limits, text = paged_limits(prefill_chunk=5), io.StringIO()
    engine = Engine(PagedExecutor(limits), StepLog(text))
    for length in (12, 14, 9):
        tokens_of(engine, engine.add(ask(range(length), repetition_penalty=1.1)))
    (tmp_path / "steps.jsonl").write_text(text.getvalue())
    recorded = list(read_steps(tmp_path / "steps.jsonl"))
    assert {Admit, Recall, Prefill} < {type(step) for step, _ in recorded}
    assert list(replay((step for step, _ in recorded), PagedExecutor(limits))) == recorded


def test_closing_starts_with_an_empty_cache():
    engine = Engine(PagedExecutor(paged_limits(prefill_chunk=16)))
    next(engine.stream(engine.add(ask(range(20)))))
    engine.close()
    assert (engine.cache.pool.num_held, engine.cache.pool.num_cached) == (0, 0)


def test_the_least_recently_used_page_goes_first():
    cache = PrefixCache(num_pages=6, page_size=2)
    for start in (0, 10, 20):
        text = range(start, start + 4)
        held = cache.acquire(text, 4)
        cache.keep(held, text, 4)
        cache.release(held)
    cache.release(cache.acquire(range(5), 4))  # 0..3 was used last
    taken = cache.acquire((99,), 5)
    assert cached_tokens(cache) == {(0, 1), (0, 1, 2, 3), (20, 21)}, "10.. first, then the end of 20.."
    cache.release(taken)


def test_a_page_of_the_same_text_by_another_sequence_counts_as_used():
    cache = PrefixCache(num_pages=4, page_size=2)
    texts = ((1, 2), (1, 2), (3, 4))
    held = [cache.acquire(text, 2) for text in texts]
    for one, text in zip(held, texts, strict=True):
        cache.keep(one, text, 2)
    for index in (0, 2, 1):
        cache.release(held[index])
    cache.acquire((9,), 6)
    assert cached_tokens(cache) == {(1, 2)}


def test_what_follows_a_dropped_page_is_dropped_with_it():
    """Two sequences compute the same text at a time; the first one's pages, which the tree has, go before the end of
    the second."""
    cache = PrefixCache(num_pages=6, page_size=2)
    text = tuple(range(6))
    first, second = cache.acquire(text, 2), cache.acquire(text, 6)
    cache.keep(first, text, 2)
    cache.keep(second, text, 4)
    assert cached_tokens(cache) == {text[:2], text[:4]}
    cache.release(first)
    third = cache.acquire((50,), 6)
    assert cached_tokens(cache) == set() and cache.pool.num_free == 0
    cache.keep(second, text, 6)
    assert cached_tokens(cache) == {text[:2], text[:4], text}, "with its own pages"
    cache.release(second)
    cache.release(third)
    assert (cache.pool.num_held, cache.pool.num_cached, cache.pool.num_free) == (0, 3, 3)


def cached_tokens(cache):
    """Return the texts that the cache would find."""

    def below(node, before):
        for tokens, child in node.children.items():
            text = (*before, *memoryview(tokens).cast("q"))
            yield text
            yield from below(child, text)

    return set(below(cache._root, ()))


@pytest.mark.parametrize("misuse", [lambda pool: pool.drop(0), lambda pool: pool.hold(pool.take())])
def test_pages_cannot_be_returned_twice_or_shared_without_contents(misuse):
    with pytest.raises(AssertionError):
        misuse(PagePool(2, lambda page: None))


class Sequences(RuleBasedStateMachine):
    """State machine of sequences that come, compute and go on a cache with room for three of the greatest length."""

    LONGEST, AT_A_TIME = 12, 3

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(self.AT_A_TIME * self.LONGEST // 2, page_size=2)
        self.running = []
        self.contents = {}

    @precondition(lambda self: len(self.running) < self.AT_A_TIME)
    @rule(text=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=LONGEST), prompt=st.integers(1, LONGEST))
    def start(self, text, prompt):
        held = self.cache.acquire(text[:prompt], len(text))
        assert held.num_cached < min(prompt, len(text)) and len(held.table) == -(-len(text) // 2)
        for index in range(held.num_cached // 2):
            assert self.contents[held.table[index]] == text[: 2 * index + 2], "a page of another text"
        self.running.append([held, text, held.num_cached])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data):
        entry = data.draw(st.sampled_from(self.running))
        held, text, written = entry
        entry[2] = written = data.draw(st.integers(written, len(text)))
        for index in range(held.num_cached // 2, written // 2):
            self.contents[held.table[index]] = text[: 2 * index + 2]
        self.cache.keep(held, text, written)
        assert tuple(text[: written // 2 * 2]) in cached_tokens(self.cache) | {()}

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        held, text, written = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.cache.keep(held, text, written)
        self.cache.release(held)

    @invariant()
    def counts_are_right(self):
        pool = self.cache.pool
        holders = Counter(page for held, _, _ in self.running for page in held.table)
        assert [holders[page] for page in range(len(pool._holders))] == pool._holders
        assert pool.num_held == len(holders)
        assert len({*pool._free, *pool._cached, *holders}) == len(pool._holders)
        assert len(pool._free) == len({*pool._free}) and not {*pool._free} & pool._kept
        assert pool._kept == self.cache._nodes.keys() and pool._cached.keys() <= pool._kept

    @invariant()
    def pages_that_several_hold_begin_alike(self):
        for held, text, _ in self.running:
            for index in range(held.num_cached // 2):
                assert self.contents[held.table[index]] == text[: 2 * index + 2]


Sequences.TestCase.settings = examples(40, stateful_step_count=25)
TestSequences = Sequences.TestCase
