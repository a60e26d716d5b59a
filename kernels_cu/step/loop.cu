// The end of steps that are the body of a WHILE node: whether the launch runs them once more.
//
//   formula   goes_on = num_passed + 1 < num_passes and a row of the last step has a sequence that has not finished; where
//             it does not go on, the commands left of those that came with the launch, num_steps for each pass, are
//             answered with no token
//   operands  results (16) ResultRecord in mapped host memory; context StepContext; states (B) SlotState; slots (num_rows)
//             int32, of the last step's rows, -1: padding, or finished before; loop: the node's conditional handle
//   launch    grid 1, block 64, no shared memory
//   numerics  integers
//   oracle    reference/executor.py ReferenceExecutor: steps of a finished sequence give no token
//   source    CUDA Programming Guide, "Conditional Graph Nodes"; original
//   layout    a file of its own: a driver that has no conditional nodes cannot load it
#include "slot_state.cuh"

// The driver has it: nothing is linked.
extern "C" __device__ void cudaGraphSetConditional(uint64_t handle, unsigned value);

// What an earlier kernel of the step wrote is not __restrict__: the compiler may move a load that it takes for one of
// a constant before pdl_wait. num_words: that answer a command.
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
