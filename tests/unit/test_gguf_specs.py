"""How the weights of a GGUF file are held: what follows from the block types of their sources, and how they are read.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType
from cpmrt.errors import CheckpointError
from cpmrt.tensor_spec import Packing, Quantization, Source, TensorSpec
from cpmrt.weights.block_rows import load_blocks, unpacked_rows
from cpmrt.weights.gguf.specs import declared_blocks, gguf_specs
from cpmrt.weights.mapped_file import TensorEntry

ROWS, COLUMNS = 128, 256


def checkpoint(pairs: dict[str, int] | None = None, **dtypes: str) -> Any:
    """Return what a spec is made of: the entries of tensors of these types, and which of them lie in pairs."""
    entries = {
        name: TensorEntry(name, dtype, (ROWS, COLUMNS), Path("model.gguf"), 0, 0) for name, dtype in dtypes.items()
    }
    return SimpleNamespace(entries=entries, pairs=pairs or {})


def weight(name: str, *sources: str, product: Any = "qkv") -> TensorSpec:
    parts = tuple(Source(source, (ROWS, COLUMNS)) for source in sources)
    return TensorSpec(name, (len(parts) * ROWS, COLUMNS), parts, product=product)


@pytest.mark.parametrize(("q", "v", "expected"), [
    ("Q4_K", "Q6_K", Quantization(6, 16, symmetric=False, in_blocks=True)),
    ("Q4_0", "Q8_0", Quantization(8, 32, symmetric=True, in_blocks=True)),
    ("Q2_K", "Q3_K", Quantization(3, 16, symmetric=False, in_blocks=True)),
    ("IQ4_XS", "Q4_0", Quantization(8, 32, symmetric=True, in_blocks=True)),
    ("Q4_K", "F16", None), ("F16", "F16", None),
])  # fmt: skip
def test_a_weight_is_held_so_that_each_of_its_sources_fits(q: str, v: str, expected: Quantization | None) -> None:
    """With the most bits, the smallest groups, and offsets if one of them has any; in 16 bits if one of them is."""
    for types in ({"q": q, "v": v}, {"q": v, "v": q}):
        (spec,) = gguf_specs([weight("layers.0.qkv", "q", "v")], checkpoint(**types))
        assert spec.quant == expected
        assert [source.packing and source.packing.format for source in spec.sources] == [
            None if kind == "F16" else kind for kind in types.values()
        ]


def test_a_head_is_made_of_the_embedding_where_the_file_has_none() -> None:
    embedding, head = weight("embed_tokens", "e", product=None), weight("lm_head", "h", product="head")
    made = gguf_specs([embedding], checkpoint(e="Q8_0"))
    assert [(spec.name, spec.product) for spec in made] == [("embed_tokens", None), ("lm_head", "head")]
    assert made[0].sources == made[1].sources
    both = gguf_specs([embedding, head], checkpoint(e="Q8_0", h="Q6_K"))
    assert [spec.sources[0].name for spec in both] == ["e", "h"]
    assert [spec.name for spec in gguf_specs([embedding], checkpoint(e="F16"))] == ["embed_tokens"]


@pytest.mark.parametrize(("depth", "wide"), [
    (32, {*range(4), 6, 9, 12, 15, 18, 21, 24, 27, *range(28, 32)}),
    (24, {*range(3), 5, 8, 11, 14, 17, *range(20, 24)}),
])  # fmt: skip
def test_half_of_the_layers_of_a_mixture_have_six_bits_where_llama_cpp_gives_them(depth: int, wide: set[int]) -> None:
    """`use_more_bits` of llama.cpp: the first and the last eighth, and every third layer between."""
    names = [(layer, part) for layer in range(depth) for part in ("q_proj", "v_proj", "down_proj")]
    specs = [weight(f"layers.{layer}.{part}", f"model.layers.{layer}.{part}.weight") for layer, part in names]
    made = declared_blocks([*specs, weight("lm_head", "lm_head.weight", product="head")], "Q4_K_M")
    packings = [spec.sources[0].packing for spec in made]
    kinds = [packing and packing.format for packing in packings]
    assert kinds == [*("Q6_K" if layer in wide and part != "q_proj" else "Q4_K" for layer, part in names), "Q6_K"]


@pytest.mark.parametrize(("head_dim", "first"), [(4, (0, 2, 1, 3)), (64, tuple(range(0, 64, 2))), (96, None)])
def test_rows_in_pairs_are_taken_in_the_order_of_the_model(head_dim: int, first: tuple[int, ...] | None) -> None:
    """Rows that make no whole heads stay as they are; the check of the weights refuses them."""
    (spec,) = gguf_specs([weight("layers.0.qkv", "q")], checkpoint({"q": head_dim}, q="Q4_K"))
    rows = spec.sources[0].rows
    assert (rows and rows[: len(first or ())]) == first and (rows is None or sorted(rows) == list(range(ROWS)))


@pytest.mark.parametrize("rows", [None, (2, 0, 3, 1)])
@pytest.mark.parametrize("is_right", [True, False])
def test_blocks_are_read_in_the_order_of_the_model_if_their_scales_are_finite(
    rows: tuple[int, ...] | None, is_right: bool
) -> None:
    """Each row has two blocks of Q4_0 with the scale 1 and the codes 8 + its number."""
    stored = np.array([[0, 0x3C, *[0x11 * (8 + row)] * 16] * 2 for row in range(4)], np.uint8)
    if not is_right:
        stored[2, 19] = 0x7C
    source = Source("w", (4, 64), Packing("Q4_0", 32, True, row_bytes=36), rows)
    entries = {"w": TensorEntry("w", "Q4_0", (4, 64), Path("model.gguf"), 0, 0)}
    file: Any = SimpleNamespace(view=lambda name: stored, entries=entries)
    out = np.zeros((4, 36), np.uint8)
    spec = TensorSpec("layers.0.down", (4, 64), (source,), Quantization(4, 32, in_blocks=True))
    if is_right:
        load_blocks(spec, file, [out])
        values = np.concatenate(list(unpacked_rows(source, file, DType.FLOAT32)))
        order = list(rows or range(4))
        assert np.array_equal(out, stored[order]) and np.array_equal(values, np.repeat(order, 64).reshape(4, 64))
    else:
        for read in (lambda: load_blocks(spec, file, [out]), lambda: list(unpacked_rows(source, file, DType.FLOAT32))):
            with pytest.raises(CheckpointError, match="not finite"):
                read()
