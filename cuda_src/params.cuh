// Numbers, and what a launch hands to an attention kernel. The host packs it from one NumPy dtype (cuflash/params.py),
// whose offsets are asserted behind this header.
//
// Constants in front of every source define `Element` (dtype of q, k, v) and `Accum` (float, or double for double), in
// which all arithmetic is done.
#pragma once

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Elements that one 16-byte access moves.
constexpr int VECTOR = 16 / sizeof(Element);

struct alignas(16) Vector {
  Element e[VECTOR];
};

__device__ __forceinline__ float to_accum(float x) { return x; }
__device__ __forceinline__ double to_accum(double x) { return x; }
__device__ __forceinline__ float to_accum(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_accum(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_accum(Accum x);
template <>
__device__ __forceinline__ float from_accum<float>(Accum x) {
  return static_cast<float>(x);
}
template <>
__device__ __forceinline__ double from_accum<double>(Accum x) {
  return static_cast<double>(x);
}
template <>
__device__ __forceinline__ __half from_accum<__half>(Accum x) {
  return __float2half_rn(static_cast<float>(x));
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_accum<__nv_bfloat16>(Accum x) {
  return __float2bfloat16_rn(static_cast<float>(x));
}

template <class T>
struct Limits;
template <>
struct Limits<float> {
  static __device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
};
template <>
struct Limits<double> {
  static __device__ __forceinline__ double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
};

__device__ __forceinline__ Accum infinity() { return Limits<Accum>::infinity(); }

__device__ __forceinline__ float exp_2(float x) { return exp2f(x); }
__device__ __forceinline__ double exp_2(double x) { return exp2(x); }
__device__ __forceinline__ float log_e(float x) { return logf(x); }
__device__ __forceinline__ double log_e(double x) { return log(x); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr Accum LOG2_E = 1.4426950408889634;

// NVRTC has no offsetof; its front end has a constant address instead.
#ifdef __CUDACC_RTC__
#define OFFSET_OF(type, member) (u64)(__INTADDR__(&((type*)0)->member))
#else
#define OFFSET_OF(type, member) __builtin_offsetof(type, member)
#endif

// An array (batch, seqlen, num_heads, head_dim) whose last axis is contiguous; packed: batch stride 0.
template <class T>
struct Tensor {
  T* data;
  i64 batch_stride, row_stride, head_stride;  // in elements

  __device__ __forceinline__ T* at(i64 batch, i64 row, i64 head) const {
    return data + batch * batch_stride + row * row_stride + head * head_stride;
  }
};

// Rows of one (sequence, head) of an array. What lies outside reads as 0, whatever is there.
struct Rows {
  const Element* data;
  i64 stride;
  int num_rows, num_columns;
  bool vectors;  // 16-byte accesses are aligned

  __device__ __forceinline__ Rows(const Element* data, i64 stride, int num_rows, int num_columns)
      : data(data), stride(stride), num_rows(num_rows), num_columns(num_columns) {
    vectors = (reinterpret_cast<u64>(data) | static_cast<u64>(stride) * sizeof(Element)) % 16 == 0;
  }

  __device__ __forceinline__ Vector read(int row, int column) const {
    Vector x;
    const Element* from = data + row * stride + column;
    const bool inside = row >= 0 && row < num_rows;
    if (vectors && inside && column + VECTOR <= num_columns) return *reinterpret_cast<const Vector*>(from);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) x.e[i] = inside && column + i < num_columns ? from[i] : from_accum<Element>(0);
    return x;
  }
};

// An array that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_k): the stride of a broadcast axis is 0.
template <class T>
struct ScoreTensor {
  T* data;
  i64 batch_stride, head_stride, row_stride, column_stride;  // in elements
  i64 num_rows, num_columns;                                 // index limits; 2^31 - 1 on a broadcast axis
};

struct AttentionParams {
  Tensor<const Element> q;     // (batch, seqlen_q, num_heads_q, head_dim)
  Tensor<const Element> k;     // (batch, seqlen_k, num_heads_kv, head_dim)
  Tensor<const Element> v;     // (batch, seqlen_k, num_heads_kv, head_dim_v)
  Tensor<Element> out;         // (batch, seqlen_q, num_heads_q, head_dim_v)
  Tensor<const Element> dout;  // like out
  Tensor<Element> dq;          // like q
  Tensor<Element> dk;          // like k
  Tensor<Element> dv;          // like v
  Tensor<Accum> lse;           // (batch, num_heads_q, seqlen_q), natural logarithm
  Tensor<const Accum> dlse;    // like lse, or null
  Tensor<Accum> delta;         // like lse: rowsum(dout * out) - dlse
  Tensor<Accum> dslope_rows;   // like lse: each row's part of the slopes' gradient, or null
  Tensor<Accum> out_parts;     // (batch * splits, ..) like out: results over parts of the keys, or null
  Tensor<Accum> lse_parts;     // like lse, for them
  ScoreTensor<const BiasElement> bias;
  ScoreTensor<BiasElement> dbias;
  ScoreTensor<const u8> mask;
  Accum* dbias_parts;         // (splits, *dbias) contiguous, or null with one split
  Accum* dsink;               // (num_heads_q,)
  Accum* dalibi_slopes;       // (batch | 1, num_heads_q)
  const Accum* alibi_slopes;  // (batch | 1, num_heads_q)
  const Accum* sink;          // (num_heads_q,), or null
  const int* q_lengths;       // (batch,), or null
  const int* kv_lengths;      // (batch,), or null
  const int* cu_seqlens_q;    // (batch + 1,), or null: not packed
  const int* cu_seqlens_k;    // (batch + 1,), or null
  const u64* dropout_seed;    // one element, or null: dropout_key
  const int* block_list;      // visited tiles of each row or column of tiles: (.., num_lists, list_capacity)
  const int* block_count;     // (.., num_lists)
  const int* block_slots;     // (.., seqlen_q / 64, seqlen_k / 64): -1 hidden, -2 visible, else index into block_bits
  const u32* block_bits;      // (num_partial, 64, 2)
  const u32* block_key_bits;  // (num_partial, 128): the same as sm90/gradient_options.cuh takes them
  u32* tile_counter;          // sm90/schedule.cuh, or null; 0 before and after a launch
  Accum* dq_sum;              // sm90/gradient_rows.cuh, like row_lse and row_delta
  u8* work_space;             // sm90/split_layout.cuh
  Accum* row_lse;             // (.., num_query_tiles, BLOCK_M)
  Accum* row_delta;           // (.., num_query_tiles, BLOCK_M)
  int* dq_turns;              // tiles taken; (.., num_query_tiles, DQ_PARTS): sm90/gradient_rows.cuh; or null
  u64 dropout_key;
  i64 block_batch_stride, block_head_stride;  // in (list | slot) grids; 0 on a broadcast axis
  double softmax_scale, softcap;
  double dropout_rescale;  // 1 / (1 - p)
  u32 dropout_threshold;   // floor(p * 2^32)
  int batch, seqlen_q, seqlen_k;
  int num_heads_q, num_heads_kv, head_dim, head_dim_v;
  int window_left, window_right;
  int alibi_batch_stride, dalibi_batch_stride;                // 0 if all sequences share the slopes
  int dbias_batches, dbias_heads, dbias_rows, dbias_columns;  // shape of dbias
  int num_lists, list_capacity;                               // of block_list
  int slot_rows, slot_columns;                                // of block_slots
  int num_tiles;                                              // tiles (packed: tile slots) of one head
  int num_query_tiles;                                        // the same of queries where num_tiles are of keys
  int splits;                                                 // of the loop behind one tile of dbias, or of the keys
  int heads_together;                                         // sm90/schedule.cuh
};
