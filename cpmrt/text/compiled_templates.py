"""Runs the chat templates of a checkpoint with Jinja, in a sandbox."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError

from cpmrt.errors import CheckpointError, RequestError
from cpmrt.text.marks import Marks
from cpmrt.text.messages import other_forms
from cpmrt.text.template_sandbox import ChatEnvironment
from cpmrt.yielding_json import encoded


class RefusedError(TemplateError):
    """A template has called `raise_exception`: it cannot render these messages."""


class CompiledTemplates:
    """The chat templates of a checkpoint, from their sources by name; `path` is the file that holds them.

    Raises CheckpointError with the line where a template cannot be compiled.
    """

    def __init__(self, sources: Mapping[str, str], path: Path):
        self._path, self._environment = path, ChatEnvironment()
        self._environment.set_filter("tojson", _to_json)
        self._environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._templates = {name: self._compile(source) for name, source in sources.items()}

    def render(self, variables: dict[str, object], marks: Marks | None) -> str:
        """Return what the template writes for these variables; those with `tools` go to the one named "tool_use".

        Raises RequestError if it does not take them, CheckpointError if it does what templates may not do.
        """
        name = "tool_use" if variables["tools"] and "tool_use" in self._templates else "default"
        self._environment.current.marks = marks
        try:
            return self._run(self._templates[name], variables)
        except Exception as error:
            self._explain(error)
        finally:
            self._environment.current.marks = None

    def _run(self, template: Template, variables: dict[str, object]) -> str:
        """Return what the template writes. If it fails on the messages as they are, try them in `other_forms`."""
        others = other_forms(variables["messages"])
        while True:
            try:
                return self._run_once(template, variables)
            except (UndefinedError, TypeError):
                if (messages := next(others, None)) is None:
                    raise
            variables = variables | {"messages": messages}

    def _run_once(self, template: Template, variables: dict[str, object]) -> str:
        allowance = self._environment.allowance
        allowance.start(variables)
        pieces: list[str] = []
        for piece in template.generate(variables):
            allowance.spend(len(piece))
            pieces.append(piece)
        return "".join(pieces)

    def _compile(self, source: str) -> Template:
        try:
            code = self._environment.compile(source, filename=str(self._path))
            return Template.from_code(self._environment, code, self._environment.make_globals(None))
        except TemplateSyntaxError as error:
            raise CheckpointError(f"{self._path}, line {error.lineno} of the template: {error.message}") from error
        except Exception as error:  # Python's compiler may refuse what Jinja has accepted
            raise CheckpointError(f"{self._path}: the template cannot be compiled: {_reason(error)}") from error

    def _explain(self, error: Exception) -> NoReturn:
        """Raise the error that says whether the messages or the template are at fault, with the template's line."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self._path)]
        line = f", line {lines[-1]} of the template" if lines else ""
        if isinstance(error, RefusedError):
            said = self._environment.unmarked(error.message)
            raise RequestError(f"the chat template refuses the messages: {said}") from error
        if isinstance(error, (SecurityError, RecursionError, MemoryError)):
            raise CheckpointError(f"{self._path}{line}: a chat template may not do this: {_reason(error)}") from error
        # Without the folder, since a server tells its clients.
        raise RequestError(
            f"the chat template cannot render these messages: {_reason(error)} ({self._path.name}{line})",
            fix="check the messages for what the template needs",
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, SecurityError):
        return str(error)[:300]
    return f"{type(error).__name__}: {str(error)[:300]}"


def _raise_exception(message: object) -> NoReturn:
    raise RefusedError(str(message)[:1000])


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON: the filter `tojson` as Hugging Face has it. Jinja's own would escape HTML."""
    return encoded(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
