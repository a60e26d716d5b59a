// Blocks of a cluster (sm_90 and later): their barrier, addresses in each other's shared memory, values sent there that a barrier counts.
#pragma once
#include "mbarrier.cuh"

// Arrives at the cluster's barrier without a fence: for threads that have written nothing that a peer will read.
DEVICE void cluster_announce() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Returns the address, in the shared memory of block `rank` of the cluster, of what lies at `address` in this block's.
DEVICE uint32_t peer_address(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Sends floats to a peer: `to` and `barrier`, which counts the bytes, are addresses in its memory (peer_address).
DEVICE void send_float4(uint32_t to, uint32_t barrier, float a, float b, float c, float d) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(a),
               "f"(b), "f"(c), "f"(d), "r"(barrier)
               : "memory");
}
DEVICE void send_float(uint32_t to, uint32_t barrier, float a) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(a), "r"(barrier)
               : "memory");
}
// Sends 16 bytes to block `peer`: to the place and the barrier, which counts them, that have these addresses in this block's memory.
DEVICE void send_piece(uint4 v, uint32_t to, uint32_t barrier, int peer) {
  send_float4(peer_address(to, peer), peer_address(barrier, peer), __uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
              __uint_as_float(v.w));
}
