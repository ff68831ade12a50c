// Which sequence and which rows of it a thread block works on; padded and packed layouts look the same from here on.
#pragma once
#include "params.cuh"

struct Sequence {
  int batch;         // index of the sequence; -1 for packed rows outside every sequence
  i64 row_q, row_k;  // first row in q and k (0 when padded: the batch stride leads there)
  int rows_q;        // rows that belong to the sequence, padding included
  int rows_k;
  int len_q;  // rows in use: causal, window and alibi align to these
  int len_k;

  __device__ __forceinline__ i64 batch_or_0() const { return batch < 0 ? 0 : batch; }
  // Key j is on the diagonal of query i where j = i + diagonal().
  __device__ __forceinline__ int diagonal() const { return len_k - len_q; }
};

__device__ __forceinline__ int clamped(int x, int limit) { return smaller(larger(x, 0), limit); }

__device__ __forceinline__ int used_length(const int* lengths, int batch, int rows) {
  return lengths == nullptr ? rows : clamped(lengths[batch], rows);
}

__device__ __forceinline__ Sequence sequence_of(const AttentionParams& p, int batch) {
  Sequence s;
  s.batch = batch;
  if (p.cu_seqlens_q == nullptr) {
    s.row_q = s.row_k = 0;
    s.rows_q = p.seqlen_q;
    s.rows_k = p.seqlen_k;
  } else {
    const int begin_q = clamped(p.cu_seqlens_q[batch], p.seqlen_q);
    const int begin_k = clamped(p.cu_seqlens_k[batch], p.seqlen_k);
    s.row_q = begin_q;
    s.row_k = begin_k;
    s.rows_q = larger(clamped(p.cu_seqlens_q[batch + 1], p.seqlen_q) - begin_q, 0);
    s.rows_k = larger(clamped(p.cu_seqlens_k[batch + 1], p.seqlen_k) - begin_k, 0);
  }
  s.len_q = used_length(p.q_lengths, batch, s.rows_q);
  s.len_k = used_length(p.kv_lengths, batch, s.rows_k);
  return s;
}

struct Work {
  Sequence sequence;
  int head;  // query head where queries are tiled, KV head where keys are
  int tile;  // of its sequence
};

// First row of packed group e: 0 is what lies before cu_seqlens[0], 1..batch the sequences, batch + 1 the rest.
__device__ __forceinline__ int group_begin(const int* cu_seqlens, int e, int batch, int total) {
  return e == 0 ? 0 : e == batch + 2 ? total : clamped(cu_seqlens[e - 1], total);
}

// Packed: group e starts at tile slot begin(e) / block + e. A group of n rows never needs more slots than the next
// group's start leaves, so the host needs total / block + batch + 2 slots and no lengths, and the device one search.
template <bool TILES_OF_KEYS>
__device__ __forceinline__ Work packed_work(const AttentionParams& p, int block, int slot, int head) {
  const int* cu_seqlens = TILES_OF_KEYS ? p.cu_seqlens_k : p.cu_seqlens_q;
  const int total = TILES_OF_KEYS ? p.seqlen_k : p.seqlen_q;
  int low = 0, high = p.batch + 1;  // the last group whose first slot is not beyond ours
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (group_begin(cu_seqlens, middle, p.batch, total) / block + middle <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int begin = group_begin(cu_seqlens, low, p.batch, total);
  Work w;
  w.head = head;
  w.tile = slot - (begin / block + low);
  if (low >= 1 && low <= p.batch) {
    w.sequence = sequence_of(p, low - 1);
  } else {
    const int rows = group_begin(cu_seqlens, low + 1, p.batch, total) - begin;
    w.sequence = {-1, begin, begin, rows, rows, 0, 0};
  }
  return w;
}

// The number of a tile of queries; packed: its slot (packed_work).
__device__ __forceinline__ i64 query_tile(const AttentionParams& p, const Sequence& s, int head, int tile, int block) {
  if (p.cu_seqlens_q == nullptr) {
    return (static_cast<i64>(s.batch) * p.num_heads_q + head) * p.num_query_tiles + tile;
  }
  return static_cast<i64>(head) * p.num_query_tiles + s.row_q / block + (s.batch + 1) + tile;
}

// Thread block -> (tile, head, sequence), tiles fastest, so that blocks that run together share keys in L2. Where a
// diagonal makes tiles differ, as many images as fill a GPU go together, their longest tiles first: the last to run are
// short.
constexpr u32 TILES_TOGETHER = 256;
template <bool TILES_OF_KEYS>
__device__ __forceinline__ Work work_of(const AttentionParams& p, int block, u32 num_heads, bool longest_first) {
  const u32 id = blockIdx.x, num_tiles = p.num_tiles;
  u32 image = id / num_tiles, slot = id % num_tiles;
  if (p.cu_seqlens_q != nullptr) return packed_work<TILES_OF_KEYS>(p, block, slot, image % num_heads);
  if (longest_first) {
    const u32 together = num_tiles < TILES_TOGETHER ? TILES_TOGETHER / num_tiles : 1;
    const u32 first = image / together * together, left = num_heads * p.batch - first;
    const u32 count = left < together ? left : together, place = id - first * num_tiles;
    image = first + place % count;
    slot = TILES_OF_KEYS ? place / count : num_tiles - 1 - place / count;
  }
  Work w;
  w.head = image % num_heads;
  w.tile = slot;
  w.sequence = sequence_of(p, image / num_heads);
  return w;
}
