// This header has the tiles of the portable kernels, which use no tensor cores and run on every GPU and dtype. Products
// are plain multiply-adds, whose operands stream through two buffers in shared memory. A block is 16 x 16 threads. In a
// tile of R x C elements thread (r, c) owns R/16 rows and C/16 columns. Their indices come in pairs {i, i ^ 8}, because
// one call of dropout's generator decides on both (rules/dropout.cuh). portable/forward.cu and
// portable/gradient_tile.cuh build on it.
#include "../rules/hook.cuh"
#include "../rules/dropout.cuh"

constexpr int NUM_THREADS = SIDE * SIDE;
// PAD keeps the transposing stores below two-way bank conflicts and rows aligned to 16 bytes.
constexpr int PAD = ALIGNMENT / sizeof(Accum);
// SUMS_TILES: the products of a tile are summed by themselves before they are added to the result, as errors grow with
// the number of terms of a sum.
constexpr bool SUMS_TILES = SUM_COLUMNS > 0;

// slice_begin() is the first column of the results that the thread block computes. Results that are wider than the
// widest kernel are cut into slices, for each of which a thread block computes the scores anew; blockIdx.y numbers the
// slices.
DEVICE int slice_begin() { return SLICE_COLUMNS == 0 ? 0 : blockIdx.y * SLICE_COLUMNS; }

DEVICE int thread_row() { return threadIdx.x / SIDE; }
DEVICE int thread_column() { return threadIdx.x % SIDE; }

// owned_index() is the row (or column) of the tile that is element e of the PER = SIZE / 16 that thread t owns.
template <int PER>
DEVICE int owned_index(int t, int e) {
  constexpr int HALF = PER / 2;      // consecutive elements on either side of bit 3 of the index
  constexpr int SHARING = 8 / HALF;  // threads that share a group of 16 indices
  return t / SHARING * 16 + e / HALF * 8 + t % SHARING * HALF + e % HALF;
}

// stored_at() is the place of that element in shared memory: groups of four for each thread, so that 16 threads read
// 256 bytes in a row.
template <int PER>
DEVICE int stored_at(int t, int e) {
  constexpr int GROUP = PER < 4 ? PER : 4;
  return e / GROUP * (GROUP * SIDE) + t * GROUP + e % GROUP;
}

// stored_index() is the place of the tile's row (or column) `index`: the inverse of owned_index, then stored_at.
template <int PER>
DEVICE int stored_index(int index) {
  constexpr int HALF = PER / 2, SHARING = 8 / HALF;
  return stored_at<PER>(index / 16 * SHARING + index % 8 / HALF, index / 8 % 2 * HALF + index % HALF);
}

template <int N>
struct alignas(N * sizeof(Accum) < 16 ? N * sizeof(Accum) : 16) Group {
  Accum x[N];
};

// read_owned() reads the elements that thread t owns of a row in that order.
template <int PER>
DEVICE void read_owned(Accum (&x)[PER], const Accum* row, int t) {
  constexpr int GROUP = PER < 4 ? PER : 4;
#pragma unroll
  for (int g = 0; g < PER / GROUP; g++) {
    const Group<GROUP> values = *reinterpret_cast<const Group<GROUP>*>(row + stored_at<PER>(t, g * GROUP));
#pragma unroll
    for (int i = 0; i < GROUP; i++) x[g * GROUP + i] = values.x[i];
  }
}

template <int ROWS, int COLUMNS>
DEVICE void clear(Accum (&x)[ROWS][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) x[r][c] = 0;
  }
}

// multiply_chunk() computes x[r][c] += sum over k < DEPTH of a[k][r] * b[k][c].
template <int DEPTH, int ROWS, int COLUMNS>
DEVICE void multiply_chunk(Accum (&x)[ROWS][COLUMNS], const Accum* a, int a_stride, const Accum* b, int b_stride) {
#pragma unroll UNROLL
  for (int k = 0; k < DEPTH; k++) {
    Accum left[ROWS], right[COLUMNS];
    read_owned(left, a + k * a_stride, thread_row());
    read_owned(right, b + k * b_stride, thread_column());
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) x[r][c] += left[r] * right[c];
    }
  }
}

// TransposedChunk is a chunk of BLOCK_K columns of N rows on its way to shared memory, where it lies transposed:
// (BLOCK_K, N + PAD) as [k][stored row]. fetch() reads it into registers, commit() writes it to shared memory.
template <int N>
struct TransposedChunk {
  static constexpr int STRIDE = N + PAD;
  static constexpr int PER_ROW = BLOCK_K / VECTOR;
  static constexpr int VECTORS = N * PER_ROW;
  static constexpr int PER_THREAD = (VECTORS + NUM_THREADS - 1) / NUM_THREADS;
  static_assert(BLOCK_K % VECTOR == 0, "a chunk is whole vectors");
  Vector in_registers[PER_THREAD];

