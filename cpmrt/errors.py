"""Errors a user can meet: each says what is wrong, what was expected, what was found and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from reprlib import Repr
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


class _Short(Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Return digits, or from 1000 bits on the number of bits: Python refuses to write more than 4300 digits."""
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"an integer of {x.bit_length()} bits"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlist = 8


def quoted(value: object) -> str:
    """Return a name or value that came from outside as a short printable text: escaped, and cut if it is long."""
    return _SHORT.repr(value)


def reason_of(error: Exception) -> str:
    """Return the text of an error without its file's path, which the message around it names already."""
    return getattr(error, "strerror", None) or str(error)


def listed(items: Sequence[str], limit: int = 8) -> str:
    """List the first `limit` items, then say how many more there are."""
    more = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {more} more" if more > 0 else "")


class CpmrtError(Exception):
    """An error that says on one line what is wrong.

    `expected`, `actual` and `fix` are kept as attributes, so that a caller can act on them without parsing text.
    """

    def __init__(self, what: str, *, expected: object = None, actual: object = None, fix: str | None = None):
        self.what, self.expected, self.actual, self.fix = what, expected, actual, fix
        found = [f"expected {expected}"] * (expected is not None) + [f"got {actual}"] * (actual is not None)
        message = what + (": " + ", ".join(found) if found else "") + (f"; {fix}" if fix else "")
        # A path may hold bytes that are no text, which nobody could print.
        super().__init__(" ".join(message.split()).encode(errors="backslashreplace").decode())


class ConfigError(CpmrtError):
    """A model or engine setting is missing, malformed or contradicts another."""


class CheckpointError(CpmrtError):
    """A checkpoint file is absent, corrupt, or does not hold what its config promises."""


class UnsupportedModelError(CpmrtError):
    """The checkpoint is well-formed but needs something this runtime does not implement."""


class RequestError(CpmrtError):
    """One request (prompt, messages or sampling parameters) is not valid; the engine is unharmed."""


class ArgumentError(CpmrtError, TypeError):
    """A call has an argument of a name, or a type, that the function does not take."""


class ClosedError(CpmrtError):
    """The model was closed before the answer was complete, or belongs to another process."""


SHORTEN_PROMPT = "shorten the prompt or raise max_context"


class ContextLengthError(RequestError):
    """Prompt plus new tokens do not fit the context."""

    @classmethod
    def of(cls, what: str, most: int, actual: object, *, fix: str = SHORTEN_PROMPT) -> ContextLengthError:
        """Return the error for `what` (a prompt, a request), which takes `actual` tokens of a context of `most`."""
        return cls(f"{what} does not fit the context", expected=f"at most {most} tokens", actual=actual, fix=fix)


class BusyError(RequestError):
    """A request cannot be taken now, as too much work of its kind is under way; the same request may be sent again."""


def of_each(name: str, items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
    """Return `make` of each item. A RequestError says which item it is about: "prompts[2]: the prompt is empty"."""
    made = []
    for number, item in enumerate(items):
        try:
            made.append(make(item))
        except RequestError as error:
            what = f"{name}[{number}]: {error.what}"
            raise type(error)(what, expected=error.expected, actual=error.actual, fix=error.fix) from error
    return made


class MemoryPlanError(CpmrtError):
    """The planned buffers do not fit the memory budget."""


class PrefixError(CpmrtError):
    """A prefix file is damaged, or was made by another model."""


class KernelCompileError(CpmrtError):
    """NVRTC refused a kernel source, or what it needs to compile is not installed."""


class DeviceError(CpmrtError):
    """The GPU failed while it ran; the process's context is lost."""


class NonFiniteLogitsError(CpmrtError):
    """The model gave NaN or infinity where a token was to be sampled or scored, or a text embedded; other sequences go
    on."""

    @classmethod
    def at(cls, position: int) -> NonFiniteLogitsError:
        """Return the error for the token at a position, counted from the beginning of the prompt."""
        return cls.of(f"the logits for position {position}")

    @classmethod
    def of(cls, what: str) -> NonFiniteLogitsError:
        """Return the error for numbers of the model that are not finite; `what` names them, in the plural."""
        fix = "look for NaN and infinity in the weights, or use dtype bfloat16 or float32: float16 ends at 65504"
        return cls(f"{what} are not finite", expected="numbers", actual="NaN or infinity", fix=fix)


class FormError(CpmrtError):
    """An answer under a grammar cannot go on: no token is allowed, or the grammar has become too complex."""


class MaskError(FormError):
    """The mask of an answer under a grammar was not found in time, or not obeyed; the grammar is not at fault."""

    @classmethod
    def late(cls) -> MaskError:
        """Return the error for a mask, or the masks of a tree, for which the device has waited in vain."""
        fix = "look for what stops this process for so long; close every LLM before it is left"
        return cls("the mask of a step was not there in time", expected="within 10 s", fix=fix)

    @classmethod
    def unexplained(cls, what: str) -> MaskError:
        """Return the error for a failure `what` that only a fault of this program can cause."""
        return cls(what, fix="report this as a bug")

    @classmethod
    def of(cls, failure: str) -> MaskError:
        """Return the error for an `executor.MaskFailure`."""
        return cls.late() if failure == "late" else cls.unexplained(_MASK_FAILURES[failure])


_MASK_FAILURES = {
    "cut": "a drafted node was reached that its form has cut",
    "nothing": "every token that the mask of a row allows has the logit -infinity",
}


class NoDeviceError(CpmrtError):
    """No usable device for the executor that was asked for."""
