"""The kernel sources, the table KERNELS, the ops, the header blocks, the README and the tests agree with each other.
Reads text only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kernel_builds import CONSTANTS, constant_sets

from cpmrt.cuda.build.source import kernels_folder
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.kernels import KERNELS
from cpmrt.ops.spec import OPS

ENTRY = re.compile(r'extern\s+"C"\s+__global__[^;{]*?KERNEL\((\w+)\)', re.DOTALL)
DEFINED = re.compile(r"!?defined\((\w+)\)")
NAMES = re.compile(r"`([^`]+)`")
MULTI = re.MULTILINE | re.DOTALL | re.IGNORECASE
# The seven items of a kernel's header block, each with the pattern that one of its lines must begin with.
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
    """Return, by kernel name, the file's opening comment and the comment right before the kernel."""
    opening = leading_comment(text.splitlines())
    return {
        match.group(1): opening + "\n" + leading_comment(text[: match.start()].splitlines()[::-1])
        for match in ENTRY.finditer(text)
    }


def leading_comment(lines: list[str]) -> str:
    """Return the leading `//` lines, without the slashes."""
    comment = []
    for line in lines:
        if not line.startswith("//"):
            break
        comment.append(line.removeprefix("//").strip())
    return "\n".join(comment)


def sources() -> dict[str, str]:
    """Return the text of every `.cu` file by its path within the kernel folder, such as "rows/embed.cu", in order."""
    folder = kernels_folder()
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.cu"))}


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


def constants_of(text: str) -> tuple[set[str], set[str]]:
    """Return the compile-time constants of a `.cu` file: those that every build must define, and those that only some
    products define or that switch something on by being defined."""
    check = re.search(r"^#if( !defined.*?)\n#error", text, re.MULTILINE | re.DOTALL)
    tests = check.group(1) if check else ""
    always = {name for name in DEFINED.findall(re.sub(r"\([^()]*&&[^()]*\(\w+\)\)", "", tests))}
    switches = set(re.findall(r"^#ifdef (?!CPMRT_)(\w+)", text, re.MULTILINE))
    return always, set(DEFINED.findall(tests)) - always | switches


def test_the_sizes_that_a_file_asks_for_are_those_of_its_block_its_kernels_and_their_builds() -> None:
    assert CONSTANTS.keys() <= {spec.file for spec in KERNELS}
    for file, text in sources().items():
        always, sometimes = constants_of(text)
        item = re.search(r"^constants\b(.*?)(?=^(?:launch|grid)\b)", leading_comment(text.splitlines()), MULTI)
        assert set(re.findall(r"\b([A-Z][A-Z0-9_]+):", item.group(1) if item else "")) == always | sometimes, file
        for spec in KERNELS:
            if spec.file == file:
                assert always <= set(spec.macros) <= always | sometimes, spec.name
        for sizes in constant_sets(file):
            assert always <= sizes.keys() <= always | sometimes, (file, sizes)


def readme_rows() -> dict[str, list[str]]:
    """Return the rows of the README's tables: the other cells by the file or header in the first cell."""
    lines = (kernels_folder() / "README.md").read_text().splitlines()
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `"))
    return {cells[0].strip("`"): cells[1:] for cells in rows}


def test_the_readme_has_every_file_its_kernels_and_sizes() -> None:
    rows = readme_rows()
    for file, text in sources().items():
        assert set(NAMES.findall(rows[file][0])) == entries(text).keys(), file
        assert set(NAMES.findall(rows[file][2])) == set.union(*constants_of(text)), file


def headers() -> dict[str, Path]:
    return {path.relative_to(kernels_folder()).as_posix(): path for path in kernels_folder().rglob("*.cuh")}


def test_the_readme_has_every_header_and_who_includes_it() -> None:
    """The README lists who includes a header: the files for a header of one folder, the folders for one of `include`,
    which must be at least two, else the header belongs into that one folder."""
    rows, users = readme_rows(), includers()
    names = [Path(header).name for header in headers()]
    assert len(names) == len(set(names)), "two headers of one name"
    for header, path in headers().items():
        listed = set(NAMES.findall(rows[header][1]))
        if path.parent.name == "include":
            assert {name.strip("/") for name in listed} == rooms_of(path, users) and len(listed) > 1, header
        else:
            assert listed == {user.name for user in users[path.name]} != set(), header
    assert {file for file in rows if file.endswith((".cu", ".cuh"))} == headers().keys() | sources().keys()


def includers() -> dict[str, set[Path]]:
    """Return the files that include each header directly, by the header's name."""
    found: dict[str, set[Path]] = {}
    for path in kernels_folder().rglob("*.cu*"):
        for name in re.findall(r'#include "(?:.*/)?(.*?)"', path.read_text()):
            found.setdefault(name, set()).add(path)
    return found


def rooms_of(header: Path, users: dict[str, set[Path]]) -> set[str]:
    """Return the folders with a file that includes a header, directly or through another header of `include`."""
    rooms: set[str] = set()
    for user in users.get(header.name, ()):
        rooms |= rooms_of(user, users) if user.parent.name == "include" else {user.parent.name}
    return rooms


def test_no_kernel_asks_the_host_for_a_field_of_a_command() -> None:
    """A warp that reads a command's field from host memory waits most of a microsecond behind the others: kernels use
    `read_header`, which asks once for a block."""
    asking = [file for file, text in sources().items() if re.search(r"load_host\(\s*&", text)]
    assert not asking
