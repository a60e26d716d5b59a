"""Forms of answers as grammars: from a schema, a regular expression or a Lark grammar to the tokens that may come next.

llguidance (https://github.com/guidance-ai/llguidance) does the parsing. The engine gets bits and token ids only.
"""

from cpmrt.grammar.grammars import Grammars
from cpmrt.grammar.matcher import Thought

__all__ = ["Grammars", "Thought"]
