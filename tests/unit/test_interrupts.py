"""Ctrl-C in the middle of the engine's bookkeeping, which is put off until the bookkeeping ends."""

import signal
import threading

import pytest

from cpmrt.sharing.interrupts import HeldInterrupt


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def default_handler():
    """Install Python's own SIGINT handler, and check that the test leaves it in place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_the_first_waits_until_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupt() as held:
        assert not held.requested
        press()
        assert held.requested
        done.append("the rest")
    assert done == ["the rest"]


def test_the_second_comes_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupt():
        press()
        press()
        done.append("never")
    assert not done


def test_an_error_of_the_block_comes_first():
    with pytest.raises(ValueError, match="of the block"), HeldInterrupt():
        press()
        raise ValueError("of the block")


def test_a_block_within_a_block_leaves_it_to_the_outer_one():
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupt() as outer:
        with HeldInterrupt() as inner:
            press()
        done.append((outer.requested, inner.requested))
    assert done == [(True, False)]


def test_a_handler_of_the_programs_own_is_left_alone():
    pressed = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    with HeldInterrupt() as held:
        press()
    assert pressed == [1] and not held.requested
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with HeldInterrupt():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_change_no_handler():
    found = []

    def hold():
        with HeldInterrupt():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
