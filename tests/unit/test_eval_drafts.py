"""tools/eval_drafts.py: its figures equal those of completions, a draft that changes tokens is caught, its prompts."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
from draft_checkpoint import VOCAB, write_all
from tiny_checkpoint import write_tokenizer

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import eval_drafts
from draft_evaluation import measurement
from draft_evaluation.measurement import (
    ChangedTokensError,
    Outcome,
    Variant,
    draft_table,
    head_table,
    measure,
    plain_tokens,
    records,
)
from draft_evaluation.prompts import FrequentTokens, file_prompts, held_out_prompts
from quantization.quality import standard_library_texts

from cpmrt import LLM, SamplingParams
from cpmrt.config import TreeShape
from cpmrt.engine.stats import AcceptCounts
from cpmrt.executor import ExecutorLimits

SHAPE = TreeShape(2, 4, 6)
NEW = 10
QUESTION = "<|im_start|>user\nWhat is the purpose of json.dumps?<|im_end|>\n<|im_start|>assistant\n"
CODE = "def read_lines(path):\n    with open(path) as file:\n        return file.read().splitlines()\n" * 9
FEW_CHARACTERS = "".join(chr(33 + number * number % 21) for number in range(200))
"""A text of the 21 bytes after the space, which with the special tokens are all that the small target knows."""
PROMPTS = {"code": [[1, 5, 6, 5, 6, 5], [1, 9, 3]], "chat": [[1, 7, 8, 4, 7, 8]]}
FREQUENT = tuple(range(3, 23, 2))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "code.txt").write_text(CODE)
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in (QUESTION, CODE)))
    return [folder / "code.txt", folder / "chat.jsonl"]


@pytest.fixture(scope="module")
def demo():
    with LLM(executor="reference") as llm:
        yield llm


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = write_all(tmp_path_factory.mktemp("drafts"))
    write_tokenizer(root / "target")
    (root / "few.txt").write_text(FEW_CHARACTERS)
    (root / "index.json").write_text(json.dumps(FREQUENT))
    return root


@pytest.fixture(scope="module")
def opened(folders):
    """A function that opens the target with a variant, whose draft is "lookup" or a folder's name."""

    def open_llm(variant=None):
        arguments = {} if variant is None else variant.arguments()
        if arguments and variant.draft != "lookup":
            arguments["draft"] = folders / variant.draft
        return LLM(folders / "target", executor="reference", prefix_cache=False, **arguments)

    return open_llm


@pytest.fixture(scope="module")
def plain(opened):
    with opened() as llm:
        return plain_tokens(llm, PROMPTS, (0.0, 1.0), NEW)


