"""A folder of prefixes: a long system message is computed once, whoever asks and however often the model is started."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.cli.conversation import Conversation
from cpmrt.cli.local_model import LocalModel
from cpmrt.cli.main import main
from cpmrt.errors import ConfigError, PrefixError
from cpmrt.executor import Prefill
from cpmrt.prefixes.folder import PrefixFolder
from cpmrt.prefixes.prefix_file import PrefixFile, PrefixWriter
from cpmrt.prefixes.system_part import system_part

GREEDY = SamplingParams(max_new_tokens=4, temperature=0)
SYSTEM = "You know " + "a lot of things and say few. " * 20
"""A system message of 589 bytes: with "[system]" and the BOS token before it, it fills 9 whole pages."""
KEPT = 576


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def conversation(question: str = "Why?", system: str = SYSTEM) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def ask(model: Path, folder: Path | None, *questions: str, system: str = SYSTEM, **settings: Any) -> list[Any]:
    """Start the model and ask; return each answer's tokens and how many tokens of its prompt came from the cache."""
    with LLM(model, executor="reference", prefix_dir=folder, **settings) as llm:
        answers = [llm.chat(conversation(question, system), GREEDY) for question in questions]
    return [(answer.token_ids, answer.stats.cached_tokens) for answer in answers]


def files(folder: Path, suffix: str = ".prefix") -> list[Path]:
    return sorted(folder.glob(f"*{suffix}"))


