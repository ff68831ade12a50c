// These small kernels stand around the pass for the gradients of a rule's operands: they clear its sums, and write a
// gradient in its own dtype and strides.
#include "../rules/fixed_point.cuh"

DEVICE i64 thread_index() { return static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; }

extern "C" __global__ void __launch_bounds__(THREADS) clear_operand_sums(const AttentionParams p) {
  if (thread_index() < p.operand_total) p.operand_sums[thread_index()] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) clear_operand_words(const AttentionParams p) {
  if (thread_index() >= p.operand_total) return;
  for (int word = 0; word < 3; word++) p.operand_words[word * p.operand_total + thread_index()] = 0;
}

// write_operand writes the gradient of one operand. Its elements are numbered with the last axis as the fastest.
extern "C" __global__ void __launch_bounds__(THREADS) write_operand(const AttentionParams p) {
  const i64 index = thread_index();
  if (index >= p.doperand_size) return;
  const i64 from = p.doperand_begin + index;
  double sum;
  if (p.operand_words == nullptr) {
    sum = static_cast<double>(p.operand_sums[from]);
  } else {
    const u64* words = p.operand_words + from;
    sum = sum_of(words[0], words[p.operand_total], words[2 * p.operand_total], p.operand_bits);
  }
  const i64 sizes[] = {p.doperand_size_0, p.doperand_size_1, p.doperand_size_2, p.doperand_size_3,
                       p.doperand_size_4, p.doperand_size_5, p.doperand_size_6, p.doperand_size_7};
  const i64 strides[] = {p.doperand_stride_0, p.doperand_stride_1, p.doperand_stride_2, p.doperand_stride_3,
                         p.doperand_stride_4, p.doperand_stride_5, p.doperand_stride_6, p.doperand_stride_7};
  i64 rest = index, place = 0;
#pragma unroll
  for (int axis = 7; axis >= 0; axis--) {
    place += rest % sizes[axis] * strides[axis];
    rest /= sizes[axis];
  }
  auto* to = reinterpret_cast<OperandElement*>(p.doperand) + place;
  if constexpr (sizeof(OperandElement) == 8) {
    *to = static_cast<OperandElement>(sum);
  } else {
    *to = OperandElement(static_cast<float>(sum));
  }
}
