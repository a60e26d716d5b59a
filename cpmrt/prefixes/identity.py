"""A fingerprint of everything that keys and values depend on besides the tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from cpmrt.config import EngineConfig
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models import decoder
from cpmrt.models.planning import position_limit
from cpmrt.weights.draft_folder import resolve
from cpmrt.weights.files import open_file, reading
from cpmrt.weights.gguf.names import is_gguf, split_paths
from cpmrt.weights.model_folder import ModelFolder

REVISION = 1
"""The version of the pages' contents, raised when pages of the same shapes come to hold other numbers."""
_MAX_HEADER_BYTES = 1 << 20


def fingerprint(folder: ModelFolder, settings: EngineConfig, plan: MemoryPlan) -> str:
    """Return 64 hexadecimal digits: two equal ones mean that pages of one model may be read by the other.

    They cover config, weights, rotary embedding, types and shapes of the pages, and the draft. Of a weight file they
    cover size, time of change and header, but not all bytes, which would take seconds. Raises CheckpointError.
    """
    digest = hashlib.sha256()
    for part in _parts(folder, settings, plan):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _parts(folder: ModelFolder, settings: EngineConfig, plan: MemoryPlan) -> Iterator[bytes]:
    config, limit = folder.config, position_limit(folder.config, settings)
    yield f"{REVISION} {settings.storage_dtype(config.dtype).label} {config!r}".encode()
    for table in decoder.tables(config.for_context(plan.max_context), PAGE_SIZE, limit):
        yield from (piece.tobytes() for piece in table.pieces())
    regions = {region.name: region for region in plan.regions}
    for name, region in plan.paged(regions).items():
        yield f"{name} {region.dtype} {region.shape[:1]} {region.shape[2:]}".encode()
    if settings.load_format == "dummy":
        yield f"random {settings.seed}".encode()
        return
    yield from _files(folder.path)
    if settings.draft is not None:
        yield from _files(small := resolve(settings.draft, folder.path))
        inner = settings.speculation and settings.speculation.inner
        if inner and inner.draft is not None:
            yield from _files(resolve(inner.draft, small))


def _files(folder: Path) -> Iterator[bytes]:
    """Yield the name, size, time of change and beginning of each weight file of a folder, or of a GGUF file."""
    for path in split_paths(folder) if is_gguf(folder) else sorted(folder.glob("*.safetensors")):
        with open_file(path) as file, reading(path):
            status = os.fstat(file.fileno())
            yield f"{path.name} {status.st_size} {status.st_mtime_ns}".encode()
            yield file.read(_MAX_HEADER_BYTES)
