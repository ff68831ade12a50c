// The patterns by which TMA and wgmma permute 16-byte pieces of shared memory.
#pragma once
#include <cstdint>

namespace cpu_device {

// Rows of 16, 32, 64 or 128 bytes.
enum class Swizzle : int { kNone = 0, k32 = 1, k64 = 2, k128 = 3 };

// Where a byte lies whose address without swizzling is given: bits 4.. are combined with bits 7.. (as many as the
// pattern has).
inline uint32_t swizzled(uint32_t address, Swizzle swizzle) {
  const uint32_t mask = (1u << int(swizzle)) - 1;
  return address ^ (address >> 7 & mask) << 4;
}

}  // namespace cpu_device
