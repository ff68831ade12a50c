// This header has the matrix products of a warpgroup by wgmma, and brings a warp's results to global memory. Operands
// lie in shared memory as TMA writes them: a tile is panels of 64 columns, each with its rows one after the other in
// the 128-byte swizzle. All kernels of sm90/ on 16 bits use it; split/sm90_products.cuh adds the products of float32 in
// parts.
#include "pipeline.cuh"

constexpr u32 ROW_BYTES = SWIZZLE_BYTES, ATOM_BYTES = SMEM_ALIGNMENT;
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL, PANELS_V = (HEAD_DIM_V + PANEL - 1) / PANEL;
constexpr u32 Q_BYTES = BLOCK_M * ROW_BYTES * PANELS;
constexpr u32 K_BYTES = BLOCK_N * ROW_BYTES * PANELS, V_BYTES = BLOCK_N * ROW_BYTES * PANELS_V;

// own_warpgroup() is the warpgroup's number. The shuffle tells the compiler that it is uniform.
DEVICE int own_warpgroup() { return __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0); }
// warp_row() is the warp's first row of the 64 of its warpgroup.
DEVICE int warp_row() { return threadIdx.x % WARPGROUP / WARP * 16; }

template <class T, int N>
DEVICE void keep(T (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) ptx::keep(x[e]);
}

// rows_descriptor() describes a tile at a shared address by its rows; an offset in bytes is added to it as offset / 16.
// step_offset() is that offset, in bytes, for a step of 16 columns.
DEVICE u64 rows_descriptor(u32 address) { return ptx::wgmma_descriptor(address, 16, ATOM_BYTES); }
DEVICE constexpr u32 step_offset(int step, int rows) { return step / 4 * rows * ROW_BYTES + step % 4 * 32; }

struct NothingMore {
  DEVICE void operator()() const {}
};

// multiply_by_rows() starts x = a b^T over DEPTH, and adds what `more` starts; the panels of a and b have ROWS_A and
// ROWS_B rows. The first STEPS_IN_REGISTERS steps of a are fragments in registers.
template <int DEPTH, int ROWS_A, int ROWS_B, int STEPS_IN_REGISTERS = 0, int N, class More = NothingMore>
DEVICE void multiply_by_rows(float (&x)[N], u32 a, u32 b, More more = {}, const u32 (*a_fragments)[4] = nullptr) {
  const u64 left = rows_descriptor(a), right = rows_descriptor(b);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < DEPTH / STEP; step++) {
    const u64 b_step = right + step_offset(step, ROWS_B) / 16;
    if (step < STEPS_IN_REGISTERS) {
      const u32(&f)[4] = a_fragments[step];
      ptx::wgmma_rs<Element, 0>(x, f[0], f[1], f[2], f[3], b_step, step > 0);
    } else {
      ptx::wgmma_ss<Element, 0, 0>(x, left + step_offset(step, ROWS_A) / 16, b_step, step > 0);
    }
  }
  more();
  ptx::wgmma_commit_group();
}

// columns_of() describes a tile of ROWS rows by its columns, for the transposing products.
template <int ROWS>
DEVICE u64 columns_of(u32 address) {
  return ptx::wgmma_descriptor(address, ROWS * ROW_BYTES, ATOM_BYTES);
}

// multiply_by_columns() starts x = a b over DEPTH: a is read by its rows, b by its columns.
template <int DEPTH, int ROWS_A, int N>
DEVICE void multiply_by_columns(float (&x)[N], u32 a, u32 b) {
  const u64 left = rows_descriptor(a), right = columns_of<DEPTH>(b);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < DEPTH / STEP; step++) {
    ptx::wgmma_ss<Element, 0, 1>(x, left + step_offset(step, ROWS_A) / 16, right + step * (STEP * ROW_BYTES / 16),
                                 step > 0);
  }
  ptx::wgmma_commit_group();
}

