"""Moves the pages of a prefix between a shared engine and a file."""

from __future__ import annotations

from collections.abc import Callable, Generator

from cpmrt.config import Sampling
from cpmrt.engine import Engine
from cpmrt.executor import Admit, Prefill, Recall, Release
from cpmrt.prefixes.prefix_file import PrefixFile, PrefixWriter, runs_of
from cpmrt.sharing.jobs import Reading

Run = Callable[[Reading], None]
"""A function that runs a job to its end, and raises the error that ends it, if one does."""


def save(
    engine: Engine, run: Run, writer: PrefixWriter, token_ids: tuple[int, ...], *, reuses_known: bool = False
) -> None:
    """Compute whole pages of tokens in a slot, keep them for prompts, and write them.

    Pages that are known are computed anew, unless `reuses_known`: those of an answer were computed token by token, with
    other roundings. Raises OSError, and what the steps raise.
    """

    def work(slot: int, block_table: tuple[int, ...]) -> Generator[None, None, None]:
        loan = job.loan
        assert loan is not None and loan.pages is not None
        yield from _prefilled(engine, slot, block_table, token_ids, loan.pages.num_cached)
        engine.slots.keep(loan, token_ids)
        for pages in runs_of(len(block_table)):
            writer.add(engine.executor.read_pages(block_table[pages.start : pages.stop]))
            yield

    # One token more: the cache never gives the page of a prompt's last token.
    job = Reading(len(token_ids), work, (*token_ids, 0) if reuses_known else ())
    run(job)


def load(engine: Engine, run: Run, file: PrefixFile) -> None:
    """Fill pages from a file, and make them known to prompts that begin with its tokens. Raises PrefixError."""

    def work(slot: int, block_table: tuple[int, ...]) -> Generator[None, None, None]:
        for pages, contents in file.runs():
            engine.executor.write_pages(block_table[pages.start : pages.stop], contents)
            yield
        assert job.loan is not None
        engine.slots.keep(job.loan, file.token_ids)

    job = Reading(len(file.token_ids), work)
    run(job)


def _prefilled(
    engine: Engine, slot: int, block_table: tuple[int, ...], token_ids: tuple[int, ...], num_known: int
) -> Generator[None, None, None]:
    """Prefill the tokens behind the first `num_known`, which are in the pages already; yield after each chunk."""
    executor, chunk = engine.executor, engine.limits.prefill_chunk
    executor.submit(Admit(slot, Sampling(), 0, 1, (), block_table))
    try:
        for start in range(0, num_known, chunk):
            executor.submit(Recall(slot, token_ids[start : min(start + chunk, num_known)]))
        for start in range(num_known, len(token_ids), chunk):
            executor.submit(Prefill(slot, token_ids[start : start + chunk], start, False)).wait()
            yield
    finally:
        executor.submit(Release(slot))