  template <class Source>
  DEVICE void fetch(const Source& rows, int first_row, int k) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
      const int v = threadIdx.x + i * NUM_THREADS;
      if (VECTORS % NUM_THREADS == 0 || v < VECTORS)
        in_registers[i] = rows.read(first_row + v / PER_ROW, k + v % PER_ROW * VECTOR);
    }
  }

  DEVICE void commit(Accum* to) const {
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
      const int v = threadIdx.x + i * NUM_THREADS;
      if (VECTORS % NUM_THREADS != 0 && v >= VECTORS) continue;
      const int row = stored_index<N / SIDE>(v / PER_ROW);
#pragma unroll
      for (int e = 0; e < VECTOR; e++) to[(v % PER_ROW * VECTOR + e) * STRIDE + row] = to_accum(in_registers[i].e[e]);
    }
  }
};

// Chunk is a chunk of rows of N columns, those of the slice, which lies in shared memory as it does in global memory:
// BLOCK_K rows, or as many elements of those columns that are summed at once. Its rows come in the order in which
// write_transposed leaves the other factor: row k of the tile's product is the key (or query) with
// owned_index(k % 16, k / 16).
template <int N, int DEPTH>
struct Chunk {
  static constexpr int COLUMNS = SUMS_TILES && N > SUM_COLUMNS ? SUM_COLUMNS : N;
  static constexpr int SIZE = BLOCK_K * N, ROWS = SIZE / COLUMNS;
  static constexpr int PER_ROW = COLUMNS / VECTOR;
  static constexpr int VECTORS = ROWS * PER_ROW;
  static constexpr int PER_THREAD = (VECTORS + NUM_THREADS - 1) / NUM_THREADS;
  Vector in_registers[PER_THREAD];

  static DEVICE int row_in_tile(int k) { return owned_index<DEPTH / SIDE>(k % SIDE, k / SIDE); }

  template <class Source>
  DEVICE void fetch(const Source& rows, int first_row, int k, int column = 0) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
      const int v = threadIdx.x + i * NUM_THREADS;
      if (VECTORS % NUM_THREADS == 0 || v < VECTORS) {
        in_registers[i] =
            rows.read(first_row + row_in_tile(k + v / PER_ROW), slice_begin() + column + v % PER_ROW * VECTOR);
      }
    }
  }

  // commit() writes the chunk; rows that no element of the tile sees count as 0, also where they hold NaN.
  DEVICE void commit(Accum* to, int k, const u8* seen) const {
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
      const int v = threadIdx.x + i * NUM_THREADS;
      if (VECTORS % NUM_THREADS != 0 && v >= VECTORS) continue;
      const bool zero = seen != nullptr && seen[row_in_tile(k + v / PER_ROW)] == 0;
#pragma unroll
      for (int e = 0; e < VECTOR; e++) to[v * VECTOR + e] = zero ? Accum(0) : to_accum(in_registers[i].e[e]);
    }
  }
};

// write_transposed() writes a tile as the left factor of multiply_rows: (COLUMNS * 16, ROWS * 16 + PAD) as [column in
// the order of Chunk][stored row].
template <int ROWS, int COLUMNS>
DEVICE void write_transposed(Accum* to, const Accum (&x)[ROWS][COLUMNS]) {
  constexpr int GROUP = ROWS < 4 ? ROWS : 4;
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    Accum* column = to + (c * SIDE + thread_column()) * (ROWS * SIDE + PAD);
#pragma unroll
    for (int g = 0; g < ROWS / GROUP; g++) {
      Group<GROUP> values;
#pragma unroll
      for (int i = 0; i < GROUP; i++) values.x[i] = x[g * GROUP + i][c];
      *reinterpret_cast<Group<GROUP>*>(column + stored_at<ROWS>(thread_row(), g * GROUP)) = values;
    }
  }
}

// Buffers alternates between two buffers. One barrier a chunk is enough: whoever fills a buffer has passed the barrier
// behind its last use.
template <int SIZE>
struct Buffers {
  Accum* base;
  int current = 0;

  DEVICE explicit Buffers(Accum* base) : base(base) {}
  DEVICE Accum* next() { return base + (current ^= 1) * SIZE; }
};

