"""Compiles the forms of answers for one tokenizer, within limits of time and size, and caches them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import replace
from functools import cached_property
from threading import BoundedSemaphore, RLock, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from cpmrt.config.form import JSON_STYLE, Form, as_terminal
from cpmrt.errors import BusyError, RequestError, quoted
from cpmrt.grammar.advice import advice_for
from cpmrt.grammar.compiled_form import CompiledForm
from cpmrt.grammar.depth import check_levels
from cpmrt.grammar.exact_numbers import check_lark, check_schema
from cpmrt.grammar.far_bounds import grammar_without_far_bounds, schema_without_far_bounds
from cpmrt.grammar.gbnf import in_lark
from cpmrt.grammar.mask_threads import MaskThreads, default_num_threads
from cpmrt.grammar.matcher import NO_THOUGHT, AnswerMatcher, Thought, Vocabulary
from cpmrt.grammar.rule_depth import rule_levels
from cpmrt.grammar.schema_depth import schema_levels
from cpmrt.grammar.trigger import GrammarTrigger, matcher_behind
from cpmrt.installation import install_extra, missing_packages
from cpmrt.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

MAX_COMPILE_S = 5.0
"""The longest time that a request waits for its turn, and again for its grammar. `_LIMITS` bound the work itself."""
MAX_KEPT = 64
"""The most compiled grammars that are kept for further requests."""
_MAX_COMPILING = 2
"""The most grammars that are compiled at the same time."""
_QUICK_S = 0.1
"""A form that takes longer than this to compile is compiled only once, however many answers use it."""
_LIMITS = {
    "initial_lexer_fuel": 200_000, "step_lexer_fuel": 100_000, "max_items_in_row": 10_000, "max_grammar_size": 100_000,
    "verbose_errors": False,
}  # fmt: skip
"""llguidance's limits. With these a mask takes at most about ten milliseconds, or its answer ends with an error."""

_IN_A_STRING = r"""[^"\\\x00-\x1F\x7F]"""
_SLICES = (
    r"[\x20\x0A\x0D\x09]+", *(f"{_IN_A_STRING}{{1,{n}}}" for n in (2, 4, 6, 8, 12, 16, 30)), f"{_IN_A_STRING}+",
)  # fmt: skip
"""Classes of tokens (regular expressions) that llguidance allows or forbids as a whole: white space, and JSON string
text by length.

With more lengths than llguidance's own two (10 and 30), masks within a string of limited length take half the time.
"""


