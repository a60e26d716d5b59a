"""The verdicts of GemmTrial on cuBLASLt's algorithms: which of them later starts reuse, and when an algorithm is tried
again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpmrt.cuda.build import cubin_cache
from cpmrt.cuda.driver.blaslt import Algorithm, CublasLtError
from cpmrt.cuda.ops.gemm_trial import GemmTrial
from cpmrt.dtypes import DType

BASIS = ("gemm.cubin", "NVIDIA H200", "sm_90", 132, (13, 0))


REFUSED = 8
"""The number of an algorithm with which the library refuses the trial's shape."""


def algorithm(number: int) -> Algorithm:
    made = Algorithm()
    made.words[0] = number
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path))
    return tmp_path / "cubins"


class Start:
    """A start of a process, on a library of some version. Algorithms of odd numbers give the bits of the project's own
    kernel."""

    def __init__(self, basis: tuple[object, ...] = BASIS, version: int = 130100, dtype: DType = DType.BFLOAT16):
        self.tried: list[int] = []
        self._library: Any = SimpleNamespace(version=version)
        workspace: Any = SimpleNamespace(nbytes=32 << 20)
        own: Any = None
        self._trial = GemmTrial(workspace, dtype, own, own, lambda: basis)
        self._trial._is_equal = self._tried  # type: ignore[method-assign]

    def _tried(self, library: Any, tried: Algorithm) -> bool:
        self.tried.append(tried.words[0])
        if tried.words[0] == REFUSED:
            raise CublasLtError("not supported")
        return tried.words[0] % 2 == 1

    def verdicts(self, *numbers: int) -> list[bool]:
        return [self._trial.agrees(self._library, algorithm(number)) for number in numbers]


def test_a_start_tries_each_algorithm_once_and_the_next_one_none() -> None:
    first, second = Start(), Start()
    assert first.verdicts(1, 2, 1, 3) == [True, False, True, True] and first.tried == [1, 2, 3]
    assert second.verdicts(3, 2, 1, 4) == [True, False, True, False] and second.tried == [4]


def test_a_refusal_is_not_kept(cache: Path) -> None:
    """A refusal is not kept, so a later start tries again: its reason may have been another one, such as memory, and a
    try costs little."""
    for start in (Start(), Start()):
        assert start.verdicts(REFUSED, REFUSED) == [False, False] and start.tried == [REFUSED]
    assert not cache.exists()


@pytest.mark.parametrize("place", range(len(BASIS)))
def test_what_a_verdict_rests_on_is_part_of_its_key(place: int) -> None:
    Start().verdicts(1, 2)
    other = Start((*BASIS[:place], "other", *BASIS[place + 1 :]))
    assert other.verdicts(1, 2) == [True, False] and other.tried == [1, 2]


@pytest.mark.parametrize("change", [{"version": 130200}, {"dtype": DType.FLOAT16}])
def test_another_library_or_type_is_tried_anew(change: dict[str, Any]) -> None:
    Start().verdicts(1)
    other = Start(**change)
    other.verdicts(1)
    assert other.tried == [1]


@pytest.mark.parametrize("damage", [b"", b"differs", b"agree", b"AGREES"])
def test_a_damaged_verdict_is_tried_anew_and_kept_again(cache: Path, damage: bytes) -> None:
    """A verdict's file with any other content is tried anew and overwritten under the same name."""
    Start().verdicts(1)
    (path,) = cache.iterdir()
    path.write_bytes(damage)
    second, third = Start(), Start()
    assert second.verdicts(1) == [True] and second.tried == [1]
    assert third.verdicts(1) == [True] and third.tried == []
    assert list(cache.iterdir()) == [path] and path.read_bytes() == b"agrees"


def test_verdicts_are_no_cubins() -> None:
    """Verdicts are not found as cubins, neither by counting compiled kernels nor by a search for any compiler's
    cubin."""
    Start().verdicts(1, 2)
    kept = list(cubin_cache.folder().iterdir())
    assert len(kept) == 2 and list(cubin_cache.folder().glob("*.cubin")) == []
    assert all(cubin_cache.find(path.name.partition(".")[0], None) is None for path in kept)


@pytest.mark.filterwarnings("error")
def test_without_a_folder_to_write_to_each_process_tries_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path / "file"))
    first = Start()
    assert first.verdicts(1, 2, 1) == [True, False, True] and first.tried == [1, 2]
