// Taking commands out of their ring in page-locked host memory.
//
// The device counts entries by itself, so that a captured launch needs no new argument. A kernel that finds a command of
// another kind than its own traps: the rings are out of step and no result could be trusted.
#pragma once
#include "slot_state.cuh"

// Reads a word of the host's memory, never from a cache. A warp's request takes most of a microsecond, and requests for the same place are
// answered one after another, whichever blocks they come from.
DEVICE int load_host(const int32_t* source) { return __ldcv(source); }

DEVICE const int32_t* payload(const Command* command) { return reinterpret_cast<const int32_t*>(command + 1); }

// Returns where the next command lies in the ring, without taking it.
DEVICE const Command* next_command(const StepContext* context, const uint8_t* commands, int command_bytes) {
  const uint8_t* at = commands + static_cast<int64_t>(context->next_entry % kRingEntries) * command_bytes;
  return reinterpret_cast<const Command*>(at);
}

// Returns the header of a command. The first warp reads it for the block, all threads of which call this.
DEVICE Command read_header(const Command* command) {
  __shared__ Command header;
  int32_t* words = reinterpret_cast<int32_t*>(&header);
  if (threadIdx.x < sizeof(Command) / 4) {
    words[threadIdx.x] = load_host(reinterpret_cast<const int32_t*>(command) + threadIdx.x);
  }
  __syncthreads();
  return header;
}

// Counts the command as taken, and traps unless it is of the kernel's kind. All threads of the kernel's only block call it, after
// next_command.
DEVICE void take(StepContext* context, bool is_expected) {
  const uint64_t entry = context->next_entry;
  __syncthreads();
  if (threadIdx.x == 0) {
    context->next_entry = entry + 1;
    context->sequence = entry + 1;
    if (!is_expected) __trap();
  }
  __syncthreads();
}

// Takes the next command, which must be of `kind`: returns where it lies and puts its header into `header`.
DEVICE const Command* take_command(Command& header, StepContext* context, const uint8_t* commands, int command_bytes,
                                   CommandKind kind) {
  const Command* command = next_command(context, commands, command_bytes);
  header = read_header(command);
  take(context, header.kind == kind);
  return command;
}
