// The CPU test device: what kernels and instruction twins may ask of the runtime (fibers.cpp, launch.cpp).
#pragma once
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cpu_device {

// Where in the kernel's text a call stands. As a default argument, Where() is evaluated at the caller.
struct Where {
  const char* file;
  int line;
  Where(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}
};

struct Block;

// One CUDA thread: one fiber.
struct Thread {
  uint3 index;          // threadIdx
  unsigned rank;        // linear index inside its block
  Block* block;
  void* stack_pointer;  // while it does not run
  char* stack;          // low end
  const char* waits_for = nullptr;  // what it is blocked on, for the deadlock report
  Where where;
  int barrier_result = 0;
  bool exited = false;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

// A collective operation of some lanes of a warp. The last lane to arrive performs it for all: args[lane] points
// into the lanes' own frames, which stay alive because those lanes wait.
using WarpOperation = void (*)(void* const args[32], unsigned mask);

struct Warp {
  struct Arrival {
    unsigned mask = 0;  // 0: not waiting
    WarpOperation operation = nullptr;
    void* args = nullptr;
  } arrivals[32];
  Thread* lanes[32] = {};
};

struct Barrier {
  unsigned arrived = 0, expected = 0;  // expected 0: all threads of the block that have not exited
  int any = 0, all = 1, count = 0;     // reductions of the predicate of __syncthreads_or and friends
  std::vector<Thread*> waiting;
};

// One thread block (CTA).
struct Block {
  uint3 index;
  unsigned num_threads, live_threads;
  std::vector<Thread*> threads;
  std::vector<Warp> warps;
  Barrier barriers[16];
  unsigned char* shared;  // shared address 0; the dynamic part begins at kDynamicShared
  std::vector<void*> static_shared;
  size_t shared_top;  // end of the part in use
};

constexpr size_t kDynamicShared = 1024;          // shared addresses below are reserved, as on Hopper
constexpr size_t kSharedCapacity = 1024 * 512;   // room for the red zones too
constexpr unsigned kWarpSize = 32;

struct LaunchShape {
  dim3 grid, block, cluster;
  size_t dynamic_shared;
};

// These two name the running thread and the launch it belongs to.
extern thread_local Thread* current __attribute__((tls_model("initial-exec")));
extern thread_local const LaunchShape* shape __attribute__((tls_model("initial-exec")));

inline Block& block() { return *current->block; }
inline unsigned lane() { return current->rank % kWarpSize; }
inline Warp& warp() { return block().warps[current->rank / kWarpSize]; }

// Ends the launch with a message that names the place. Does not return to the kernel.
[[noreturn]] void fail(Where where, const char* format, ...) __attribute__((format(printf, 2, 3)));
// Lets other threads run; returns when the random order comes back to this one.
void yield(const char* waits_for, Where where);
// Sleeps until make_ready is called on this thread.
void block_current(const char* waits_for, Where where);
void make_ready(Thread* thread);
void warp_collective(unsigned mask, WarpOperation operation, void* args, const char* name, Where where);
// bar.sync (waits) and bar.arrive; threads 0: the whole block.
int barrier_sync(unsigned id, unsigned threads, int predicate, const char* name, Where where);
void barrier_arrive(unsigned id, unsigned threads, Where where);
unsigned random_below(unsigned bound);

void* dynamic_shared();
// A static __shared__ variable: its identity, and its address in the running block.
int new_static_slot();
void* static_shared(int slot, size_t bytes, size_t alignment);
uint32_t shared_address(const void* pointer);
void* shared_pointer(uint32_t address);

}  // namespace cpu_device