// ChunkPair is both operands of multiply_transposed on their way to shared memory.
template <int A, int B>
struct ChunkPair {
  static constexpr int SIZE = BLOCK_K * (TransposedChunk<A>::STRIDE + TransposedChunk<B>::STRIDE);
  TransposedChunk<A> a;
  TransposedChunk<B> b;

  template <class Source>
  DEVICE void fetch(const Rows& rows_a, int first_a, const Source& rows_b, int first_b, int k) {
    a.fetch(rows_a, first_a, k);
    b.fetch(rows_b, first_b, k);
  }
};

// multiply_transposed() computes x[r][c] += sum over k of a[first_a + r][k] * b[first_b + c][k]. The caller has fetched
// the first chunk; `next` starts to fetch the operands of the next product when the last chunk has arrived.
template <int SIZE, int ROWS, int COLUMNS, class Source, class Next>
DEVICE void multiply_transposed(Accum (&x)[ROWS][COLUMNS], Buffers<SIZE>& buffers,
                                ChunkPair<ROWS * SIDE, COLUMNS * SIDE>& pair, const Rows& a, int first_a,
                                const Source& b, int first_b, Next next) {
  using Pair = ChunkPair<ROWS * SIDE, COLUMNS * SIDE>;
  static_assert(SIZE >= Pair::SIZE, "both chunks fit a buffer");
  for (int k = 0; k < a.num_columns; k += BLOCK_K) {
    Accum* buffer_a = buffers.next();
    Accum* buffer_b = buffer_a + BLOCK_K * pair.a.STRIDE;
    pair.a.commit(buffer_a);
    pair.b.commit(buffer_b);
    __syncthreads();
    if (k + BLOCK_K < a.num_columns) {
      pair.fetch(a, first_a, b, first_b, k + BLOCK_K);
    } else {
      next();
    }
    multiply_chunk<BLOCK_K>(x, buffer_a, pair.a.STRIDE, buffer_b, pair.b.STRIDE);
  }
}

// multiply_rows() computes x[r][c] += sum over k < DEPTH of a[k][r] * b[first_b + k][c], with a as write_transposed
// left it. The first chunk and `next` are as in multiply_transposed; rows of b that are not `seen` count as 0 (null:
// all are seen).
template <int DEPTH, int SIZE, int ROWS, int COLUMNS, class Source, class Next>
DEVICE void multiply_rows(Accum (&x)[ROWS][COLUMNS], Buffers<SIZE>& buffers, const Accum* a,
                          Chunk<COLUMNS * SIDE, DEPTH>& chunk, const Source& b, int first_b, const u8* seen,
                          Next next) {
  using Own = Chunk<COLUMNS * SIDE, DEPTH>;
  static_assert(SIZE >= Own::SIZE && DEPTH % Own::ROWS == 0, "the chunk fits a buffer and the tile");
  constexpr int PER = Own::COLUMNS / SIDE;
#pragma unroll
  for (int first = 0; first < COLUMNS; first += PER) {
    Accum sum[ROWS][PER];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < PER; c++) sum[r][c] = SUMS_TILES ? Accum(0) : x[r][first + c];
    }
    for (int k = 0; k < DEPTH; k += Own::ROWS) {
      Accum* buffer = buffers.next();
      chunk.commit(buffer, k, seen);
      __syncthreads();
      if (k + Own::ROWS < DEPTH) {
        chunk.fetch(b, first_b, k + Own::ROWS, first * SIDE);
      } else if (first + PER < COLUMNS) {
        chunk.fetch(b, first_b, 0, (first + PER) * SIDE);
      } else {
        next();
      }
      multiply_chunk<Own::ROWS>(sum, a + k * (ROWS * SIDE + PAD), ROWS * SIDE + PAD, buffer, Own::COLUMNS);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < PER; c++) x[r][first + c] = SUMS_TILES ? x[r][first + c] + sum[r][c] : sum[r][c];
    }
  }
}

