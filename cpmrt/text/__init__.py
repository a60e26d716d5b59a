"""The text before and after the model: tokenizer, chat template, streaming detokenizer, stop strings."""

from cpmrt.text.chat_template import ChatTemplate
from cpmrt.text.streaming import Detokenizer, StopStrings
from cpmrt.text.thinking import ThoughtEnd
from cpmrt.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "ThoughtEnd", "Tokenizer"]
