// This header holds what every kernel shares: scalar helpers, the parameter struct that a launch passes by value
// (cuflash/gpu/params.py packs it, and asserts each offset), and the search for the sequence and the rows that a thread
// block works on. Padded and packed (varlen) batches look the same to a kernel once it has its Sequence. The host
// writes constants and the types `Element` (of q, k and v) and `Accum` (of sums: float, or double for float64) in front
// of this text.

#include "offset_of.cuh"

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// VECTOR is the number of elements that one 16-byte access moves.
constexpr int VECTOR = ALIGNMENT / sizeof(Element);

struct alignas(ALIGNMENT) Vector {
  Element e[VECTOR];
};

DEVICE float to_accum(float x) { return x; }
DEVICE double to_accum(double x) { return x; }
DEVICE float to_accum(__half x) { return __half2float(x); }
DEVICE float to_accum(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
DEVICE T from_accum(Accum x) {
  if constexpr (sizeof(T) > 2) return static_cast<T>(x);
  return T(static_cast<float>(x));
}

DEVICE Accum infinity() { return __int_as_float(0x7f800000); }

DEVICE float exp_2(float x) { return exp2f(x); }
DEVICE double exp_2(double x) { return exp2(x); }
DEVICE float log_e(float x) { return logf(x); }
DEVICE double log_e(double x) { return log(x); }
DEVICE float tanh_of(float x) { return tanhf(x); }
DEVICE double tanh_of(double x) { return tanh(x); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE double larger(double a, double b) { return fmax(a, b); }
DEVICE float smaller(float a, float b) { return fminf(a, b); }
DEVICE double smaller(double a, double b) { return fmin(a, b); }

DEVICE int larger(int a, int b) { return a > b ? a : b; }
DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Either is A where FIRST, else B.
template <bool FIRST, class A, class B>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using Type = B;
};

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr Accum LOG2_E = 1.4426950408889634;

#define VIEW_SHARED_STORAGE(shared)                                                               \
  static_assert(sizeof(SharedStorage) <= SMEM_BYTES, "the plan's shared memory holds the tiles"); \
  extern __shared__ __align__(alignof(SharedStorage)) unsigned char shared_bytes[];               \
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes)

// Tensor is an array (batch, seqlen, num_heads, head_dim) whose last axis is contiguous. Packed arrays are (total,
// num_heads, head_dim), with a batch stride of 0. An array without head_dim, such as lse, uses the same three strides.
template <class T>
struct Tensor {
  T* data;
  i64 batch_stride, row_stride, head_stride;  // in elements

  DEVICE T* at(i64 batch, i64 row, i64 head) const {
    return data + batch * batch_stride + row * row_stride + head * head_stride;
  }
};

// element_offset() gives the offset, in elements, of an index that is not negative. The index is unsigned because a
// sign takes two instructions more.
DEVICE i64 element_offset(u32 index, i64 stride) { return static_cast<i64>(index * static_cast<u64>(stride)); }

// Rows are the rows (num_rows, num_columns) of one (sequence, head) of an array. An element outside reads as 0,
// whatever memory holds there.
struct Rows {
  const Element* data;
  i64 stride;
  int num_rows, num_columns;
  bool vectors;  // 16-byte accesses of every row are aligned

  DEVICE Rows(const Element* data, i64 stride, int num_rows, int num_columns)
      : data(data), stride(stride), num_rows(num_rows), num_columns(num_columns) {
    vectors = (reinterpret_cast<u64>(data) | static_cast<u64>(stride) * sizeof(Element)) % ALIGNMENT == 0;
  }

  // read() reads VECTOR elements from (row, column) on.
  DEVICE Vector read(int row, int column) const {
    Vector x;
    const Element* from = data + row * stride + column;
    const bool inside = row >= 0 && row < num_rows;
    if (vectors && inside && column + VECTOR <= num_columns) return *reinterpret_cast<const Vector*>(from);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) x.e[i] = inside && column + i < num_columns ? from[i] : from_accum<Element>(0);
    return x;
  }
};

// ScoreTensor is an array that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_k): the stride of a broadcast axis
// is 0.
template <class T>
struct ScoreTensor {
  T* data;
  i64 batch_stride, head_stride, row_stride, column_stride;  // in elements
  i64 num_rows, num_columns;                                 // sizes of the last two axes; 2^31 - 1 on a broadcast axis
};

