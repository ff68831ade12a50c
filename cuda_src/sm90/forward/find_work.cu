// This kernel reads the lengths of a packed batch and writes its list of work (work_list.cuh), so that the
// multiprocessors end together whatever the lengths are. It is one thread block: lists are short, as an entry stands
// for all KV heads.
//
// A tile with many keys is cut into chunks of a quantum of tiles of keys and what is left over (Flash-Decoding's
// splits, of a size that the whole batch decides). The longest entries come first, so that the small ones even out the
// end. Among several quanta that is taken which ends first: no entry ends later than all work before it, dealt out
// evenly, and itself take (Graham 1969, "Bounds on multiprocessing timing anomalies").
#include "../../rules/mask.cuh"
#include "work_list.cuh"

constexpr int CANDIDATES = THREADS / WARP;  // a warp holds each quantum against the list
constexpr int BUCKETS = WARP;               // of costs, one for each lane
constexpr float EQUAL_ENDS = 1.02f;         // ends that differ by less are the same, and the larger quantum is taken
constexpr int WHOLE_TILES = 1 << 28;        // a quantum that cuts nothing

// quarters_of() is how many times each multiprocessor takes a quantum, in quarters; 0 cuts nothing.
DEVICE int quarters_of(int candidate) {
  return candidate == 0 ? 0 : candidate == CANDIDATES - 1 ? MOST_QUARTERS : 3 + candidate + (candidate == 6);
}

// Chunks says how a tile of `steps` tiles of keys is cut: all chunks but the last one are a quantum. No chunk is
// shorter than LEAST_STEPS, unless it is a whole tile.
struct Chunks {
  int number, last;

  DEVICE Chunks(int steps, int quantum)
      : number(steps < quantum + LEAST_STEPS ? 1 : (steps - LEAST_STEPS) / quantum + 1),
        last(steps - (number - 1) * quantum) {}
};

// Costs puts the costs of entries into buckets. A cost is counted in tiles of keys; a tile of queries costs `per_entry`
// of them besides its own.
struct Costs {
  int per_entry, largest;

  DEVICE Costs(const AttentionParams& p, int quantum, int longest)
      : per_entry(p.steps_of_entry), largest(smaller(quantum + LEAST_STEPS, longest) + p.steps_of_entry) {}
  DEVICE int of(int steps) const { return steps + per_entry; }
  DEVICE int bucket(int steps) const {
    return smaller(static_cast<int>(of(steps) * i64(BUCKETS) / (largest + 1)), BUCKETS - 1);
  }
  // edge() is a cost that no entry of the bucket exceeds.
  DEVICE float edge(int bucket) const {
    return static_cast<float>(largest + 1) * static_cast<float>(bucket + 1) / BUCKETS;
  }
};

// Total is what all tiles have: tiles of keys, tiles, and the most tiles of keys of one.
struct Total {
  i64 steps, tiles;
  int longest;

  DEVICE void add(const Total& other) {
    steps += other.steps;
    tiles += other.tiles;
    longest = larger(longest, other.longest);
  }
  DEVICE void add_lanes() {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
      add({__shfl_xor_sync(ALL_LANES, steps, step), __shfl_xor_sync(ALL_LANES, tiles, step),
           __shfl_xor_sync(ALL_LANES, longest, step)});
    }
  }
};

// sum_up_to() adds x over this lane and those below it.
template <class T>
DEVICE T sum_up_to(T x) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    const T other = __shfl_up_sync(ALL_LANES, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

// end_of() bounds when the last entry ends, if entries with these costs are dealt out, the longest first. `counts` are
// those of the buckets, for one head. All lanes of a warp get it.
DEVICE float end_of(const AttentionParams& p, const Costs& costs, const u32* counts) {
  const int bucket = BUCKETS - 1 - static_cast<int>(threadIdx.x) % WARP;
  const u32 count = counts[bucket];
  const float edge = costs.edge(bucket), sms = static_cast<float>(p.num_multiprocessors);
  const float heads = static_cast<float>(p.num_heads_kv);
  const float number = heads * static_cast<float>(sum_up_to(count));
  const float work = heads * sum_up_to(static_cast<float>(count) * edge);
  float end = count == 0 ? 0 : number <= sms ? edge : (work - edge) / sms + edge;
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) end = larger(end, __shfl_xor_sync(ALL_LANES, end, step));
  return end;
}

