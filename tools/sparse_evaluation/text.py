"""Long held-out text: documents of the packages at hand that the demo model was not trained on, end to end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from demo_model.corpus import Source, installed_packages, is_held_out, is_wanted, read_document, standard_library
from demo_model.retrieval import Tokens
from tokenizers import Tokenizer


@dataclass(frozen=True)
class HeldOutText:
    """Token ids, each document between its <s>, which is `bos`, and </s>, and what they are made of."""

    token_ids: Tokens
    bos: int
    provenance: str

    def windows(self, count: int, length: int) -> list[Tokens]:
        """At most `count` pieces of `length` tokens from all over the text, <s> first, none of them overlapping."""
        available = len(self.token_ids) // (length - 1)
        starts = np.linspace(0, available - 1, min(count, available)).astype(int) * (length - 1)
        return [np.concatenate([[self.bos], self.token_ids[start : start + length - 1]]) for start in starts]


def held_out_text(tokenizer: Tokenizer, bos: int, eos: int) -> HeldOutText:
    """The rule is that of the training, which goes by the path alone, so it holds for any version of a package."""
    packages, _ = installed_packages()
    pieces: list[np.ndarray] = []
    names: set[str] = set()
    for source in (standard_library(), *packages):
        texts = _documents(source)
        names |= {source.name} if texts else set()
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        pieces += [np.array([bos, *encoding.ids, eos], np.int64) for encoding in encodings]
    provenance = f"{len(pieces)} documents of {len(names)} packages that training left out"
    return HeldOutText(np.concatenate(pieces), bos, provenance)


def _documents(source: Source) -> list[str]:
    wanted = (path for path in source.paths if is_wanted(Path(path)) and is_held_out(f"{source.name}/{path}"))
    texts = (read_document(str(Path(source.root, path))) for path in wanted)
    return [text for text in texts if text is not None]
