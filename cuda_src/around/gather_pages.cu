// Paged keys become padded or packed arrays: gather_pages copies the rows of every page that holds keys in use. It
// moves bytes, so Element is an unsigned integer of the arrays' size. Rows beyond the keys in use are neither read nor
// written; attention hides them by kv_lengths.
#include "../params.cuh"
#include "pages.cuh"

constexpr int KEYS = 32;  // keys that a thread block copies before it goes on to others

// copy_rows() copies keys [first, end) of one sequence from a pool to rows of the same logical keys.
DEVICE void copy_rows(const Tensor<const Element>& pool, const Tensor<Element>& to, const PageTable& table, i64 batch,
                      i64 first_row, int first, int end, int heads, int head_dim) {
  const u64 places = reinterpret_cast<u64>(pool.data) | reinterpret_cast<u64>(to.data) |
                     sizeof(Element) * static_cast<u64>(pool.batch_stride | pool.row_stride | pool.head_stride |
                                                        to.batch_stride | to.row_stride | to.head_stride | head_dim);
  const bool vectors = places % ALIGNMENT == 0;
  const int width = vectors ? VECTOR : 1, per_head = head_dim / width, per_key = heads * per_head;
  for (i64 i = threadIdx.x; i < static_cast<i64>(end - first) * per_key; i += THREADS) {
    const int key = first + static_cast<int>(i / per_key), rest = static_cast<int>(i % per_key);
    const int head = rest / per_head, column = rest % per_head * width;
    const Element* from = pool.at(table.page_of(key), table.row_of(key), head) + column;
    Element* target = to.at(batch, first_row + key, head) + column;
    if (vectors) {
      *reinterpret_cast<Vector*>(target) = *reinterpret_cast<const Vector*>(from);
    } else {
      *target = *from;
    }
  }
}

// gather_pages has num_tiles thread blocks for each sequence, which share its keys. Where rows are packed, it also
// writes where each sequence begins; without arrays for the rows it does nothing else.
extern "C" __global__ void __launch_bounds__(THREADS) gather_pages(const AttentionParams p) {
  const int capacity = p.max_pages * p.page_size;
  if (p.first_keys != nullptr && blockIdx.x == 0) {
    for (int b = threadIdx.x; b <= p.batch; b += THREADS) p.first_keys[b] = b * capacity;
  }
  const int sequence = blockIdx.x / p.num_tiles, block = blockIdx.x % p.num_tiles;
  if (sequence >= p.batch || p.k_rows.data == nullptr) return;
  const PageTable table(p, sequence);
  const bool packed = p.first_keys != nullptr;
  const i64 batch = packed ? 0 : sequence, first_row = packed ? static_cast<i64>(sequence) * capacity : 0;
  const int length = used_length(p.kv_lengths, sequence, capacity);
  for (i64 first = static_cast<i64>(block) * KEYS; first < length; first += static_cast<i64>(p.num_tiles) * KEYS) {
    const int key = static_cast<int>(first), end = length - key < KEYS ? length : key + KEYS;
    copy_rows(p.k, p.k_rows, table, batch, first_row, key, end, p.num_heads_kv, p.head_dim);
    copy_rows(p.v, p.v_rows, table, batch, first_row, key, end, p.num_heads_kv, p.head_dim_v);
  }
}
