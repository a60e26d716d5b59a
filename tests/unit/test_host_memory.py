"""The host memory that may be used: the machine's, or less under a limit of the process or its control group."""

import json
import resource
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from cpmrt.config import ModelConfig
from cpmrt.memory.host_memory import available_bytes
from cpmrt.models.decoder import tables

GIB = 2**30
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 1, "vocab_size": 512, "max_position_embeddings": 2**20,
}  # fmt: skip


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


MACHINE = {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n"}
GROUP = "sys/fs/cgroup/outer/inner"


def test_a_machine_without_limits_gives_what_is_available(tmp_path):
    assert available_bytes(write(tmp_path, MACHINE)) == 8 * GIB


@pytest.mark.parametrize(("limits", "expected"), [
    ({f"{GROUP}/memory.max": "max", f"{GROUP}/memory.current": "1"}, 8 * GIB),
    ({f"{GROUP}/memory.max": str(3 * GIB), f"{GROUP}/memory.current": str(GIB)}, 2 * GIB),
    ({f"{GROUP}/memory.max": str(3 * GIB), f"{GROUP}/memory.current": str(2 * GIB),
      f"{GROUP}/memory.stat": f"anon 5\ninactive_file {GIB}\n"}, 2 * GIB),
    ({"sys/fs/cgroup/outer/memory.max": str(GIB), "sys/fs/cgroup/outer/memory.current": "0",
      f"{GROUP}/memory.max": str(2 * GIB), f"{GROUP}/memory.current": "0"}, GIB),
    ({"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": str(2 * GIB)}, 0),
])  # fmt: skip
def test_the_narrowest_control_group_counts(tmp_path, limits, expected):
    files = {**MACHINE, "proc/self/cgroup": "3:cpu:/x\n0::/outer/inner\n", **limits}
    assert available_bytes(write(tmp_path, files)) == expected


def test_a_limit_of_the_process_counts():
    code = (
        "import resource; from cpmrt.memory.host_memory import available_bytes; "
        f"resource.setrlimit(resource.RLIMIT_AS, ({2 * GIB}, {2 * GIB})); print(available_bytes())"
    )
    found = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert GIB < found < 2 * GIB


def test_what_the_process_has_mapped_already_is_no_longer_free(tmp_path):
    """The first number of statm counts pages."""
    root = write(tmp_path, {**MACHINE, "proc/self/statm": f"{GIB // resource.getpagesize()} 5 5 5 0 5 0\n"})
    code = (
        "import resource; from pathlib import Path; from cpmrt.memory.host_memory import available_bytes; "
        f"resource.setrlimit(resource.RLIMIT_AS, ({3 * GIB}, {3 * GIB})); print(available_bytes(Path({str(root)!r})))"
    )
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) == 2 * GIB


def test_filling_the_rotary_table_takes_little_beside_it():
    config = ModelConfig.from_hf(CONFIG)
    (table,) = tables(config, 2**18, 2**18)
    array = np.empty(table.spec.shape, table.spec.dtype)
    tracemalloc.start()
    for part, values in table.parts(array, lambda values: values):
        part[:] = values
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20 < array.nbytes // 4
    angle = (2**18 - 1) / 10000.0 ** (2 / 128)
    np.testing.assert_allclose(array[:, -1, 1], [np.cos(angle), np.sin(angle)], atol=1e-6)


@pytest.mark.all
def test_what_the_system_refuses_is_an_error_of_the_memory_plan(tmp_path):
    """Under a memory limit the plan refuses a requested context that does not fit, before any allocation."""
    from tiny_checkpoint import write_checkpoint

    folder = write_checkpoint(tmp_path, max_position_embeddings=2**31 - 1)
    code = (
        "import resource, sys\nfrom cpmrt import LLM\nfrom cpmrt.errors import MemoryPlanError\n"
        "budget = int(sys.argv[2]) or None\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({4 * GIB}, {4 * GIB}))\n"
        "try:\n"
        "    LLM(sys.argv[1], executor='reference', max_context=2**31 - 1, memory_budget=budget)\n"
        "except MemoryPlanError as error:\n"
        "    print(error)\n"
        "llm = LLM(sys.argv[1], executor='reference')\n"
        "print(json.dumps([llm.plan.total_bytes, llm.max_context]))\n"
    )
    for budget, words in ((0, "does not fit"), (2**50, "system does not give the memory")):
        command = [sys.executable, "-c", "import json\n" + code, str(folder), str(budget)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert words in lines[0]
        total, context = json.loads(lines[1])
        assert total < 4 * GIB and 2**16 < context < 2**31 - 1
