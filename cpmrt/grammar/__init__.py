"""Constrains answers: turns a schema, a regular expression or a grammar into the tokens that may come next.

llguidance (https://github.com/guidance-ai/llguidance) does the parsing. The engine gets only bits and token ids.
"""

from cpmrt.grammar.grammars import Grammars
from cpmrt.grammar.matcher import Thought

__all__ = ["Grammars", "Thought"]
