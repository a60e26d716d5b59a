"""`cpmrt train-draft` on a tiny random target, on the CPU: every part against plain loops in NumPy."""
# ruff: noqa: E402

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from plain_draft import PlainDraft
from tiny_checkpoint import write_checkpoint

torch = pytest.importorskip("torch", reason="cpmrt train-draft needs torch")
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from draft_training.acceptance import AcceptCounts, TreeDrafter, walk
from draft_training.draft import features_of, make_eagle
from draft_training.dspark import BlockDrafter, DSpark
from draft_training.files import DraftConfig, check_target_layers, default_target_layers, read_draft, write_draft
from draft_training.generation import PromptPool, generate, prompt_windows
from draft_training.target import Target
from draft_training.training import frequent_tokens, pass_outputs, soft_cross_entropy

from cpmrt import LLM
from cpmrt.cli.main import main
from cpmrt.config import EngineConfig, Sampling, SpeculationConfig, TreeShape
from cpmrt.errors import ConfigError
from cpmrt.executor import Admit, Prefill, Speculate
from cpmrt.reference.assembly import open_executor
from cpmrt.text import Tokenizer
from cpmrt.weights.model_folder import ModelFolder

METHODS = ("eagle2", "eagle3")
TRAINED = (*METHODS, "dspark")
LENGTH = 12
HEAD_IDS = np.arange(0, 259, 2)
CPU = torch.device("cpu")
FAMILIES = {
    "minicpm": {}, "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]}, "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Run torch on one thread: products this small take longer on several, and much longer on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("target") / "tiny", num_hidden_layers=3)


@pytest.fixture(scope="module")
def target(folder):
    return Target(ModelFolder.open(folder), CPU, torch.float32, 64)


@pytest.fixture
def tokens():
    return torch.from_numpy(np.random.default_rng(1).integers(3, 259, (2, LENGTH + 1)))


def random_draft(method, target):
    """Return a draft with four query heads on two KV heads, and its token ids; EAGLE-3's head has half of the
    tokens."""
    ids = HEAD_IDS if method == "eagle3" else None
    taps = (0, 2, 1) if method == "eagle3" else ()
    vocab = 259 if ids is None else len(ids)
    torch.manual_seed(7)
    draft = make_eagle(DraftConfig(method, 64, 48, 4, 2, 32, vocab, 1e-6, 0.7, taps), target, ids)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return draft, ids


