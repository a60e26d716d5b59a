"""Steps and their results as JSON lines, for tests that compare executors and for bug reports."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import IO, Any, get_args

from cpmrt.config import Sampling
from cpmrt.errors import ConfigError
from cpmrt.executor import Admit, Executor, Mask, SlotResult, Step, StepResult, TokenLogprobs, TreeMasks

_STEPS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Step)}


class StepLog:
    """An engine listener that writes each step and its result as one line."""

    def __init__(self, file: IO[str]):
        self._file = file

    def __call__(self, step: Step, result: StepResult) -> None:
        record = {"step": type(step).__name__, **_fields(step), "result": asdict(result)["slots"]}
        self._file.write(json.dumps(record, default=_written) + "\n")
        self._file.flush()


def read_steps(path: Path) -> Iterator[tuple[Step, StepResult]]:
    """Yield the steps of a log with their recorded results. Raises ConfigError naming the line that is not one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line.decode("utf-8"))
                yield _step(record), StepResult(tuple(_slot_result(entry) for entry in record["result"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: not a step ({error})") from error


def replay(steps: Iterable[Step], executor: Executor) -> Iterator[tuple[Step, StepResult]]:
    """Submit recorded steps one after the other and yield each with the result that this executor gives."""
    for step in steps:
        yield step, executor.submit(step).wait()


def _step(record: dict[str, Any]) -> Step:
    kind = _STEPS[record["step"]]
    values = {field.name: _value(record[field.name]) for field in fields(kind) if field.name in record}
    if kind is Admit:
        values["sampling"] = Sampling(**{name: _hashable(value) for name, value in dict(values["sampling"]).items()})
    step: Step = kind(**values)
    return step


def _slot_result(entry: dict[str, Any]) -> SlotResult:
    logprobs = tuple(
        TokenLogprobs(item["token_id"], item["logprob"], _hashable(item["top"])) for item in entry["logprobs"]
    )
    return SlotResult(tuple(entry["token_ids"]), logprobs, entry.get("non_finite", False), entry.get("mask_failure"))


def _fields(step: Step) -> dict[str, Any]:
    return {field.name: getattr(step, field.name) for field in fields(step)}


def _written(value: object) -> dict[str, Any]:
    """Return the JSON object of a step's masks, or of any dataclass in a step."""
    if isinstance(value, Mask):
        return {"mask": _text(value.bits)}
    if isinstance(value, TreeMasks):
        return {"paths": [[path, _text(bits)] for path, bits in (value.bits or {}).items()]}
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"no part of a step: {value!r}")


def _text(bits: bytes | None) -> str | None:
    return None if bits is None else b64encode(bits).decode()


def _bits(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text)


def _value(value: Any) -> Any:
    """Return the value of a step's field from its JSON value."""
    if isinstance(value, dict) and value.keys() == {"mask"}:
        return Mask(_bits(value["mask"]), is_filled=True)
    if isinstance(value, dict) and value.keys() == {"paths"}:
        return TreeMasks({tuple(path): _bits(text) for path, text in value["paths"]})
    return tuple(_value(item) for item in value) if isinstance(value, list) else value


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