def test_file_prompts_are_beginnings_then_later_windows(demo, texts):
    tokenizer = demo.tokenizer
    code = tokenizer.encode(CODE, add_special_tokens=False)
    question = tokenizer.encode(QUESTION, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    found = file_prompts(demo, texts[1], 4, 40)
    assert found == [[bos, *question[:39]], [bos, *code[:39]], [bos, *code[39:78]], [bos, *code[78:117]]]
    assert len(question) < 39  # a prompt as it is
    everything = file_prompts(demo, texts[0], 1000, 40)
    assert [token for prompt in everything for token in prompt[1:]] == code[: len(code) // 39 * 39]


@pytest.fixture(scope="module")
def held_out_ones(demo):
    return held_out_prompts(demo, 5, 24)


def test_held_out_prompts_are_of_modules_that_were_not_trained_on(demo, held_out_ones):
    found = held_out_ones
    assert {name: len(found[name]) for name in found} == {"code": 5, "prose": 5, "edits": 5, "questions": 5}
    decode, held_out = demo.tokenizer.decode, standard_library_texts(held_out=True)
    flat = " ".join(" ".join(text for _, text in held_out).split())
    for name in ("code", "prose"):
        for prompt in found[name]:
            assert len(prompt) == 24 and prompt[0] == demo.tokenizer.bos_token_id
            assert " ".join(decode(prompt[1:]).split()) in flat
    firsts = [
        documented.split("\n\n")[0]
        for _, text in held_out
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and (documented := ast.get_docstring(node))
    ]  # fmt: skip
    assert not any(first.startswith(decode(prompt[1:])) for first in firsts for prompt in found["prose"])
    assert all("What is the purpose of" in decode(prompt) for prompt in found["questions"])


def test_an_edit_is_a_function_and_its_beginning_with_a_new_name(demo, held_out_ones):
    for prompt in held_out_ones["edits"]:
        function, asked = demo.tokenizer.decode(prompt[1:]).split("\n\n# The same with ")
        names, begun = asked.split(":\n", 1)
        new, old = names.split(" for ")
        assert new == f"new_{old}" and old in function and new not in function
        assert function.startswith(begun.replace(new, old)) and len(begun) < 0.7 * len(function)
        ast.parse(function)


@pytest.mark.parametrize(("draft", "shape"), [
    ("vllm", SHAPE), ("vllm", TreeShape.chain(4)), ("eagle3", TreeShape(3, 3, 9)), ("model", TreeShape.chain(3)),
    ("lookup", TreeShape.chain(2)), ("vllm", TreeShape(2, 4, 6, 5)),
])  # fmt: skip
def test_figures_are_those_of_completions(opened, plain, draft, shape):
    variant = Variant(draft, shape)
    with opened(variant) as llm:
        outcome = measure(llm, variant, PROMPTS, plain, NEW)
        entries = {(entry["text"], entry["temperature"]): entry for entry in records(outcome)}
        for (name, temperature), answers in plain.items():
            histogram, depths = [0] * shape.max_emitted, shape.max_emitted - 1
            accepted, reached = [0.0] * depths, [0.0] * depths
            for seed, (prompt, answer) in enumerate(zip(PROMPTS[name], answers, strict=True)):
                params = SamplingParams(max_new_tokens=NEW, temperature=temperature, seed=seed)
                stream = llm.stream(prompt, params)
                sizes = [len(piece.token_ids) for piece in stream if piece.token_ids]
                completion = stream.completion
                assert completion.token_ids == answer
                for index, count in enumerate(completion.stats.accept_histogram):
                    histogram[index] += count
                for number, size in enumerate(sizes[1:], 2):
                    for depth in range(min(size, depths)):
                        is_cut = number == len(sizes) and depth == size - 1
                        reached[depth] += not is_cut
                        accepted[depth] += size > depth + 1
            entry = entries[name, temperature]
            assert entry["accept_histogram"] == histogram
            assert entry["tokens"] == sum(size * count for size, count in enumerate(histogram, 1))
            assert entry["mean_accept_length"] == pytest.approx(entry["tokens"] / sum(histogram))
            expected = [hits / tries for hits, tries in zip(accepted, reached, strict=True) if tries]
            assert list(entry["accept_rates"]) == pytest.approx(expected)


def test_a_draft_that_changes_a_token_is_an_error(opened, plain):
    variant = Variant("lookup", TreeShape.chain(2))
    for name, change in (("code", lambda ids: (*ids[:4], ids[4] + 1, *ids[5:])), ("chat", lambda ids: ids[:-1])):
        changed = {cell: [change(ids) if cell == (name, 1.0) else ids for ids in said] for cell, said in plain.items()}
        where = f"prompt 0 of {name} at temperature 1: the draft changed token"
        with opened(variant) as llm, pytest.raises(ChangedTokensError, match=where):
            measure(llm, variant, PROMPTS, changed, NEW)


def test_the_head_is_what_the_variant_asks_for(opened, plain, folders):
    greedy = {cell: said for cell, said in plain.items() if cell[1] == 0}
    index, outcomes, full = FrequentTokens(folders / "index.json", FREQUENT), [], VOCAB * 32
    for cut, bits, rows, num_bytes in (
        (None, None, VOCAB, full * 4),
        (index, None, 10, 10 * 32 * 4),
        (None, 8, VOCAB, full + VOCAB * 4),
        (None, 4, VOCAB, full // 2 + VOCAB * 4),
        (index, 4, 10, 10 * 32 // 2 + 10 * 4),
    ):
        variant = Variant("vllm", SHAPE, cut, bits)
        with opened(variant) as llm:
            outcomes.append(measure(llm, variant, PROMPTS, greedy, NEW))
        assert (outcomes[-1].head_rows, outcomes[-1].head_bytes) == (rows, num_bytes)
    said = [token for answers in greedy.values() for answer in answers for token in answer]
    assert outcomes[1].covered == sum(token in FREQUENT for token in said) / len(said)
    lines = list(head_table(outcomes))
    assert lines[0] == "| tokens | covered | bits | KiB | code | chat |"
    assert lines[1].count("---") == 6 and lines[2].startswith("| 24 | 100.0% | 32 | 3.0 |")
    assert lines[6].startswith(f"| 10 | {outcomes[1].covered:.1%} | 4 | 0.2 |")


def test_a_cell_has_the_mean_and_the_rates_out_of_enough_steps():
    counts = AcceptCounts(ExecutorLimits(1, 64, 16, tree_shapes=(TreeShape.chain(3),)))
    for num_tokens, number in ((1, 6), (2, 8), (3, 2)):
        for _ in range(number):
            counts.add(0, num_tokens, is_last=False)
    outcome = Outcome(Variant("a", TreeShape.chain(3)), {("code", 0.0): counts}, 0, 0, 0, None)
    assert list(draft_table([outcome]))[2] == "| a | chain of 3 | 1.75: 62 20 |"
    assert records(outcome)[0]["accept_rates"] == (0.625, 0.2, 0.0)
    assert list(head_table([outcome]))[2] == "| 0 | - | 0 | 0.0 | 1.75 |"


def test_a_head_of_other_tokens_has_no_share(opened, plain):
    variant = Variant("eagle3", TreeShape.chain(2))
    with opened(variant) as llm:
        outcome = measure(llm, variant, {"code": []}, {("code", 0.0): []}, NEW)
    assert (outcome.head_rows, outcome.covered) == (18, None)
    assert records(outcome)[0]["mean_accept_length"] is None


def command_of(folders, *others):
    return ["--executor=reference", f"--model={folders / 'target'}", f"--text={folders / 'few.txt'}", *others]


def test_the_command(folders, tmp_path, capsys):
    out, draft = tmp_path / "out.json", str(folders / "vllm")
    command = command_of(folders, "--prompts=2", "--prompt-length=12", "--tokens=9", f"--json={out}")
    command += ["--shape=2,4,6", "--shape=2,1,3", "--draft=lookup", f"--draft={draft}", "--head-vocab", "12"]
    command += ["--lookup", "7"]
    assert eval_drafts.main([*command, "--head-bits", "4", f"--frequent-text={folders / 'few.txt'}"]) == 0
    shown, progress = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    trees = ["2, 4, 6", "chain of 2", "2, 4, 6, lookup of 7", "chain of 2, lookup of 7"]
    assert [row[:2] for row in rows[2:7]] == [["lookup", "chain of 2"], *([draft, tree] for tree in trees)]
    assert [row[0] for row in rows[9:]] == ["24", "12", "24"] and [row[2] for row in rows[9:]] == ["32", "32", "4"]
    results = json.loads(out.read_text())["results"]
    assert len(results) == 14 and {entry["text"] for entry in results} == {"few"}
    for entry, cell in zip(results[:2], rows[2][2:], strict=True):
        assert cell.split(":")[0] == f"{entry['mean_accept_length']:.2f}"
    assert f"{draft} (2, 4, 6), head of 12 tokens" in progress


def test_a_small_model_alone_and_with_drafts_of_its_own(folders, capsys):
    """A small model, here the target itself, drafts the same tokens in fewer passes when it has a draft of its own."""
    command = command_of(folders, "--prompts=2", "--prompt-length=12", "--tokens=13", f"--draft={folders / 'target'}")
    assert eval_drafts.main([*command, "--shape=5,1,6", "--inner=../target", "--inner=lookup"]) == 0
    shown = capsys.readouterr().out.split("Tokens and passes of")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    assert [row[:2] for row in rows[2:]] == [["5", "-"], ["5", "../target"], ["5", "lookup"]]
    tokens, passes = zip(*(map(float, row[2].split(", ")) for row in rows[2:]), strict=True)
    assert tokens == (6, 6, 6)
    assert passes[:2] == (5, 2) and passes[2] <= 5


@pytest.mark.parametrize(("arguments", "says"), [
    (["--model", "absent/folder"], "absent/folder"),
    (["--draft", "absent/draft"], "absent/draft"),
    (["--text", "absent.txt", "--draft", "lookup"], "absent.txt"),
    (["--text", "a.txt", "--text", "b/a.txt", "--draft", "lookup"], "files of different names"),
    (["--draft", "eagle2", "--head-vocab", "5000", "--frequent-text", __file__], "got 5000"),
])  # fmt: skip
def test_mistakes_are_messages(capsys, monkeypatch, arguments, says):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert eval_drafts.main(["--executor", "reference", *arguments]) == 1
    error = capsys.readouterr().err
    assert says in error and "eval_drafts.py: " in error and "Traceback" not in error


@pytest.mark.parametrize("argument", ["--shape=2,10", "--shape=0,1,2", "--tokens=1", "--prompts=x", "--head-bits=5"])
def test_sizes_are_checked(argument):
    with pytest.raises(SystemExit):
        eval_drafts.main([argument])


def test_a_changed_token_ends_the_command(folders, capsys, monkeypatch):
    continued = measurement._continued

    def wrong(llm, *arguments):
        is_drafting = bool(llm.engine.limits.tree_shapes)
        return ((ids[:-1] if is_drafting else ids, accepts) for ids, accepts in continued(llm, *arguments))

    monkeypatch.setattr(measurement, "_continued", wrong)
    command = command_of(folders, "--prompts=2", "--tokens=4", "--draft=lookup")
    assert eval_drafts.main(command) == 1
    shown, error = capsys.readouterr()
    assert "the draft changed token 3" in error and "|" not in shown