// AttentionParams is what the host passes to a kernel by value; only tensor maps for TMA are arguments of their own.
// cuflash/gpu/params.py describes its members and emits them, with an assertion of each one's place. Arrays are in the
// caller's memory with the caller's strides; a comment gives each one's shape.
struct AttentionParams {
#include "AttentionParams.members"
};
#include "AttentionParams.layout"

// Sequence says where one sequence lies in the arrays and how many of its rows are in use.
struct Sequence {
  int batch;         // index of the sequence; -1 for packed rows outside every sequence
  i64 row_q, row_k;  // first row in q and k (0 when padded: the batch stride leads there)
  int rows_q;        // rows of q that belong to the sequence, padding included
  int rows_k;        // rows of k and v that belong to it, padding included
  int len_q;         // queries in use: causal, window and alibi align to these
  int len_k;         // keys in use

  DEVICE i64 batch_or_0() const { return batch < 0 ? 0 : batch; }
  // Key j is on the diagonal of query i where j = i + diagonal(): the last query in use sees the last key in use.
  DEVICE int diagonal() const { return len_k - len_q; }
};

// batch_of() is the index on the batch axis of the arrays; packed arrays have none.
DEVICE i64 batch_of(const AttentionParams& p, const Sequence& s) { return p.cu_seqlens_q == nullptr ? s.batch : 0; }

// group_size() is the number of query heads that share a KV head (GQA).
DEVICE int group_size(const AttentionParams& p) { return p.num_heads_q / p.num_heads_kv; }

DEVICE int clamped(int x, int limit) { return smaller(larger(x, 0), limit); }

// used_length() is the length given for a sequence, clamped to its rows, or all rows where no lengths are given.
DEVICE int used_length(const int* lengths, int batch, int rows) {
  return lengths == nullptr ? rows : clamped(lengths[batch], rows);
}

// sequence_of() finds where sequence `batch` lies and how many of its rows are in use. KEYS_IN_PAGES: a packed
// sequence's keys are those of its table, and no row of k is its first.
template <bool KEYS_IN_PAGES = false>
DEVICE Sequence sequence_of(const AttentionParams& p, int batch) {
  Sequence s;
  s.batch = batch;
  if (p.cu_seqlens_q == nullptr) {
    s.row_q = s.row_k = 0;
    s.rows_q = p.seqlen_q;
    s.rows_k = p.seqlen_k;
  } else {
    const int begin_q = clamped(p.cu_seqlens_q[batch], p.seqlen_q);
    const int begin_k = KEYS_IN_PAGES ? 0 : clamped(p.cu_seqlens_k[batch], p.seqlen_k);
    s.row_q = begin_q;
    s.row_k = begin_k;
    s.rows_q = larger(clamped(p.cu_seqlens_q[batch + 1], p.seqlen_q) - begin_q, 0);
    s.rows_k =
        KEYS_IN_PAGES ? p.max_pages * p.page_size : larger(clamped(p.cu_seqlens_k[batch + 1], p.seqlen_k) - begin_k, 0);
  }
  s.len_q = used_length(p.q_lengths, batch, s.rows_q);
  s.len_k = used_length(p.kv_lengths, batch, s.rows_k);
  return s;
}

// Work is one tile of one head: what a thread block computes.
struct Work {
  Sequence sequence;
  int head;  // query head where the tile is of queries, KV head where it is of keys
  int tile;  // number of the tile in its sequence
};

// group_begin() is the first row of packed group e: group 0 is the padding before cu_seqlens[0], groups 1 to batch are
// the sequences, group batch + 1 is the padding behind the last.
DEVICE int group_begin(const int* cu_seqlens, int e, int batch, int total) {
  return e == 0 ? 0 : e == batch + 2 ? total : clamped(cu_seqlens[e - 1], total);
}

// group_at() finds by bisection the last packed group whose first place, which ascends, is not beyond `place`.
template <class FirstPlace>
DEVICE int group_at(const AttentionParams& p, int place, FirstPlace first_place) {
  int low = 0, high = p.batch + 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_place(middle) <= place) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// sequence_of_group() is a packed group as a sequence; padding is one without a number, of which nothing is in use.
