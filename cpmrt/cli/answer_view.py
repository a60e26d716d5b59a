"""Shows an answer as it comes: the interface, and the view for files and pipes. `terminal_view` is for terminals."""

from __future__ import annotations

from typing import Protocol

from cpmrt.cli.conversation import Part
from cpmrt.cli.output import write


class AnswerView(Protocol):
    """Shows the parts of one answer."""

    def show(self, part: Part) -> None: ...

    def end(self) -> None:
        """Show what is held back, and end the last line."""
        ...


class PlainView:
    """Writes an answer to standard output unchanged, with an empty line between the thoughts and the rest."""

    def __init__(self) -> None:
        self._was_thought = False

    def show(self, part: Part) -> None:
        if part.text:
            write("\n\n" * (self._was_thought and not part.is_thought) + part.text)
            self._was_thought = part.is_thought

    def end(self) -> None:
        write("\n")
