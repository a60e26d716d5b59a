"""Prefixes on disk: which work they save after a restart, which models may read them, and what damage does."""

from __future__ import annotations

import os
import shutil
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.errors import ContextLengthError, PrefixError, RequestError
from cpmrt.executor import Prefill

GREEDY = SamplingParams(max_new_tokens=6, temperature=0)
IDS = np.random.default_rng(1).integers(3, 259, 600).tolist()
KEPT = 576
"""The number of tokens of IDS that fill whole pages."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("prefix") / "model")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Path:
    path = folder.parent / "saved.prefix"
    with open_model(folder) as llm:
        assert llm.save_prefix(path, IDS) == KEPT
    return path


def open_model(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, executor="reference", **settings)


def answer(llm: LLM, ids: list[int] = IDS) -> tuple[tuple[int, ...], int]:
    completion = llm.generate(ids, GREEDY)
    return completion.token_ids, completion.stats.cached_tokens


@pytest.mark.parametrize("settings", [
    {}, {"kv_dtype": "fp8"}, {"max_sequences": 3}, {"prefill_chunk": 100},
    {"sparse": {"dense_len": 128, "topk": 4, "window_size": 128, "init_blocks": 1}},
], ids=str)  # fmt: skip
def test_a_restart_goes_on_behind_the_prefix(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    path = tmp_path / "x.prefix"
    with open_model(folder, **settings) as llm:
        expected, _ = answer(llm)
    with open_model(folder, **settings) as llm:
        assert llm.save_prefix(path, IDS) == KEPT
        assert answer(llm) == (expected, KEPT)
    steps: list[Any] = []
    with open_model(folder, on_step=lambda step, _: steps.append(step), **settings) as llm:
        assert llm.load_prefix(path) == KEPT and not steps
        assert answer(llm) == (expected, KEPT)
        assert sum(len(step.token_ids) for step in steps if isinstance(step, Prefill)) == len(IDS) - KEPT
        assert answer(llm, IDS[:100] + [7] + IDS[100:])[1] == 64, "only what the texts share"


def test_the_pages_are_those_that_a_prompt_computes(folder: Path, saved: Path) -> None:
    """Loaded pages have the bits that the prompt computes, at whatever place in the cache they are."""
    with open_model(folder) as llm:
        llm.generate(IDS, GREEDY)
        first = llm.engine.cache.acquire((*IDS[:KEPT], 0), KEPT).table  # type: ignore[union-attr]
        expected = llm.executor.read_pages(first)
    with open_model(folder) as llm:
        llm.generate([5] * 200, GREEDY)
        llm.load_prefix(saved)
        table = llm.engine.cache.acquire((*IDS[:KEPT], 0), KEPT).table  # type: ignore[union-attr]
        assert table != first
        for name, array in llm.executor.read_pages(table).items():
            assert np.array_equal(array, expected[name])


def test_a_draft_has_pages_of_its_own(folder: Path, tmp_path: Path) -> None:
    """A prefix holds the draft's keys and values too: here the model itself drafts and must be always right."""
    settings = {"draft": folder, "speculate": {"num_passes": 3}}
    path = tmp_path / "x.prefix"
    with open_model(folder, **settings) as llm:
        expected, _ = answer(llm)
    with open_model(folder, **settings) as llm:
        llm.save_prefix(path, IDS)
    with open_model(folder, **settings) as llm:
        llm.load_prefix(path)
        completion = llm.generate(IDS, GREEDY)
        assert (completion.token_ids, completion.stats.cached_tokens) == (expected, KEPT)
        assert completion.stats.accept_rates == (1.0, 1.0, 1.0)
    with open_model(folder) as llm, pytest.raises(PrefixError, match="made by another model"):
        llm.load_prefix(path)


def test_so_has_the_draft_of_a_small_model(folder: Path, tmp_path: Path) -> None:
    path, chain = tmp_path / "x.prefix", {"num_passes": 3}
    settings = {"draft": folder, "speculate": chain | {"inner": chain | {"draft": str(folder)}}}
    passes = []
    for reads in (False, True):
        with open_model(folder, **settings) as llm:
            if reads:
                llm.load_prefix(path)
            else:
                llm.save_prefix(path, IDS)
            completion = llm.generate(IDS, GREEDY)
            assert completion.stats.accept_rates == (1.0, 1.0, 1.0)
            passes.append(llm.executor.num_draft_passes)  # type: ignore[attr-defined]
    steps = completion.stats.speculative_steps
    assert passes == [2 * steps, 2 * steps], "a pass for the first token, one for the two behind it"
    other = shutil.copytree(folder, tmp_path / "other", copy_function=shutil.copy)  # its files have other times
    for inner in ({}, {"inner": "lookup"}, {"inner": chain | {"draft": str(other)}}):
        settings = {"draft": folder, "speculate": chain | inner}
        with open_model(folder, **settings) as llm, pytest.raises(PrefixError, match="another model.* kv_dtype, draft"):
            llm.load_prefix(path)


