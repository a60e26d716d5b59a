"""Kernels, their table, ops, header blocks and tests agree. Reads text only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kernel_builds import CONSTANTS, constant_sets

from cpmrt.cuda.build.source import kernels_folder, read_source, source_files
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.kernels import KERNELS
from cpmrt.ops.spec import OPS

ENTRY = re.compile(r'extern\s+"C"\s+__global__[^;{]*?KERNEL\((\w+)\)', re.DOTALL)
SIZE = re.compile(r"(?:#\s*ifn?def\s+|defined\s*\(?\s*)(\w+)")
# The seven items of a kernel's opening block, each by what its line begins with or must hold.
BLOCK = {
    "formula": r"formula|.* = ",
    "operands": r"operands|.*[\[(][^\])]*[\])].*(?:scalar_t|float|int)",
    "grid, block and shared memory": r"launch|grid",
    "numerics": r"numerics",
    "oracle": r"oracle",
    "source": r"source",
    "why the layout is so": r"layout|why",
}
TESTS = Path(__file__).parent


def entries(text: str) -> dict[str, str]:
    """Kernel name -> the file's opening comment and the comment right before the kernel."""
    opening = leading_comment(text.splitlines())
    return {
        match.group(1): opening + "\n" + leading_comment(text[: match.start()].splitlines()[::-1])
        for match in ENTRY.finditer(text)
    }


def leading_comment(lines: list[str]) -> str:
    """The `//` lines at the start, without the slashes."""
    comment = []
    for line in lines:
        if not line.startswith("//"):
            break
        comment.append(line.removeprefix("//").strip())
    return "\n".join(comment)


def sources() -> dict[str, str]:
    return {file: (kernels_folder() / file).read_text() for file in source_files()}


def missing_items(block: str) -> Iterator[str]:
    for item, pattern in BLOCK.items():
        if not re.search(rf"^(?:{pattern})", block, re.MULTILINE | re.IGNORECASE):
            yield item


def test_every_kernel_has_a_row_and_every_row_a_kernel() -> None:
    written = {(file, name) for file, text in sources().items() for name in entries(text)}
    listed = [(spec.file, spec.name) for spec in KERNELS]
    assert sorted(listed) == sorted(written)


def test_every_entry_point_is_named_by_the_macro() -> None:
    for file, text in sources().items():
        assert len(re.findall(r'extern\s+"C"\s+__global__', text)) == len(entries(text)) > 0, file


def test_every_row_names_an_op_or_says_why_not() -> None:
    for spec in KERNELS:
        assert (spec.op in OPS) != bool(spec.reason), f"{spec.name}: an op of ops/spec.py, or op='' and a reason"
        assert spec.op in OPS or spec.op == "", spec.name


def test_every_kernel_opens_with_its_block() -> None:
    found = {
        f"{file} {name}": list(missing_items(block))
        for file, text in sources().items()
        for name, block in entries(text).items()
    }
    assert not {kernel: missing for kernel, missing in found.items() if missing}


def test_a_block_with_an_item_left_out_is_seen() -> None:
    block = "formula y = x\noperands y (T) scalar_t\ngrid T\nnumerics fp32\noracle embed\nsource original\nlayout flat"
    assert list(missing_items(block)) == []
    for line in block.splitlines()[2:]:
        assert len(list(missing_items(block.replace(line, "...")))) == 1, line


def is_tested(spec: KernelSpec, tests: dict[str, str]) -> bool:
    own = f"test_{Path(spec.file).stem}.py"
    return own in tests or any(re.search(rf"""["']{spec.name}["']""", text) for text in tests.values())


def test_every_kernel_has_a_test() -> None:
    tests = {path.name: path.read_text() for path in TESTS.glob("test_*.py")}
    assert [spec.name for spec in KERNELS if not is_tested(spec, tests)] == []


def test_the_sizes_in_the_table_are_the_ones_the_sources_ask_for() -> None:
    assert CONSTANTS.keys() <= {spec.file for spec in KERNELS}
    for spec in KERNELS:
        source = read_source(spec.file)
        text = b"\n".join((source.text, *source.headers.values())).decode()
        known = set(SIZE.findall(text))
        sets = constant_sets(spec.file)
        assert all(constants.keys() <= known for constants in sets), f"{spec.file}: a size that no source asks for"
        assert any(set(spec.macros) <= constants.keys() for constants in sets), f"{spec.name}: {spec.macros}"


def test_no_kernel_asks_the_host_for_a_field_of_a_command() -> None:
    """Every warp that did would wait most of a microsecond behind the others: `read_header` asks once for a block."""
    asking = [file for file, text in sources().items() if re.search(r"load_host\(\s*&", text)]
    assert not asking
