"""Garbage collection is off during a start and on again when the start ends, however it ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from cpmrt import LLM
from cpmrt.collector import no_collections
from cpmrt.errors import CheckpointError


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_they_come_back_behind_an_error() -> None:
    with pytest.raises(KeyError), no_collections():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_an_application_that_has_none_gets_none() -> None:
    gc.disable()
    with no_collections():
        pass
    assert not gc.isenabled()


def test_two_starts_at_once_leave_them_on() -> None:
    first, second = no_collections(), no_collections()
    with first:
        second.__enter__()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_garbage_of_later_starts_goes_with_the_next_collection() -> None:
    class Knot:
        def __init__(self) -> None:
            self.itself = self

    with no_collections():
        alive = weakref.ref(Knot())
    gc.collect(0)
    assert alive() is None


def test_what_imports_leave_counts_as_old() -> None:
    code = (
        "import gc; from cpmrt.collector import no_collections\n"
        "with no_collections(): import decimal; kept = []\n"
        "print(any(each is kept for each in gc.get_objects(2)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


def test_a_start_that_fails_leaves_them_on(tmp_path: object) -> None:
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path), executor="reference")
    assert gc.isenabled()


def test_the_first_use_of_a_public_name_imports_without_them() -> None:
    code = (
        "import gc; begun = []; gc.callbacks.append(lambda phase, info: begun.append(phase == 'start'))\n"
        "import cpmrt; begun.clear(); cpmrt.LLM; print(sum(begun), gc.isenabled(), 'no_collections' in vars(cpmrt))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    count, is_on, is_public = done.stdout.split()
    assert int(count) <= 2 and (is_on, is_public) == ("True", "False")
