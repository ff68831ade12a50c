#include "mask.cuh"

// The tiles of queries, of all heads of the group, that see some key of a tile.
struct QueryWalk {
  // Bits of a block mask take registers.
  static constexpr bool HELD = !HAS_BLOCK_MASK;
  const AttentionParams& p;
  const Work& work;
  int held_tile, head, held_end;
  Blocks blocks;

  DEVICE QueryWalk(const AttentionParams& p, const Work& work)
      : p(p), work(work), held_tile(work.tile), head(work.head * group()), held_end(head + group()), blocks(of_head()) {
    skip();
  }
  DEVICE int first_row() const { return blocks.block * BLOCK_M; }
  // Its tile if each head's are walked from the last.
  DEVICE int from_last() const {
    const Blocks all = of_head();
    return all.block + all.end - 1 - blocks.block;
  }
  DEVICE bool done() const { return HELD ? head == held_end : blocks.done(); }
  DEVICE void advance() {
    blocks.advance();
    skip();
  }

 private:
  DEVICE int group() const { return p.num_heads_q / p.num_heads_kv; }
  DEVICE int end_head() const { return HELD ? held_end : (work.head + 1) * group(); }
  DEVICE Blocks of_head() const {
    return blocks_of_queries(p, work.sequence, head, HELD ? held_tile : work.tile, BLOCK_M, BLOCK_N);
  }
  DEVICE void skip() {
    while (blocks.done() && ++head < end_head()) blocks = of_head();
  }
};