def plain_draft(draft, tokens, ids):
    """Return the NumPy oracle for a draft over rows of tokens."""
    target = draft.target
    return PlainDraft(
        draft.config, draft.tensors(), target.embed(torch.arange(target.config.vocab_size)).numpy(),
        (target.head / target.config.logit_divisor).numpy(), (target.cos.numpy(), target.sin.numpy()),
        features_of(draft, tokens)[0].numpy(), ids,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_target_is_the_model_of_the_reference_executor(family, tmp_path):
    path = write_checkpoint(tmp_path / family, **FAMILIES[family])
    ids = [1, 40, 41, 90, 7, 200, 13]
    with LLM(path, executor="reference", dtype="float32") as llm:
        expected = llm.logits(ids)
    found = Target(ModelFolder.open(path), CPU, torch.float32, 64)
    hidden, tapped = found.hidden_states(torch.tensor([ids]), (0, 1))
    np.testing.assert_allclose(found.logits(hidden)[0].numpy(), expected, atol=2e-4)
    np.testing.assert_allclose(tapped[0, :, :64], found.embed(torch.tensor(ids)).numpy(), atol=1e-6)
    assert not torch.allclose(tapped[0, :, :64], tapped[0, :, 64:])


@pytest.mark.parametrize("method", METHODS)
def test_every_pass_is_a_drafted_path(method, target, tokens):
    """Row q of pass s equals the s-th drafted row after a root at q - s, given the text's own tokens."""
    draft, ids = random_draft(method, target)
    plain = plain_draft(draft, tokens, ids)
    features = features_of(draft, tokens)[0][:, :-1]
    outputs = pass_outputs(draft, target.embed(tokens[:, 1:]), features, 4)
    for root in (0, 3, LENGTH - 4):
        real, seen = plain.real_rows(tokens, 1, root)
        g = real[-1]
        np.testing.assert_allclose(outputs[0][1, root].detach(), g, atol=1e-4)
        for index in range(1, 4):
            g, own = plain.row(int(tokens[1, root + index + 1]), g, root + index, seen, False)
            seen = [*seen, own]
            np.testing.assert_allclose(outputs[index][1, root + index].detach(), g, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [TreeShape(2, 4, 9), TreeShape(3, 3, 10), TreeShape.chain(3)], ids=str)
def test_accepted_tokens_are_the_path_through_the_tree(method, shape, target, tokens):
    draft, ids = random_draft(method, target)
    # The text after one root follows the deepest path of its tree, so that something is accepted there.
    path = max(plain_draft(draft, tokens, ids).tree(tokens, 0, 4, shape), key=len)
    tokens[0, 6 : 6 + len(path)] = torch.tensor(path)
    plain, names = plain_draft(draft, tokens, ids), None if ids is None else torch.from_numpy(ids)
    found = TreeDrafter(draft, names, shape).accepted(tokens)
    for row, root in [(0, root) for root in range(LENGTH)] + [(1, 2), (1, LENGTH - 1)]:
        nodes, expected = set(plain.tree(tokens, row, root, shape)), 0
        text = tuple(tokens[row, root + 2 :].tolist())
        while expected < len(text) and text[: expected + 1] in nodes:
            expected += 1
        assert found[row, root] == expected, (row, root)
    assert found[0, 4] == len(path) >= 2


def test_generated_rows_are_what_the_target_says(target):
    pool = PromptPool([[[1, 30, 31], [1, 50]], [[1, 99, 98, 97]]], CPU)
    random = torch.Generator().manual_seed(4)
    written = generate(target, pool, torch.tensor([0.0, 0.0, 1.0, 3.0]), 40, random)
    assert written.sources.tolist() == [0, 1, 0, 1]
    likeliest = target.logits(target.hidden_states(written.tokens)[0]).argmax(-1)
    for row in range(2):
        chosen = written.is_chosen[row, 1:]
        assert chosen.sum() > 20
        assert torch.equal(written.tokens[row, 1:][chosen], likeliest[row, :-1][chosen])
    assert (written.tokens[3, 1:] != likeliest[3, :-1])[written.is_chosen[3, 1:]].any()
    assert written.tokens[1, :4].tolist() == [1, 99, 98, 97]
    assert not written.is_chosen[:, 0].any() and written.is_chosen[1, 4:7].all()


def test_another_prompt_begins_where_a_text_ends(target):
    # At so high a temperature every token is as likely as another, so some of many rows stop.
    pool = PromptPool([[[1, 50, 51]]], CPU)
    written = generate(target, pool, torch.full((64,), 1e4), 40, torch.Generator().manual_seed(2))
    stops = [(row, place) for row, place in zip(*np.nonzero((written.tokens == 2).numpy()), strict=True) if place < 36]
    assert stops
    for row, place in stops:
        assert written.is_chosen[row, place]
        assert written.tokens[row, place + 1 : place + 4].tolist() == [1, 50, 51]
        assert written.is_chosen[row, place + 1 : place + 5].tolist() == [False, False, False, True]


def test_prompts_are_beginnings_and_later_parts_of_documents(folder, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("short", "", "x" * 600, "y" * 40)))
    tokenizer = Tokenizer.open(folder)
    windows = prompt_windows(path, tokenizer, 100, 16)
    assert [len(window) for window in windows] == [6, 16, 16, 16]
    assert all(window[0] == 1 and 1 not in window[1:] for window in windows)
    assert [tokenizer.decode(window[1:])[0] for window in windows] == ["s", "x", "x", "y"]
    assert len(prompt_windows(path, tokenizer, 2, 16)) == 2


def test_soft_cross_entropy_has_its_least_at_the_distribution_itself():
    target = torch.softmax(torch.randn(3, 7), -1)
    entropy = -(target * target.log()).sum(-1)
    torch.testing.assert_close(soft_cross_entropy(target.log() + 5, target), entropy)
    kept = target[:, :4]
    expected = -(kept * torch.log_softmax(kept.log(), -1)).sum(-1)
    torch.testing.assert_close(soft_cross_entropy(kept.log(), kept), expected)
    assert (soft_cross_entropy(torch.randn(3, 7), target) > entropy).all()