// Order mixes two classes of entries: tiles that share their keys with others of their sequence, which keep the tensor
// cores busy, and those that are alone, which keep memory busy. As both may run at the same time, entries of the class
// in front, which has the longest ones, stand evenly among the first `mixed` ones of the other class. The rest of these
// is left for the end, so that no long entry is the last.
struct Order {
  u64 in_front, mixed;

  // place() counts the entries that come before one with this rank in its class.
  DEVICE int place(bool is_in_front, int rank) const {
    const u64 odd = 2 * static_cast<u64>(rank) + 1;
    u64 others = in_front;
    if (is_in_front) {
      others = mixed == 0 ? 0 : ((odd * mixed - 1) / in_front + 1) / 2;
    } else if (static_cast<u64>(rank) < mixed) {
      others = (odd * in_front / mixed + 1) / 2;
    }
    return rank + static_cast<int>(others);
  }
};

// num_mixed() is the number of the longest entries of the class behind (`counts` by bucket) that are mixed with the
// class in front: the others are work for all multiprocessors while the last entry of the class in front runs, which
// takes `longest`.
DEVICE u32 num_mixed(const AttentionParams& p, const Costs& costs, const u32* counts, int longest) {
  float left =
      static_cast<float>(longest) * static_cast<float>(p.num_multiprocessors) / static_cast<float>(p.num_heads_kv);
  u32 number = 0;
  for (int bucket = 0; bucket < BUCKETS; bucket++) {
    const float of_bucket = static_cast<float>(counts[bucket]) * costs.edge(bucket);
    if (left > 0 && of_bucket > left) {
      number += counts[bucket] - static_cast<u32>(ceilf(left / costs.edge(bucket)));
    } else if (left <= 0) {
      number += counts[bucket];
    }
    left -= of_bucket;
  }
  return number;
}

// Shared is what the threads find together.
struct Shared {
  Total of_warps[CANDIDATES];
  u32 cut, parts;                   // tiles that are cut, and their chunks, so far
  int longest_of[2];                // the cost of the longest entry of each class
  u32 entries[2], mixed;            // entries of each class; see num_mixed()
  u32 counts[CANDIDATES][BUCKETS];  // by candidate; then of the two classes, for the quantum that was taken
  float ends[CANDIDATES];
};

// own_warp() and own_lane() say which thread this is.
DEVICE int own_warp() { return static_cast<int>(threadIdx.x) / WARP; }
DEVICE int own_lane() { return static_cast<int>(threadIdx.x) % WARP; }

// is_alone() tells whether a tile is alone in its sequence: the next slot has no other one of it.
DEVICE bool is_alone(const AttentionParams& p, const TileKeys* tiles, int slot) {
  const TileKeys& tile = tiles[slot];
  return tile.tile == 0 && (slot + 1 >= p.num_tiles || tiles[slot + 1].group != tile.group);
}

