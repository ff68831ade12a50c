// How the mma.sync kernels multiply where keys and values, and perhaps queries, are e4m3 codes (sm_80 and newer). It
// is `products` of forward.cuh in place of half_tile.cuh, with own_codes.cuh or paged_codes.cuh as `keys`.
//
// Codes are what is read from memory and what waits in shared memory. By MULTIPLIES_CODES (sm_89 and newer, where the
// queries are codes) they are what is multiplied, too. Else a thread block makes elements of 16 bits of each tile,
// which is exact. It does so once and not in the fragments, because each of its warps may have all of a tile's keys as
// a factor: there every warp would convert every code, which takes longer than the products do.
//
// Factors: the score of a key is multiplied by its k_scale, and its weight by its v_scale. Weights so multiplied may be
// far from 1, so they stand in a unit of their row (Units).
#include "../around/code_vector.cuh"
#include "../fragment/softmax_fragment.cuh"
#include "tile.cuh"

constexpr bool FOLLOWS_MAXIMA = true;  // weights are rounded against the running maximum, whose own is exact
constexpr int WARP_KEYS = BLOCK_N / (SPLITS_WARPS ? NUM_WARPS : 1);
constexpr int UNROLLED = ALIGNED ? 4 : 1;  // loads that a thread issues together; element by element they are long
static_assert(sizeof(Element) == 2 && KEY_WARPS == 1 && STAGES == 2 && LISTED == 1, "what these tiles are for");

// ---- Where codes and their scales lie

DEVICE const float* scales_at(const Tensor<const float>& scale, i64 batch, i64 row, i64 head) {
  return scale.data == nullptr ? nullptr : scale.at(batch, row, head);
}

// CodeRows are the rows of codes of one (sequence, head) and the scale of each; without scales all are 1.
struct CodeRows {
  const u8* data;
  i64 stride;
  const float* scales;  // or null
  i64 scale_stride;
  int num_rows, num_columns;

  DEVICE const u8* codes_at(int row) const { return data + row * stride; }
  DEVICE const float* scale_at(int row) const { return scales + row * scale_stride; }
  DEVICE bool scales_vary() const { return scale_stride != 0; }
};

DEVICE CodeRows rows_of_codes(const AttentionParams& p, const Sequence& s, Operand operand, int head) {
  const bool of_keys = operand != Operand::Q;
  const Tensor<const u8> x = codes_of(operand == Operand::Q ? p.q : operand == Operand::K ? p.k : p.v);
  const Tensor<const float>& scale = operand == Operand::Q ? p.q_scale : operand == Operand::K ? p.k_scale : p.v_scale;
  const i64 batch = batch_of(p, s), row = of_keys ? s.row_k : s.row_q;
  return {x.at(batch, row, head),
          x.row_stride,
          scales_at(scale, batch, row, head),
          scale.row_stride,
          of_keys ? s.len_k : s.len_q,
          operand == Operand::V ? p.head_dim_v : p.head_dim};
}

// ---- Tiles

// read_codes() reads a vector of a row; a code outside is 0.
template <class Source>
DEVICE CodeVector read_codes(const Source& rows, int row, bool inside, int vector) {
  return read_codes<ALIGNED>(rows.codes_at(row) + vector * CODES, inside ? rows.num_columns - vector * CODES : 0);
}

// copy_codes() starts to copy a vector of a row to shared memory; a code outside is 0.
template <class Source>
DEVICE void copy_codes(u32 to, const Source& rows, int row, bool inside, int vector) {
  if constexpr (ALIGNED) {
    const int left = inside ? rows.num_columns - vector * CODES : 0;
    const u8* from = inside ? rows.codes_at(row) : rows.data;
    ptx::cp_async_16(to, from + (left > 0 ? vector * CODES : 0), clamped(left, CODES));
  } else {
    *static_cast<uint4*>(at_shared(to)) = read_codes(rows, row, inside, vector).vector;
  }
}

// DecodedTile is ROWS x COLUMNS elements that are made of codes. A thread decodes the vectors that it has loaded.
template <int ROWS, int COLUMNS>
struct DecodedTile : SharedTile<ROWS, COLUMNS, true> {
  using Elements = SharedTile<ROWS, COLUMNS, true>;
  static constexpr int ROW_VECTORS = COLUMNS / CODES, VECTORS = ROWS * ROW_VECTORS;

  template <class Operation>
  static DEVICE void for_own_vectors(const Operation& operation) {
#pragma unroll(UNROLLED)
    for (int i = threadIdx.x; i < VECTORS; i += NUM_THREADS) operation(i, i / ROW_VECTORS, i % ROW_VECTORS);
  }
  // decode() writes the elements of a vector of codes.
  DEVICE void decode(int row, int vector, const CodeVector& codes) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      *static_cast<uint4*>(at_shared(this->address + Elements::offset(row, 2 * vector + half))) =
          elements_of(codes, half);
    }
  }
};