def test_walk_counts_the_steps_of_a_generation():
    #            prompt   chosen                 prompt chosen
    is_chosen = [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    accepted = np.zeros(16, int)
    accepted[[1, 4, 8]] = 2, 1, 2
    # Roots: 2 (2 accepted), 5 (1), 7 (0), 8 (0), then 11, whose step stays; from 14 on the row's end is too near.
    assert walk(accepted, np.array(is_chosen, bool), 2) == [5, 1, 1]
    accepted[[7]] = 2
    # Root 8 may emit one token only: the text ends at 9.
    assert walk(accepted, np.array(is_chosen, bool), 2) == [5, 1, 1]


def test_counts_give_lengths_and_rates():
    counts = AcceptCounts([4, 3, 3])
    assert counts.mean_length == pytest.approx(1.9)
    assert counts.rates() == pytest.approx([0.6, 0.5])


def test_a_cut_vocabulary_holds_the_stops_and_the_most_frequent_tokens():
    tokens = torch.tensor([[5, 5, 5, 9, 9, 7], [5, 9, 3, 3, 3, 7]])
    assert frequent_tokens(tokens, 12, 4, (2,)).tolist() == [2, 3, 5, 9]


@pytest.fixture
def block_draft(target):
    """A DSpark draft of two layers and blocks of four, with no parameter zero."""
    torch.manual_seed(3)
    draft = DSpark(DraftConfig("dspark", 64, 48, 4, 2, 32, 259, 1e-6, 1.0, (1, 2), 2, 4, 200, 16), target)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return draft


def test_blocks_train_behind_a_target_in_bfloat16_as_behind_one_in_float32(folder, block_draft):
    """A draft's losses behind a target in bfloat16, as on a GPU, are close to those behind one in float32."""
    short = DSpark(block_draft.config, Target(ModelFolder.open(folder), CPU, torch.bfloat16, 64))
    short.load_state_dict(block_draft.state_dict())
    tokens, roots = torch.randint(0, 259, (2, 17)), torch.tensor([[1, 8], [3, 9]])
    (loss, entropies), (wanted, exact) = short.losses(tokens, roots), block_draft.losses(tokens, roots)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=0.05)
    assert torch.allclose(entropies, exact, rtol=0.1)


def test_blocks_are_those_that_the_reference_executor_drafts(folder, block_draft, target, tmp_path):
    """The reference executor drafts the blocks that training computes, both with weights read back in 16 bits."""
    draft, shape = block_draft, TreeShape.chain(4)
    write_draft(tmp_path / "draft", draft.config, ModelFolder.open(folder), draft.tensors(), None)
    config, tensors, names = read_draft(tmp_path / "draft")
    assert config == draft.config and names is None
    draft.load(tensors)
    wish = SpeculationConfig("dspark", (shape,))
    settings = EngineConfig(executor="reference", max_context=64, draft=str(tmp_path / "draft"), speculation=wish)
    executor = open_executor(ModelFolder.open(folder), settings)[0]
    prompt = tuple(np.random.default_rng(2).integers(3, 259, 9).tolist())
    executor.submit(Admit(0, Sampling(), 1, 30, ())).wait()
    text = [*prompt, *executor.submit(Prefill(0, prompt, 0, True)).wait().slots[0].token_ids]
    for _ in range(4):
        drafted = executor.proposed(0, shape).tokens.tolist()[1:]
        rows = torch.tensor([[*text, *drafted]])
        assert BlockDrafter(draft, shape).accepted(rows)[0, len(text) - 2] == len(drafted)
        text += executor.submit(Speculate((0,))).wait().slots[0].token_ids


def test_accepted_tokens_of_blocks_are_counted_up_to_the_first_wrong_one(block_draft, tokens):
    draft, root = block_draft, 5
    _, features = draft.target.hidden_states(tokens[:, :-1], draft.config.taps)
    states, previous, path = draft.states(tokens, features, torch.tensor([[root], [root]])), tokens[:, root], []
    for place in range(4):
        path.append(draft.block_logits(states[:, 0, place], path[-1] if path else previous).argmax(-1))
    for right in range(5):
        row = tokens.clone()
        row[0, root + 1 : root + 5] = torch.stack(path)[:, 0]
        if right < 4:
            row[0, root + 1 + right] = (row[0, root + 1 + right] + 1) % 259
        # A root does not see what comes after it.
        counts = [BlockDrafter(draft, TreeShape.chain(n), roots_at_once=5).accepted(row) for n in (4, 2)]
        assert [int(count[0, root - 1]) for count in counts] == [right, min(right, 2)]
        assert counts[0].shape == (2, LENGTH)


