"""Makes the prompts of the evaluation, and lists of the most frequent tokens.

Prompts are code and prose that the bundled model was not trained on, edits of such code, questions, or text of the
user's own files.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import gen_fr_index
from demo_model.conversations import HELD_OUT_PHRASING
from quantization.quality import standard_library_texts

from cpmrt import LLM
from cpmrt.errors import ConfigError, RequestError
from cpmrt.quantization.calibration import read_texts
from cpmrt.text import Tokenizer
from cpmrt.weights.token_index import read_token_index

Prompts = list[list[int]]
ASKED_ABOUT = (
    "os.path.join", "json.dumps", "functools.lru_cache", "collections.Counter", "itertools.chain", "subprocess.run",
    "pathlib.Path.exists", "re.sub", "threading.Lock", "random.shuffle", "shutil.copytree", "datetime.timedelta",
    "logging.getLogger", "tempfile.mkdtemp", "heapq.heappush", "csv.DictReader", "socket.create_connection",
    "contextlib.suppress", "textwrap.dedent", "zipfile.ZipFile", "bisect.insort", "argparse.ArgumentParser",
    "urllib.parse.urlencode", "string.capwords", "copy.deepcopy", "glob.iglob", "operator.itemgetter",
    "statistics.median", "time.monotonic", "uuid.uuid4", "weakref.finalize", "shlex.split",
)  # fmt: skip
"""Names to ask about, in the phrasing that the bundled model's training left out (HELD_OUT_PHRASING)."""
EDITED_LENGTHS = range(120, 260)
"""The lengths, in tokens, of functions to edit: long enough to repeat, short enough for a small model to follow."""


def held_out_prompts(llm: LLM, count: int, length: int) -> dict[str, Prompts]:
    """Returns at most `count` prompts of `length` tokens each of code and prose, and as many edits and questions.

    Code: functions of those modules of this Python that the bundled model's training left out. Prose: their
    docstrings without the first paragraph, which the training conversations may quote. Edits: whole functions, each
    followed by its own beginning with a variable renamed. Without a chat template there are no questions.
    """
    modules = standard_library_texts(held_out=True)
    tokenizer = _tokenizer(llm)
    found = {
        "code": _beginnings(_functions(modules), tokenizer, count, length),
        "prose": _beginnings(_docstrings(modules), tokenizer, count, length),
        "edits": _edits(_functions(modules), tokenizer, count),
    }
    if llm.chat_template is not None:
        questions = (HELD_OUT_PHRASING.format(name=name) for name in ASKED_ABOUT[:count])
        found["questions"] = [llm.chat_prompt([{"role": "user", "content": question}]) for question in questions]
    return found


def file_prompts(llm: LLM, path: Path, count: int, length: int) -> Prompts:
    """Returns at most `count` prompts out of a text file, a .jsonl file ("text" of each line), or a folder of such.

    The first `length` tokens of every document come first, then the windows of that length after them, until there are
    `count`. Raises CheckpointError, ConfigError.
    """
    tokenizer = _tokenizer(llm)
    bos, body = _bos(tokenizer), length - len(_bos(tokenizer))
    windows: list[tuple[int, list[int]]] = []
    for text in read_texts(path):
        try:
            ids = tokenizer.encode(text, add_special_tokens=False)
        except RequestError:
            continue
        # A short document, such as a question, is a whole prompt; the end of a longer one that fills no window is left.
        last = max(1, len(ids) - body + 1)
        windows += [(start, bos + ids[start : start + body]) for start in range(0, last, body) if ids]
    if not windows:
        raise ConfigError(f"{path} holds no text", expected="at least one document")
    return [window for _, window in sorted(windows, key=lambda pair: pair[0])[:count]]


def _tokenizer(llm: LLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise ConfigError("the model has no tokenizer", fix="add its tokenizer.json")
    return llm.tokenizer


def _bos(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def _beginnings(texts: Iterable[str], tokenizer: Tokenizer, count: int, length: int) -> Prompts:
    """Returns the first `length` tokens of texts that have more, in an order by hash, so that modules are mixed."""
    bos = _bos(tokenizer)
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in _shuffled(texts))
    long_enough = (bos + ids[: length - len(bos)] for ids in encoded if len(ids) > length)
    return list(islice(long_enough, count))


def _edits(functions: Iterable[str], tokenizer: Tokenizer, count: int) -> Prompts:
    """Returns functions, each followed by its first quarter with its most frequent variable renamed."""

    def prompts() -> Iterator[list[int]]:
        for text in _shuffled(functions):
            variables = Counter(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))
            names = [name for name, _ in variables.most_common() if len(name) > 3 and name.islower()]
            if not names or len(tokenizer.encode(text, add_special_tokens=False)) not in EDITED_LENGTHS:
                continue
            lines = text.splitlines(keepends=True)
            begun = "".join(lines[: max(2, len(lines) // 4)])
            renamed = re.sub(rf"\b{names[0]}\b", f"new_{names[0]}", begun)
            asked = f"{text}\n\n# The same with new_{names[0]} for {names[0]}:\n{renamed}"
            yield _bos(tokenizer) + tokenizer.encode(asked, add_special_tokens=False)

    return list(islice(prompts(), count))


def _shuffled(texts: Iterable[str]) -> list[str]:
    return sorted(set(texts), key=lambda text: hashlib.sha256(text.encode()).digest())


def _functions(modules: Iterable[tuple[str, str]]) -> Iterator[str]:
    for _, text in modules:
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))


def _docstrings(modules: Iterable[tuple[str, str]]) -> Iterator[str]:
    for _, text in modules:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                documented = inspect.cleandoc(ast.get_docstring(node) or "")
                yield documented.partition("\n\n")[2].lstrip("\n")


@dataclass(frozen=True)
class FrequentTokens:
    """A list of frequent tokens: the file that the draft reads, and the ids in it."""

    path: Path
    token_ids: tuple[int, ...]


def frequent_tokens(
    model: str, texts: Sequence[Path], sizes: Sequence[int], vocab_size: int, work: Path
) -> list[FrequentTokens]:
    """Makes a list of each size in the folder `work`, counted in `texts`, else in modules of this Python trained on.

    Raises CheckpointError, ConfigError.
    """
    if not sizes:
        return []
    if not texts:
        texts = [work / "text"]
        texts[0].mkdir()
        for name, text in standard_library_texts(held_out=False):
            (texts[0] / name.replace("/", ".")).write_text(text, encoding="utf-8")
    command = [model, *map(str, texts), "--sizes", ",".join(map(str, sizes)), "--out", str(work)]
    with contextlib.redirect_stdout(sys.stderr):
        failed = gen_fr_index.main(command)
    if failed:
        raise ConfigError("no lists of frequent tokens", fix="see the message above")
    paths = [work / f"freq_{size}.json" for size in sizes]
    return [FrequentTokens(path, read_token_index(path, vocab_size)) for path in paths]
