// Attention of one row by the GRID blocks of a kernel that also does other work: with the runs, and the bits, of decode_attention.cu
// without clusters.
//
// Needs GROUP, HEAD_DIM, PAGE_STAGES (places of a warp's ring of pages, 2 or more) and PORTABLE 1; blocks of 256 threads, of whose warps
// four attend; kMemoryBytes of shared memory, aligned to 128.
#pragma once
#include "cluster.cuh"
#include "copy.cuh"
#include "fast_math.cuh"
#include "mma.cuh"
#define ROW_HALVES (GROUP <= 8 ? 1 : 2)
#undef STAGES
#define STAGES PAGE_STAGES
// The headers of products and those of attention define some of the same names.
namespace attention {
#include "decode_block.cuh"

constexpr int kMemoryBytes = kTeamBytes + kWarps * 16 * 4;   // bytes of the team, then of the log sums of its warps

// One row, and the part of its attention that the calling block has: runs of all units (tiles of query heads), every GRID-th of them.
struct RowAttention {
  scalar_t* out;
  const scalar_t* q;
  float* partials;
  int* arrivals;
  const int* block_table;
  int num_splits, num_kv_heads;
  float factor;
  Keys keys;
  Cut cut;
  int num_runs;      // runs of all units; 0: the row is padding

  DEVICE RowAttention(scalar_t* output, const scalar_t* queries, float* workspace, int* counters, const int* block_tables,
                      int slot, int position, int splits, int kv_heads, int pages_per_sequence, float scale)
      : out(output), q(queries), partials(workspace), arrivals(counters),
        block_table(block_tables + static_cast<int64_t>(slot) * pages_per_sequence), num_splits(splits), num_kv_heads(kv_heads),
        factor(scale * kLog2e), keys{position + 1, position}, cut(keys, splits) {
    num_runs = slot < 0 || position < 0 ? 0 : cut.num_runs * units();
  }
  // Returns the number of the lane's page in the block's first run, as in Stream::ids: all layers have the same ones. Called by whole
  // warps.
  DEVICE int first_page() const {
    if (!has_run()) return 0;
    Stream stream = stream_of(blockIdx.x / units(), nullptr, nullptr, 0);
    stream.locate();
    return stream.ids[0];
  }
  // Returns the number of tiles of query heads of all KV heads.
  DEVICE int units() const { return num_kv_heads * kTiles; }
  DEVICE bool has_run() const { return blockIdx.x < num_runs; }
  DEVICE Heads heads_of(int unit) const {
    const int tile = unit % kTiles;
    return {static_cast<int64_t>(unit / kTiles * GROUP + tile * kHeads) * HEAD_DIM, min(kHeads, GROUP - tile * kHeads)};
  }
  // Returns the stream of a run for the warps that attend. The numbers of its pages have not been looked up.
  DEVICE Stream stream_of(int run, const scalar_t* k_rows, const scalar_t* v_rows, uint32_t memory) const {
    return {k_rows,
            v_rows,
            static_cast<int64_t>(num_kv_heads) * kPageTokens * HEAD_DIM,
            {nullptr, keys.old, keys.old, 0},
            block_table,
            nullptr,
            memory + kQueryBytes + (threadIdx.x >> 5) * (STAGES * kStageBytes),
            cut.first_page,
            cut.run_pages,
            run,
            cut.num_runs,
            cut.steps_of(run, cut.num_runs, kAtOnce),
            cut.num_pages};
  }
  // Attends to the block's runs; of each tile of heads the last block to finish merges them. `first_page` is what first_page() returned.
  // Keys older than this step are read before `wait()`, which all threads call once. No warp may use `memory` any more, and in blocks
  // with a run no copy to it may be in flight.
  template <class Wait>
  DEVICE void attend(unsigned char* memory, int first_page, const scalar_t* k_pages, const scalar_t* v_pages, Wait wait) const {
    float (&log_sums)[kWarps][16] = *reinterpret_cast<float (*)[kWarps][16]>(memory + kTeamBytes);
    const int warp = threadIdx.x >> 5;
    const bool attends = warp < kWarps;
#pragma unroll 1
    for (int item = blockIdx.x; item < num_runs; item += GRID) {
      const int run = item / units();
      const int64_t offset = static_cast<int64_t>(item % units() / kTiles * kPageTokens + warp * kKeys) * HEAD_DIM;
      Stream stream = stream_of(run, k_pages + offset, v_pages + offset, shared_address(memory));
      Stream::NewRow added = {};
      if (attends) {
        stream.numbers = cut.first_page + run * cut.run_pages + (threadIdx.x & 31), stream.ids[0] = first_page;
        if (item != blockIdx.x) stream.locate();
        added = stream.fill(keys);
      }
      if (item == blockIdx.x) wait();
      if (attends) {
        Query query;
        query.read(q, heads_of(item % units()), load16_past_l1);
        const bool has_new = added.copy();
        query.store(memory);
        if (has_new) cp_async_wait_all();
      }
      __syncthreads();
      Stream::Place room;
      room.k_tile = stream.ring;
      if (attends) {
        WarpState state;
        load_query(state, shared_address(memory));
        begin_run(state);
        const int page = cut.first_page + run * cut.run_pages, pages = min(cut.run_pages, cut.first_page + cut.num_pages - page);
        if (pages <= STAGES) {
          attend_filled(state, stream, keys, page, pages, factor);
        } else {
          attention::attend(state, stream, keys, page, pages, factor, [] {});
          room = stream.advance();
        }
        publish_warp(state, room.k_tile, log_sums[warp]);
      }
      __syncthreads();
      asm volatile("" : "+r"(item));   // all that depends on `item` is computed again: registers are few
      const int unit = item % units();
      const Heads heads = heads_of(unit);
      const Target target = {out, partials + static_cast<int64_t>(unit) * num_splits * kVectors * 5, item / units(), cut.num_runs};
      if (attends)
        merge_warps(memory + kQueryBytes + (room.k_tile - stream.ring), log_sums,
                    [&](int vector, const Partial& merged) { target.keep(heads, vector, merged); });
      if (cut.num_runs == 1) __syncthreads();
      else if (arrives_last(arrivals + unit, cut.num_runs)) target.merge_clusters<256>(heads, 0);
    }
    if (!has_run()) wait();
    if (num_runs == 0 && blockIdx.x < units() && attends) store_zeros(out, heads_of(blockIdx.x));
  }
};
}  // namespace attention