@torch.no_grad()
def test_the_loss_of_blocks(block_draft, tokens):
    """The loss of blocks equals loops over roots and places; the confidence learns how often the best token is the
    target's."""
    draft, roots = block_draft, torch.tensor([[1, 8], [4, 2]])
    total, entropies = draft.losses(tokens, roots)
    hidden, features = draft.target.hidden_states(tokens[:, :-1], draft.config.taps)
    weights = np.exp(-np.arange(4) / 4)
    expected, found = 0.0, np.zeros(4)
    for row in range(2):
        for root in roots[row].tolist():
            alone = draft.states(tokens[row : row + 1], features[row : row + 1], torch.tensor([[root]]))[0, 0]
            for place in range(4):
                at = root + place
                logits = draft.block_logits(alone[place], tokens[row, at]).double()
                own, wanted = logits.softmax(-1), draft.target.logits(hidden[row, at]).double().softmax(-1)
                entropy = -float(own[tokens[row, at + 1]].log())
                confidence = float(draft.confidence(alone[place], tokens[row, at]).sigmoid())
                accepted = float(wanted[logits.argmax()])
                doubt = -(accepted * np.log(confidence) + (1 - accepted) * np.log(1 - confidence))
                distance = 1 - float(torch.minimum(own, wanted).sum())
                expected += weights[place] / weights.sum() * (0.1 * entropy + 0.9 * distance + doubt) / 4
                found[place] += entropy / 4
    assert float(total) == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(entropies, found, rtol=1e-4)


def test_the_layers_that_a_dspark_draft_reads():
    assert default_target_layers(42) == (1, 10, 20, 30, 39)
    assert default_target_layers(36) == (1, 9, 17, 25, 33)
    for count in range(2, 9):
        assert check_target_layers(default_target_layers(count), count)
    with pytest.raises(ConfigError, match=r"layers in \[0, 2\), got \[2\]"):
        check_target_layers((2,), 3)


@pytest.mark.all
@pytest.mark.parametrize("method", TRAINED)
def test_the_tool_trains_and_measures(method, folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of {n * n}\n" for n in range(300)))
    command = [
        "--model", str(folder), "--method", method, "--out", str(tmp_path), "--text", str(text), "--held-out",
        str(text), "--generated", str(tmp_path / "rows.npy"), "--rows", "48", "--length", "32", "--batch", "8",
        "--steps", "120", "--measured-rows", "2", "--prompt-length", "8", "--greedy-share", "1",
    ]  # fmt: skip
    own = {
        "eagle2": [], "eagle3": ["--draft-vocab", "64", "--taps", "0", "1", "2", "--heads", "2"],
        "dspark": ["--layers", "1", "--block-size", "3", "--markov-rank", "16", "--blocks", "8"],
    }  # fmt: skip
    assert main(["train-draft", *command, *own[method]]) == 0
    printed = capsys.readouterr().out
    entropies = [json.loads(line)["cross_entropy"] for line in printed.splitlines() if '"step"' in line]
    assert len(entropies) == 3
    assert all(last < first for first, last in zip(entropies[0], entropies[-1], strict=True))
    config, _, ids = read_draft(tmp_path / method)
    assert config.method == method and config.vocab_size == (64 if ids is not None else 259)
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| text ")]
    assert len(rows) == 3 and [float(row[1]) for row in rows[1:]] == [0.0, 1.0]
    # The greedy text of a random target is a loop, and this draft has seen it.
    assert float(rows[1][2]) > 1.5
    # --resume keeps the sizes and vocabulary of the existing draft, which is as good as it was.
    assert main(["train-draft", *command, "--resume", "--steps", "1", "--batch", "48"]) == 0
    summary = next(json.loads(line) for line in capsys.readouterr().out.splitlines() if '"parameters"' in line)
    assert all(entropy < first for entropy, first in zip(summary["cross_entropy"], entropies[0], strict=True))
    again, _, same_ids = read_draft(tmp_path / method)
    assert again == config and np.array_equal(same_ids, ids)


def test_mistakes_are_explained(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("text")
    common = ["--model", str(folder), "--out", str(tmp_path), "--text", str(text)]
    assert main(["train-draft", "--model", str(folder), "--out", str(tmp_path), "--method", "eagle2"]) == 1
    assert "no text" in capsys.readouterr().err
    for options, word in (
        (["--method", "eagle2", "--length", "9999"], "row length"),
        (["--method", "eagle3", "--taps", "0", "1", "3"], "taps"),
        (["--method", "eagle2", "--kv-heads", "3"], "heads"),
        (["--method", "dspark", "--target-layers", "2"], "target layers"),
        (["--method", "dspark", "--length", "8", "--block-size", "8"], "block size"),
    ):
        assert main(["train-draft", *common, *options]) == 1
        error = capsys.readouterr().err
        assert error.startswith("cpmrt: error: ") and word in error
