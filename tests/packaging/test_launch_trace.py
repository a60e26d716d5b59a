"""tools/launch_trace.py: it traces the launches of a start and notices a changed one.

It and tools/digests.py refuse to compare with nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
# In a process of its own: the tool puts a stand-in in CuPy's place.
CHECK = """
import copy
import launch_trace

setups, device = launch_trace.setups(), launch_trace.traced_device("sm_90")
for name in ("small 64", "small sparse", "small int4 eagle2 4"):
    before, after = (launch_trace.trace(setups[name], device) for _ in range(2))
    assert sum(map(len, before.values())) > 20, name
    assert not launch_trace.differences(before, after), name
    graph = next(graph for graph, launches in after.items() if launches)
    changed = copy.deepcopy(after)
    changed[graph][-1][3] = [64, 1, 1]
    (told,) = launch_trace.differences(before, changed)
    assert told.startswith(f"{graph}, launch {len(after[graph]) - 1}:"), told
    del changed[graph]
    assert launch_trace.differences(before, changed) == [f"{graph}: only before"]
screened = {graph for graph in launch_trace.trace(setups["small screened head"], device) if "screened" in graph}
assert screened >= {"decode 1 screened", "decode 1 short screened", "decode 16 screened"}, screened
drafting = launch_trace.trace(setups["small screened eagle2"], device)
heads = {graph for graph, launches in drafting.items() if "rescore" in {launch[0] for launch in launches}}
assert "speculate 0 1 screened" in heads and "speculate 0 1" in drafting.keys() - heads, heads
are_joined = {"small 1": True, "small int4 1": True, "small fp8": False, "qwen2": False, "qwen3": False, "big 1": False}
for name, is_joined in are_joined.items():
    graphs = launch_trace.trace(setups[name], device)
    short, unknown = graphs["decode 1 short"], graphs["decode 1"]
    assert (len(short) < len(unknown)) == is_joined, name
    grids = [[launch[2] for launch in graph if launch[0] == "decode_attention"] for graph in (short, unknown)]
    assert is_joined or grids == [[[8, 2, 1]] * 2, [[56, 2, 1]] * 2], name
    assert "decode 1 short" not in launch_trace.trace(setups[name], launch_trace.traced_device("portable")), name
sparse = launch_trace.trace(setups["small sparse"], device)
lengths = [len(sparse[f"decode 1{kind}"]) for kind in (" inside dense", " inside", "")]
assert lengths == sorted(set(lengths)), "what is known of a row spares launches"
short, dense = (sparse[f"decode 1{kind}"] for kind in (" short inside dense", " inside dense"))
assert len(short) == len(dense) and short != dense
"""


def test_a_start_is_traced_and_a_change_is_seen() -> None:
    ended = subprocess.run([sys.executable, "-c", CHECK], cwd=TOOLS, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("tool", [("launch_trace.py",), ("digests.py", "--executor", "reference")])
@pytest.mark.parametrize("content", [None, "no traces"])
def test_a_file_that_holds_nothing_to_compare_with_is_refused_at_once(tmp_path, tool, content) -> None:
    path = tmp_path / "before"
    if content is not None:
        path.write_text(content)
    command = [sys.executable, TOOLS / tool[0], *tool[1:], "--compare", path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and ended.stdout == ""
    assert f"{path}: expected a file that --write has written, got " in ended.stderr.splitlines()[-1]


def test_digests_of_no_case_are_an_error() -> None:
    command = [sys.executable, TOOLS / "digests.py", "--executor", "reference", "--only", "dmeo"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "--only: 'dmeo' finds none of " in ended.stderr and "demo" in ended.stderr
