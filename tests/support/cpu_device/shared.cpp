// Shared memory: addresses, static variables, and the calls that checked kernels make before each access.
#include <algorithm>
#include <cstring>

#include "instructions.h"
#include "worker.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(pointer, bytes) __asan_poison_memory_region(pointer, bytes)
#define UNPOISON(pointer, bytes) __asan_unpoison_memory_region(pointer, bytes)
#else
#define POISON(pointer, bytes) (void)(pointer), (void)(bytes)
#define UNPOISON(pointer, bytes) (void)(pointer), (void)(bytes)
#endif

namespace cpu_device {

thread_local Window window;

namespace {

constexpr size_t kStaticRedZone = 64;

}  // namespace

void begin_shared(Block& block) {
  UNPOISON(block.shared, block.shared_top);
  memset(block.shared, kUnwrittenByte, block.shared_top);
  POISON(block.shared, kSharedCapacity);
  UNPOISON(block.shared + kDynamicShared, block.shared_top - kDynamicShared);
  for (const Range& zone : worker->launch->red_zones) POISON(block.shared + kDynamicShared + zone.offset, zone.bytes);
  shadow::begin_block(block);
}

void end_shared(Block& block) { UNPOISON(block.shared, kSharedCapacity); }

void* dynamic_shared() { return block().shared + kDynamicShared; }

int new_static_slot() {
  static std::atomic<int> next{0};
  return next++;
}

void* static_shared(int slot, size_t bytes, size_t alignment) {
  Block& b = block();
  if (b.static_shared.size() <= size_t(slot)) b.static_shared.resize(slot + 1);
  if (!b.static_shared[slot]) {
    const size_t offset = (b.shared_top + kStaticRedZone + alignment - 1) / alignment * alignment;
    b.shared_top = offset + bytes;
    if (b.shared_top > kSharedCapacity) fail({}, "more than %zu bytes of shared memory", kSharedCapacity);
    b.static_shared[slot] = b.shared + offset;
    UNPOISON(b.shared + offset, bytes);
    memset(b.shared + offset, kUnwrittenByte, bytes);
    shadow::add_variable(b, offset, bytes);
  }
  return b.static_shared[slot];
}

uint32_t shared_address(const void* pointer, Where where) {
  const size_t offset = static_cast<const unsigned char*>(pointer) - block().shared;
  if (offset >= kSharedCapacity) fail(where, "a pointer into shared memory was expected");
  return offset;
}

uint32_t cluster_address(uint32_t address, unsigned rank, Where where) {
  if (rank >= worker->blocks.size()) fail(where, "block %u of a cluster of %zu", rank, worker->blocks.size());
  return local_address(address) | (rank + 1) << kClusterShift;
}

Block& block_of_address(uint32_t address, Where where) {
  const unsigned rank = address >> kClusterShift;
  if (rank > worker->blocks.size()) fail(where, "%08x is no shared address", address);
  return rank ? worker->blocks[rank - 1] : block();
}

uint32_t local_address(uint32_t address) { return address & ((1u << kClusterShift) - 1); }

unsigned char* shared_memory(uint32_t address, size_t bytes, size_t alignment, const char* name, Where where) {
  Block& target = block_of_address(address, where);
  const uint32_t local = local_address(address);
  if (local < kDynamicShared || local + bytes > target.shared_top)
    fail(where, "%s: shared addresses %u to %zu are out of bounds", name, local, local + bytes);
  if (local % alignment) fail(where, "%s: shared address %u is not a multiple of %zu", name, local, alignment);
  return target.shared + local;
}

namespace {

void access(const void* pointer, size_t bytes, bool write, shadow::Place place,
            shadow::Written written = shadow::Written::kAll) {
  const size_t offset = reinterpret_cast<uintptr_t>(pointer) - window.base;
  if (offset >= window.bytes || !current) return;
  Block& target = worker->blocks[offset / kSharedCapacity];
  shadow::access(target, offset % kSharedCapacity, bytes, write, self(), place, written);
}

}  // namespace

void on_read(const void* pointer, size_t bytes, Where where) { access(pointer, bytes, false, shadow::place_of(where)); }

void on_write(const void* pointer, size_t bytes, Where where) { access(pointer, bytes, true, shadow::place_of(where)); }

void store_shared(uint32_t address, const void* from, unsigned bytes, Where where) {
  unsigned char* to = shared_memory(address, bytes, bytes, "st.shared::cluster", where);
  on_write(to, bytes, where);
  memcpy(to, from, bytes);
}

void on_atomic(const void* pointer, size_t bytes, Where where) {
  const size_t offset = reinterpret_cast<uintptr_t>(pointer) - window.base;
  if (offset < window.bytes)
    shadow::check_initialised(worker->blocks[offset / kSharedCapacity], offset % kSharedCapacity, bytes, where);
}

}  // namespace cpu_device

