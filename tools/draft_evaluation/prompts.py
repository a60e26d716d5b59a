"""What is continued: code and prose that the bundled model was not trained on, questions, or the user's own files."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from demo_model.conversations import HELD_OUT_PHRASING
from quantization.calibration import read_texts
from quantization.quality import standard_library_texts

from cpmrt import LLM
from cpmrt.errors import ConfigError, RequestError
from cpmrt.text import Tokenizer

Prompts = list[list[int]]
ASKED_ABOUT = (
    "os.path.join", "json.dumps", "functools.lru_cache", "collections.Counter", "itertools.chain", "subprocess.run",
    "pathlib.Path.exists", "re.sub", "threading.Lock", "random.shuffle", "shutil.copytree", "datetime.timedelta",
    "logging.getLogger", "tempfile.mkdtemp", "heapq.heappush", "csv.DictReader", "socket.create_connection",
    "contextlib.suppress", "textwrap.dedent", "zipfile.ZipFile", "bisect.insort", "argparse.ArgumentParser",
    "urllib.parse.urlencode", "string.capwords", "copy.deepcopy", "glob.iglob", "operator.itemgetter",
    "statistics.median", "time.monotonic", "uuid.uuid4", "weakref.finalize", "shlex.split",
)  # fmt: skip
"""The questions about them have the phrasing that the bundled model's training left out."""


def held_out_prompts(llm: LLM, count: int, length: int) -> dict[str, Prompts]:
    """At most `count` prompts of `length` tokens each of code and prose, and as many questions.

    Code: functions of those modules of this Python that the bundled model's training left out. Prose: their
    docstrings without the first paragraph, which its conversations may quote. No questions without a chat template.
    """
    modules = standard_library_texts(held_out=True)
    tokenizer = _tokenizer(llm)
    found = {
        "code": _beginnings(_functions(modules), tokenizer, count, length),
        "prose": _beginnings(_docstrings(modules), tokenizer, count, length),
    }
    if llm.chat_template is not None:
        questions = (HELD_OUT_PHRASING.format(name=name) for name in ASKED_ABOUT[:count])
        found["questions"] = [llm.chat_prompt([{"role": "user", "content": question}]) for question in questions]
    return found


def file_prompts(llm: LLM, path: Path, count: int, length: int) -> Prompts:
    """At most `count` prompts out of a text file, a .jsonl file ("text" of each line), or a folder of such.

    The beginning of every document, at most `length` tokens, then the windows of that length after them, as far as
    they are needed. Raises CheckpointError, ConfigError.
    """
    tokenizer = _tokenizer(llm)
    bos, body = _bos(tokenizer), length - len(_bos(tokenizer))
    windows: list[tuple[int, list[int]]] = []
    for text in read_texts(path):
        try:
            ids = tokenizer.encode(text, add_special_tokens=False)
        except RequestError:
            continue
        # A question is a prompt as it is; of a longer document, what does not fill a window is left.
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
    """The first tokens of texts that are longer; in an order of their own, so that no module comes first."""
    bos = _bos(tokenizer)
    prompts: Prompts = []
    for text in sorted(set(texts), key=lambda text: hashlib.sha256(text.encode()).digest()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > length:
            prompts.append(bos + ids[: length - len(bos)])
        if len(prompts) == count:
            break
    return prompts


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
