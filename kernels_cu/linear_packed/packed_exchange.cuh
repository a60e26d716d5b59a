// How the eight blocks with the runs of the same tiles exchange their sums (SHARED_RUN = 1 and RUNS = 8); each finishes an eighth.
#pragma once
#include "packed_activations.cuh"

constexpr int kLaneTokens = ROWS == 1 ? 1 : 2;   // of a token tile
constexpr bool kLooksEarly = NT <= 2;            // at what an epilogue needs: before the products, or while sums are on their way
using Sums = float[NT][4];   // of a lane and its warp's tile: token tile, {lo: token 2t, 2t+1; hi: the same}

// With CLUSTERS: through the shared memory of the block that finishes a tile, which counts the bytes that come: received [own tile][run][token
// tile][lane] float4.
struct Exchange {
  const Lane& at;
  int num_tiles, T;

  DEVICE uint32_t barrier() const { return at.shared + kReceivedBarrier; }
  // Where the sums of a run for the tile at `place` arrive.
  DEVICE uint32_t received(int place, int run) const {
    return at.shared + kReceivedOffset + (place / RUNS * kFilledRuns + run) * NT * 512;
  }
  // Says how many bytes will come in a round. One thread calls it.
  DEVICE void expect(int round) const {
    int count = 0;
    for (int place = at.run; place < kWarps; place += RUNS) count += Lane::tile(round, place) < num_tiles;
    mbarrier_arrive_expect(barrier(), count * kFilledRuns * ((T + 7) / 8) * 512);
  }
  // Sets up the barriers. It comes before cluster_wait, and that before anything is sent.
  DEVICE void prepare() const {
    if (threadIdx.x == 0) {
      mbarrier_init(barrier(), 1), mbarrier_init(at.shared + kSquareBarrier, 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect(at.shared + kSquareBarrier, RUNS * T * 4);
      expect(0);
    }
    cluster_announce();
  }
  DEVICE void send(const Sums& out, int round) const {
    if (at.tile(round) >= num_tiles || at.slices == 0) return;
    const uint32_t to = peer_address(received(at.warp, at.run) + at.lane * 16, at.warp % RUNS);
    const uint32_t peer_barrier = peer_address(barrier(), at.warp % RUNS);
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
      if (nt * 8 < T) send_float4(to + nt * 512, peer_barrier, out[nt][0], out[nt][1], out[nt][2], out[nt][3]);
  }
  // visit(i, tile, row, token, where its lo part of the first run is) for what the thread finishes.
  template <class Visit>
  DEVICE void visit_own(int round, Visit visit) const {
    int thread;   // read here, so that nothing of the places is computed, and kept, before the products
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
  template <class Epilogue>
  DEVICE void finish(const Sums& out, Epilogue& epilogue, const RowScale& scale, int round, bool is_last) const {
    if (!RECEIVED_APART) cluster_announce();   // what lies where peers send has been read, and used: no fence
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
    __syncthreads();   // all have seen this phase end: the next may end at once
    if (threadIdx.x == 0) expect(round + 1);
    cluster_arrive();
  }
};

constexpr int kDeparted = 1 << 16;   // counts blocks that need an arrival counter no more

// What all threads wrote before a barrier comes before the count; who has seen the count sees it.
DEVICE void announce(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
DEVICE int arrivals_seen(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// Without CLUSTERS: through memory: partials (tiles, RUNS, NT, 32) float4; arrivals (tiles) int32, 0 before and after.
// A block waits for the others. All of a grid are on the device together: there are no more than multiprocessors, the kernels
// before it end without it, and those after it start only when all its blocks have.
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
  asm volatile("" : "+r"(departed));   // its thread does not wait for the result before
  if (threadIdx.x == 0 && departed / kDeparted == RUNS - 1) *arrived = 0;
}