// find_keys() finds the keys of each tile (p.num_tiles,), and returns what all tiles have.
DEVICE Total find_keys(const AttentionParams& p, Shared& shared, TileKeys* tiles) {
  const int queries = BLOCK_M / group_size(p);
  Total own = {};
  for (int slot = threadIdx.x; slot < p.num_tiles; slot += THREADS) {
    const TileSlot at = tile_slot<false>(p, queries, slot);
    const Sequence s = p.block_table == nullptr ? sequence_of_group<false, false>(p, at.group)
                                                : sequence_of_group<false, true>(p, at.group);
    TileKeys found = {NOBODY, 0, 0, 0};
    if (at.tile * queries < s.rows_q) {
      const Mask::Range range = range_of_keys(p, s, at.tile, queries, BLOCK_N);
      found = {at.group, at.tile, range.begin < range.end ? range.begin : 0, range.begin < range.end ? range.end : 0};
      own.add({found.end - found.begin, 1, found.end - found.begin});
    }
    tiles[slot] = found;
  }
  own.add_lanes();
  if (own_lane() == 0) shared.of_warps[own_warp()] = own;
  __syncthreads();
  Total all = {};
  for (const Total& of_warp : shared.of_warps) all.add(of_warp);
  return all;
}

// quantum_of() is a candidate's quantum, of tiles of keys.
DEVICE int quantum_of(const AttentionParams& p, const Total& all, int candidate) {
  const i64 work = p.num_heads_kv * (all.steps + p.steps_of_entry * all.tiles);
  const i64 share = static_cast<i64>(p.num_multiprocessors) * quarters_of(candidate);
  if (share == 0) return WHOLE_TILES;
  const i64 quantum = (4 * work + share - 1) / share;
  return larger(LEAST_STEPS, quantum < WHOLE_TILES ? static_cast<int>(quantum) : WHOLE_TILES);
}

// choose_quantum() holds a quantum against the tiles with each warp, and returns the one with which all ends first.
DEVICE int choose_quantum(const AttentionParams& p, Shared& shared, const TileKeys* tiles, const Total& all) {
  u32* counts = shared.counts[own_warp()];
  const int quantum = quantum_of(p, all, own_warp());
  const Costs costs(p, quantum, all.longest);
  for (int slot = own_lane(); slot < p.num_tiles; slot += WARP) {
    const TileKeys tile = tiles[slot];
    if (tile.group == NOBODY) continue;
    const Chunks chunks(tile.end - tile.begin, quantum);
    if (chunks.number > 1) atomicAdd(&counts[costs.bucket(quantum)], static_cast<u32>(chunks.number - 1));
    atomicAdd(&counts[costs.bucket(chunks.last)], 1u);
  }
  __syncwarp();
  const float end = end_of(p, costs, counts);
  if (own_lane() == 0) shared.ends[own_warp()] = end;
  __syncthreads();
  float soonest = shared.ends[0];
  for (float other : shared.ends) soonest = smaller(soonest, other);
  int candidate = 0;
  while (shared.ends[candidate] > soonest * EQUAL_ENDS) candidate++;
  return quantum_of(p, all, candidate);
}

// count_entries() counts the entries of both classes by cost, and then the entries of buckets with longer ones.
DEVICE Order count_entries(const AttentionParams& p, Shared& shared, const TileKeys* tiles, const Costs& costs,
                           int quantum, int& front) {
  const int warp = own_warp(), lane = own_lane();
  if (warp < 2) shared.counts[warp][lane] = 0;
  __syncthreads();
  for (int slot = threadIdx.x; slot < p.num_tiles; slot += THREADS) {
    const TileKeys tile = tiles[slot];
    if (tile.group == NOBODY) continue;
    const Chunks chunks(tile.end - tile.begin, quantum);
    const int alone = is_alone(p, tiles, slot);
    u32* counts = shared.counts[alone];
    if (chunks.number > 1) atomicAdd(&counts[costs.bucket(quantum)], static_cast<u32>(chunks.number - 1));
    atomicAdd(&counts[costs.bucket(chunks.last)], 1u);
    atomicMax(&shared.longest_of[alone], costs.of(larger(chunks.last, chunks.number > 1 ? quantum : 0)));
  }
  __syncthreads();
  front = shared.longest_of[1] > shared.longest_of[0];
  if (threadIdx.x == 0) shared.mixed = num_mixed(p, costs, shared.counts[1 - front], shared.longest_of[front]);
  __syncthreads();
  // Counts become the ranks of the first entries of each bucket, the longest entries first.
  if (warp < 2) {
    const int bucket = BUCKETS - 1 - lane;
    const u32 own = shared.counts[warp][bucket], up_to = sum_up_to(own);
    __syncwarp();
    shared.counts[warp][bucket] = up_to - own;
    if (lane == WARP - 1) shared.entries[warp] = up_to;
  }
  __syncthreads();
  return {shared.entries[front], shared.mixed};
}

