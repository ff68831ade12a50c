// The 128 bytes that stand for a CUtensorMap on this device. device.py packs the same.
#pragma once
#include <cstdint>

namespace cpu_device {

struct TensorMap {
  uint64_t mark;
  uint64_t address;
  uint64_t strides[5];  // bytes; strides[0] is the element's size
  uint32_t extents[5];
  uint16_t box[5];
  uint8_t rank;
  uint8_t element_bytes;
  uint8_t swizzle;   // of 16, 32, 64 or 128 bytes: 0 none, 1, 2, 3
  uint8_t is_float;  // float32: the only elements that sums are modelled of
};
static_assert(sizeof(TensorMap) <= 128, "fits the place of a CUtensorMap");

constexpr uint64_t kTensorMapMark = 0x70616d5f75706321;

}  // namespace cpu_device
