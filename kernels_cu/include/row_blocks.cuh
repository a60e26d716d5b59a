// The blocks that share a row: a cluster of 8 on sm_90 and later unless PORTABLE, else one block that is its own peer.
#pragma once
#include "types.cuh"

#if __CUDA_ARCH__ >= 900 && !PORTABLE
#define ROW_BLOCKS __cluster_dims__(8, 1, 1)
constexpr int kBlocks = 8;
#else
#define ROW_BLOCKS
constexpr int kBlocks = 1;
#endif

DEVICE void row_arrive() {
  if constexpr (kBlocks > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
// Arrives at the barrier of the row's blocks without a fence: for threads that have written nothing that a peer will read.
DEVICE void row_announce() {
  if constexpr (kBlocks > 1) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
DEVICE void row_wait() {
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  }
}
DEVICE void row_barrier() {
  row_arrive();
  row_wait();
}

// Returns the address, in the shared memory of block `block` of the cluster, of what `local` points to in this block's.
DEVICE uint32_t peer_address(const void* local, int block) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(local))), "r"(block));
  return remote;
}
DEVICE uint32_t load_peer(const uint32_t* local, int block) {
  if constexpr (kBlocks == 1) return *local;
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(peer_address(local, block)) : "memory");
  return value;
}
DEVICE void store_peer(uint32_t* local, int block, uint32_t value) {
  if constexpr (kBlocks == 1) {
    *local = value;
  } else {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(peer_address(local, block)), "r"(value) : "memory");
  }
}
DEVICE void store_peer(uint64_t* local, int block, uint64_t value) {
  if constexpr (kBlocks == 1) {
    *local = value;
  } else {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(peer_address(local, block)), "l"(value) : "memory");
  }
}
// Sends a value to block `block` of the cluster, whose mbarrier counts its bytes. `local` and `barrier` are given as addresses of this
// block, and mean the same places in that one.
DEVICE void send_peer(const uint64_t* local, uint32_t barrier, int block, uint64_t value) {
  if constexpr (kBlocks > 1) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(barrier), "r"(block));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(peer_address(local, block)),
                 "l"(value), "r"(remote)
                 : "memory");
  }
}