def test_a_third_start_computes_the_question_only(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    ((expected, _),) = ask(model, None, "Why?")
    assert ask(model, folder, "Why?") == [(expected, 0)] and not files(folder), "it may be met only once"
    assert ask(model, folder, "Why?") == [(expected, KEPT)] and len(files(folder)) == 1
    written = files(folder)[0].stat().st_mtime_ns, files(folder)[0].read_bytes()
    ((_, first), (found, second)) = ask(model, folder, "How?", "Why?")
    assert (first, second) == (KEPT, KEPT) and found == expected
    assert files(folder)[0].read_bytes() == written[1] and files(folder)[0].stat().st_mtime_ns > written[0]


def test_a_home_that_there_is_not_is_a_name_like_any_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("~nobody of this name")
    ask(model, folder, "Why?", "How?")
    assert len(files(tmp_path / folder)) == 1


def test_the_second_question_of_a_start_writes_what_the_first_has_computed(model: Path, tmp_path: Path) -> None:
    lengths: list[int] = []
    with LLM(model, executor="reference", prefix_dir=tmp_path) as llm:
        submit = llm.executor.submit

        def counting(step: Any) -> Any:
            lengths.extend([len(step.token_ids)] if isinstance(step, Prefill) else [])
            return submit(step)

        llm.executor.submit = counting  # type: ignore[method-assign]
        for question in ("Why?", "How?"):
            llm.chat(conversation(question), GREEDY)
    assert len(files(tmp_path)) == 1
    assert sum(lengths) < KEPT + 100, "no page is computed twice"


@pytest.mark.parametrize(("system", "settings"), [
    ("Be brief.", {}), (SYSTEM, {"prefix_dir": None}), ("x" * 230, {}),
], ids=["short", "no folder", "less than four pages"])  # fmt: skip
def test_what_is_not_kept(model: Path, tmp_path: Path, system: str, settings: dict[str, Any]) -> None:
    for _ in range(3):
        ask(model, settings.get("prefix_dir", tmp_path), "Why?", system=system)
    assert not list(tmp_path.iterdir())


def test_other_models_and_texts_have_files_of_their_own(model: Path, tmp_path: Path) -> None:
    for settings in ({}, {"kv_dtype": "fp8"}, {"dtype": "bfloat16"}):
        for _ in range(2):
            ask(model, tmp_path, "Why?", **settings)
    for _ in range(2):
        ask(model, tmp_path, "Why?", system=SYSTEM.replace("few", "all"))
    assert len(files(tmp_path)) == 4


def test_a_damaged_file_is_made_again(model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        ask(model, tmp_path, "Why?")
    (path,) = files(tmp_path)
    good = path.read_bytes()
    for damage in (good[:-1], good[:2000] + bytes([good[2000] ^ 1]) + good[2001:], b""):
        path.write_bytes(damage)
        with pytest.warns(UserWarning, match="made again: .*prefix") as warned:
            ((_, cached),) = ask(model, tmp_path, "Why?")
        assert "save the prefix again" not in str(warned[0].message)  # the model does that itself
        assert warned[0].filename == __file__
        assert cached == KEPT and path.read_bytes() == good


def test_a_file_with_the_name_of_another_text_is_not_believed(model: Path, tmp_path: Path) -> None:
    other = SYSTEM.replace("few", "all")
    for system in (SYSTEM, other):
        for _ in range(2):
            ((expected, _),) = ask(model, tmp_path, "Why?", system=system)
    first, second = files(tmp_path)
    swapped = first.read_bytes(), second.read_bytes()
    first.write_bytes(swapped[1])
    second.write_bytes(swapped[0])
    with pytest.warns(UserWarning, match="has other tokens than its name says"):
        assert ask(model, tmp_path, "Why?", system=other) == [(expected, KEPT)]


def test_a_folder_that_cannot_be_used_costs_a_warning(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="prefix folder cannot be used, .*below: Not a dir.*; name a folder") as warned:
        ((_, cached),) = ask(model, tmp_path / "file" / "below", "Why?")
    assert cached == 0 and warned[0].filename == __file__
    with pytest.raises(ConfigError, match="prefix_dir: expected nothing without the prefix cache"):
        ask(model, tmp_path, "Why?", prefix_cache=False)


@pytest.mark.parametrize(("interrupted", "num_files"), [("a step", 1), ("a wait", 2)])
def test_what_interrupts_a_thread_that_fetches_does_not_wait_for_it(
    model: Path, tmp_path: Path, interrupted: str, num_files: int
) -> None:
    """Code that interrupts a thread that fetches a prefix must not wait for that thread.

    A listener interrupts a step; a signal handler can interrupt a thread that waits while another one drives, too.
    """
    others, prompts, fetching = [conversation(system=f"Other. {SYSTEM}")], list[list[int]](), list[bool]()

    def interrupt(*_: object) -> None:
        if fetching and others:
            prompts.append(llm.chat_prompt(others.pop()))

    with LLM(model, executor="reference", prefix_dir=tmp_path, max_sequences=2, on_step=interrupt) as llm:
        expected = llm.chat_prompt(others[0])
        llm.chat_prompt(conversation())
        stream = llm.stream("abc", SamplingParams(max_new_tokens=100, ignore_eos=True))
        next(stream)
        run = llm._prefixes._run_now

        def waiting(job: Any) -> None:
            fetching.append(True)
            if interrupted == "a wait":
                interrupt()
            run(job)

        llm._prefixes._run_now = waiting
        thread = Thread(target=llm.chat_prompt, args=(conversation(),), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and prompts == [expected]
        assert len(files(tmp_path)) == num_files, "nobody waits for a file within a step"


def test_a_prompt_does_not_wait_for_a_slot(model: Path, tmp_path: Path) -> None:
    """Else a server whose slots are taken could prepare no further request, not even one that needs no slot."""
    with LLM(model, executor="reference", prefix_dir=tmp_path) as llm:
        expected = llm.chat_prompt(conversation())
        with llm.stream("abc", SamplingParams(max_new_tokens=100, ignore_eos=True)) as stream:
            next(stream)
            assert llm.chat_prompt(conversation()) == expected and not files(tmp_path)
            assert llm.engine.running, "the answer is not over"
        assert llm.chat_prompt(conversation()) == expected and len(files(tmp_path)) == 1
        assert llm.load_prefix(files(tmp_path)[0]) == KEPT


def test_what_a_process_remembers_does_not_pile_up(model: Path, tmp_path: Path) -> None:
    """Only system parts whose pages are in the cache are of use to it."""
    with LLM(model, executor="reference", prefix_dir=tmp_path, max_context=1024) as llm:
        for number in range(4):
            for _ in range(2):
                llm.chat_prompt(conversation(system=f"{number}. {SYSTEM}"))
        assert len(files(tmp_path)) == 4 and len(llm._prefixes._stored) == 1


def test_what_was_not_used_for_the_longest_time_goes_first(tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path, max_bytes=2500)
    paths = [folder.path_of("f" * 64, (number,)) for number in range(4)]
    assert len(set(paths)) == 4 and not folder.use(paths[0])
    for age, path in enumerate(paths):
        path.write_bytes(bytes(1000))
        os.utime(path, ns=(age, age))
    assert folder.use(paths[0])
    folder.trim(keep=paths[1])
    assert files(tmp_path) == sorted([paths[0], paths[1]])


@pytest.mark.parametrize(("max_bytes", "num_left"), [(30, 3), (29, 2), (9, 1)])
def test_a_folder_may_be_full_to_the_last_byte(tmp_path: Path, max_bytes: int, num_left: int) -> None:
    folder = PrefixFolder(tmp_path, max_bytes=max_bytes)
    paths = [folder.path_of("f" * 64, (number,)) for number in range(3)]
    for path in paths:
        path.write_bytes(b"x" * 10)
    folder.trim(keep=paths[0])
    assert len(files(tmp_path)) == num_left and paths[0].exists()


def test_a_prefix_that_is_refused_is_not_left_open(tmp_path: Path) -> None:
    path, shapes = tmp_path / "a.prefix", {"keys": ((1, 4, 2), np.dtype(np.float32))}
    with PrefixWriter(path, "f" * 64, tuple(range(64)), shapes) as writer:
        writer.add({"keys": np.zeros((1, 1, 2), np.float32)})
    PrefixFile.open(path, "f" * 64, shapes).close()
    with pytest.raises(PrefixError) as refused:
        PrefixFile.open(path, "0" * 64, shapes)
    assert "another model" in str(refused.value) and str(path) not in Path("/proc/self/maps").read_text()


def test_what_killed_processes_had_begun_does_not_pile_up(tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path)
    kept = folder.path_of("f" * 64, (1, 2))
    writers = [PrefixWriter(kept, "f" * 64, (), {}).__enter__() for _ in range(2)]
    abandoned, begun = tmp_path.iterdir()
    os.utime(abandoned, (0, 0))
    kept.write_bytes(b"a file")
    folder.trim(keep=kept)
    assert set(tmp_path.iterdir()) == {kept, begun}
    for writer in writers:
        writer.__exit__(KeyboardInterrupt)


def test_notes_of_texts_that_were_met_once_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpmrt.prefixes.folder.MAX_NOTES", 10)
    folder = PrefixFolder(tmp_path)
    paths = [folder.path_of("f" * 64, (number,)) for number in range(12)]
    for age, path in enumerate(paths):
        assert not folder.was_met(path)
        if path.with_suffix(".met").exists():
            os.utime(path.with_suffix(".met"), ns=(age, age))
    assert len(files(tmp_path, ".met")) <= 10 and folder.was_met(paths[10]) and not folder.was_met(paths[0])


def test_the_system_part_of_a_chat() -> None:
    def tokens_of(messages: Any) -> list[int]:
        return [ord(char) for message in messages for char in f"{message['role']}:{message['content']};"]

    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "question"}]
    assert "".join(map(chr, system_part(tokens_of(chat), chat, tokens_of))) == "system:s;user:"
    alone = chat[1:]
    assert "".join(map(chr, system_part(tokens_of(alone), alone, tokens_of))) == "user:"


@pytest.mark.parametrize(("lines", "num_files"), [("Why?\n/stats\n", 0), ("Why?\nHow?\n", 1)])
def test_a_chat_meets_its_system_message_once_a_question(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, num_files: int
) -> None:
    from io import BytesIO, TextIOWrapper

    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(lines.encode())))
    options = ["--executor", "reference", "--prefix-dir", str(tmp_path), "--system", SYSTEM, "--temperature", "0"]
    assert main(["chat", "--model", str(model), "--max-new-tokens", "3", *options]) == 0
    assert (len(files(tmp_path, ".met")), len(files(tmp_path))) == (1, num_files)


