// This header finds the keys of one sequence in pools of pages.
#include "../params.cuh"

struct PageTable {
  const int* entries;
  int num_pages, page_size;

  DEVICE PageTable(const AttentionParams& p, i64 sequence)
      : entries(p.block_table + sequence * p.table_stride), num_pages(p.num_pages), page_size(p.page_size) {}

  // entry() is the page that stands at place i of the table, clamped to the pool.
  DEVICE int entry(int i) const { return clamped(entries[i], num_pages - 1); }
  DEVICE int page_of(int key) const { return entry(key / page_size); }
  DEVICE int row_of(int key) const { return key % page_size; }
};
