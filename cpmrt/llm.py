"""The public entry: a model loaded, planned and ready to generate. The only file that picks an executor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar

import numpy as np

from cpmrt.config import EngineConfig, ModelConfig, SamplingDefaults, SamplingParams, SparseSetting
from cpmrt.config.engine import parse_bytes
from cpmrt.dtypes import F32
from cpmrt.engine import Engine, Request, ThinkingBudget, request_seed
from cpmrt.engine.engine import StepListener
from cpmrt.errors import ContextLengthError, NoDeviceError, NonFiniteLogitsError, RequestError
from cpmrt.executor import Executor
from cpmrt.generation import Completion
from cpmrt.memory.plan import MemoryPlan
from cpmrt.prefixes.prefixes import Prefixes
from cpmrt.sharing.jobs import Ended, EndsInbox, Generation, Job, Reading
from cpmrt.sharing.shared_engine import SharedEngine
from cpmrt.sharing.text_stream import TextStream
from cpmrt.text import ChatTemplate, ThoughtEnd, Tokenizer
from cpmrt.weights.draft_folder import with_speculation
from cpmrt.weights.files import is_there
from cpmrt.weights.model_folder import ModelFolder

Prompt = str | Sequence[int]
T = TypeVar("T")
_MARKER_TOKENS = 16
"""The most tokens that the marker of an opened thought takes at the end of a prompt."""


class LLM:
    """A language model on one device, for any number of threads.

    Calls of several threads run together as far as there are slots (`max_sequences`), else one after the other; each
    gets what it would get alone. `close` ends calls that still wait with a ClosedError.

    `model` is a folder or a Hugging Face id; None is the bundled demo model. `executor`: "auto", "cuda" or
    "reference" (NumPy). `dtype` of weights, KV and activations: "auto" (the checkpoint's), "bfloat16", "float16",
    "float32". `max_context` in tokens and `memory_budget` in bytes (or such as "8GiB") bound the memory plan (None: the
    model's own context, what is free). `lm_head_bits` 8 or 4 rounds the output head to that many bits.
    `kv_dtype="fp8"` keeps keys and values in 8 bits (`ops.fp8_pages`); not with a draft.
    `prefix_cache` spares a prompt what an earlier one that began alike has computed already, and changes no bit.
    "fast" reuses what decode steps have written too, so that the next turn of a chat computes only its new part; a
    prefill would round that a little differently. `prefix_dir` is a folder that keeps what long system messages have
    cost from one start to the next (`cpmrt.prefixes`).

    `draft` makes decoding faster and changes no token: a folder or hub id of an EAGLE draft or of a smaller model with
    the same tokenizer, the name of a folder within the model's own, or "lookup", which needs no model. `speculate`:
    "auto" (a few tree shapes, of which the engine takes the one that pays off, or none), "off", or an object with any
    of num_passes, top_k, tree_size (one tree), shapes (a list of those three), adaptive, draft_vocab (FR-Spec: how many
    tokens, or a file that lists them), window, head_bits, residual_scale, method (`config.speculate_argument`) and
    simulate_accept, for benchmarks on random weights: a draft step then gives that many tokens on average, and the text
    means nothing.

    `load_format="dummy"` fills the config with seeded random weights. `hf_overrides` replace keys of config.json.
    `sparse`: "auto" (block-sparse attention if config.json has a sparse_config), "off", or fields of it that replace
    those of config.json or the defaults, such as {"topk": 32}, {} (`config.sparse`).
    `on_step` is called with every step and its result (`engine.step_log.StepLog` writes them).

    Raises CheckpointError, ConfigError, UnsupportedModelError, MemoryPlanError or NoDeviceError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        executor: str = "auto",
        dtype: str = "auto",
        max_context: int | None = None,
        memory_budget: int | str | None = None,
        load_format: str = "auto",
        seed: int = 0,
        hf_overrides: Mapping[str, Any] | None = None,
        sparse: SparseSetting = "auto",
        prefill_chunk: int = 512,
        max_sequences: int = 1,
        cuda_graphs: bool = True,
        dependent_launch: bool = True,
        steps_per_launch: int = 1,
        lm_head_bits: int | None = None,
        prefix_cache: bool | str = True,
        kv_dtype: str = "auto",
        prefix_dir: str | Path | None = None,
        draft: str | Path | None = None,
        speculate: str | Mapping[str, Any] = "auto",
        on_step: StepListener | None = None,
    ):
        budget = parse_bytes(memory_budget) if isinstance(memory_budget, str) else memory_budget
        settings = EngineConfig(
            executor, dtype, max_context, budget, load_format, seed, prefill_chunk, max_sequences,
            cuda_graphs, dependent_launch, steps_per_launch, lm_head_bits, prefix_cache, kv_dtype=kv_dtype,
            prefix_dir=str(prefix_dir) if isinstance(prefix_dir, Path) else prefix_dir,
        )  # fmt: skip
        is_dummy = load_format == "dummy"
        folder = ModelFolder.open(model, revision=revision, weights=False, hf_overrides=hf_overrides, sparse=sparse)
        self.tokenizer = _open_tokenizer(folder, is_dummy)
        if folder.lacks_weights and not is_dummy:
            _on_executor(folder, settings, lambda assembly: assembly.fetch_weights(folder, settings))
        settings = with_speculation(settings, folder, draft, speculate)
        self.config: ModelConfig = folder.config
        self.sampling_defaults: SamplingDefaults = folder.sampling
        self._seed, self._numbers = seed, count()
        self._rendering = Lock()
        self.chat_template = ChatTemplate.open(folder.path)
        self._executor, self._plan = _on_executor(
            folder, settings, lambda assembly: assembly.open_executor(folder, settings)
        )
        self._prefixes = Prefixes(folder, settings, self._plan, lambda: self.engine, self._run)
        adaptive = settings.speculation is None or settings.speculation.is_adaptive
        self.use(Engine(self._executor, on_step, prefix_cache=prefix_cache, adaptive=adaptive))

    def use(self, engine: Engine) -> None:
        """Run everything on this engine from now on: tests bring one of their own."""
        self._shared = SharedEngine(engine, self.tokenizer)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Continue a prompt (text, or token ids taken as they are). Raises RequestError, ContextLengthError."""
        job = Generation(self.request(prompt, params or SamplingParams()))
        self._run(job)
        return job.completion

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TextStream:
        """Continue a prompt like `generate`, but return its text piece by piece.

        Its `completion` holds the whole answer. A stream that is closed or left before its end is cancelled.
        """
        return TextStream(self._shared, Generation(self.request(prompt, params or SamplingParams())))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        allow_special_tokens: bool = False,
        **template_kwargs: Any,
    ) -> Completion:
        """Answer a conversation: messages of {"role", "content"}, rendered by the checkpoint's chat template.

        Special tokens such as <|im_end|> that users, tools and documents write are plain text, so that nobody can forge
        a turn; `allow_special_tokens` makes them count.
        """
        prompt = self.chat_prompt(
            messages,
            tools=tools,
            enable_thinking=enable_thinking,
            allow_special_tokens=allow_special_tokens,
            **template_kwargs,
        )
        return self.generate(prompt, params)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        allow_special_tokens: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, ready for `stream`."""
        if self.chat_template is None:
            raise RequestError("the checkpoint has no chat template", fix="use generate, or add chat_template.jinja")
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer", fix="pass token ids instead of text")
        control_tokens = () if allow_special_tokens else self.tokenizer.control_tokens.texts
        options = {"tools": tools, "enable_thinking": enable_thinking, **template_kwargs}
        with self._rendering:  # templates share an allowance of work
            text = self.chat_template.render_marked(messages, control_tokens, **options)
        return self.tokenizer.encode_marked(text, max_tokens=self.max_context)

    def logits(self, token_ids: Sequence[int]) -> F32:
        """Logits at every position: float32 [T, V], in the model's vocabulary order."""
        ids = self._readable(token_ids)

        def work(slot: int, block_table: tuple[int, ...]) -> Generator[None, None, F32]:
            parts = list[F32]()
            for logits in self._executor.prompt_logits(slot, ids, block_table):
                parts.append(logits)
                yield
            return np.concatenate(parts)

        return self._read(ids, work)

    def score(self, token_ids: Sequence[int]) -> F32:
        """Natural log-probability of each token after the first, given those before it: float32 [T - 1].

        Raises NonFiniteLogitsError where the model gives NaN or infinity.
        """
        from cpmrt.reference.sampling import log_softmax

        ids = self._readable(token_ids)

        def work(slot: int, block_table: tuple[int, ...]) -> Generator[None, None, F32]:
            parts, start = list[F32](), 0
            for logits in self._executor.prompt_logits(slot, ids, block_table):
                following = np.array(ids[start + 1 : start + 1 + len(logits)], np.int64)
                bad = np.flatnonzero(~np.isfinite(logits[: len(following)].max(axis=-1)))
                if len(bad):
                    raise NonFiniteLogitsError.at(start + int(bad[0]) + 1)
                parts.append(log_softmax(logits[: len(following)])[np.arange(len(following)), following])
                start += len(logits)
                yield
            return np.concatenate(parts)

        return self._read(ids, work)

    def save_prefix(self, path: str | Path, prompt: Prompt) -> int:
        """Write the keys and values of a prompt (text, or token ids) to a file; return of how many tokens.

        These are whole pages of 64 tokens. They are in memory then too. Raises PrefixError, RequestError,
        ContextLengthError.
        """
        ids = self._checked(self._encode(prompt) if isinstance(prompt, str) else prompt)
        return self._prefixes.save(Path(path), ids)

    def load_prefix(self, path: str | Path) -> int:
        """Read a file of `save_prefix`, so that prompts that begin with its tokens begin behind them; return how many.

        Raises PrefixError for a file that is damaged, or of another model, dtype, context or type of keys and values,
        and CheckpointError, RequestError, ContextLengthError.
        """
        return self._prefixes.load(Path(path))

    @property
    def plan(self) -> MemoryPlan:
        """What was allocated, part by part; `str(plan)` is a table."""
        return self._plan

    @property
    def executor(self) -> Executor:
        """What carries out the steps, for tools that drive it themselves; it is closed with this object."""
        return self._executor

    @property
    def engine(self) -> Engine:
        """The state machine, for tools that drive it themselves while nothing else uses this object."""
        return self._shared.engine

    @property
    def shared(self) -> SharedEngine:
        """What runs the jobs of all threads, for a server."""
        return self._shared

    @property
    def max_context(self) -> int:
        """Tokens a sequence may hold, prompt and new ones together."""
        return self.engine.limits.max_context

    def close(self) -> None:
        """Free everything; calls that still wait, in whatever thread, raise ClosedError. May be called again."""
        self._shared.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, job: Job) -> None:
        """Run one job to its end. Raises what ends it, and cancels it where waiting raises."""
        inbox = EndsInbox()
        self._shared.submit((job,), inbox)
        try:
            _, end = self._shared.next(inbox)
        except BaseException:
            self._shared.cancel((job,))
            raise
        if isinstance(end, Ended) and end.error is not None:
            raise end.error

    def _read(
        self, ids: tuple[int, ...], work: Callable[[int, tuple[int, ...]], Generator[None, None, T]]
    ) -> T:
        """Return what `work` (see `Reading`) makes of a prompt."""
        reading = Reading(len(ids), work)
        self._run(reading)
        result: T = reading.result
        return result

    def _readable(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        ids = self._checked(token_ids)
        if not ids:
            raise RequestError("token_ids are empty", expected="at least one token", actual=0)
        if len(ids) > self.max_context:
            raise ContextLengthError(
                "the tokens do not fit the context",
                expected=f"at most {self.max_context}",
                actual=len(ids),
                fix="raise max_context",
            )
        return ids

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """What the engine takes: token ids, sampling, length, end tokens and seed made definite.

        Raises RequestError.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError("params", expected="SamplingParams", actual=type(params).__name__)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer", fix="use stop_token_ids")
        ids = self._checked(self._encode(prompt) if isinstance(prompt, str) else prompt)
        end_ids = () if params.ignore_eos else self._end_token_ids()
        seed = params.seed if params.seed is not None else request_seed(self._seed, next(self._numbers))
        own = self.sampling_defaults
        return Request(
            ids,
            params.with_defaults(own),
            seed % 2**64,
            tuple(sorted({*params.stop_token_ids, *end_ids})),
            # Without room for one token the engine refuses the request, with figures.
            params.max_new_tokens or max(1, self.max_context - len(ids)),
            params.stop,
            params.loop_repeats,
            own.loop_penalty if params.loop_penalty is None else params.loop_penalty,
            self._thinking_budget(ids, params),
        )

    def _thinking_budget(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> ThinkingBudget | None:
        if params.max_thinking_tokens is None:
            return None
        if self.tokenizer is None:
            raise RequestError("max_thinking_tokens needs a tokenizer", fix="leave it out")
        prompt_end = self.tokenizer.decode(prompt_ids[-_MARKER_TOKENS:], skip_special_tokens=False)
        thought_end = ThoughtEnd.of(self.tokenizer, self.chat_template, prompt_end)
        return ThinkingBudget(params.max_thinking_tokens, thought_end)

    def _end_token_ids(self) -> tuple[int, ...]:
        own = self.tokenizer.eos_token_ids if self.tokenizer else ()
        return (*self.config.eos_token_ids, *own)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer", fix="pass token ids instead of text")
        return self.tokenizer.encode(text, max_tokens=self.max_context)

    def _checked(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        if isinstance(token_ids, np.ndarray):
            token_ids = token_ids.tolist()
        if not isinstance(token_ids, Sequence):
            raise RequestError("prompt", expected="text or a list of token ids", actual=type(token_ids).__name__)
        vocab = self.config.vocab_size
        for index, token in enumerate(token_ids):
            is_integer = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
            if not is_integer or not 0 <= token < vocab:
                raise RequestError(f"prompt: token {index}", expected=f"an id in [0, {vocab})", actual=repr(token)[:80])
        return tuple(int(token) for token in token_ids)


def _open_tokenizer(folder: ModelFolder, is_dummy: bool) -> Tokenizer | None:
    """Random weights need no tokenizer; a real checkpoint has one."""
    if is_dummy and not is_there(folder.path / "tokenizer.json"):
        return None
    return Tokenizer.open(folder.path, vocab_size=folder.config.vocab_size)


class Assembly(Protocol):
    """What the module `assembly` of an executor offers."""

    def fetch_weights(self, folder: ModelFolder, settings: EngineConfig) -> None: ...
    def open_executor(self, folder: ModelFolder, settings: EngineConfig) -> tuple[Executor, MemoryPlan]: ...


def _on_executor(folder: ModelFolder, settings: EngineConfig, run: Callable[[Assembly], T]) -> T:
    """Run something on a GPU if it can be used and nothing else was asked for; on NumPy by wish, or for the bundled
    model.

    Only what runs is imported: a start on a GPU needs nothing of the NumPy executor.
    """
    if settings.executor == "reference":
        return run(_reference())
    from cpmrt.cuda import assembly

    try:
        return run(assembly)
    except NoDeviceError as error:
        if settings.executor == "cuda":
            raise
        if folder.is_bundled:
            return run(_reference())
        raise NoDeviceError(
            f"{error.what}, and the NumPy executor is about a hundred times slower",
            actual=error.actual,
            fix="use executor='reference' (--executor reference) to run it anyway, or see `cpmrt doctor`",
        ) from error


def _reference() -> Assembly:
    from cpmrt.reference import assembly

    return assembly
