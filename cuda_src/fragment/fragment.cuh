// This header says where the elements of a warp's accumulator stand, and moves such fragments to memory. mma.sync and
// wgmma share the layout: 16 rows for mma.sync, or 16 of the 64 rows of wgmma for each of its warps. A thread holds N /
// 2 elements of a 16 x N fragment; element e is at row 8 * (e / 2 % 2) and column 8 * (e / 4) + e % 2, counted from the
// thread's first. The kernels in sm80/ and sm90/ build on it; the portable kernels have portable/tile.cuh instead.
#include "../params.cuh"
#include "../ptx/sm80.cuh"

DEVICE int lane() { return threadIdx.x % WARP; }
// fragment_row() and fragment_column() are the place of the thread's element 0; row_offset() and column_offset() lead
// from there to element e.
DEVICE int fragment_row() { return lane() / 4; }
DEVICE int fragment_column() { return lane() % 4 * 2; }
DEVICE constexpr int row_offset(int e) { return e / 2 % 2 * 8; }
DEVICE constexpr int column_offset(int e) { return e / 4 * 8 + e % 2; }

// packed() rounds two numbers to 16 bits and puts them into one word, `low` into its low half.
DEVICE u32 packed(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}
DEVICE u32 packed(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

// pack() makes an accumulator the left factor of the next product: the layouts agree, so only the precision changes.
template <int N>
DEVICE void pack(u32 (&pairs)[N / 2], const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) pairs[i] = packed(Element(), x[2 * i], x[2 * i + 1]);
}

// mark_seen() sets seen[key] for each key of the fragment that some query sees; x are scores, -inf where hidden.
template <int N>
DEVICE void mark_seen(u8* seen, const Accum (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) {
    if (row_offset(e) == 0 && (x[e] != -infinity() || x[e + 2] != -infinity())) {
      seen[fragment_column() + column_offset(e)] = 1;
    }
  }
}

// transpose_quad() transposes 4 x 4 words within a quad: lane t gets word t of each lane, in the order of the lanes.
DEVICE void transpose_quad(u32 (&w)[4]) {
  const bool high = lane() & 2, odd = lane() & 1;
  const u32 sent_0 = high ? w[0] : w[2], sent_1 = high ? w[1] : w[3];
  const u32 own_0 = high ? w[2] : w[0], own_1 = high ? w[3] : w[1];
  const u32 far_0 = __shfl_xor_sync(ALL_LANES, sent_0, 2), far_1 = __shfl_xor_sync(ALL_LANES, sent_1, 2);
  const u32 own = odd ? own_1 : own_0, far = odd ? far_1 : far_0;
  const u32 near = __shfl_xor_sync(ALL_LANES, odd ? own_0 : own_1, 1);
  const u32 farther = __shfl_xor_sync(ALL_LANES, odd ? far_0 : far_1, 1);
  const u32 pair[2] = {odd ? near : own, odd ? own : near}, far_pair[2] = {odd ? farther : far, odd ? far : farther};
  w[0] = high ? far_pair[0] : pair[0];
  w[1] = high ? far_pair[1] : pair[1];
  w[2] = high ? pair[0] : far_pair[0];
  w[3] = high ? pair[1] : far_pair[1];
}

// write_fragment() writes out * factor[row] for the thread's rows `row` and row + 8 of `data` (rows, head_dim). Rows in
// [len, rows) are padding and become 0.
template <class T, int N>
DEVICE void write_fragment(T* data, i64 row_stride, int row, int len, int rows, int head_dim, const float (&out)[N],
                           const float (&factor)[2]) {
  const bool vectors = (reinterpret_cast<u64>(data) | static_cast<u64>(row_stride) * sizeof(T)) % sizeof(Vector) == 0;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + 8 * r;
    T* target = data + i * row_stride;
#pragma unroll
    for (int group = 0; group < (N + 15) / 16; group++) {  // the last group may be a half
      union {
        u32 words[4];
        T elements[8];
      } piece;
#pragma unroll
      for (int block = 0; block < 4; block++) {
        const int e = (group * 4 + block) * 4 + 2 * r;
        // Padding is selected rather than multiplied by 0, because it may be NaN.
        piece.words[block] = e < N && i < len ? packed(T(), out[e] * factor[r], out[e + 1] * factor[r]) : 0;
      }
      transpose_quad(piece.words);
      const int column = group * 32 + lane() % 4 * VECTOR;
      if (i >= rows) continue;
      if (vectors && column + VECTOR <= head_dim) {
        // One intrinsic makes one store; the compiler would make four of an assignment.
        __stcs(reinterpret_cast<uint4*>(target + column),
               make_uint4(piece.words[0], piece.words[1], piece.words[2], piece.words[3]));
      } else {
#pragma unroll
        for (int e = 0; e < VECTOR; e++) {
          if (column + e < head_dim) target[column + e] = piece.elements[e];
        }
      }
    }
  }
}

// rescale_kept() scales results by 1 / (1 - p), because the weights that dropout kept stand for all.
DEVICE void rescale_kept(const AttentionParams& p, Accum (&inverse)[2]) {
  if constexpr (HAS_DROPOUT) {
    inverse[0] *= static_cast<Accum>(p.dropout_rescale);
    inverse[1] *= static_cast<Accum>(p.dropout_rescale);
  }
}

// ---- Results in float32 or float64. Only the last factor may lead to subnormals, or out of range.
DEVICE float times_last(float x, float factor) { return ptx::multiply(x, factor); }
DEVICE double times_last(double x, double factor) { return x * factor; }

// write_wide_fragment() is write_fragment for float32 and float64, with the results times unit[row] as well.
template <int N>
DEVICE void write_wide_fragment(Element* data, i64 row_stride, int row, int len, int rows, int head_dim,
                                const Accum (&out)[N], const Accum (&factor)[2], const Accum (&unit)[2]) {
  struct alignas(2 * sizeof(Element)) Pair {
    Element x, y;
  };
  const bool vectors =
      (reinterpret_cast<u64>(data) | static_cast<u64>(row_stride) * sizeof(Element)) % sizeof(Pair) == 0;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + 8 * r;
    if (i >= rows) continue;
    Element* target = data + i * row_stride;
#pragma unroll
    for (int e = 2 * r; e < N; e += 4) {
      const int column = fragment_column() + column_offset(e);
      const Pair pair = {i < len ? times_last(out[e] * factor[r], unit[r]) : 0,
                         i < len ? times_last(out[e + 1] * factor[r], unit[r]) : 0};
      if (vectors && column + 1 < head_dim) {
        *reinterpret_cast<Pair*>(target + column) = pair;
      } else {
        if (column < head_dim) target[column] = pair.x;
        if (column + 1 < head_dim) target[column + 1] = pair.y;
      }
    }
  }
}

// write_in_units() writes a fragment of a sum whose rows have units of their own.
template <class Units, class... Arguments>
DEVICE void write_in_units(const Units& units, Arguments&&... arguments) {
  const Accum unit[2] = {units.at(0), units.at(1)};
  write_wide_fragment(arguments..., unit);
}

// write_results() writes the fragments of a warp, one below the other. Nothing is staged in shared memory.
template <class Units, class T, int FRAGMENTS, int N>
DEVICE void write_results(const Units (&units)[FRAGMENTS], const T&, int, Element* data, i64 row_stride, int row,
                          int len, int rows, int head_dim, const Accum (&out)[FRAGMENTS][N]) {
  const Accum one[2] = {1, 1};
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    write_in_units(units[f], data, row_stride, row + 16 * f + fragment_row(), len, rows, head_dim, out[f], one);
  }
}