// Code compiled with -fsanitize=thread calls these functions. Only shared memory is watched.
#define CPU_DEVICE_ACCESS(name, size, write)                                       \
  extern "C" void __tsan_##name(void* pointer) {                                   \
    using namespace cpu_device;                                                    \
    if (reinterpret_cast<uintptr_t>(pointer) - window.base < window.bytes)         \
      access(pointer, size, write, shadow::place_of(__builtin_return_address(0))); \
  }
CPU_DEVICE_ACCESS(read1, 1, false)
CPU_DEVICE_ACCESS(read2, 2, false)
CPU_DEVICE_ACCESS(read4, 4, false)
CPU_DEVICE_ACCESS(read8, 8, false)
CPU_DEVICE_ACCESS(read16, 16, false)
CPU_DEVICE_ACCESS(unaligned_read2, 2, false)
CPU_DEVICE_ACCESS(unaligned_read4, 4, false)
CPU_DEVICE_ACCESS(unaligned_read8, 8, false)
CPU_DEVICE_ACCESS(unaligned_read16, 16, false)
CPU_DEVICE_ACCESS(volatile_read1, 1, false)
CPU_DEVICE_ACCESS(volatile_read2, 2, false)
CPU_DEVICE_ACCESS(volatile_read4, 4, false)
CPU_DEVICE_ACCESS(volatile_read8, 8, false)
CPU_DEVICE_ACCESS(write1, 1, true)
CPU_DEVICE_ACCESS(write2, 2, true)
CPU_DEVICE_ACCESS(write4, 4, true)
CPU_DEVICE_ACCESS(write8, 8, true)
CPU_DEVICE_ACCESS(write16, 16, true)
CPU_DEVICE_ACCESS(unaligned_write2, 2, true)
CPU_DEVICE_ACCESS(unaligned_write4, 4, true)
CPU_DEVICE_ACCESS(unaligned_write8, 8, true)
CPU_DEVICE_ACCESS(unaligned_write16, 16, true)
CPU_DEVICE_ACCESS(volatile_write1, 1, true)
CPU_DEVICE_ACCESS(volatile_write2, 2, true)
CPU_DEVICE_ACCESS(volatile_write4, 4, true)
CPU_DEVICE_ACCESS(volatile_write8, 8, true)
extern "C" void __tsan_read_range(void* pointer, size_t bytes) {
  cpu_device::access(pointer, bytes, false, cpu_device::shadow::place_of(__builtin_return_address(0)));
}
extern "C" void __tsan_write_range(void* pointer, size_t bytes) {
  cpu_device::access(pointer, bytes, true, cpu_device::shadow::place_of(__builtin_return_address(0)));
}
// clang's; g++ writes such copies out. clang does not tell where a struct has padding, so one whose members are read
// together counts as written if a byte of it is.
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  using namespace cpu_device;
  access(from, bytes, false, shadow::place_of(__builtin_return_address(0)), shadow::Written::kSome);
  access(to, bytes, true, shadow::place_of(__builtin_return_address(0)));
  return memcpy(to, from, bytes);
}
extern "C" void* __tsan_memset(void* to, int byte, size_t bytes) {
  cpu_device::access(to, bytes, true, cpu_device::shadow::place_of(__builtin_return_address(0)));
  return memset(to, byte, bytes);
}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
