// The exchange of sums among the eight blocks that have the runs of the same tiles (SHARED_RUN = 1 and RUNS = 8). Each finishes an eighth of
// the tiles.
#pragma once
#include "packed_activations.cuh"

constexpr int kLaneTokens = ROWS == 1 ? 1 : 2;   // tokens of a token tile that a lane has sums of
constexpr bool kLooksEarly = NT <= 2;            // whether clusters read what an epilogue needs before the products; else while sums are on their way
using Sums = float[NT][4];   // a lane's sums of its warp's tile: [token tile][lo of tokens 2 t and 2 t + 1, hi of the same]

// The exchange with CLUSTERS: sums are sent to the shared memory of the block that finishes their tile, whose barrier counts the bytes that
// come. They lie there as [own tile][run][token tile][lane] float4.
struct Exchange {
  const Lane& at;
  int num_tiles, T;

  DEVICE uint32_t barrier() const { return at.shared + kReceivedBarrier; }
  // Returns the address at which the sums of a run arrive for the tile of the round that the warps numbered `place` have.
  DEVICE uint32_t received(int place, int run) const {
    return at.shared + kReceivedOffset + (place / RUNS * kFilledRuns + run) * NT * 512;
  }
  // Tells the barrier how many bytes will come in a round. One thread calls it.
  DEVICE void expect(int round) const {
    int count = 0;
    for (int place = at.run; place < kWarps; place += RUNS) count += Lane::tile(round, place) < num_tiles;
    mbarrier_arrive_expect(barrier(), count * kFilledRuns * ((T + 7) / 8) * 512);
  }
  // Sets up the barriers and arrives at that of the cluster. A cluster_wait must come between it and the first send.
  DEVICE void prepare() const {
    if (threadIdx.x == 0) {
      mbarrier_init(barrier(), 1), mbarrier_init(at.shared + kSquareBarrier, 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect(at.shared + kSquareBarrier, RUNS * T * 4);
      expect(0);
    }
    cluster_announce();
  }
  // Sends the warp's sums of a round to the block that finishes its tile.
  DEVICE void send(const Sums& out, int round) const {
    if (at.tile(round) >= num_tiles || at.slices == 0) return;
    const uint32_t to = peer_address(received(at.warp, at.run) + at.lane * 16, at.warp % RUNS);
    const uint32_t peer_barrier = peer_address(barrier(), at.warp % RUNS);
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
      if (nt * 8 < T) send_float4(to + nt * 512, peer_barrier, out[nt][0], out[nt][1], out[nt][2], out[nt][3]);
  }
  // Calls visit(i, tile, row, token, part) for each output that the thread finishes; `part` is the address of the lo row's sum in run 0.
  template <class Visit>
  DEVICE void visit_own(int round, Visit visit) const {
    int thread;   // read here, so that the compiler does not compute the places before the products, and keep them
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
#pragma unroll
    for (int i = 0; i < kThreadPairs; i++) {
      const int pair = thread + i * kThreads, place = pair / (NT * 64) * RUNS + at.run, tile = Lane::tile(round, place);
      const int nt = pair / 64 % NT, odd = pair / 32 % 2, token = nt * 8 + pair % 4 * 2 + odd;
      if (pair < kPairs && place < kWarps && tile < num_tiles && token < T)
        visit(i, tile, pair / 4 % 8, token, received(place, 0) + nt * 512 + pair % 32 * 16 + odd * 4);
    }
  }
  template <class Epilogue>
  DEVICE void look(Epilogue& epilogue, int round) const {
    visit_own(round, [&](int i, int tile, int row, int token, uint32_t) { epilogue.prefetch(0, i, tile, row, token); });
  }
  // Sends the warp's sums of a round, waits for those of the peers, and gives the block's share of outputs to the epilogue.
  template <class Epilogue>
  DEVICE void finish(const Sums& out, Epilogue& epilogue, const RowScale& scale, int round, bool is_last) const {
    if (!RECEIVED_APART) cluster_announce();   // weights and x in the place where peers send have been read and used: no fence
    if (!RECEIVED_APART || round > 0) cluster_wait();
    send(out, round);
    if (!kLooksEarly) look(epilogue, round);
    mbarrier_wait(barrier(), round & 1);
    if (NORM && !PREPARED) mbarrier_wait(at.shared + kSquareBarrier, 0);
    visit_own(round, [&](int i, int tile, int row, int token, uint32_t part) {
      float lo = 0.0f, hi = 0.0f;
#pragma unroll
      for (int run = 0; run < kFilledRuns; run++)
        lo += load_shared_float(part + run * NT * 512), hi += load_shared_float(part + run * NT * 512 + 8);
      const float factor = scale.of(token);
      epilogue.store(0, i, tile, row, token, lo * factor, hi * factor);
    });
    if (is_last) return;
    __syncthreads();   // all threads have seen this phase of the barrier end: the next one may end at once
    if (threadIdx.x == 0) expect(round + 1);
    cluster_arrive();
  }
};

constexpr int kDeparted = 1 << 16;   // what a block adds to an arrival counter when it needs it no more

// Counts an arrival, with release semantics: whoever has seen the count (arrivals_seen) sees all that the block's threads wrote before a
// barrier in front of this call.
DEVICE void announce(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
// Returns the counter, with acquire semantics.
DEVICE int arrivals_seen(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// The exchange without CLUSTERS, through memory: writes the warp's sums of a round, waits for those of the other blocks, and gives the block's
// share of outputs to the epilogue. partials (tiles, RUNS, NT, 32) float4; arrivals (tiles) int32, 0 before and after.
// A block may wait for others, because all blocks of a grid are on the device together: there are no more than multiprocessors. Kernels
// before this one end without waiting for it, and those after it start only when all its blocks have started.
template <class Epilogue>
DEVICE void finish_grid(const Sums& out, const Lane& at, Epilogue& epilogue, const RowScale& scale, int round,
                        int num_tiles, int T, float4* partials, int* arrivals) {
  constexpr int kRunParts = NT * 32;
  const int own = at.tile(round);
  if (own < num_tiles && at.slices > 0) {
    float4* const parts = partials + (static_cast<size_t>(own) * RUNS + at.run) * kRunParts + at.lane;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
      if (nt * 8 < T) __stcg(parts + nt * 32, make_float4(out[nt][0], out[nt][1], out[nt][2], out[nt][3]));
  }
  int* const arrived = arrivals + Lane::tile(round, 0);
  __syncthreads();
  int departed = 0;
  if (threadIdx.x == 0) {
    announce(arrived);
    while (arrivals_seen(arrived) % kDeparted < RUNS) {
    }
    departed = atomicAdd(arrived, kDeparted);
  }
  __syncthreads();
#pragma unroll 1
  for (int item = threadIdx.x; item < (kWarps + RUNS - 1) / RUNS * kRunParts; item += kThreads) {
    const int place = item / kRunParts * RUNS + at.run, tile = Lane::tile(round, place), part_of = item % kRunParts;
    const int first = part_of / 32 * 8 + item % 4 * 2, row = item / 4 % 8;
    if (place >= kWarps || tile >= num_tiles || first >= T) continue;
    const float4* const parts = partials + static_cast<size_t>(tile) * RUNS * kRunParts + part_of;
    float4 part[kFilledRuns];
#pragma unroll
    for (int run = 0; run < kFilledRuns; run++) part[run] = __ldcg(parts + run * kRunParts);
#pragma unroll
    for (int odd = 0; odd < kLaneTokens; odd++)
      if (first + odd < T) epilogue.prefetch(0, odd, tile, row, first + odd);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int run = 0; run < kFilledRuns; run++) sum.x += part[run].x, sum.y += part[run].y, sum.z += part[run].z, sum.w += part[run].w;
    const float factor = scale.of(first);
    epilogue.store(0, 0, tile, row, first, sum.x * factor, sum.z * factor);
    if (kLaneTokens == 1 || first + 1 >= T) continue;
    const float next_factor = scale.of(first + 1);
    epilogue.store(0, 1, tile, row, first + 1, sum.y * next_factor, sum.w * next_factor);
  }
  asm volatile("" : "+r"(departed));   // the thread waits for the result of its atomicAdd only here
  if (threadIdx.x == 0 && departed / kDeparted == RUNS - 1) *arrived = 0;
}
