// Keys and values that a block of tree_attention reads for all of its rows: the pages of its runs, one after another
// through a ring, and the nodes of the tree, which lie in the order of the nodes.
//
// The including file defines kThreads, CLUSTER, STAGES, kStageBytes and kTileBytes.
#pragma once
#include "decode_tile.cuh"

// The pages of a block's runs of one cluster of runs: every CLUSTER-th of these runs.
struct Pages {
  const scalar_t *k_pages, *v_pages;  // of this KV head in page 0
  int page_stride;
  const int* block_table;  // of the slot
  uint32_t ring;
  int base;  // keys from here on are nodes
  int first_page, first_run, run_pages;
  int count;
  int numbers, ids;  // of 32 consecutive steps, one a lane: the page of the row, its place in memory

  DEVICE Pages(const Cut& cut, int cluster, int rank) {
    run_pages = cut.run_pages;
    first_page = cut.first_page;
    first_run = cluster * kCluster + rank;
    const int end = min(cut.num_runs, (cluster + 1) * kCluster), runs = (end - first_run + CLUSTER - 1) / CLUSTER;
    const int last_run = first_run + (runs - 1) * CLUSTER;
    count = runs > 0 ? (runs - 1) * run_pages + min(run_pages, cut.num_pages - last_run * run_pages) : 0;
  }
  DEVICE int page_of(int step) const {
    return first_page + (first_run + step / run_pages * CLUSTER) * run_pages + step % run_pages;
  }
  DEVICE uint32_t stage(int step) const { return ring + step % STAGES * kStageBytes; }

  // The first step of the run in which the base lies or which begins behind it.
  DEVICE int first_tail() const {
    const int run = max(base / kPageTokens - first_page, 0) / run_pages;
    return max(run - first_run + CLUSTER - 1, 0) / CLUSTER * run_pages;
  }

  // The ring's first pages, a group each.
  DEVICE void fill() {
#pragma unroll 1
    for (int step = 0; step < STAGES; ++step) {
      load(step);
      cp_async_commit();
    }
  }
  // By all threads, for steps in ascending order: the keys before the base.
  DEVICE void load(int step) {
    if (step % 32 == 0) {
      const int own = step + (threadIdx.x & 31);
      numbers = page_of(own);
      ids = own < count ? __ldcg(block_table + numbers) : 0;
    }
    const int valid = base - __shfl_sync(0xFFFFFFFFu, numbers, step % 32) * kPageTokens;
    const int64_t offset = (int64_t)__shfl_sync(0xFFFFFFFFu, ids, step % 32) * page_stride;
    if (step < count && valid > 0) copy(stage(step), k_pages + offset, v_pages + offset, valid);
  }

  // By all threads: the nodes, which may go on in the page after that of the base.
  DEVICE void load_nodes(uint32_t nodes, int num_nodes) const {
    for (int index = threadIdx.x; index < num_nodes * kRowChunks; index += kThreads) {
      const int node = index / kRowChunks, chunk = index % kRowChunks, location = base + node;
      const int64_t page = __ldcg(block_table + location / kPageTokens);
      const int64_t source = page * page_stride + location % kPageTokens * HEAD_DIM + chunk * 8;
      cp_async16(nodes + swizzled(node, chunk), k_pages + source);
      cp_async16(nodes + kTileBytes + swizzled(node, chunk), v_pages + source);
    }
  }

 private:
  DEVICE void copy(uint32_t tile, const scalar_t* keys, const scalar_t* values, int valid) const {
#pragma unroll
    for (int i = 0; i < (kPageTokens * kRowChunks + kThreads - 1) / kThreads; ++i) {
      const int index = threadIdx.x + i * kThreads, row = index / kRowChunks, chunk = index % kRowChunks;
      if (kPageTokens * kRowChunks % kThreads != 0 && row >= kPageTokens) continue;
      const int source_bytes = row < valid ? 16 : 0;
      cp_async16(tile + swizzled(row, chunk), keys + index * 8, source_bytes);
      cp_async16(tile + kTileBytes + swizzled(row, chunk), values + index * 8, source_bytes);
    }
  }
};
