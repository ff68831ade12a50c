// These kernels prepare block-sparse masks on the device, without atomics, so that results repeat their bits. A bool
// array becomes the canonical store (cuflash/masks/store.py): a grid of slots, each hidden, visible or the number of a
// 64 x 64 block of bits. From the store come the lists of tiles that attention kernels visit (rules/mask.cuh), and the
// bits in the order of fragments. The order of launches is classify_blocks, number_blocks, pack_blocks, order_bits,
// then list_tiles for each tile size.

namespace {

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WORDS = CANONICAL / WARP;  // 32-bit words in one row of a canonical block
constexpr int UNNUMBERED = 0;            // the slot of a partial block that has no number yet
constexpr int ROWS_PER_VOTE = 8;         // rows that a warp reads between two votes on whether it may stop
constexpr int SCAN_ITEMS = 8;            // slots that one thread numbers in each round
static_assert(CANONICAL % WARP == 0 && SCAN_THREADS % WARP == 0);

__device__ long long warp_in_grid() { return (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP; }
__device__ int lane_in_warp() { return threadIdx.x % WARP; }
__device__ unsigned lanes_below(int lane) { return (1u << lane) - 1; }
__device__ int blocks_in(int seqlen) { return (seqlen + CANONICAL - 1) / CANONICAL; }

// Source is a bool array (batch, heads, rows of cells, columns of cells) whose element (i / cell_rows, j /
// cell_columns) says whether (i, j) is visible; strides are in bytes.
struct Source {
  const unsigned char* data;
  long long stride_b, stride_h, stride_i, stride_j;
  int heads, cell_rows, cell_columns, seqlen_q, seqlen_k;
};

// BlockReader reads one canonical block with a warp; each lane has one column in every word.
struct BlockReader {
  const unsigned char* column[WORDS];  // the lane's column in each word at row 0 of the array; null beyond the array
  long long stride_i;
  int cell_rows, first_row, rows;

  __device__ BlockReader(const Source& source, long long block) {
    const int blocks_k = blocks_in(source.seqlen_k), blocks_q = blocks_in(source.seqlen_q);
    const int first_column = static_cast<int>(block % blocks_k) * CANONICAL;
    const long long batch_head = block / blocks_k / blocks_q;
    first_row = static_cast<int>(block / blocks_k % blocks_q) * CANONICAL;
    rows = min(CANONICAL, source.seqlen_q - first_row);
    cell_rows = source.cell_rows;
    stride_i = source.stride_i;
    const unsigned char* data =
        source.data + batch_head / source.heads * source.stride_b + batch_head % source.heads * source.stride_h;
    for (int word = 0; word < WORDS; ++word) {
      const int j = first_column + word * WARP + lane_in_warp();
      column[word] = j < source.seqlen_k ? data + j / source.cell_columns * source.stride_j : nullptr;
    }
  }

  __device__ bool in_array(int row, int word) const { return row < rows && column[word] != nullptr; }
  __device__ bool visible(int row, int word) const {
    return column[word][(first_row + row) / cell_rows * stride_i] != 0;
  }
};

// TileState is what a mask shows of a tile.
enum class TileState { hidden, partial, full };

// Census gathers whether anything seen so far was visible, and whether anything was hidden.
struct Census {
  bool visible = false, hidden = false;
  __device__ bool partial() const { return visible && hidden; }
};

// count_bits() adds rows [row0, row1) and columns [column0, column1) of a partial block, counted from the block's
// corner.
__device__ void count_bits(Census& census, const unsigned* block, int row0, int row1, int column0, int column1) {
  for (int word = 0; word < WORDS; ++word) {
    const int from = max(column0 - word * WARP, 0), to = min(column1 - word * WARP, WARP);
    if (from >= to) continue;
    const unsigned window = ALL_LANES >> (WARP - (to - from)) << from;
    for (int row = row0; row < row1 && !census.partial(); ++row) {
      const unsigned bits = block[row * WORDS + word];
      census.visible |= (bits & window) != 0;
      census.hidden |= (~bits & window) != 0;
    }
  }
}

// tile_state() tells what the mask shows of rows [i0, i1) x columns [j0, j1), all in the array; `slots` (blocks_q,
// blocks_k) are those of one (batch, head).
__device__ TileState tile_state(const int* slots, const unsigned* bits, int blocks_k, int i0, int i1, int j0, int j1) {
  Census census;
  for (int bi = i0 / CANONICAL; bi * CANONICAL < i1; ++bi) {
    for (int bj = j0 / CANONICAL; bj * CANONICAL < j1; ++bj) {
      const int slot = slots[static_cast<long long>(bi) * blocks_k + bj];
      if (slot == HIDDEN) {
        census.hidden = true;
      } else if (slot == VISIBLE) {
        census.visible = true;
      } else {
        const int top = bi * CANONICAL, left = bj * CANONICAL;
        count_bits(census, bits + static_cast<long long>(slot) * CANONICAL * WORDS, max(i0 - top, 0),
                   min(i1 - top, CANONICAL), max(j0 - left, 0), min(j1 - left, CANONICAL));
      }
      if (census.partial()) return TileState::partial;
    }
  }
  return census.visible ? TileState::full : TileState::hidden;
}

}  // namespace

// classify_blocks sets each slot (batch, heads, blocks_q, blocks_k) to HIDDEN, VISIBLE or UNNUMBERED. One warp reads
// one block.
extern "C" __global__ void classify_blocks(const unsigned char* data, long long stride_b, long long stride_h,
                                           long long stride_i, long long stride_j, int heads, int cell_rows,
                                           int cell_columns, int seqlen_q, int seqlen_k, long long num_blocks,
                                           int* slots) {
  const long long block = warp_in_grid();
  if (block >= num_blocks) return;
  const BlockReader reader(
      {data, stride_b, stride_h, stride_i, stride_j, heads, cell_rows, cell_columns, seqlen_q, seqlen_k}, block);
  Census own, all;
  for (int first = 0; first < reader.rows && !all.partial(); first += ROWS_PER_VOTE) {
    for (int row = first; row < first + ROWS_PER_VOTE; ++row) {
      for (int word = 0; word < WORDS; ++word) {
        if (!reader.in_array(row, word)) continue;
        const bool visible = reader.visible(row, word);
        own.visible |= visible;
        own.hidden |= !visible;
      }
    }
    all.visible = __any_sync(ALL_LANES, own.visible);
    all.hidden = __any_sync(ALL_LANES, own.hidden);
  }
  if (lane_in_warp() == 0) slots[block] = all.partial() ? UNNUMBERED : all.visible ? VISIBLE : HIDDEN;
}

// number_blocks numbers the partial blocks in the order of their slots, by a scan. It runs as one thread block.
extern "C" __global__ void number_blocks(long long num_blocks, int* slots, int* num_partial) {
  __shared__ int in_warp[SCAN_THREADS / WARP];
  const int warp = threadIdx.x / WARP, lane = lane_in_warp();
  int numbered = 0;
  for (long long round = 0; round < num_blocks; round += SCAN_THREADS * SCAN_ITEMS) {
    const long long first = round + warp * (WARP * SCAN_ITEMS) + lane;
    unsigned partial[SCAN_ITEMS];
    int count = 0;
    for (int item = 0; item < SCAN_ITEMS; ++item) {
      const long long block = first + item * WARP;
      partial[item] = __ballot_sync(ALL_LANES, block < num_blocks && slots[block] == UNNUMBERED);
      count += __popc(partial[item]);
    }
    if (lane == 0) in_warp[warp] = count;
    __syncthreads();
    int number = numbered;
    for (int other = 0; other < SCAN_THREADS / WARP; ++other) {
      if (other < warp) number += in_warp[other];
      numbered += in_warp[other];
    }
    for (int item = 0; item < SCAN_ITEMS; ++item) {
      if (partial[item] >> lane & 1) slots[first + item * WARP] = number + __popc(partial[item] & lanes_below(lane));
      number += __popc(partial[item]);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *num_partial = numbered;
}

// pack_blocks writes the bits of the partial blocks, (num_partial, 64, WORDS). One warp packs one block.
extern "C" __global__ void pack_blocks(const unsigned char* data, long long stride_b, long long stride_h,
                                       long long stride_i, long long stride_j, int heads, int cell_rows,
                                       int cell_columns, int seqlen_q, int seqlen_k, long long num_blocks,
                                       const int* slots, unsigned* bits) {
  const long long block = warp_in_grid();
  if (block >= num_blocks) return;
  const int slot = slots[block], lane = lane_in_warp();
  if (slot < 0) return;
  const BlockReader reader(
      {data, stride_b, stride_h, stride_i, stride_j, heads, cell_rows, cell_columns, seqlen_q, seqlen_k}, block);
  for (int first = 0; first < CANONICAL; first += WARP) {
    unsigned own[WORDS];  // the words of row first + lane
    for (int row = 0; row < WARP; ++row) {
      for (int word = 0; word < WORDS; ++word) {
        const bool visible = reader.in_array(first + row, word) && reader.visible(first + row, word);
        const unsigned ballot = __ballot_sync(ALL_LANES, visible);
        if (lane == row) own[word] = ballot;
      }
    }
    unsigned* target = bits + (static_cast<long long>(slot) * CANONICAL + first + lane) * WORDS;
    for (int word = 0; word < WORDS; ++word) target[word] = own[word];
  }
}

// order_bits rewrites the bits of the partial blocks in the order of fragments, (num_partial, 128): a word for each
// thread of four warps, a bit for each element of its fragment of 64 queries x 64 keys or, for kernels that keep a tile
// of keys, the reverse. One warp writes 32 words.
extern "C" __global__ void order_bits(const unsigned* bits, long long num_partial, int rows_are_queries,
                                      unsigned* fragment_bits) {
  constexpr int WARPS = CANONICAL / 16;
  const long long warp = warp_in_grid();
  if (warp >= num_partial * WARPS) return;
  const int lane = lane_in_warp(), first_row = static_cast<int>(warp % WARPS) * 16 + lane / 4;
  const unsigned* block = bits + warp / WARPS * CANONICAL * WORDS;
  unsigned own = 0;
  for (int e = 0; e < WARP; ++e) {
    const int row = first_row + e / 2 % 2 * 8, column = lane % 4 * 2 + e / 4 * 8 + e % 2;
    const int query = rows_are_queries ? row : column, key = rows_are_queries ? column : row;
    own |= (block[query * WORDS + key / WARP] >> key % WARP & 1) << e;
  }
  fragment_bits[warp * WARP + lane] = own;
}

// list_tiles writes TileLists of cuflash/masks/store.py: for each row of tiles the tiles of keys that it visits,
// row_index (num_batch_heads, num_m, num_n) and row_count (num_batch_heads, num_m), and for each column those of
// queries, col_index (num_batch_heads, num_n, num_m) and col_count (num_batch_heads, num_n). One warp writes one list.
extern "C" __global__ void list_tiles(const int* slots, const unsigned* bits, int num_batch_heads, int seqlen_q,
                                      int seqlen_k, int block_m, int block_n, int num_m, int num_n, int* row_index,
                                      int* row_count, int* col_index, int* col_count) {
  const int lane = lane_in_warp(), lists = num_m + num_n;
  const long long warp = warp_in_grid(), batch_head = warp / lists;
  if (batch_head >= num_batch_heads) return;
  const int blocks_k = blocks_in(seqlen_k);
  const int* own_slots = slots + batch_head * blocks_in(seqlen_q) * blocks_k;
  const int list = static_cast<int>(warp % lists);
  const bool is_row = list < num_m;
  const int own = is_row ? list : list - num_m, others = is_row ? num_n : num_m;
  int* index = is_row ? row_index + (batch_head * num_m + own) * num_n : col_index + (batch_head * num_n + own) * num_m;
  int count = 0;
  for (int first = 0; first < others; first += WARP) {
    const int other = first + lane;
    TileState state = TileState::hidden;
    if (other < others) {
      const int i0 = (is_row ? own : other) * block_m, j0 = (is_row ? other : own) * block_n;
      state = tile_state(own_slots, bits, blocks_k, i0, min(i0 + block_m, seqlen_q), j0, min(j0 + block_n, seqlen_k));
    }
    const unsigned visited = __ballot_sync(ALL_LANES, state != TileState::hidden);
    if (state != TileState::hidden)
      index[count + __popc(visited & lanes_below(lane))] = other << 1 | (state == TileState::partial);
    count += __popc(visited);
  }
  if (lane == 0) (is_row ? row_count + batch_head * num_m : col_count + batch_head * num_n)[own] = count;
}
