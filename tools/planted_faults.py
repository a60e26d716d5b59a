"""Checks that compute-sanitizer sees our kernels: each of its tools must find a fault planted in a kernel.

    python tools/planted_faults.py /usr/local/cuda/bin/compute-sanitizer

Exit code 0 if every fault was found. With a fault's name instead of a path it launches that kernel.
"""

from __future__ import annotations

import subprocess
import sys

FAULTS = {
    "memcheck": "out[64] = 1;",
    "racecheck": "__shared__ int at[64]; at[threadIdx.x] = threadIdx.x; out[threadIdx.x] = at[63 - threadIdx.x];",
    "initcheck": "out[0] = out[1] + 1;",
}
NUM_BYTES, NUM_THREADS, FOUND = 256, 64, 99


def launch(fault: str) -> None:
    """Launches a kernel with this fault, with 64 threads on fresh memory of 64 words."""
    import cupy

    memory = cupy.cuda.Memory(NUM_BYTES)
    words = cupy.ndarray((NUM_BYTES // 4,), cupy.int32, cupy.cuda.MemoryPointer(memory, 0))
    source = f'extern "C" __global__ void planted(volatile int* out) {{ {FAULTS[fault]} }}'
    cupy.RawKernel(source, "planted")((1,), (NUM_THREADS,), (words,))
    cupy.cuda.runtime.deviceSynchronize()


def is_found(sanitizer: str, tool: str) -> bool:
    """Tells whether the tool of the sanitizer finds its fault, by its exit code for errors."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, __file__, tool]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    found = done.returncode == FOUND
    print(f"{tool}: {'finds its fault' if found else f'finds nothing (exit code {done.returncode})'}", flush=True)
    if not found:
        print(done.stdout, flush=True)
    return found


if __name__ == "__main__":
    if sys.argv[1] in FAULTS:
        launch(sys.argv[1])
    else:
        sys.exit(not all([is_found(sys.argv[1], tool) for tool in FAULTS]))
