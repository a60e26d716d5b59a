// Ends a pass of the steps that are the body of a WHILE node: decides whether the launch runs them once more.
//
//   formula   goes_on = num_passed + 1 < num_passes, and a row of the last step has a sequence that has not finished. If the
//             launch does not go on, the commands of its remaining passes, num_steps each, are answered with no token
//   operands  results (16) ResultRecord in mapped host memory; context StepContext; states (B) SlotState; slots (num_rows)
//             int32, of the last step's rows, -1: padding, or finished before; loop: the node's conditional handle
//   launch    grid 1, block 64, no shared memory
//   numerics  integers
//   oracle    reference/executor.py ReferenceExecutor: steps of a finished sequence give no token
//   source    CUDA Programming Guide, "Conditional Graph Nodes"; original
//   layout    this kernel has a file of its own, because a driver without conditional nodes cannot load it
#include "slot_state.cuh"

// The driver provides this function when it loads the kernel; no device library is linked.
extern "C" __device__ void cudaGraphSetConditional(uint64_t handle, unsigned value);

// Pointers to what an earlier kernel of the step wrote are not __restrict__, which would let the compiler move loads before pdl_wait.
// num_words: the words of the answer to a command.
extern "C" __global__ void __launch_bounds__(kMaxRows)
    KERNEL(loop_end)(ResultRecord* __restrict__ results, StepContext* context, const SlotState* states,
                     const int32_t* slots, uint64_t loop, int num_passes, int num_steps, int num_rows, int num_words) {
  pdl_begin();
  const int row = threadIdx.x, slot = row < num_rows ? slots[row] : -1;
  const uint64_t sequence = context->sequence;
  const int passed = context->num_passed + 1, left = (num_passes - passed) * num_steps;
  const bool runs = __syncthreads_or(slot >= 0 && !states[slot].finished);
  const bool goes_on = runs && left > 0;
  if (!goes_on && row < num_words) {
    for (int i = 1; i <= left; i++) publish(results, sequence + i, row, kNoToken, false);
  }
  if (row != 0) return;
  context->num_passed = goes_on ? passed : 0;
  if (!goes_on) context->next_entry = context->sequence = sequence + left;
  cudaGraphSetConditional(loop, goes_on);
}
