"""A kernel to launch before one under test: it starts the next kernel at once and writes long after that began.

So a kernel that reads its predecessor's output before `pdl_wait` gets stale values in every run.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

SOURCE = r"""
extern "C" __global__ void slow_writer(unsigned int** targets, unsigned int** sources, const int* sizes, int arrays) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  for (const long long start = clock64(); clock64() - start < 1000000;) {}
  for (int array = 0; array < arrays; array++)
    for (int i = threadIdx.x; i < sizes[array]; i += blockDim.x) targets[array][i] = sources[array][i];
}
"""


class SlowWriter:
    """The slow kernel: copies `after` over `targets`, arrays of whole 4-byte words, which hold `before` until then."""

    def __init__(self, cuda: Any, targets: Sequence[Any], before: Sequence[Any], after: Sequence[Any]):
        self.cuda, self.targets, self.before, self.after = cuda, targets, before, after
        self.kernel = cuda.cupy.RawKernel(SOURCE, "slow_writer")
        self.pointers = [cuda.array(np.array([a.data.ptr for a in arrays], np.uint64)) for arrays in (targets, after)]
        self.num_words = cuda.array(np.array([array.nbytes // 4 for array in targets], np.int32))

    def launch(self) -> None:
        with self.cuda.stream:
            for target, source in zip(self.targets, self.before, strict=True):
                target[...] = source
            self.kernel((1,), (1024,), (*self.pointers, self.num_words, np.int32(len(self.targets))))