class Grammars:
    """Makes the matchers of answers. `end_ids` are the tokens that end an answer. For any thread.

    The first use reads the vocabulary, which takes a second or two. Masks of several answers are computed in
    `num_threads` threads.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], *, num_threads: int | None = None):
        self._tokenizer, self._end_ids = tokenizer, sorted(set(end_ids))
        self._num_threads = default_num_threads() if num_threads is None else num_threads
        self._compiled: OrderedDict[Form, CompiledForm | RequestError] = OrderedDict()
        # A signal handler may ask for a form inside either: hence locks that their own thread may take again.
        self._lock, self._vocabulary_lock = RLock(), RLock()
        self._compiling = BoundedSemaphore(_MAX_COMPILING)

    def matcher(self, form: Form, thought: Thought = NO_THOUGHT) -> Callable[[], AnswerMatcher]:
        """Return a factory of matchers, to be called once for each answer of this form.

        Raises RequestError for a form that is invalid, takes too long or is too large, and if llguidance is missing;
        BusyError if too many others are being compiled.
        """
        compiled, vocabulary = self._compiled_form(form)
        return lambda: AnswerMatcher(compiled, vocabulary, thought)

    def trigger(self, form: Form, prompt_closing: bytes = b"") -> Callable[[], GrammarTrigger]:
        """Return a factory of triggers, which find where the form begins to bind an answer; one call for each answer.

        `prompt_closing` is the closing marker of a thought that the prompt has opened.
        Raises as `matcher` does, and RequestError for a form that does not begin with its trigger.
        """
        compiled, vocabulary = self._compiled_form(form)
        if not any(matcher_behind(tokens, compiled, vocabulary) for tokens in self._ways_to_say(form.trigger)):
            expected = "a text with which the grammar begins"
            raise RequestError("SamplingParams.grammar_trigger", expected=expected, actual=quoted(form.trigger))
        return lambda: GrammarTrigger(form.trigger.encode(), compiled, vocabulary, prompt_closing)

    def _compiled_form(self, form: Form) -> tuple[CompiledForm, Vocabulary]:
        form = replace(form, trigger="")
        with self._vocabulary_lock:
            vocabulary = self._vocabulary
        found = self._known(form)
        if found is None:
            found = self._compile_first(form)
        if isinstance(found, RequestError):
            raise RequestError(found.what, expected=found.expected, actual=found.actual, fix=found.fix)
        return found, vocabulary

    def _ways_to_say(self, text: str) -> Iterator[list[int]]:
        """Yield the tokens of a text spelled character by character, then those with its special tokens as tokens."""
        spelled = self._vocabulary.spelled
        yield spelled(text)
        parts = self._tokenizer.control_tokens.parts(text)
        yield [token for part in parts for token in ([part] if isinstance(part, int) else spelled(part))]

    def prepare(self) -> None:
        """Read the vocabulary now; otherwise the first use does."""
        with self._vocabulary_lock:
            _ = self._vocabulary

    @cached_property
    def _library(self) -> LLTokenizer:
        llguidance, known = _llguidance(), self._tokenizer.vocab_size
        ends = [token for token in self._end_ids if token < known]
        if not ends:
            fix = "a form needs a tokenizer with eos_token, or config.json with eos_token_id"
            raise RequestError("the model has no end token", fix=fix)
        found: LLTokenizer = llguidance.LLTokenizer(self._tokenizer.serialized(), eos_token=ends, slices=list(_SLICES))
        return found

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        library, bits = self._library, bytearray(b"\xff" * -(-self._library.vocab_size // 8))
        for token in self._end_ids:
            if token < library.vocab_size:
                bits[token // 8] &= ~(1 << token % 8)
        threads = MaskThreads(self._num_threads, library.vocab_size)
        return Vocabulary(self._tokenizer.written_bytes, library.tokenize_bytes, bytes(bits), threads)

    def _known(self, form: Form) -> CompiledForm | RequestError | None:
        with self._lock:
            found = self._compiled.get(form)
            if found is not None:
                self._compiled.move_to_end(form)
            return found

    def _kept(self, form: Form, compiled: CompiledForm | RequestError) -> CompiledForm | RequestError:
        with self._lock:
            self._compiled[form] = compiled
            while len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def _compile_first(self, form: Form) -> CompiledForm | RequestError:
        """Compile a form, or find it compiled by a thread that had its turn before; return the error of an invalid one.

        Raises BusyError if no turn comes within the limit, and RequestError if it takes longer than the limit. What is
        compiled after that is kept for further requests.
        """
        if not self._compiling.acquire(timeout=MAX_COMPILE_S):
            raise BusyError("other grammars are being compiled", fix="ask again later")
        found = self._known(form)
        if found is not None:
            self._compiling.release()
            return found
        try:
            return self._in_a_thread(lambda: self._kept(form, self._first(form)), daemon=True).result(MAX_COMPILE_S)
        except TimeoutError:
            raise _refused(form, f"one that was not compiled within {MAX_COMPILE_S:g} s") from None

    def _first(self, form: Form) -> CompiledForm | RequestError:
        begun = perf_counter()
        found = self._compile(form)
        if isinstance(found, RequestError):
            return found
        most = self._num_threads if perf_counter() - begun < _QUICK_S else 1
        return CompiledForm(found, most, lambda: self._compile_beside(form))

    def _compile_beside(self, form: Form) -> Future[LLMatcher | RequestError] | None:
        """Begin to compile a form once more; None if others are being compiled. The process waits for it at exit."""
        if not self._compiling.acquire(blocking=False):
            return None
        try:
            return self._in_a_thread(lambda: self._compile(form), daemon=False)
        except RuntimeError:  # the system gives no more threads; one compiled form is enough
            return None

    def _in_a_thread(self, compiled: Callable[[], T], *, daemon: bool) -> Future[T]:
        """Compile in a thread of its own. It cannot be stopped, and may go on when nobody waits for it any more.

        The caller has acquired `_compiling`, and the thread releases it. A process that ends while a `daemon` thread is
        within llguidance may crash.
        """
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(compiled())
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._compiling.release()

        try:
            Thread(target=work, name="cpmrt-grammar", daemon=daemon).start()
        except BaseException:
            self._compiling.release()
            raise
        return future

    def _compile(self, form: Form) -> LLMatcher | RequestError:
        """Return a matcher in its initial state, its first mask computed already, or the error of an invalid form."""
        llguidance = _llguidance()
        try:
            grammar = _grammar(form)
        except (ValueError, RecursionError) as error:
            return _refused(form, str(error))
        except RequestError as error:
            return error
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._library, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        reason = matcher.get_error() or self._error_ahead(matcher)
        return _refused(form, reason) if reason else matcher

    def _error_ahead(self, matcher: LLMatcher) -> str:
        """Return the error behind the text that every answer begins with, "" if there is none."""
        ahead = matcher.deep_copy()
        certain = matcher.compute_ff_tokens() or self._library.tokenize_bytes(matcher.compute_ff_bytes())
        ahead.consume_tokens(certain[: ahead.validate_tokens(certain)])
        if not ahead.is_stopped():
            ahead.compute_bitmask()
        return ahead.get_error()


def _grammar(form: Form) -> str:
    """Return a form as a grammar in llguidance's own language. Raises ValueError, or RequestError if it is too deep."""
    matchers = _llguidance().LLMatcher
    if form.kind == "json_schema":
        check_levels(form.kind, schema_levels(json.loads(form.text)))
        # llguidance writes JSON_STYLE into the schema, which must be an object then.
        text = "{}" if form.text == "true" else schema_without_far_bounds(form.text)
        check_schema(json.loads(text))
        return str(matchers.grammar_from_json_schema(text, overrides=JSON_STYLE))
    if form.kind == "regex":
        return str(matchers.grammar_from_regex(form.text))
    if form.kind == "grammar":
        text = grammar_without_far_bounds(in_lark(form.text))
        check_levels(form.kind, rule_levels(text))
        check_lark(text)
        return str(matchers.grammar_from_lark(text))
    # All choices are one terminal, so that they become one automaton.
    choices = " | ".join(map(as_terminal, json.loads(form.text)))
    return str(matchers.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))


_EXPECTED = {
    "json_schema": "a JSON schema", "regex": "a regular expression", "choices": "a list of texts",
    "grammar": "a grammar in the syntax of Lark or GBNF",
}  # fmt: skip
_IN_OUR_WORDS = {"NoExtensionBias": "one that no text matches", "initial_lexer_fuel": "one that is too complex"}
"""A name in an error of llguidance -> what it means, for the message."""


def _refused(form: Form, reason: str) -> RequestError:
    expected = _EXPECTED[form.kind] + " that can be compiled"
    if form.kind == "regex":  # the other lines of the report are about the grammar around it
        reason = next((line for line in reason.splitlines() if line.startswith("error: ")), reason)
    said = next((words for sign, words in _IN_OUR_WORDS.items() if sign in reason), reason)
    actual = " ".join(said.removeprefix("error: ").split())[:300]
    return RequestError(f"SamplingParams.{form.kind}", expected=expected, actual=actual, fix=advice_for(reason))


def _llguidance() -> Any:
    if missing_packages("grammar"):
        raise RequestError("schemas and grammars need llguidance", fix=install_extra("grammar"))
    import llguidance  # imported here: `import cpmrt` stays light

    return llguidance