// write_rows() writes x * factor, the columns of the slice, as rows [first, first + 16 * ROWS) of `data` (limit,
// num_columns); rows from `used` to `limit` become 0.
template <int ROWS, int COLUMNS>
DEVICE void write_rows(Element* data, i64 stride, int first, int used, int limit, int num_columns,
                       const Accum (&x)[ROWS][COLUMNS], const Accum (&factor)[ROWS]) {
  constexpr int GROUP = COLUMNS < 4 ? COLUMNS : 4;
  constexpr int BYTES = GROUP * sizeof(Element);
  struct alignas(BYTES < 16 ? BYTES : 16) Store {
    Element e[GROUP];
  };
  const bool vectors = (reinterpret_cast<u64>(data) | static_cast<u64>(stride) * sizeof(Element)) % alignof(Store) == 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int row = first + owned_index<ROWS>(thread_row(), r);
    if (row >= limit) continue;
#pragma unroll
    for (int g = 0; g < COLUMNS / GROUP; g++) {
      // Columns are owned in the order in which Chunk stores them.
      const int column = slice_begin() + stored_at<COLUMNS>(thread_column(), g * GROUP);
      Store values;
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        values.e[i] = from_accum<Element>(row < used ? x[r][g * GROUP + i] * factor[r] : Accum(0));
      }
      Element* to = data + row * stride + column;
      if (vectors && column + GROUP <= num_columns) {
        *reinterpret_cast<Store*>(to) = values;
      } else {
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
          if (column + i < num_columns) to[i] = values.e[i];
        }
      }
    }
  }
}

// score_tile() turns products into scores, -inf where hidden. With TRANSPOSED rows are keys and columns are queries. In
// a masked tile seen[column] becomes 1 where some row sees it; the caller has cleared it and synchronises before it is
// read.
template <bool TRANSPOSED, int ROWS, int COLUMNS>
DEVICE void score_tile(Accum (&x)[ROWS][COLUMNS], const Score& score, const Mask& mask, int first_row, int first_column,
                       bool masked, u8* seen) {
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    const int column = owned_index<COLUMNS>(thread_column(), c);
    bool any = false;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int row = first_row + owned_index<ROWS>(thread_row(), r);
      const int i = TRANSPOSED ? first_column + column : row, j = TRANSPOSED ? row : first_column + column;
      if (masked) {
        x[r][c] = mask.visible(i, j) ? score.value(x[r][c], i, j) : -infinity();
        any |= x[r][c] != -infinity();
      } else {
        x[r][c] = score.value(x[r][c], i, j);
      }
    }
    if (masked && any) seen[column] = 1;
  }
}

// needs_mask() tells whether elements of the current tile need a test. A tile with a bias or a score rule does, because
// these may hide by -inf.
DEVICE bool needs_mask(const Mask& mask, const Blocks& blocks, int i, int m, int j, int n) {
  return HIDES_IN_ANY_TILE || blocks.partial || !mask.wholly_inside(i, m, j, n);
}

// for_each_kept() calls drop(row, column, whether it is kept) for the thread's elements of a tile.
template <bool TRANSPOSED, int ROWS, int COLUMNS, class Drop>
DEVICE void for_each_kept(const Dropout& dropout, int first_row, int first_column, Drop drop) {
  constexpr int KEYS = TRANSPOSED ? ROWS : COLUMNS, QUERIES = TRANSPOSED ? COLUMNS : ROWS;
  if constexpr (HAS_PLACE) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const int row = first_row + owned_index<ROWS>(thread_row(), r);
        const int column = first_column + owned_index<COLUMNS>(thread_column(), c);
        drop(r, c, TRANSPOSED ? dropout.keeps(column, row) : dropout.keeps(row, column));
      }
    }
    return;
  }
  constexpr bool PAIRS = KEYS > 2;  // a thread owns both keys j and j + 1 of a word, or only one of them
#pragma unroll
  for (int q = 0; q < QUERIES / 2; q++) {
#pragma unroll
    for (int k = 0; k < KEYS / 2; k += PAIRS ? 2 : 1) {
      const int query = TRANSPOSED ? owned_index<QUERIES>(thread_column(), q) : owned_index<QUERIES>(thread_row(), q);
      const int key = TRANSPOSED ? owned_index<KEYS>(thread_row(), k) : owned_index<KEYS>(thread_column(), k);
      const int i = (TRANSPOSED ? first_column : first_row) + query, j = (TRANSPOSED ? first_row : first_column) + key;
      const int odd = PAIRS ? 0 : j & 1;
      const u32 kept = dropout.keep(i, j - odd) >> odd;
#pragma unroll
      for (int side = 0; side < 4; side++) {
        const int own_q = q + side / 2 * (QUERIES / 2), own_k = k + side % 2 * (KEYS / 2);
        const int r = TRANSPOSED ? own_k : own_q, c = TRANSPOSED ? own_q : own_k;
        drop(r, c, (kept >> 2 * side & 1) != 0);
        if constexpr (PAIRS) drop(TRANSPOSED ? r + 1 : r, TRANSPOSED ? c : c + 1, (kept >> 2 * side & 2) != 0);
      }
    }
  }
}
