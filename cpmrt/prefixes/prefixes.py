"""The prefixes of one model: saved to files and loaded by hand, or kept in a folder for prompts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import RLock

from cpmrt import env
from cpmrt.caller_warnings import warn_caller
from cpmrt.config import EngineConfig
from cpmrt.errors import (
    CheckpointError,
    ClosedError,
    ContextLengthError,
    CpmrtError,
    PrefixError,
    RequestError,
    quoted,
    reason_of,
)
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.memory.plan import MemoryPlan
from cpmrt.prefixes import transfer
from cpmrt.prefixes.folder import PrefixFolder
from cpmrt.prefixes.identity import fingerprint
from cpmrt.prefixes.prefix_file import PrefixFile, PrefixWriter, Shapes
from cpmrt.prefixes.system_part import Message, TokensOf, system_part
from cpmrt.sharing.jobs import NoSlotError, Reading
from cpmrt.sharing.shared_engine import SharedEngine
from cpmrt.weights.model_folder import ModelFolder

MIN_TOKENS = 4 * PAGE_SIZE
"""The shortest beginning that a folder keeps: shorter ones are computed as fast as they are read."""
_WRITE_ELSEWHERE = "name a file in a folder where you may write, on a disk with enough room"
_KEEP_ELSEWHERE = "name a folder where you may write, on a disk with enough room"


class Prefixes:
    """Saves and loads the whole pages of a prompt's beginning, in jobs of the shared engine.

    With a `prefix_dir` in the settings `prepare` does both for the system parts of chats. Any thread may call.
    """

    def __init__(self, model: ModelFolder, settings: EngineConfig, plan: MemoryPlan, shared: SharedEngine):
        self._model, self._settings, self._plan, self._shared = model, settings, plan, shared
        self._engine = shared.engine
        name = settings.prefix_dir
        self._folder = None if name is None else PrefixFolder(Path(env.expanded(name)))
        self._stored = set[tuple[int, ...]]()
        """System parts that this process has read from the folder or written to it, if their pages are still known."""
        self._lock = RLock()
        """Held by the one thread that fetches; a signal handler in that thread may ask for another system part."""

    @property
    def has_folder(self) -> bool:
        """Whether there is a folder for the system parts of chats."""
        return self._folder is not None

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._model, self._settings, self._plan)

    @cached_property
    def _shapes(self) -> Shapes:
        regions = {region.name: region for region in self._plan.regions}
        return {name: (region.shape, region.dtype) for name, region in self._plan.paged(regions).items()}

    def save(self, path: str | Path, token_ids: tuple[int, ...]) -> int:
        """Compute the whole pages of a prompt and write them to a file; return the number of their tokens.

        Raises RequestError for a prompt without a whole page, ContextLengthError, PrefixError.
        """
        return self._save(_as_path(path), token_ids)

    def _save(self, path: Path, token_ids: tuple[int, ...], *, for_folder: bool = False) -> int:
        self._check_reuse()
        kept = token_ids[: len(token_ids) // PAGE_SIZE * PAGE_SIZE]
        if not kept:
            raise RequestError("the prompt is too short for a prefix", expected=f"at least {PAGE_SIZE} tokens",
                               actual=len(token_ids))  # fmt: skip
        self._check_length(len(kept))
        try:
            with PrefixWriter(path, self._fingerprint, kept, self._shapes) as writer:
                run = self._run_now if for_folder else self._run
                transfer.save(self._engine, run, writer, kept, reuses_known=for_folder)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise PrefixError(f"{path} cannot be written: {reason_of(error)}", fix=_WRITE_ELSEWHERE) from error
        return len(kept)

    def load(self, path: str | Path) -> int:
        """Read the pages in a file, for prompts that begin with their tokens; return the number of these.

        Raises PrefixError for a file of another model or one that is damaged, ContextLengthError.
        """
        self._check_reuse()
        file = PrefixFile.open(_as_path(path), self._fingerprint, self._shapes)
        try:
            self._check_length(len(file.token_ids))
            transfer.load(self._engine, self._run, file)
        finally:
            file.close()
        return len(file.token_ids)

    def prepare(self, token_ids: Sequence[int], messages: Sequence[Message], tokens_of: TokensOf) -> None:
        """Make the pages of a chat's system part known, where that is long; see `system_part` for the arguments.

        They are read from the folder, or written to it when the same system part is met for the second time. Where no
        slot is free the folder is left alone: waiting for one would hold up the prompt, and whatever else its thread
        has to do, for as long as other answers take. A failure only warns: the prompt is computed as it would be
        without a folder. Called in a listener, inside a step of the engine, this does nothing: the job that it would
        wait for could not run. Raises ClosedError.
        """
        if self._folder is None or len(token_ids) < MIN_TOKENS or self._shared.is_driven_here:
            return
        try:
            part = system_part(token_ids, messages, tokens_of)
            part = part[: len(part) // PAGE_SIZE * PAGE_SIZE]
            if len(part) >= MIN_TOKENS and not self._is_ready(part):
                with self._lock:
                    if not self._is_ready(part):
                        self._fetch(self._folder, part)
        except ClosedError:
            raise
        except NoSlotError:
            return
        except (CpmrtError, OSError, ValueError) as error:
            what = "the prefix folder cannot be used, so prompts are computed whole"
            if not isinstance(error, CpmrtError):
                error = PrefixError(f"{self._folder.name}: {reason_of(error)}", fix=_KEEP_ELSEWHERE)
            warn_caller(f"{what}: {error}")

    def _run(self, job: Reading) -> None:
        self._shared.run([job])

    def _run_now(self, job: Reading) -> None:
        """Run a job if a slot is free for it. Raises NoSlotError if none is."""
        job.waits = False
        self._run(job)

    def _is_ready(self, token_ids: tuple[int, ...]) -> bool:
        return token_ids in self._stored and self._is_known(token_ids)

    def _is_known(self, token_ids: tuple[int, ...]) -> bool:
        return self._engine.slots.num_known(token_ids) == len(token_ids)

    def _note_stored(self, token_ids: tuple[int, ...]) -> None:
        """Remember a system part, and forget those whose pages were dropped: they are read again when they are met."""
        self._stored = {part for part in self._stored if self._is_known(part)} | {token_ids}

    def _fetch(self, folder: PrefixFolder, token_ids: tuple[int, ...]) -> None:
        """Load the pages of these tokens, or write them if they were met before."""
        path = folder.path_of(self._fingerprint, token_ids)
        if folder.use(path) and self._loaded(path, token_ids):
            self._note_stored(token_ids)
        elif folder.was_met(path):
            self._save(path, token_ids, for_folder=True)
            self._note_stored(token_ids)
            folder.trim(keep=path)

    def _loaded(self, path: Path, token_ids: tuple[int, ...]) -> bool:
        """Load a file of the folder; one that is damaged or has other tokens is removed."""
        try:
            file = PrefixFile.open(path, self._fingerprint, self._shapes)
            try:
                if file.token_ids != token_ids:
                    raise PrefixError(f"{path} has other tokens than its name says")
                transfer.load(self._engine, self._run_now, file)
            finally:
                file.close()
        except (PrefixError, CheckpointError) as error:
            damage = PrefixError(error.what, expected=error.expected, actual=error.actual)  # no fix: it is made again
            warn_caller(f"a file of the prefix folder is made again: {damage}")
            path.unlink(missing_ok=True)
            return False
        return True

    def _check_reuse(self) -> None:
        limits = self._engine.limits
        if not self._settings.prefix_cache or not limits.num_pages:
            raise RequestError("prefixes need the prefix cache", fix="leave prefix_cache on")
        if limits.num_snapshots:
            raise RequestError("prefixes of a model with a recurrent state cannot be saved: pages are not all of it")

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self._engine.limits.max_context:
            raise ContextLengthError.of(
                "the prefix", self._engine.limits.max_context, num_tokens, fix="raise max_context"
            )


def _as_path(path: object) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise PrefixError("the path of a prefix", expected="a string or a Path", actual=quoted(path))
    return Path(env.expanded(path))