// add_product() starts sum += factor b over DEPTH: `factor` is a fragment in registers, b is read by its columns.
template <int DEPTH, int N>
DEVICE void add_product(float (&sum)[N], u32 (&factor)[DEPTH / 4], u32 b) {
  const u64 right = columns_of<DEPTH>(b);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < DEPTH / STEP; step++) {
    ptx::wgmma_rs<Element, 1>(sum, factor[4 * step], factor[4 * step + 1], factor[4 * step + 2], factor[4 * step + 3],
                              right + step * (STEP * ROW_BYTES / 16), true);
  }
  ptx::wgmma_commit_group();
}

// transposed_address() is the address of the thread's row of four 8 x 8 matrices in the panel of its keys, for stmatrix
// and ldmatrix.
DEVICE u32 transposed_address(u32 panel, u32 thread) {
  const u32 lane = thread % WARP;
  const u32 query = lane / 16 * 8 + lane % 8, chunk = thread % WARPGROUP / WARP * 2 + lane / 8 % 2;
  return panel + query * ROW_BYTES + (chunk ^ query % 8) * 16;
}

// store_transposed() writes a fragment of 64 keys x N queries as rows of queries into the panel of its keys.
template <int N>
DEVICE void store_transposed(u32 panel, const u32 (&words)[N]) {
  const u32 target = transposed_address(panel, threadIdx.x);
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    ptx::stmatrix_x4_trans(target + i * 16 * ROW_BYTES, words[4 * i], words[4 * i + 1], words[4 * i + 2],
                           words[4 * i + 3]);
  }
}

// ---- The epilogue: a warp's results go by way of shared memory, so that neighbouring lanes store whole lines.

// pack_results() rounds eight results of a thread from `first` on, four of each of its two rows: out * factor of the
// row, or 0 where the row is not used.
template <int N>
DEVICE void pack_results(u32 (&words)[4], const float (&out)[N], int first, const float (&factor)[2],
                         const bool (&used)[2]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int e = first + 2 * i;
    words[i] = used[i % 2] ? packed(Element(), out[e] * factor[i % 2], out[e + 1] * factor[i % 2]) : 0;
  }
}

// write_rows() writes out * factor for the warp's rows [row, row + 16) of `data` (rows, head_dim); rows in [len, rows)
// are padding and become 0. `staging` is the warp's own: 16 rows of eight 16-byte chunks, each chunk in the place of
// its number xor the row's, which avoids bank conflicts.
template <int N>
DEVICE void write_rows(Element* data, i64 row_stride, int row, int len, int rows, int head_dim, const float (&out)[N],
                       const float (&factor)[2], unsigned char* staging) {
  constexpr int CHUNK = sizeof(Vector), CHUNKS = ROW_BYTES / CHUNK, ROWS_AT_ONCE = WARP / CHUNKS;
  const bool vectors = (reinterpret_cast<u64>(data) | static_cast<u64>(row_stride) * sizeof(Element)) % CHUNK == 0 &&
                       head_dim % VECTOR == 0;
  u32 own_lane = lane();
  ptx::forget(own_lane);
  const int thread = static_cast<int>(own_lane);
  const bool used[2] = {row + thread / 4 < len, row + thread / 4 + 8 < len};
  const int from_row = thread % ROWS_OF_WARP, from_chunk = thread / ROWS_OF_WARP;
  const u32 from = ptx::shared_address(staging) + from_row * ROW_BYTES;
  const int to_row = thread / CHUNKS, to_chunk = thread % CHUNKS;
  Element* target = data + (row + to_row) * row_stride + to_chunk * VECTOR;
#pragma unroll
  for (int panel = 0; panel * (PANEL / 2) < N; panel++) {
#pragma unroll
    for (int block = 0; block < PANEL / 16; block++) {
      const int first = panel * (PANEL / 2) + block * 8;
      if (first >= N) break;
      u32 words[4];
      pack_results(words, out, first, factor, used);
      ptx::stmatrix_x4(from + ((2 * block + from_chunk) ^ (from_row % CHUNKS)) * CHUNK, words[0], words[1], words[2],
                       words[3]);
    }
    __syncwarp();
    const int columns_left = head_dim - (panel * PANEL + to_chunk * VECTOR);
    // A panel whose columns the fragment has in part is staged in part.
    const bool is_staged = N % (PANEL / 2) == 0 || columns_left > 0;
    const int rows_left = columns_left > 0 ? rows - row - to_row : 0;
    const auto staged = [&](int i) {
      return reinterpret_cast<const Vector*>(staging + (i + to_row) * ROW_BYTES +
                                             (to_chunk ^ (i + to_row) % CHUNKS) * CHUNK);
    };
    if (vectors && is_staged) {
      Vector x[ROWS_OF_WARP / ROWS_AT_ONCE];
#pragma unroll
      for (int i = 0; i < ROWS_OF_WARP; i += ROWS_AT_ONCE) x[i / ROWS_AT_ONCE] = *staged(i);
      Element* to = target + panel * PANEL;
#pragma unroll
      for (int i = 0; i < ROWS_OF_WARP; i += ROWS_AT_ONCE, to += ROWS_AT_ONCE * row_stride) {
        if (i < rows_left) *reinterpret_cast<Vector*>(to) = x[i / ROWS_AT_ONCE];
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < smaller(rows_left, ROWS_OF_WARP); i += ROWS_AT_ONCE) {
#pragma unroll 1
        for (int e = 0; e < smaller(columns_left, VECTOR); e++) {
          target[i * row_stride + panel * PANEL + e] = staged(i)->e[e];
        }
      }
    }
    __syncwarp();
  }
}

