// gather_host_pages copies keys out of pages in pinned host memory, which the GPU reads over the link, into rows of
// device memory. The pages of a launch come by value, so that no table has to be brought before. It moves words as wide
// as the rows' alignment allows, and neighbouring threads have neighbouring words: a warp reads whole lines, which a
// link carries at its full rate. The host writes `Word` and `Index`, which counts words, in front of this text
// (cuflash/gpu/host_pages.py): a division of 32 bits is no call, for which a thread could wait with some of its words
// under way.
using u64 = unsigned long long;
using i64 = long long;
#include "../offset_of.cuh"

constexpr int AT_ONCE = 4;  // words of a thread that are under way over the link at a time

struct PageNumbers {
  int of[MOST_PAGES];  // (sequences, pages of each)
};
struct HostPagesParams {
#include "HostPagesParams.members"
};
#include "HostPagesParams.layout"

// CopiedWord is one of the words of all sequences, and where it comes from.
struct CopiedWord {
  const Word* source;
  Word* target;

  DEVICE CopiedWord(const HostPagesParams& p, Index index) {
    const Index words = static_cast<Index>(p.words), page_words = static_cast<Index>(p.page_words);
    const Index sequence = index / words, at = index - sequence * words;
    const Index behind = static_cast<Index>(p.skipped) + at, place = behind / page_words;
    const i64 page = p.pages.of[sequence * static_cast<Index>(p.pages_each) + place];
    source = p.pool + page * p.page_stride + (behind - place * page_words);
    target = p.target + sequence * p.target_stride + at;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) gather_host_pages(const __grid_constant__ HostPagesParams p) {
  const Index count = static_cast<Index>(p.sequences * p.words), of_block = AT_ONCE * THREADS;
  for (Index first = blockIdx.x * of_block + threadIdx.x; first < count; first += gridDim.x * of_block) {
    Word loaded[AT_ONCE];
    Word* targets[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      const Index index = first + n * THREADS;
      targets[n] = nullptr;
      if (index >= count) continue;
      const CopiedWord word(p, index);
      loaded[n] = *word.source;
      targets[n] = word.target;
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      if (targets[n] != nullptr) *targets[n] = loaded[n];
    }
  }
}