// write_last_chunks() writes the entries of whole tiles, and the last ones of those that are cut.
DEVICE void write_last_chunks(const AttentionParams& p, Shared& shared, const TileKeys* tiles, const Costs& costs,
                              int quantum, const Order& order, int front) {
  WorkEntry* list = work_entries(p);
  for (int slot = threadIdx.x; slot < p.num_tiles; slot += THREADS) {
    const TileKeys tile = tiles[slot];
    if (tile.group == NOBODY) continue;
    const Chunks chunks(tile.end - tile.begin, quantum);
    const int alone = is_alone(p, tiles, slot), others = chunks.number - 1;
    u32* ranks = shared.counts[alone];
    int part = WHOLE;
    if (others > 0) {
      const int first_part = static_cast<int>(atomicAdd(&shared.parts, static_cast<u32>(chunks.number)));
      const int rank = static_cast<int>(atomicAdd(&ranks[costs.bucket(quantum)], static_cast<u32>(others)));
      cut_tiles(p)[atomicAdd(&shared.cut, 1u)] = {tile.group, tile.tile, first_part, chunks.number,
                                                  tile.begin, tile.end,  rank,       alone == front};
      part = first_part + others;
    }
    const int rank = static_cast<int>(atomicAdd(&ranks[costs.bucket(chunks.last)], 1u));
    list[order.place(alone == front, rank)] = {tile.group, tile.tile, tile.end - chunks.last, tile.end, others, part};
  }
}

// write_other_chunks() writes, with a warp for each tile that is cut, its chunks but the last one.
DEVICE void write_other_chunks(const AttentionParams& p, const Shared& shared, int quantum, const Order& order) {
  WorkEntry* list = work_entries(p);
  for (u32 number = own_warp(); number < shared.cut; number += THREADS / WARP) {
    const CutTile tile = cut_tiles(p)[number];
    for (int chunk = own_lane(); chunk < tile.parts - 1; chunk += WARP) {
      const int begin = tile.begin + chunk * quantum;
      list[order.place(tile.in_front, tile.first_rank + chunk)] = {tile.group,      tile.tile, begin,
                                                                   begin + quantum, chunk,     tile.first_part + chunk};
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) find_work(const AttentionParams p) {
  __shared__ Shared shared;
  if (threadIdx.x == 0) {
    shared.cut = shared.parts = 0;
    shared.longest_of[0] = shared.longest_of[1] = 0;
  }
  shared.counts[own_warp()][own_lane()] = 0;
  __syncthreads();

  TileKeys* tiles = tile_keys(p);
  // 1. Find the keys of each tile.
  const Total all = find_keys(p, shared, tiles);
  // 2. Each warp holds a quantum against the tiles; the one with which all ends first is taken.
  const int quantum = choose_quantum(p, shared, tiles, all);
  const Costs costs(p, quantum, all.longest);
  __syncthreads();
  // 3. Count both classes' entries by cost, which gives their places in the list.
  int front;  // the class in front
  const Order order = count_entries(p, shared, tiles, costs, quantum, front);
  // 4. Write the entries of whole tiles, and the last ones of those that are cut.
  write_last_chunks(p, shared, tiles, costs, quantum, order, front);
  __syncthreads();
  // 5. Write the other chunks of tiles that are cut.
  write_other_chunks(p, shared, quantum, order);
  if (threadIdx.x == 0) {
    work_counts(p) = {static_cast<int>(shared.entries[0] + shared.entries[1]), static_cast<int>(shared.cut)};
  }
}
