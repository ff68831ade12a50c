// This header reads the scales of e4m3 codes.
#include "../params.cuh"

// scale_at() is the scale of a row of one head; without scales all are 1.
DEVICE float scale_at(const Tensor<const float>& scale, i64 batch, i64 row, int head) {
  return scale.data == nullptr ? 1.0f : *scale.at(batch, row, head);
}

// is_usual() tells whether a positive number may be multiplied by log2(e), and by a few others like it.
DEVICE bool is_usual(float x) { return x > 0x1p-80f && x < 0x1p80f; }