// DecodedQueries are decoded when they are loaded.
template <int ROWS, int COLUMNS>
struct DecodedQueries : DecodedTile<ROWS, COLUMNS> {
  DEVICE void load(const CodeRows& rows, int first_row) const {
    this->for_own_vectors([&](int, int row, int vector) {
      this->decode(row, vector, read_codes(rows, first_row + row, first_row + row < rows.num_rows, vector));
    });
  }
};

// DecodedKeys (or values) have their codes behind their elements; decode() follows where a thread's copies are done.
template <int ROWS, int COLUMNS>
struct DecodedKeys : DecodedTile<ROWS, COLUMNS> {
  using Base = DecodedTile<ROWS, COLUMNS>;
  static constexpr bool DECODES = true;
  static constexpr u32 ELEMENT_BYTES = Base::Elements::BYTES, BYTES = ELEMENT_BYTES + Base::VECTORS * VECTOR_BYTES;

  DEVICE u32 place(int i) const { return this->address + ELEMENT_BYTES + i * VECTOR_BYTES; }
  template <class Source>
  DEVICE void load(const Source& rows, int first_row, int begin = 0) const {
    this->for_own_vectors([&](int i, int row, int vector) {
      const int source = first_row + row;
      copy_codes(place(i), rows, source, source >= begin && source < rows.num_rows, vector);
    });
  }
  DEVICE void decode() const {
    this->for_own_vectors([&](int i, int row, int vector) {
      CodeVector codes;
      codes.vector = *static_cast<const uint4*>(at_shared(place(i)));
      Base::decode(row, vector, codes);
    });
  }
};

// CodeTile is ROWS x COLUMNS codes, two to an element.
template <int ROWS, int COLUMNS>
struct CodeTile : SharedTile<ROWS, COLUMNS / 2, true> {
  using Pairs = SharedTile<ROWS, COLUMNS / 2, true>;
  template <class Source>
  DEVICE void load(const Source& rows, int first_row, int begin = 0) const {
#pragma unroll(UNROLLED)
    for (int i = threadIdx.x; i < ROWS * Pairs::PER_ROW; i += NUM_THREADS) {
      const int row = i / Pairs::PER_ROW, vector = i % Pairs::PER_ROW, source = first_row + row;
      copy_codes(this->address + Pairs::offset(row, vector), rows, source, source >= begin && source < rows.num_rows,
                 vector);
    }
  }
};

template <int ROWS, int COLUMNS, bool = true>
using KeyedTile = typename Either<MULTIPLIES_CODES, CodeTile<ROWS, COLUMNS>, DecodedKeys<ROWS, COLUMNS>>::Type;
template <int ROWS, int COLUMNS, bool = true>
using ValuedTile = KeyedTile<ROWS, COLUMNS>;
template <int ROWS, int COLUMNS>
using QueriedTile = typename Either<
    MULTIPLIES_CODES, CodeTile<ROWS, COLUMNS>,
    typename Either<QUERY_CODES, DecodedQueries<ROWS, COLUMNS>, SharedTile<ROWS, COLUMNS, true>>::Type>::Type;

// rows_of() is the queries' rows of one (sequence, head), by one of two functions that their type tells apart.
using OperandRows = Either<QUERY_CODES, CodeRows, Rows>::Type;
DEVICE CodeRows queries_of(const CodeRows*, const AttentionParams& p, const Sequence& s, int head) {
  return rows_of_codes(p, s, Operand::Q, head);
}
DEVICE Rows queries_of(const Rows*, const AttentionParams& p, const Sequence& s, int head) {
  return Rows(p.q.at(batch_of(p, s), s.row_q, head), p.q.row_stride, s.len_q, p.head_dim);
}
DEVICE OperandRows rows_of(const AttentionParams& p, const Sequence& s, Operand, int head) {
  return queries_of(static_cast<const OperandRows*>(nullptr), p, s, head);
}

// ---- Scales

// ValueScales are those of a tile's values.
struct ValueScales {
  const float* of_keys;  // in shared memory
  bool vary;             // else all of them are the first
  int begin;             // the warp's first key
};

// Factors are the scales of the rows of a pair of tiles: (BUFFERS, ROWS) each.
template <int ROWS, int BUFFERS>
struct Factors {
  static_assert(ROWS <= NUM_THREADS, "a thread has one");
  static constexpr int SIZE = BUFFERS == 1 && !QUERY_CODES ? 1 : ROWS;
  alignas(8) float keyed_scales[BUFFERS][SIZE], valued_scales[BUFFERS][BUFFERS == 1 ? 1 : SIZE];
  bool values_vary[BUFFERS];