@pytest.mark.parametrize("change", [
    {"dtype": "bfloat16"}, {"kv_dtype": "fp8"}, {"hf_overrides": {"rope_theta": 9999.0}}, "weights",
    {"hf_overrides": {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "max_context": 4096},
], ids=str)  # fmt: skip
def test_another_model_may_not_read_it(folder: Path, saved: Path, tmp_path: Path, change: Any) -> None:
    if change == "weights":  # the file keeps its size and header
        folder, change = shutil.copytree(folder, tmp_path / "model"), {}
        raw = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(raw[:-4] + bytes(4))
    message = r"saved.prefix was made by another model.*save the prefix again"
    with open_model(folder, **change) as llm, pytest.raises(PrefixError, match=message):
        llm.load_prefix(saved)


def test_settings_that_change_no_key_may_differ(folder: Path, saved: Path) -> None:
    with open_model(folder, max_context=1024, prefill_chunk=64, max_sequences=2, lm_head_bits=8) as llm:
        assert llm.load_prefix(saved) == KEPT


def test_every_damage_is_noticed(folder: Path, saved: Path, tmp_path: Path) -> None:
    raw, random = saved.read_bytes(), np.random.default_rng(3)
    header = 8 + int.from_bytes(raw[:8], "little")
    places = [0, 9, header - 20, header, header + 3, len(raw) - 1, *random.integers(header, len(raw), 20).tolist()]
    damages = [raw[:place] + bytes([raw[place] ^ 1 << place % 8]) + raw[place + 1 :] for place in places]
    damages += [raw[:-1], raw[: len(raw) // 2], b"", b"x" * 1000, raw + b"\0"]
    path = tmp_path / "damaged.prefix"
    with open_model(folder) as llm:
        expected, _ = answer(llm, IDS[:300])
    with open_model(folder) as llm:
        for damage in damages:
            path.write_bytes(damage)
            with pytest.raises(PrefixError) as caught:
                llm.load_prefix(path)
            assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        tokens, cached = answer(llm, IDS[:300])
        assert tokens == expected and cached == 0
        path.unlink()
        with pytest.raises(PrefixError, match="does not exist"):
            llm.load_prefix(path)
        assert llm.load_prefix(saved) == KEPT


def test_what_cannot_be_saved(folder: Path, saved: Path, tmp_path: Path) -> None:
    with open_model(folder, max_context=256) as llm:
        with pytest.raises(RequestError, match="too short for a prefix: expected at least 64 tokens, got 63"):
            llm.save_prefix(tmp_path / "x", IDS[:63])
        with pytest.raises(PrefixError, match="none/x cannot be written: No such file .*; name a file in a folder"):
            llm.save_prefix(tmp_path / "none" / "x", IDS[:100])
        for call in (lambda: llm.save_prefix(tmp_path / "x", IDS), lambda: llm.load_prefix(saved)):
            with pytest.raises(ContextLengthError, match="expected at most 256 tokens, got 576"):
                call()
        assert llm.generate(IDS[:100], GREEDY).stats.new_tokens == 6, "no slot is lost"
    with open_model(folder, prefix_cache=False) as llm, pytest.raises(RequestError, match="need the prefix cache"):
        llm.save_prefix(tmp_path / "x", IDS)
    assert not list(tmp_path.iterdir())


def test_nothing_but_a_prefix_is_replaced(folder: Path, saved: Path, tmp_path: Path) -> None:
    prefix, text, fifo, link = (tmp_path / name for name in ("old.prefix", "notes.txt", "pipe", "link"))
    shutil.copy(saved, prefix)
    text.write_text("mine")
    os.mkfifo(fifo)
    link.symlink_to(text)
    with open_model(folder) as llm:
        assert llm.save_prefix(prefix, IDS[:100]) == 64 and llm.load_prefix(prefix) == 64
        for path in (text, fifo, link, tmp_path):
            with pytest.raises(PrefixError, match="is there already and no prefix file"):
                llm.save_prefix(path, IDS[:100])
    assert text.read_text() == "mine" and fifo.is_fifo() and link.is_symlink()


@pytest.mark.parametrize("path", [None, 7, b"x", ["x"], "", "a\0b", "~a\0b", "\ud800", "~\ud800"])
def test_a_path_that_is_none_is_an_error_of_its_own(folder: Path, path: Any) -> None:
    with open_model(folder) as llm:
        for call in (lambda: llm.save_prefix(path, IDS[:100]), lambda: llm.load_prefix(path)):
            with pytest.raises(PrefixError):
                call()


def test_a_tilde_is_the_home_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder)
    with open_model(folder) as llm:
        assert llm.save_prefix("~/x.prefix", IDS[:100]) == 64
        assert (tmp_path / "x.prefix").is_file() and llm.load_prefix(Path("~/x.prefix")) == 64


def test_nothing_is_there_before_all_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model(folder) as llm:
        read_pages, calls = llm.executor.read_pages, list[Any]()

        def failing(pages: Any) -> Any:
            calls.append(pages)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")
            return read_pages(pages)

        monkeypatch.setattr(llm.executor, "read_pages", failing)
        with pytest.raises(PrefixError, match="No space left on device"):
            llm.save_prefix(tmp_path / "x.prefix", IDS)
    assert not list(tmp_path.iterdir())


class FullDisk(FileIO):
    """A file that fails every write with a full disk."""

    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


def test_nor_is_anything_where_not_even_the_header_could_be_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fdopen", FullDisk)
    with open_model(folder) as llm, pytest.raises(PrefixError, match="No space left on device"):
        llm.save_prefix(tmp_path / "x.prefix", IDS)
    assert not list(tmp_path.iterdir())


def test_other_threads_go_on_meanwhile(folder: Path, saved: Path, tmp_path: Path) -> None:
    with open_model(folder, max_sequences=2) as llm:
        expected = llm.generate(IDS[:50], GREEDY).token_ids
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda i=i: found.append(  # type: ignore[misc]
                llm.generate(IDS[:50], GREEDY).token_ids if i % 3 else llm.save_prefix(tmp_path / str(i), IDS)
            ))
            for i in range(9)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(str, found)) == sorted([str(expected)] * 6 + [str(KEPT)] * 3)
    assert {(tmp_path / str(i)).read_bytes() for i in (0, 3, 6)} == {saved.read_bytes()}
