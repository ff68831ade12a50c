// This header is the scheduler of Hopper's forward kernel, which finds out which tiles there are and hands them to the
// warpgroups that load and compute. It is a thread of the warpgroup that loads.
#include "hidden_tiles.cuh"
#include "storage.cuh"

// The scheduler takes the next tile when KEYS_LEFT tiles of keys of the one before are left to load, so that it goes to
// the thread block that is ready first. Two teams of a warpgroup each have no register left to count them.
constexpr int KEYS_LEFT = 4;
constexpr bool COUNTS_LEFT = SECOND_TEAM_WARPGROUPS <= 1;

// schedule_tiles() is the scheduler, a thread of its own so that no other thread waits for its divisions.
DEVICE void schedule_tiles(const AttentionParams& p, SharedStorage& shared, Rings rings, Team team) {
  const TileRows rows(p);
  u32 phase = 0;
  // hand_on() hands on a tile. If the tile that was in this stage before needs a recheck, the recheck goes first, and
  // the loop looks for a stage again.
  const auto hand_on = [&](const SplitWork& work) {
    bool recheck;
    do {
      rings.work.acquire();
      recheck = HIDES_ANYWHERE && shared.non_finite[rings.work.stage];
      shared.non_finite[rings.work.stage] = 0;
      TileMessage& message = shared.work[rings.work.stage];
      if (!recheck) message = {work};
      message.recheck = recheck;
      if (message.tile >= 0) {
        if constexpr (HAS_BLOCK_MASK) {
          shared.lists[rings.work.stage] = blocks_of_split(p, message, rows);
          message.empty = shared.lists[rings.work.stage].done();
        } else {
          message.find_keys(p, rows);
          if (is_hidden(p, message.keys)) return;
        }
      }
      rings.work.publish();
      if constexpr (COUNTS_LEFT) wait_for(ptx::shared_address(&shared.nearly_loaded_barrier), phase);
      phase ^= 1;
    } while (recheck);
  };
  const u32 num_splits = num_splits_of(p);
  const u32 total =
      HAS_WORK_LIST
          ? work_counts(p).entries * p.num_heads_kv
          : team.units((p.num_tiles - LeftOut(p).tiles) * num_batch_heads_of(p, num_tile_heads(p)) * num_splits);
  const auto work_at_index = [&](u32 index) -> SplitWork {
    if constexpr (HAS_WORK_LIST) return listed_work(p, index);
    const u32 tile = team.tile(index);
    return {work_at<HAS_PAGES>(p, tile / num_splits, num_tile_heads(p), rows.queries, LeftOut(p).tiles),
            {},
            static_cast<int>(SECOND_TEAM_WARPGROUPS == 1 && team.number > 0 ? index % WARPGROUPS_PER_TILE
                                                                            : tile % num_splits)};
  };
  u32 index = blockIdx.x / PAIR;
  // Every stage is looked at once more behind the last tile, because its tile may need a recheck.
  int rechecks_left = HIDES_ANYWHERE ? WORK_STAGES : 0;
  while (index < total || rechecks_left-- > 0) {
    if (index >= total) {
      hand_on({{{}, 0, NO_WORK}, {}, 0});
      continue;
    }
    const SplitWork work = work_at_index(index);
    const int first_query = PACKS_HEADS ? work.tile * rows.queries : work.first_of_rows();
    if (PAIR > 1 || first_query < work.sequence.rows_q) hand_on(work);
    rings.work.acquire();
    if (rank() == 0) index = next_index(p, index, total, gridDim.x / PAIR, team.number);
    if constexpr (PAIR > 1) {
      Ring<1, sizeof(uint4)> ring(&shared.index, shared.index_barriers);
      ring.phase = rings.work.stage ^ 1;
      if (rank() == 0) {
        ring.acquire();
        shared.index.x = index;
        ptx::fence_async_shared();
        ptx::bulk_copy_cluster(ptx::cluster_address(ring.buffer(), 1), ring.buffer(), sizeof(uint4),
                               ptx::cluster_address(ring.full(), 1));
      } else {
        ring.expect();
        ring.wait();
        index = shared.index.x;
        ptx::mbarrier_arrive_cluster(ptx::cluster_address(ring.empty_barriers, 0));
      }
    }
  }
  rings.work.acquire();
  shared.work[rings.work.stage].tile = NO_TILE;
  rings.work.publish();
}