  // load() starts to load the scales; those of rows that are not in use are never read.
  template <class Source>
  DEVICE void load(u32 buffer, const Source& keyed, const Source& valued, int first) {
    if (threadIdx.x >= ROWS) return;
    load_one(&keyed_scales[buffer][threadIdx.x], keyed, first + threadIdx.x);
    if constexpr (BUFFERS > 1) {
      load_one(&valued_scales[buffer][threadIdx.x], valued, first + threadIdx.x);
      if (threadIdx.x == 0) values_vary[buffer] = valued.scales_vary();
    }
  }
  DEVICE void load(u32, const Rows&, const Rows&, int) {}
  DEVICE const float* of_keyed(u32 buffer) const { return keyed_scales[buffer]; }
  DEVICE ValueScales of_valued(u32 buffer, int begin) const {
    return {valued_scales[buffer], values_vary[buffer], begin};
  }

 private:
  template <class Source>
  static DEVICE void load_one(float* to, const Source& rows, int row) {
    if (rows.scales != nullptr && row < rows.num_rows) {
      copy_float(to, rows.scale_at(row));
    } else {
      *to = 1;
    }
  }
};

// take_scores() multiplies products by the scales of their rows and columns, of which the warp's begin at `begin`.
template <int N, class Queries, class Keys>
DEVICE void take_scores(float (&x)[N], const Queries& queries, int row, const Keys& keys, u32 buffer, int begin) {
  float of_row[2] = {1, 1};
  if constexpr (QUERY_CODES) of_row[0] = queries.of_keyed(0)[row], of_row[1] = queries.of_keyed(0)[row + 8];
#pragma unroll
  for (int e = 0; e < N; e += 4) {
    const int column = begin + fragment_column() + column_offset(e);
    const float2 scale = *reinterpret_cast<const float2*>(keys.of_keyed(buffer) + column);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[e + i] *= i % 2 == 0 ? scale.x : scale.y;
      if constexpr (QUERY_CODES) x[e + i] *= of_row[i / 2];
    }
  }
}

// Units are the units of the rows of a sum: a weight times its scale is a number of them. Where scales differ, a row's
// unit is the largest such product so far over TOP, so that the largest weight is exact: a key that has much of a row's
// weight would else bring the error of rounding its scale. Where all keys share a scale it is that.
struct Units {
  static constexpr float LEAST = 0x1p-100f;  // the least unit, whose inverse is finite
  static constexpr float TOP = QUERY_CODES ? 256 : 16384;
  float unit[2] = {LEAST, LEAST};

  DEVICE float at(int r) const { return unit[r]; }

  // scale_to_units() multiplies weights by scales, and puts them into units; it returns whether rows of the sum are to
  // be multiplied by rescale.
  template <int N>
  DEVICE bool scale_to_units(float (&x)[N], const ValueScales& scales, float (&rescale)[2]) {
    if (!scales.vary) {
      unit[0] = unit[1] = scales.of_keys[0] * (QUERY_CODES ? 1 / TOP : 1);
      if constexpr (QUERY_CODES) multiply_all(x, TOP);
      round(x);
      return false;
    }
    float top[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < N; e += 4) {
      const int column = scales.begin + fragment_column() + column_offset(e);
      const float2 scale = *reinterpret_cast<const float2*>(scales.of_keys + column);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        // The scale of a key without weight may be anything.
        x[e + i] = x[e + i] == 0 ? 0 : x[e + i] * (i % 2 == 0 ? scale.x : scale.y);
        top[i / 2] = larger(top[i / 2], fabsf(x[e + i]));
      }
    }
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float earlier = rescale[r] * unit[r];
      unit[r] = larger(larger(max_of_row<4>(top[r]) * (1 / TOP), earlier), LEAST);
      inverse[r] = quotient(1, unit[r]);
      rescale[r] = earlier * inverse[r];
    }
    rescale_rows(x, inverse);
    round(x);
    return __any_sync(ALL_LANES, rescale[0] != 1 || rescale[1] != 1);
  }

 private:
  template <int N>
  static DEVICE void multiply_all(float (&x)[N], float factor) {
#pragma unroll
    for (int e = 0; e < N; e++) x[e] *= factor;
  }
  template <int N>
  static DEVICE void round(float (&x)[N]) {
    if constexpr (QUERY_CODES && !MULTIPLIES_CODES) {
#pragma unroll
      for (int e = 0; e < N; e++) x[e] = rounded_to_e4m3(x[e]);
    }
  }
};

// ---- Products

using Weights = u32[MULTIPLIES_CODES ? WARP_KEYS / 8 : WARP_KEYS / 4];

