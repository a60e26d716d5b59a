"""Renders chat messages as a prompt, by the checkpoint's Jinja template, as Hugging Face's `apply_chat_template` does.

Formats: `chat_template.jinja` (the template, with others in `additional_chat_templates/NAME.jinja`),
`chat_template.json` and `tokenizer_config.json` (key "chat_template": the template, or a list of {"name", "template"}
with "default"). The one named "tool_use" is for requests with tools. Templates are untrusted: they get none of the
caller's objects, only checked copies that consist of JSON types.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cpmrt.errors import CheckpointError, quoted
from cpmrt.text.marks import MarkedText, Marks
from cpmrt.text.messages import checked_messages, checked_tools, marked_variables, plain
from cpmrt.text.special_tokens import CONFIG_FILE, read_optional, read_special_tokens
from cpmrt.weights.model_files import is_there, read_file

if TYPE_CHECKING:
    from cpmrt.text.compiled_templates import CompiledTemplates

KEY = "chat_template"
ADDITIONAL = "additional_chat_templates"
MAX_TEMPLATE_BYTES = 2**20


class ChatTemplate:
    """The chat template of a checkpoint. `ChatTemplate.open` makes it.

    It is compiled when it is first needed: a model that only continues texts starts without Jinja.
    """

    def __init__(self, templates: Mapping[str, str], path: Path, special_tokens: Mapping[str, object]):
        if "default" not in templates:
            raise CheckpointError(f"{path}: {KEY}", expected='one named "default"', actual=quoted(sorted(templates)))
        self._path, self._sources, self._special_tokens = path, dict(templates), dict(special_tokens)
        self.source = templates["default"]
        """The template of requests without tools, as its author wrote it."""
        self.takes_tools = any(re.search(r"\btools\b", source) for source in templates.values())
        """Whether any of the templates mentions `tools`, so that a prompt can show tools at all."""

    @property
    def text(self) -> str:
        """The sources of all templates, one after another, to search for the markers that they use."""
        return "\n".join(self._sources.values())

    @classmethod
    def open(cls, folder: Path) -> ChatTemplate | None:
        """Open the template in a checkpoint folder; None if it has none.

        Raises CheckpointError as `read_templates` does.
        """
        found = read_templates(folder)
        return None if found is None else cls(*found, read_special_tokens(folder))

    def check(self) -> None:
        """Compile the templates now. Raises CheckpointError with the line where that is not possible, as `render` would
        do."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> CompiledTemplates:
        from cpmrt.text.compiled_templates import CompiledTemplates

        return CompiledTemplates(self._sources, self._path)

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **kwargs: object,
    ) -> str:
        """Return the prompt for a list of messages, dicts with `role` and `content` (a string or text parts).

        `tools` are JSON schema functions (dicts). With `enable_thinking` None the variable is undefined, so that the
        template's own default holds. Other keyword arguments become variables of the template.
        Raises RequestError if the messages are malformed or the template does not take them, CheckpointError if
        the template cannot be compiled or does something that templates may not do (`template_sandbox`).
        """
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "enable_thinking": enable_thinking}
        return self.render_marked(messages, (), **{**kwargs, **options}).text

    def render_marked(
        self,
        messages: object,
        control_tokens: Collection[str],
        *,
        tools: object = None,
        add_generation_prompt: object = True,
        enable_thinking: object = None,
        **kwargs: object,
    ) -> MarkedText:
        """Return the same prompt as `render`, with untrusted text marked (`marks`).

        Untrusted are the messages of users and tools, and documents. System messages are trusted, as the developer
        writes them. In messages of the model only `control_tokens` are marked, except the markers of thoughts and tool
        calls. Without `control_tokens` nothing is marked.
        """
        variables: dict[str, object] = {"documents": None, **self._special_tokens}
        variables |= {name: plain(value, f"template_kwargs.{name}") for name, value in kwargs.items()}
        variables |= {
            "messages": checked_messages(messages, list(self._sources.values())),
            "tools": checked_tools(tools),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        if enable_thinking is not None:
            variables["enable_thinking"] = bool(enable_thinking)
        marks = Marks(control_tokens, [variables, *self._sources.values()]) if control_tokens else None
        return MarkedText(self._compiled.render(marked_variables(variables, marks), marks), marks)


def additional_templates(folder: Path) -> list[Path]:
    """Return the files of named templates beside `chat_template.jinja`; none if their folder is a symbolic link."""
    more = folder / ADDITIONAL
    return [] if more.is_symlink() else sorted(more.glob("*.jinja"))


def read_templates(folder: Path) -> tuple[dict[str, str], Path] | None:
    """Return the templates of a checkpoint folder by name, and the file that holds them; None if it has none.

    chat_template.jinja wins over chat_template.json, which wins over tokenizer_config.json. Raises CheckpointError
    naming the file if it is malformed.
    """
    path = folder / "chat_template.jinja"
    if is_there(path):
        named = {file.stem: _read_template(file) for file in additional_templates(folder)}
        return {**named, "default": _read_template(path)}, path
    for path in (folder / "chat_template.json", folder / CONFIG_FILE):
        value = read_optional(path).get(KEY)
        if value is not None:
            return _named_templates(value, path), path
    return None


def _read_template(path: Path) -> str:
    try:
        return read_file(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: byte {error.start} cannot be decoded") from error


def _named_templates(value: object, path: Path) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": _fitting(value, path)}
    named: dict[str, str] = {}
    for item in value if isinstance(value, list) else [value]:
        name, source = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError(
                f"{path}: {KEY}", expected="a string or a list of {name, template}", actual=quoted(item)
            )
        named[name] = _fitting(source, path)
    return named


def _fitting(source: str, path: Path) -> str:
    if len(source) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{path}: the chat template is too large", expected=f"at most {MAX_TEMPLATE_BYTES} bytes")
    return source
