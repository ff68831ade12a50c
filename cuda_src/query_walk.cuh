#pragma once
#include "mask.cuh"

// The tiles of queries, of all heads of the group, that see some key of a tile.
struct QueryWalk {
  const AttentionParams& p;
  const Work& work;
  int head;
  Blocks blocks;

  DEVICE QueryWalk(const AttentionParams& p, const Work& work)
      : p(p), work(work), head(work.head * group()), blocks(of_head()) {
    skip();
  }
  DEVICE int first_row() const { return blocks.block * BLOCK_M; }
  // Its tile if each head's are walked from the last.
  DEVICE int from_last() const {
    const Blocks all = of_head();
    return all.block + all.end - 1 - blocks.block;
  }
  DEVICE bool done() const { return blocks.done(); }
  DEVICE void advance() {
    blocks.advance();
    skip();
  }

 private:
  DEVICE int group() const { return p.num_heads_q / p.num_heads_kv; }
  DEVICE Blocks of_head() const { return blocks_of_queries(p, work.sequence, head, work.tile, BLOCK_M, BLOCK_N); }
  DEVICE void skip() {
    while (blocks.done() && ++head < (work.head + 1) * group()) blocks = of_head();
  }
};