template <bool TILES_OF_KEYS, bool KEYS_IN_PAGES = false>
DEVICE Sequence sequence_of_group(const AttentionParams& p, int group) {
  if (group >= 1 && group <= p.batch) return sequence_of<KEYS_IN_PAGES>(p, group - 1);
  const int* cu_seqlens = TILES_OF_KEYS ? p.cu_seqlens_k : p.cu_seqlens_q;
  const int total = TILES_OF_KEYS ? p.seqlen_k : p.seqlen_q;
  const int begin = group_begin(cu_seqlens, group, p.batch, total);
  const int rows = group_begin(cu_seqlens, group + 1, p.batch, total) - begin;
  return {-1, begin, begin, rows, rows, 0, 0};
}

// TileSlot is where a tile slot of packed sequences leads: a group, and a tile of it. Group e starts at slot
// begin(e) / block + e, which leaves enough slots for the group before it. So the host needs total / block + batch + 2
// slots and no lengths, and the device needs one search; slots that are left over get tiles beyond their group's rows.
struct TileSlot {
  int group, tile;
};
template <bool TILES_OF_KEYS>
DEVICE TileSlot tile_slot(const AttentionParams& p, int block, int slot) {
  const int* cu_seqlens = TILES_OF_KEYS ? p.cu_seqlens_k : p.cu_seqlens_q;
  const int total = TILES_OF_KEYS ? p.seqlen_k : p.seqlen_q;
  const auto first_slot = [&](int e) { return group_begin(cu_seqlens, e, p.batch, total) / block + e; };
  const int group = group_at(p, slot, first_slot);
  return {group, slot - first_slot(group)};
}

// packed_work() turns a tile slot of packed sequences into its tile.
template <bool TILES_OF_KEYS, bool KEYS_IN_PAGES = false>
DEVICE Work packed_work(const AttentionParams& p, int block, int slot, int head) {
  const TileSlot place = tile_slot<TILES_OF_KEYS>(p, block, slot);
  return {sequence_of_group<TILES_OF_KEYS, KEYS_IN_PAGES>(p, place.group), head, place.tile};
}

// query_tile() numbers the tiles of queries over all batch_heads; packed, the number counts slots (packed_work).
DEVICE i64 query_tile(const AttentionParams& p, const Sequence& s, int head, int tile, int block) {
  if (p.cu_seqlens_q == nullptr) {
    return (static_cast<i64>(s.batch) * p.num_heads_q + head) * p.num_query_tiles + tile;
  }
  return static_cast<i64>(head) * p.num_query_tiles + s.row_q / block + (s.batch + 1) + tile;
}

// work_of() maps a thread block to its (tile, head, sequence). Tiles are the fastest axis, so that blocks that run
// together share keys in L2. Where tiles differ in length (longest_first), as many batch_heads as fill a GPU are
// scheduled together, their longest tiles first, so that the last blocks to end are short ones.
constexpr u32 TILES_TOGETHER = 256;
template <bool TILES_OF_KEYS>
DEVICE Work work_of(const AttentionParams& p, int block, u32 num_heads, bool longest_first, u32 id = blockIdx.x,
                    u32 tiles_together = TILES_TOGETHER) {
  const u32 num_tiles = p.num_tiles;
  u32 batch_head = id / num_tiles, slot = id % num_tiles;
  if (p.cu_seqlens_q != nullptr) return packed_work<TILES_OF_KEYS>(p, block, slot, batch_head % num_heads);
  if (longest_first) {
    const u32 num_grouped = num_tiles < tiles_together ? tiles_together / num_tiles : 1;
    const u32 first = batch_head / num_grouped * num_grouped, left = num_heads * p.batch - first;
    const u32 count = left < num_grouped ? left : num_grouped, place = id - first * num_tiles;
    batch_head = first + place % count;
    slot = TILES_OF_KEYS ? place / count : num_tiles - 1 - place / count;
  }
  Work w;
  w.head = batch_head % num_heads;
  w.tile = slot;
  w.sequence = sequence_of(p, batch_head / num_heads);
  return w;
}