// ---- A bias in tiles that TMA loads, (BLOCK_M, BLOCK_N). A bias that is the same for all queries has one row.

constexpr int BIAS_PANEL = ROW_BYTES / sizeof(BiasElement);  // columns of a panel of the bias
constexpr int PANELS_BIAS = (BLOCK_N + BIAS_PANEL - 1) / BIAS_PANEL;
constexpr u32 BIAS_PANEL_BYTES = BLOCK_M * ROW_BYTES, BIAS_TILE_BYTES = PANELS_BIAS * BIAS_PANEL_BYTES;

// unpacked() makes two floats of a word of two 16-bit numbers.
DEVICE float2 unpacked(__nv_bfloat16, u32 pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
DEVICE float2 unpacked(__half, u32 pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }

// bias_address() is the address of (row, column) in a tile; `column` is a multiple of the elements of 16 bytes.
DEVICE u32 bias_address(u32 tile, int row, int column) {
  const u32 chunk = column % BIAS_PANEL * sizeof(BiasElement) / 16;
  return tile + column / BIAS_PANEL * BIAS_PANEL_BYTES + row * ROW_BYTES + (chunk ^ row % 8) * 16;
}

// add_pair() adds the bias to two scores. In a masked tile a bias of -inf hides, also where the score is NaN.
DEVICE void add_pair(float& x, float& y, float2 bias, bool masked) {
  x = masked && bias.x == -infinity() ? bias.x : x + bias.x;
  y = masked && bias.y == -infinity() ? bias.y : y + bias.y;
}

// add_bias_tile() adds a tile to a warp's fragment, whose first row in the tile is `warp_row`; with `one_row` all warps
// add the tile's single row.
template <class Bias = BiasElement>
DEVICE void add_bias_tile(float (&x)[BLOCK_N / 2], u32 tile, int warp_row, bool one_row, bool masked) {
  if constexpr (sizeof(Bias) == 2) {
    const int row = one_row ? 0 : warp_row + lane() % 16;
#pragma unroll
    for (int column = 0; column < BLOCK_N; column += 16) {
      u32 pairs[4];  // rows 0 and 8, columns 0 and 8
      ptx::ldmatrix_x4(pairs, bias_address(tile, row, column) ^ (lane() / 16 * 16));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = column / 2 + 2 * i;
        add_pair(x[e], x[e + 1], unpacked(Bias(), pairs[i]), masked);
      }
    }
  } else {
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e += 2) {
      const int row = one_row ? 0 : warp_row + fragment_row() + row_offset(e);
      const int column = column_offset(e) + fragment_column() / 4 * 4;
      const u32 address = bias_address(tile, row, column) + fragment_column() % 4 * sizeof(BiasElement);
      add_pair(x[e], x[e + 1], *static_cast<const float2*>(__cvta_shared_to_generic(address)), masked);
    }
  }
}
