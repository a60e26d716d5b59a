"""The public entry: a model loaded, planned and ready to generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np

from cpmrt.collector import no_collections
from cpmrt.config import EngineConfig, ModelConfig, SamplingDefaults, SamplingParams, SparseSetting
from cpmrt.config.engine import parse_bytes
from cpmrt.dtypes import F32
from cpmrt.errors import ConfigError, CpmrtError, quoted
from cpmrt.executor_choice import begin_device
from cpmrt.keywords import checks_keywords

# Imported for types only: `LLM.__init__` has the driver create its context while it imports these, which takes as long.
if TYPE_CHECKING:
    from cpmrt.engine import Engine, Request
    from cpmrt.engine.engine import StepListener
    from cpmrt.executor import Executor
    from cpmrt.generation import Completion
    from cpmrt.job_maker import Message, Pooling, Prompt, Prompts, Tool
    from cpmrt.memory.plan import MemoryPlan
    from cpmrt.sharing.jobs import Generation, Job, Reading
    from cpmrt.sharing.shared_engine import SharedEngine
    from cpmrt.sharing.text_stream import TextStream
    from cpmrt.tool_use.tool_choice import ToolChoice

SAMPLING_HINTS = {
    **{each.name: f"pass params=SamplingParams({each.name}=...)" for each in fields(SamplingParams)},
    "stream": "use llm.stream(prompt), or llm.stream(llm.chat_prompt(messages))",
}
"""Advice for keyword arguments that belong elsewhere, by their names."""


class LLM:
    """A language model on one device, for any number of threads.

    Calls of several threads run together as far as there are slots (`max_sequences`), else one after the other; each
    gets what it would get alone. `close` ends calls that still wait with a ClosedError.

    `model` is a folder, a GGUF file or a hub id ("org/name", of a GGUF file "org/name:Q4_K_M"); None is the bundled
    demo model. `executor`: "auto", "cuda" or "reference" (NumPy). `dtype` of weights, KV and activations: "auto" (the
    checkpoint's), "bfloat16", "float16", "float32". `max_context` in tokens and `memory_budget` in bytes (or such as
    "8GiB") bound the memory plan (None: the model's own context, what is free). `lm_head_bits` 8 or 4 rounds the output
    head to that many bits; with `lm_head_screen` a GPU reads an 8-bit copy of the head and few rows of the head itself,
    for the same tokens (None: where the copy is small). `kv_dtype="fp8"` keeps keys and values in 8 bits
    (`ops.Fp8Pages`), those of a draft's own layers in 16. `prefix_cache` lets a prompt reuse what an earlier one that
    began alike has computed, and changes no bit. "fast" reuses what decode steps have written too, so that the next
    turn of a chat computes only its new part; a prefill would round that a little differently. `prefix_dir` is a folder
    that keeps the keys and values of long system messages from one start to the next (`cpmrt.prefixes`).

    `draft` makes decoding faster and changes no token: a folder or hub id of an EAGLE or DSpark draft or of a smaller
    model with the same tokenizer, the name of a folder within the model's own, or "lookup", which needs no model.
    `speculate`: "auto" (a few tree shapes, of which the engine takes the one that pays off, or none), "off", or an
    object with any of num_passes, top_k, tree_size (one tree), shapes (a list of those three), lookup (tokens that
    followed the last three where they came before, in place of a draft's tree), inner (of a small model that drafts:
    its own draft, by name or as an object with draft and such keys), adaptive, draft_vocab (FR-Spec: how many tokens,
    or a file that lists them), window, head_bits, layer_bits, residual_scale, min_confidence (DSpark: how likely to be
    accepted a drafted token must be), method (`config.speculate_argument`) and simulate_accept, for benchmarks on
    random weights: a draft step then gives that many tokens on average, and the text means nothing.

    `load_format="dummy"` draws random weights for the config. They and seeds that requests lack derive from `seed`.
    `revision` is a branch, tag or commit of a hub. `hf_overrides` replace keys of config.json. `sparse`: "auto"
    (block-sparse attention if config.json has a sparse_config), "off", or fields of it that replace those of
    config.json or the defaults, such as {"topk": 32}, {}. A step computes at most `prefill_chunk` tokens of a prompt.
    On a GPU a launch has `steps_per_launch` decode steps (1 to 8), `cuda_graphs=False` launches kernel by kernel, and
    with `dependent_launch=False` each kernel waits for the one before. `on_step` is called with each step and result.

        >>> llm = LLM()                                              # the bundled model
        >>> llm = LLM("openbmb/MiniCPM4-0.5B", max_sequences=4)      # of the hub, four sequences together
        >>> llm = LLM("folder", executor="reference", memory_budget="8GiB")

    Raises CheckpointError, ConfigError, UnsupportedModelError, MemoryPlanError or NoDeviceError.
    """

    @checks_keywords(SAMPLING_HINTS)
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
        lm_head_screen: bool | None = None,
        prefix_cache: bool | str = True,
        kv_dtype: str = "auto",
        prefix_dir: str | Path | None = None,
        draft: str | Path | None = None,
        speculate: str | Mapping[str, Any] = "auto",
        on_step: StepListener | None = None,
    ):
        budget = parse_bytes(memory_budget) if isinstance(memory_budget, str | float) else memory_budget
        settings = EngineConfig(
            executor=executor, dtype=dtype, max_context=max_context, memory_budget=budget, load_format=load_format,
            seed=seed, prefill_chunk=prefill_chunk, max_sequences=max_sequences, cuda_graphs=cuda_graphs,
            dependent_launch=dependent_launch, steps_per_launch=steps_per_launch, lm_head_bits=lm_head_bits,
            lm_head_screen=lm_head_screen, prefix_cache=prefix_cache, kv_dtype=kv_dtype,
            prefix_dir=str(prefix_dir) if isinstance(prefix_dir, Path) else prefix_dir,
        )  # fmt: skip
        if on_step is not None and not callable(on_step):
            raise ConfigError("on_step", expected="a function of a step and its result", actual=quoted(on_step))
        begin_device(settings)
        with no_collections():
            from cpmrt.engine import Engine
            from cpmrt.loaded_model import load_model

        self._loaded = loaded = load_model(
            model, settings, revision=revision, hf_overrides=hf_overrides, sparse=sparse, draft=draft,
            speculate=speculate,
        )  # fmt: skip
        self._seed, self._name = settings.seed, "the bundled model" if model is None else str(model)
        self.config: ModelConfig = loaded.folder.config
        self.sampling_defaults: SamplingDefaults = loaded.folder.sampling
        self.tokenizer, self.chat_template = loaded.tokenizer, loaded.chat_template
        adaptive = loaded.settings.drafts_adaptively
        self.use(Engine(loaded.executor, on_step, prefix_cache=prefix_cache, adaptive=adaptive))

    def use(self, engine: Engine) -> None:
        """Run everything on this engine from now on: tests bring one of their own."""
        from cpmrt.job_maker import JobMaker
        from cpmrt.prefixes.prefixes import Prefixes
        from cpmrt.sharing.shared_engine import SharedEngine

        # Nothing here refers back to the LLM, so that its memory is freed as soon as nobody refers to it any more.
        loaded, self._shared = self._loaded, SharedEngine(engine, self.tokenizer)
        self._prefixes = prefixes = Prefixes(loaded.folder, loaded.settings, loaded.plan, self._shared)
        self.maker = JobMaker(
            engine, self.config, self.tokenizer, self.chat_template, self.sampling_defaults, self._seed,
            prefixes.prepare if prefixes.has_folder else None,
        )  # fmt: skip

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = ..., *, progress: bool = ...) -> Completion: ...
    @overload
    def generate(
        self, prompt: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = ..., *, progress: bool = ...
    ) -> list[Completion]: ...
    @checks_keywords(SAMPLING_HINTS)
    def generate(
        self,
        prompt: Prompt | Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> Completion | list[Completion]:
        """Continue a prompt: text, or token ids that are taken as they are.

        A list of prompts is continued together, as many at a time as there are slots (`max_sequences`), and gives a
        list of answers in their order; `params` may then be a list too, and `progress` shows a bar on the terminal.
        `params.n` answers to one prompt are its `choices`. Raises RequestError, ContextLengthError.

            >>> llm.generate("The capital of France is", SamplingParams(max_new_tokens=8)).text
            >>> [answer.text for answer in llm.generate(["one", "two"], progress=True)]
            >>> llm.generate("Once", SamplingParams(n=3, temperature=0.8)).choices[2].text
        """
        return self._answers(*self.maker.groups(prompt, params), progress)

    def _answers(
        self, groups: list[list[Generation]], are_several: bool, progress: bool
    ) -> Completion | list[Completion]:
        from cpmrt.progress import progress_bar
        from cpmrt.sharing.jobs import completion_of

        jobs = [job for group in groups for job in group]
        with progress_bar(len(jobs)) if progress else nullcontext(_ignore) as note:
            self._shared.run(jobs, note)
        answers = [completion_of(group) for group in groups]
        return answers if are_several else answers[0]

    @checks_keywords(SAMPLING_HINTS)
    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TextStream:
        """Continue a prompt like `generate`, but return its text piece by piece.

        Its `completion` holds the whole answer. A stream that is closed or left before its end is cancelled.

            >>> for piece in llm.stream("def read_lines(path):"):
            ...     print(piece.text, end="", flush=True)
        """
        from cpmrt.sharing.text_stream import TextStream

        return TextStream(self._shared, self.maker.only_choice(prompt, params))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = ...,
        *,
        tools: Sequence[Tool] | None = ...,
        tool_choice: ToolChoice = ...,
        enable_thinking: bool | None = ...,
        allow_special_tokens: bool = ...,
        template_kwargs: Mapping[str, Any] | None = ...,
        progress: bool = ...,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = ...,
        *,
        tools: Sequence[Tool] | None = ...,
        tool_choice: ToolChoice = ...,
        enable_thinking: bool | None = ...,
        allow_special_tokens: bool = ...,
        template_kwargs: Mapping[str, Any] | None = ...,
        progress: bool = ...,
    ) -> list[Completion]: ...
    @checks_keywords(SAMPLING_HINTS)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        enable_thinking: bool | None = None,
        allow_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> Completion | list[Completion]:
        """Answer a conversation: messages of {"role", "content"}, rendered by the checkpoint's chat template.

        A list of conversations gives a list of answers, as `generate` has it. `template_kwargs` are further variables
        of the template. Special tokens such as <|im_end|> that users, tools and documents write are plain text, so that
        nobody can forge a turn; `allow_special_tokens` makes them count.
        `tools` are functions as the OpenAI API describes them; the answer's `tool_calls` are those that it calls. With
        the `tool_choice` "required" it calls one or more, and a tool's name makes it call that one, all in the model's
        own format and with arguments that their schema allows; with "none" the model does not hear of any, and with
        OpenAI's object `allowed_tools` it calls no others. "auto" is an error if the chat template shows no tools.

            >>> llm.chat([{"role": "user", "content": "What does os.path.join do?"}]).text
        """
        groups, are_several = self.maker.chat_groups(
            messages,
            params,
            tools,
            tool_choice,
            enable_thinking=enable_thinking,
            allow_special_tokens=allow_special_tokens,
            template_kwargs=template_kwargs,
        )
        return self._answers(groups, are_several, progress)

    @checks_keywords()
    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        allow_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, for `stream`; arguments as for `chat`. May wait with a `prefix_dir`.

            >>> llm.stream(llm.chat_prompt([{"role": "user", "content": "Hi"}], enable_thinking=False))
        """
        return self.maker.chat_reader(
            tools=tools,
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
            allow_special_tokens=allow_special_tokens,
            template_kwargs=template_kwargs,
        )(messages)

    @checks_keywords()
    def logits(self, prompt: Prompt) -> F32:
        """Return the logits at every position: float32 [T, V], in the model's vocabulary order. Waits for a slot.

            >>> llm.logits("def f(").argmax(-1)
        """
        return self._read([self.maker.logits(prompt)])[0]

    @checks_keywords()
    def score(self, prompt: Prompt) -> F32:
        """Return the natural log-probability of each token after the first, given those before it: float32 [T - 1].

        Text begins with the tokenizer's BOS token if there is one. Waits for a slot. Raises NonFiniteLogitsError.

            >>> perplexity = float(np.exp(-llm.score("some text").mean()))
        """
        return self._read([self.maker.score(prompt)])[0]

    @checks_keywords()
    def embed(self, prompt: Prompt | Prompts, *, pooling: Pooling = "mean", normalize: bool = True) -> F32:
        """Embed a text from the outputs of the model's final norm: float32 [H], or [N, H] for a list of N texts.

        `pooling`: the "mean" of all positions, or the "last" token, which alone has seen the whole text. With
        `normalize` its length is 1. Waits for slots. Raises NonFiniteLogitsError where the model gives NaN or infinity.

            >>> vectors = llm.embed(["a cat", "a kitten", "a car"])
            >>> vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
        """
        from cpmrt.job_maker import is_batch

        vectors = self._read(self.maker.embed(prompt, pooling, normalize))
        return np.stack(vectors) if is_batch(prompt) else vectors[0]

    @checks_keywords(SAMPLING_HINTS)
    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Return the engine's request for a prompt, for servers and tools. Raises RequestError."""
        return self.maker.request(prompt, params)

    @checks_keywords()
    def save_prefix(self, path: str | Path, prompt: Prompt) -> int:
        """Write the keys and values of a prompt's whole pages of 64 tokens to a file; return the number of tokens.

        The prefix cache has them then too. Raises PrefixError, RequestError, ContextLengthError.
        """
        return self._prefixes.save(path, self.maker.token_ids(prompt))

    @checks_keywords()
    def load_prefix(self, path: str | Path) -> int:
        """Read a file of `save_prefix`, so that prompts that begin with its tokens skip them; return their number.

        Raises PrefixError (damaged, or of another model or settings), RequestError, ContextLengthError.
        """
        return self._prefixes.load(path)

    def prepare_next_turn(self) -> None:
        """Compute the last answers once more, as a prompt computes them, so that the next turns find them in the cache.

        A program calls it while a user reads or types, as servers and `cpmrt chat` do; else the next turn does it.
        It has no effect with `prefix_cache="fast"` and on the NumPy executor.
        """
        self._shared.remake_answers()

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan: everything that was allocated, part by part; `str(plan)` is a table."""
        return self._loaded.plan

    @property
    def executor(self) -> Executor:
        """The executor, which carries out the steps, for tools that drive it themselves; closed with this object."""
        return self.engine.executor

    @property
    def engine(self) -> Engine:
        """The state machine, for tools that drive it themselves while nothing else uses this object."""
        return self._shared.engine

    @property
    def shared(self) -> SharedEngine:
        """The shared engine, which runs the jobs of all threads, for a server."""
        return self._shared

    @property
    def max_context(self) -> int:
        """The most tokens of a sequence, prompt and new ones together."""
        return self.engine.limits.max_context

    def close(self) -> None:
        """Free everything; calls that still wait, in whatever thread, raise ClosedError. May be called again."""
        self._shared.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        limits, executor = self.engine.limits, type(self.executor).__name__.removesuffix("Executor").lower()
        return (
            f"LLM({self._name!r}, executor={executor!r}, max_context={limits.max_context}, "
            f"max_sequences={limits.max_sequences})"
        )

    def __reduce__(self) -> NoReturn:
        fix = "pass its name and settings, and make an LLM where it is used"
        raise CpmrtError("an LLM cannot be pickled or copied: it holds the memory of a device", fix=fix)

    def _read(self, readings: list[Reading]) -> list[F32]:
        self._shared.run(readings)
        return [reading.result for reading in readings]


def _ignore(job: Job) -> None:
    """Take no note of a job that has ended."""
