"""Parses Python that models write, and reads the literals in it. Nothing is executed.

Parsing takes microseconds for each piece of code, and a server's event loop waits meanwhile: longer code is refused.
Text in quotation marks, such as a file's content, costs little and may be long.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from cpmrt.tool_use.calls import within_floats

MAX_CODE_CHARACTERS = 2**15
"""The most characters outside of quotation marks and comments. A model takes many seconds to write as many, and they
take one or two tenths of a second to read."""
_QUOTED = re.compile(
    r'#[^\n]*|"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*(?:""")?'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*(?:''')?"
    r"""|"[^"\\\n]*(?:\\.[^"\\\n]*)*"?|'[^'\\\n]*(?:\\.[^'\\\n]*)*'?""",
    re.DOTALL,
)
_HOLDS_CODE = re.compile(r'[fFtT][rR]?""')
"""The beginning of an f-string, which may hold any amount of code, where what `_QUOTED` matches has become ""."""
_CONSTANTS = {"true": True, "false": False, "null": None}


def parsed(text: str) -> list[ast.stmt]:
    """Return the statements of a text. Raises ValueError if it is no Python, or more of it than calls need."""
    code = _QUOTED.sub('""', text)
    if len(code) > MAX_CODE_CHARACTERS or _HOLDS_CODE.search(code):
        raise ValueError("too much code")
    try:
        return ast.parse(text).body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("no Python") from None


def read_literal(text: str) -> Any:
    """Return the value of a text that is one literal, as `literal` does."""
    statements = parsed(text.lstrip(" \t"))
    if len(statements) != 1 or not isinstance(statements[0], ast.Expr):
        raise ValueError("no literal")
    return literal(statements[0].value)


def literal(node: ast.expr) -> Any:
    """Return the value of a literal as `DECODER` reads JSON. Raises ValueError if it is none, or JSON lacks its type.

    The first value of a repeated key counts, floats stay finite, and true, false and null are constants.
    """
    try:
        return _value(node)
    except (RecursionError, TypeError):
        raise ValueError("no literal") from None


def _value(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=float() as number):
            return within_floats(number)
        case ast.Constant(value=value):
            return value
        case ast.Name(id=("true" | "false" | "null") as name):
            return _CONSTANTS[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict():
            values: dict[Any, Any] = {}
            for key, element in zip(node.keys, node.values, strict=True):
                values.setdefault(_value(key), _value(element))
            return values
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float() as operand)):
            if not isinstance(operand, bool):
                number = _value(node.operand)
                return -number if isinstance(node.op, ast.USub) else number
    raise ValueError("no literal")
