// Gradients of padded or packed keys become gradients of pools: scatter_pages sums, for every row of a page, the rows
// of all sequences that use it, in the order of the table, and rounds once. A page that nobody uses becomes 0.
#include "../params.cuh"
#include "pages.cuh"

constexpr int PER_THREAD = 8;  // elements of a page that a thread sums in registers

// PageSums sums one gradient over the uses of a page. A thread has every THREADS-th element of a part of the page.
struct PageSums {
  const Tensor<Element>&from, &to;
  i64 first, size;  // the part's first element, and the elements of the page
  int heads, head_dim;
  Accum sum[PER_THREAD] = {};

  DEVICE PageSums(const Tensor<Element>& from, const Tensor<Element>& to, int part, int page_size, int heads,
                  int head_dim)
      : from(from),
        to(to),
        first(static_cast<i64>(part) * THREADS * PER_THREAD),
        size(to.data == nullptr ? 0 : static_cast<i64>(page_size) * heads * head_dim),
        heads(heads),
        head_dim(head_dim) {}

  // for_each() calls use(number, row of the page, head, column) for the thread's elements.
  template <class Use>
  DEVICE void for_each(Use use) {
#pragma unroll
    for (int n = 0; n < PER_THREAD; n++) {
      const i64 i = first + n * THREADS + threadIdx.x;
      if (i >= size) continue;
      const int column = static_cast<int>(i % head_dim);
      const i64 rest = i / head_dim;
      use(n, static_cast<int>(rest / heads), static_cast<int>(rest % heads), column);
    }
  }

  // add() adds the rows of one use of the page, `num_rows` from `first_row` on.
  DEVICE void add(i64 batch, i64 first_row, int num_rows) {
    for_each([&](int n, int row, int head, int column) {
      if (row < num_rows) sum[n] += to_accum(from.at(batch, first_row + row, head)[column]);
    });
  }

  DEVICE void write(int page) {
    for_each(
        [&](int n, int row, int head, int column) { to.at(page, row, head)[column] = from_accum<Element>(sum[n]); });
  }
};

// scatter_pages has num_tiles thread blocks for each page, which share its elements. Each looks for the uses of the
// page in the whole table, THREADS entries at a time.
extern "C" __global__ void __launch_bounds__(THREADS) scatter_pages(const AttentionParams p) {
  __shared__ int uses[THREADS];
  const int page = blockIdx.x / p.num_tiles, part = blockIdx.x % p.num_tiles;
  const int capacity = p.max_pages * p.page_size;
  const bool packed = p.cu_seqlens_q != nullptr;
  PageSums dk(p.dk_rows, p.dk, part, p.page_size, p.num_heads_kv, p.head_dim);
  PageSums dv(p.dv_rows, p.dv, part, p.page_size, p.num_heads_kv, p.head_dim_v);
  const i64 entries = static_cast<i64>(p.batch) * p.max_pages;
  for (i64 first = 0; first < entries; first += THREADS) {
    // A use is known by the number of its rows; only entries of keys in use are read.
    const i64 own = first + threadIdx.x;
    int num_rows = 0;
    if (own < entries) {
      const int sequence = static_cast<int>(own / p.max_pages), place = static_cast<int>(own % p.max_pages);
      const int left = used_length(p.kv_lengths, sequence, capacity) - place * p.page_size;
      if (left > 0 && PageTable(p, sequence).entry(place) == page) num_rows = smaller(left, p.page_size);
    }
    uses[threadIdx.x] = num_rows;
    if (!__syncthreads_or(num_rows > 0)) continue;
    for (int t = 0; t < THREADS; t++) {
      if (uses[t] == 0) continue;
      const i64 sequence = (first + t) / p.max_pages, key = (first + t) % p.max_pages * p.page_size;
      const i64 batch = packed ? 0 : sequence, first_row = packed ? sequence * capacity + key : key;
      dk.add(batch, first_row, uses[t]);
      dv.add(batch, first_row, uses[t]);
    }
    __syncthreads();  // all have read the uses before others take their place
  }
  dk.write(page);
  dv.write(page);
}
