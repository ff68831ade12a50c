// The CPU test device: what the kernels' language (cuda_on_cpu.h) and the instructions' twins ask of the runtime.
#pragma once
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

namespace cpu_device {

constexpr unsigned kWarpSize = 32;

// Where in the kernel's text a call stands. As a default argument, Where() is evaluated at the caller.
struct Where {
  const char* file;
  int line;
  Where(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}
};

// ThreadView is what a thread's text may read of itself. The runtime's Thread (worker.h) derives from it.
struct ThreadView {
  uint3 thread_index, block_index;
  unsigned rank;  // linear index inside its block
};
struct LaunchShape {
  dim3 grid, block, cluster;
  size_t dynamic_shared;
};
extern thread_local ThreadView* current __attribute__((tls_model("initial-exec")));
extern thread_local const LaunchShape* shape __attribute__((tls_model("initial-exec")));

inline unsigned lane() { return current->rank % kWarpSize; }

// Ends the launch with a message that names the place. Does not return to the kernel.
[[noreturn]] void fail(Where where, const char* format, ...) __attribute__((format(printf, 2, 3)));
// Lets all other threads run that can: for loops that wait for another block.
void poll(const char* waits_for, Where where);

// A collective operation of some lanes of a warp. The last lane to arrive performs it for all; args[lane] points into
// the lanes' own frames, which stay alive because those lanes wait.
using WarpOperation = void (*)(void* const args[32], unsigned mask);
void warp_collective(unsigned mask, WarpOperation operation, void* args, const char* name, Where where);
void warp_sync(unsigned mask, Where where);  // the collective that also orders memory
unsigned existing_lanes();                   // lanes of this warp that have not exited

struct Votes {
  bool any, all;
  int count;
};
// barrier.sync (waits) and barrier.arrive of barrier 0..15; threads 0: all of the block that have not exited.
Votes barrier_sync(unsigned id, unsigned threads, bool predicate, const char* name, Where where);
void barrier_arrive(unsigned id, unsigned threads, Where where);
void cluster_arrive(Where where);
void cluster_wait(Where where);

// Shared memory. Instructions name it by 32-bit addresses; those of another block of the cluster carry its rank.
void* dynamic_shared();
int new_static_slot();  // identity of a static __shared__ variable
void* static_shared(int slot, size_t bytes, size_t alignment);
uint32_t shared_address(const void* pointer, Where where);
uint32_t cluster_address(uint32_t address, unsigned rank, Where where);
// The memory behind an address after checking that `bytes` bytes of it exist and are aligned.
unsigned char* shared_memory(uint32_t address, size_t bytes, size_t alignment, const char* name, Where where);
// Tells the checks about an access that the compiler does not see. Wherever it points: only shared memory counts.
void on_read(const void* pointer, size_t bytes, Where where);
void on_write(const void* pointer, size_t bytes, Where where);
void on_atomic(const void* pointer, size_t bytes, Where where);

// Global memory. (The kernels are compiled with calls in place of atomic accesses, the runtime is not.)
int load_acquire(const int* address, Where where);  // lets others run first, as load_volatile() does
int load_volatile(const int* address, Where where);
void add_release(int* address, int value);
void memory_fence();

}  // namespace cpu_device
