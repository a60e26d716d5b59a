"""The count of tokens that wait for a draft: no more than there is room for, and no catching up before it must be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cpmrt.speculation.procedure import MAX_WAITING, Waiting

COUNTS = st.dictionaries(st.integers(0, 2), st.sampled_from([1, 2, 31, 32]), min_size=1)


@given(st.lists(st.one_of(COUNTS, st.tuples(st.integers(0, 2), st.integers(1, MAX_WAITING), st.integers(1, 9)))))
def test_tokens_wait_until_there_is_no_room(steps: list[dict[int, int] | tuple[int, int, int]]) -> None:
    """Plain steps of several slots and draft steps of one, against the numbers of the tokens that wait, written out."""
    waiting, tokens = Waiting(), {slot: list[str]() for slot in range(3)}
    for slot, own in tokens.items():
        waiting.admitted(slot)
        assert waiting.of(slot) == 0
        waiting.prefilled(slot)
        own.append("of the prompt")
    for step in steps:
        if isinstance(step, dict):
            late = waiting.before_decode(step)
            assert late == [slot for slot, count in step.items() if len(tokens[slot]) + count > MAX_WAITING]
            for slot in late:
                del tokens[slot][:-1]  # the newest still waits
            for slot, count in step.items():
                tokens[slot] += ["decoded"] * count
        else:
            slot, num_rows, num_accepted = step
            is_late = waiting.before_speculation(slot, num_rows)
            assert is_late == (len(tokens[slot]) > num_rows)
            assert waiting.of(slot) == (1 if is_late else len(tokens[slot]))
            waiting.accepted(slot, num_accepted)
            tokens[slot] = ["accepted"] * num_accepted
        assert [waiting.of(slot) for slot in tokens] == [len(own) for own in tokens.values()]
        assert all(1 <= len(own) <= MAX_WAITING for own in tokens.values())
