"""Nothing that an earlier kernel may have written is read before the wait for it: held in the machine code.

A parameter that is `const` and `__restrict__` looks like a constant to the compiler, which then may load it early.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from cpmrt.cuda import nvrtc
from cpmrt.cuda.compiler import compile_module
from cpmrt.cuda.kernels import constant_sets, files
from cpmrt.cuda.linear_plan import DeviceLimits, plan_linear
from cpmrt.dtypes import DType

H200 = DeviceLimits(num_sms=132, shared_bytes=232448, clusters=True)
QKV = [(1152, 128, 96), (768, 128, 64), (768, 256, 64), (4608, 4096, 128)]


def disassembler() -> str:
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = shutil.which("nvdisasm") or next((str(path) for path in wheels.glob("**/bin/nvdisasm")), None)
    if found is None:
        pytest.skip("needs nvdisasm (pip install nvidia-cuda-nvdisasm)")
    return found


def early_loads(cubin: Path) -> list[str]:
    """Plain global loads before the wait, in all functions. Copies of weights to shared memory are not among them."""
    text = subprocess.run([disassembler(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    loads = []
    for function in re.split(r"\.section\s+\.text\.", text)[1:]:
        code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", function)
        waits = [index for index, line in enumerate(code) if "ACQBULK" in line]
        loads += [line for line in code[: waits[0] if waits else 0] if re.search(r"\bLDG?\.", line)]
    return loads


@pytest.fixture(autouse=True)
def compiler():
    if nvrtc.version() is None:
        pytest.skip("needs NVRTC")


@pytest.mark.slow
@pytest.mark.parametrize("file", files())
def test_every_kernel_waits_before_it_reads(file):
    for constants in constant_sets(file):
        assert not early_loads(compile_module(file, "sm_90", DType.BFLOAT16, constants)), constants


@pytest.mark.parametrize(("rows", "hidden", "head_dim"), QKV)
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_the_qkv_product_waits_before_it_reads(rows, hidden, head_dim, num_rows):
    constants = plan_linear("qkv", rows, hidden, num_rows, H200).constants | {"HEAD_DIM": head_dim}
    assert not early_loads(compile_module("linear.cu", "sm_90", DType.FLOAT16, constants))