def test_a_question_that_drops_old_turns_is_one_meeting(model: Path, tmp_path: Path) -> None:
    talk = Conversation(SYSTEM)
    for _ in range(3):
        talk.add("x" * 400, "y" * 400)
    with LLM(model, executor="reference", prefix_dir=tmp_path, max_context=1536) as llm:
        answer, num_dropped = LocalModel(llm, SamplingParams(max_new_tokens=600), None).open(talk, "Why?")
        answer.__exit__()
    assert num_dropped == 3 and len(files(tmp_path, ".met")) == 1 and not files(tmp_path)


def test_the_command_has_an_option(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from io import BytesIO, TextIOWrapper

    for _ in range(2):
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"Why?\nHow?\n")))
        options = ["--executor", "reference", "--prefix-dir", str(tmp_path), "--system", SYSTEM, "--temperature", "0"]
        assert main(["chat", "--model", str(model), "--max-new-tokens", "3", *options]) == 0
    assert len(files(tmp_path)) == 1 and "warning" not in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"Why?\n")))
    options[3] = str(tmp_path / "file")
    assert main(["chat", "--model", str(model), "--max-new-tokens", "3", *options]) == 0
    warning = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warning) == 1 and warning[0].startswith("cpmrt: warning: the prefix folder cannot be used, so prompts ")
