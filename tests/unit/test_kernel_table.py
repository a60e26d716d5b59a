"""The README's table of single kernels: rates, shares, and the place it is written to."""

from __future__ import annotations

from pathlib import Path

import pytest
from tool_module import tool_module

from cpmrt.bench.shapes import shape_config
from cpmrt.config import ModelConfig
from cpmrt.cuda.kernels import KERNELS

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelConfig.from_hf(shape_config("minicpm4-8b"))


costs, table = tool_module("kernel_costs"), tool_module("kernel_table")


def test_a_row_for_each_kernel_and_case_and_a_column_for_each_shape():
    lines = [
        table.Line("big", "linear_head", "T=1", 139.0, "byte", 4.33e12, 0.95),
        table.Line("big", "gemm (o)", "T=4096", 200.0, "FLOP", 7.04e14, 0.87),
        table.Line("small", "linear_head", "T=1", 36.0, "byte", 4.18e12, 0.92),
    ]
    text = table.markdown(lines, "H200", {"byte": 4.5e12, "FLOP": 8e14}).splitlines()
    assert text[0] == "H200: memory reads 4.50 TB/s, the fastest product 800 TFLOP/s; bf16."
    assert text[2:] == [
        "| kernel | case | big | small |",
        "|---|---|---|---|",
        "| linear_head | T=1 | 139.0 us, 4,330 GB/s, 95% | 36.0 us, 4,180 GB/s, 92% |",
        "| gemm (o) | T=4096 | 200.0 us, 704 TFLOP/s, 87% |  |",
    ]


def test_only_what_stands_between_the_markers_is_replaced():
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    once = table.replaced(text, "new")
    assert once == f"before\n{table.BEGIN}\n\nnew\n\n{table.END}\nafter\n" == table.replaced(once, "new")
    for broken in ("", table.BEGIN, f"{table.END}\n{table.BEGIN}"):
        with pytest.raises(ValueError, match="no lines"):
            table.replaced(broken, "new")


def test_the_readme_has_the_markers():
    readme = (ROOT / "kernels_cu" / "README.md").read_text(encoding="utf-8")
    assert table.replaced(readme, "x") != readme


def test_costs_are_those_of_the_shape():
    assert costs.skinny_costs(MODEL)["linear_residual", 0, 16384].amount == 4096 * 16384 * 2
    assert costs.product_costs(MODEL, 10, "gemm")["gemm", 32768, 4096].amount == 2 * 10 * 32768 * 4096
    assert costs.chunk_costs(MODEL, 10)["rope_append", 0, 0].amount == 10 * 4608 * 2 * 2


def test_every_cost_is_of_a_kernel_that_there_is():
    known = {spec.name for spec in KERNELS} | {"cuBLASLt"}
    every = costs.skinny_costs(MODEL) | costs.chunk_costs(MODEL, 1)
    every |= costs.product_costs(MODEL, 1, "gemm") | costs.product_costs(MODEL, 1, "cuBLASLt")
    assert {name for name, _, _ in every} <= known
