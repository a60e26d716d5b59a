"""The commands of `cpmrt chat`: lines that begin with a slash."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cpmrt.cli.output import complain, cost_lines, plain_error_line, printable, reply
from cpmrt.config import SamplingParams
from cpmrt.config.form import FORM_FIELDS
from cpmrt.errors import RequestError

if TYPE_CHECKING:
    from cpmrt.cli.chat_session import ChatSession

_SWITCHES = {"on": True, "off": False}
_NONE_IS = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": False, "loop_repeats": 0}
"""The value that /set NAME none gives to settings which cannot be None."""
_NOT_SETTINGS = {"n", "logprobs", "logit_bias", "stop_token_ids", "grammar_trigger", *FORM_FIELDS}


class Command(NamedTuple):
    """A command: its argument and its description as /help shows them, and the function that runs it.

    `needs` says that the argument is required.
    """

    takes: str
    does: str
    run: Callable[[ChatSession, str], bool]
    needs: bool = False


def run_command(session: ChatSession, line: str) -> bool | None:
    """Run the command in a line. Return True if it worked, False if it failed (the reason has been shown then), and
    None if the line is no command but a message."""
    name, _, argument = line.partition(" ")
    if re.fullmatch(r"/[a-z?]+", name) is None or (name not in COMMANDS and argument):
        return None
    command, argument = COMMANDS.get(name), argument.strip()
    if command is None:
        near = get_close_matches(name, COMMANDS, 1)
        reply(f"{name} is no command" + (f": did you mean {near[0]}?" if near else "; /help lists them"))
        return False
    if argument and not command.takes:
        return None
    if command.needs and not argument:
        reply(f"{name} needs {command.takes}")
        return False
    try:
        return command.run(session, argument)
    except RequestError as error:
        complain(plain_error_line(error))  # /set takes names of settings, not of options
        return False


def _help(session: ChatSession, argument: str) -> bool:
    rows = [(f"{name} {command.takes}".strip(), command.does) for name, command in COMMANDS.items() if command.does]
    width = max(len(left) for left, _ in rows)
    reply("\n".join(f"  {left:<{width}}  {right}" for left, right in rows))
    reply('  """ begins and ends a message of several lines; a backslash at the end of a line continues it')
    reply("  Ctrl-C ends an answer, Ctrl-D leaves")
    return True


def _clear(session: ChatSession, argument: str) -> bool:
    session.conversation.clear()
    reply("the conversation is forgotten")
    return True


def _undo(session: ChatSession, argument: str) -> bool:
    turn = session.conversation.undo()
    reply("there is no question to forget" if turn is None else f"forgotten: {_short(turn[0])}")
    return turn is not None


def _retry(session: ChatSession, argument: str) -> bool:
    turn = session.conversation.undo()
    if turn is None:
        reply("there is no question to ask again")
        return False
    before = session.conversation.last
    done = session.answer(turn[0])
    if session.conversation.last in (None, before):  # no new answer came: the old one stays
        session.conversation.add(*turn)
    return done


def _system(session: ChatSession, argument: str) -> bool:
    if argument:
        session.conversation.system = None if argument == "none" else argument
    system = session.conversation.system
    reply("there is no system message" if system is None else f"system message: {_short(system)}")
    return True


def _save(session: ChatSession, argument: str) -> bool:
    session.conversation.save(_path(argument))
    reply(f"saved to {printable(argument)}")
    return True


def _load(session: ChatSession, argument: str) -> bool:
    session.conversation.load(_path(argument))
    turns = session.conversation.num_turns
    reply(f"loaded {turns} turn{'s' if turns != 1 else ''} from {printable(argument)}")
    return True


def _path(argument: str) -> Path:
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{printable(argument)[:80]}: {error}") from error


def _stats(session: ChatSession, argument: str) -> bool:
    lines = cost_lines(session.last) if session.last is not None else ["no answer yet"]
    reply("\n".join(filter(None, [*lines, session.model.usage(session.conversation)])))
    return True


def _set(session: ChatSession, argument: str) -> bool:
    name, _, value = argument.partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if name and not value:
        raise RequestError(f"/set {name}", expected="a value", fix="/set alone shows all settings")
    if name:
        _change(session, name, value)
    settings = {**_settings(session.model.params), "thinking": session.model.enable_thinking}
    settings |= {"stats": session.shows_cost, "markdown": session.makes_up}
    shown = {key: setting for key, setting in settings.items() if not name or key == name}
    reply("\n".join(f"  {key} {_text(setting)}" for key, setting in shown.items()))
    return True


def _change(session: ChatSession, name: str, value: str) -> None:
    """Change one setting. Raises RequestError, naming the setting, for an unknown name or an invalid value."""
    model = session.model
    known = [*_settings(model.params), "thinking", "stats", "markdown"]
    if name not in known:
        near = get_close_matches(name, known, 1)
        raise RequestError(
            f"/set {printable(name)[:40]}: there is no such setting",
            fix=f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}",
        )
    if name == "thinking" and value in ("auto", "none"):
        model.enable_thinking = None
    elif name in ("thinking", "stats", "markdown"):
        if value not in _SWITCHES:
            raise RequestError(f"/set {name}", expected="on or off", actual=value[:40])
        target, attribute = {
            "thinking": (model, "enable_thinking"), "stats": (session, "shows_cost"), "markdown": (session, "makes_up"),
        }[name]  # fmt: skip
        setattr(target, attribute, _SWITCHES[value])
    else:
        model.params = _replaced(model.params, name, value)


def _replaced(params: SamplingParams, name: str, value: str) -> SamplingParams:
    read: Any = _value(value)
    if read is None:
        read = _NONE_IS.get(name)
    elif name == "stop" and not isinstance(read, (str, tuple)):
        read = value  # a stop string that looks like a number or a switch
    try:
        return replace(params, **{name: read})
    except RequestError as error:
        what = error.what.replace("SamplingParams.", "/set ", 1)
        raise RequestError(what, expected=error.expected, actual=error.actual, fix=error.fix) from error


def _value(text: str) -> Any:
    """Return the value that a text stands for: None, a bool, a number or a list (as a tuple), else the text itself."""
    if text in ("none", "auto", "default"):
        return None
    if text in _SWITCHES:
        return _SWITCHES[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return tuple(value) if isinstance(value, list) else value


def _settings(params: SamplingParams) -> dict[str, Any]:
    return {field.name: getattr(params, field.name) for field in fields(params) if field.name not in _NOT_SETTINGS}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "default" if value is None else json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return printable(text if len(text) <= 200 else text[:197] + "...")


def _leave(session: ChatSession, argument: str) -> bool:
    session.is_over = True
    return True


COMMANDS = {
    "/help": Command("", "show this", _help),
    "/set": Command("[NAME VALUE]", "show the settings, or change one", _set),
    "/system": Command("[TEXT]", "show or change the system message (none: leave it out)", _system),
    "/retry": Command("", "ask the last question again", _retry),
    "/undo": Command("", "forget the last question and its answer", _undo),
    "/clear": Command("", "forget the conversation", _clear),
    "/save": Command("FILE", "write the conversation into a file", _save, needs=True),
    "/load": Command("FILE", "go on with the conversation of a file", _load, needs=True),
    "/stats": Command("", "what the last answer cost, and how much of the context is taken", _stats),
    "/bye": Command("", "leave", _leave),
    "/?": Command("", "", _help),
    "/reset": Command("", "", _clear),
    "/exit": Command("", "", _leave),
    "/quit": Command("", "", _leave),
}
"""The commands by name. Those without a description are aliases, as other programs name them; /help omits them."""
