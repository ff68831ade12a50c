// This header decides which weights dropout keeps: a pure function of the seed and of where a weight stands, the same
// on every kernel, tile size, architecture and on the CPU. One call of the generator decides on eight weights, chosen
// so that a thread of an accumulator's fragment owns all eight (fragment/dropout_fragment.cuh).
#include "../params.cuh"
#include "../ptx/sm80.cuh"

// philox() is Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): seven rounds.
DEVICE uint4 philox(uint4 counter, u32 key_low, u32 key_high) {
#pragma unroll
  for (int round = 0; round < 7; round++) {
    // The halves of each product are computed apart: as 64-bit products the high halves would take an addition each.
    const u32 high_x = __umulhi(0xD2511F53u, counter.x), low_x = 0xD2511F53u * counter.x;
    const u32 high_z = __umulhi(0xCD9E8D57u, counter.z), low_z = 0xCD9E8D57u * counter.z;
    counter = make_uint4(high_z ^ counter.y ^ key_low, low_z, high_x ^ counter.w ^ key_high, low_x);
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}

// Dropout serves one (sequence, query head). One call decides on the eight weights {i, i ^ 8} x {j, j ^ 1, j ^ 8, j ^
// 9}.
struct Dropout {
  u32 key_low, key_high, head, batch;
  u32 limits;                    // the threshold that a half word must reach to keep its weight, in either half
  int first_q, first_k, stride;  // positions of a part (HAS_PLACE)

  DEVICE Dropout(const AttentionParams& p, const Sequence& s, int head)
      : head(head), batch(s.batch), limits(p.dropout_limits) {
    const u64 key = p.dropout_seed == nullptr ? p.dropout_key : *p.dropout_seed;
    key_low = static_cast<u32>(key);
    key_high = static_cast<u32>(key >> 32);
    if constexpr (HAS_PLACE) {
      this->head += p.place_first_head;
      batch += p.place_first_batch;
      first_q = p.place_first_q;
      first_k = p.place_first_k;
      stride = p.place_stride;
    }
  }

  // keeps() decides on element (i, j) of a part by a call of its own: strides may tear apart what one call decides on.
  DEVICE bool keeps(int i, int j) const {
    const int row = first_q + i * stride, key = first_k + j * stride;
    const uint4 w = words(row & ~8, key & ~9);
    const u32 low = key & 8 ? w.y : w.x, high = key & 8 ? w.w : w.z, word = row & 8 ? high : low;
    return key & 1 ? keeps_high(word) : keeps_low(word);
  }

  // words() makes the call for (i, j), where bit 3 of i and bits 0 and 3 of j are clear. Word 2 * bit3(i) + bit3(j) has
  // the random bits of two weights: the low half those of j, the high half those of j + 1.
  DEVICE uint4 words(int i, int j) const { return philox(make_uint4(i, j, head, batch), key_low, key_high); }

  // keeps_low() and keeps_high() tell whether the low and the high half of a word keep their weights.
  DEVICE bool keeps_low(u32 word) const { return word << 16 >= limits << 16; }
  DEVICE bool keeps_high(u32 word) const { return word >= (limits & 0xffff0000u); }

  // keep() gives a call's eight decisions as bits, two of each word.
  DEVICE u32 keep(int i, int j) const {
    const uint4 w = words(i, j);
    const auto of_word = [&](u32 word) { return (keeps_low(word) ? 1u : 0u) | (keeps_high(word) ? 2u : 0u); };
    return of_word(w.x) | of_word(w.y) << 2 | of_word(w.z) << 4 | of_word(w.w) << 6;
  }
};

// ---- Pairs of weights, and the word that decides on both.

// drop_pair() makes a weight 0 where it is dropped.
DEVICE void drop_pair(float& low, float& high, u32 word, const Dropout& dropout) {
  ptx::multiply_below(low, high, word, dropout.limits, 0);
}
DEVICE void drop_pair(double& low, double& high, u32 word, const Dropout& dropout) {
  if (!dropout.keeps_low(word)) low = 0;
  if (!dropout.keeps_high(word)) high = 0;
}

// mark_pair() sets the sign of a weight where it is dropped: gradients need its magnitude.
DEVICE void mark_pair(float& low, float& high, u32 word, const Dropout& dropout) {
  ptx::multiply_below(low, high, word, dropout.limits, -1);
}
DEVICE void mark_pair(double& low, double& high, u32 word, const Dropout& dropout) {
  if (!dropout.keeps_low(word)) low = -low;
  if (!dropout.keeps_high(word)) high = -high;
}