// pack() makes weights codes, the left factor of the next product. Its 32 keys are those of four blocks of the
// accumulator, in the order in which a lane has them: 2 t, 2 t + 1 of the first two blocks are keys 4 t to 4 t + 3 of
// the product. multiply_codes_by_columns() reads values in this order.
template <int N>
DEVICE void pack(u32 (&codes)[N / 4], const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    const int e = i / 2 * 8 + i % 2 * 2;
    codes[i] = ptx::e4m3_of(x[e], x[e + 1], x[e + 4], x[e + 5]);
  }
}

constexpr int CODE_STEP = 32;  // depth of a product of codes

template <class A, class B, int FRAGMENTS, int N>
DEVICE void multiply_scores(float (&x)[FRAGMENTS][N], const A& queries, const B& keys) {
  if constexpr (!MULTIPLIES_CODES) {
    multiply_rows<false>(x, queries, keys);
  } else {
#pragma unroll 1  // the factors of several steps would take registers that options need
    for (int step = 0; step < HEAD_DIM / CODE_STEP; step++) {
      u32 a[FRAGMENTS][4];
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) queries.left(a[f], 16 * f, step);
#pragma unroll
      for (int block = 0; block < N / 8; block++) {
        u32 b[4];
        keys.right_transposed(b, 16 * block, step);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float (&d)[4] = *reinterpret_cast<float (*)[4]>(&x[f][8 * block + 4 * half]);
            ptx::mma_m16n8k32_e4m3(d, a[f], {b[2 * half], b[2 * half + 1]});
          }
        }
      }
    }
  }
}

// multiply_codes_by_columns() computes x += weights values. ldmatrix transposes pairs of codes, which are neighbours in
// a row: of two keys a lane gets columns 2 g and 2 g + 1. Even columns are one product and odd columns another, so a
// lane has four columns that are neighbours (column_of). The tensor cores sum up no more than a tile.
template <int M, class B, int FRAGMENTS, int N>
DEVICE void multiply_codes_by_columns(float (&x)[FRAGMENTS][N], const u32 (&weights)[FRAGMENTS][M], const B& values) {
#pragma unroll
  for (int vector = 0; vector < N / 8; vector++) {
    __syncwarp();  // without it factors of the next columns would take registers early
    float sum[FRAGMENTS][8];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) clear(sum[f]);
#pragma unroll
    for (int step = 0; step < M / 4; step++) {
      u32 d[4];
      ptx::ldmatrix_x4_trans(d, values.address + B::offset(step * CODE_STEP + lane(), vector));
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const u32 order = odd ? 0x7531 : 0x6420;
        const u32 b[2] = {__byte_perm(d[0], d[1], order), __byte_perm(d[2], d[3], order)};
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
          u32 a[4];
          copy_words(a, &weights[f][4 * step]);
          ptx::mma_m16n8k32_e4m3(*reinterpret_cast<float (*)[4]>(&sum[f][4 * odd]), a, b);
        }
      }
    }
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          x[f][8 * vector + 4 * (i / 2) + 2 * r + i % 2] += sum[f][4 * (i % 2) + 2 * r + i / 2];
      }
    }
  }
}

template <int M, class B, int FRAGMENTS, int N>
DEVICE void multiply_values(float (&x)[FRAGMENTS][N], const u32 (&weights)[FRAGMENTS][M], const B& values) {
  if constexpr (MULTIPLIES_CODES) {
    multiply_codes_by_columns(x, weights, values);
  } else {
    multiply_weights(x, weights, values);
  }
}

// ---- Results

// column_of() is where element e of a result stands.
DEVICE int column_of(int e) {
  return MULTIPLIES_CODES ? e / 8 * 16 + lane() % 4 * 4 + e / 4 % 2 * 2 + e % 2 : fragment_column() + column_offset(e);
}

// restore_channels() does nothing, as channels have no factors here.
template <class... Arguments>
DEVICE void restore_channels(Arguments&&...) {}

// write_results() writes the fragments of a warp, one below the other, times their units.
template <class T, int FRAGMENTS, int N>
DEVICE void write_results(const Units (&units)[FRAGMENTS], const T&, int, Result* data, i64 row_stride, int row,
                          int len, int rows, int head_dim, float (&out)[FRAGMENTS][N]) {
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
    for (int e = 0; e < N; e++) {
      // A result of 0 stays 0, because the unit of a row that saw nothing may be anything.
      out[f][e] = out[f][e] == 0 ? 0 : out[f][e] * units[f].unit[e / 2 % 2];
    }
    const int first = row + 16 * f + fragment_row();
    if constexpr (!MULTIPLIES_CODES && sizeof(Result) == 2) {
      const float one[2] = {1, 1};
      write_fragment(data, row_stride, first, len, rows, head_dim, out[f], one);
    } else {
#pragma unroll
      for (int e = 0; e < N; e++) {
        const int i = first + row_offset(e), column = column_of(e);
        if (i < rows && column < head_dim) data[i * row_stride + column] = Result(i < len ? out[f][e] : 0.0f);
      }
    }
  }
}
