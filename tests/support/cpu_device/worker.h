// The runtime's own view: threads, warps, blocks, and what one OS thread holds while it runs a cluster of blocks.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime.h"
#include "shadow.h"

namespace cpu_device {

struct Block;
using Action = std::function<void()>;

// A copy into shared memory.
struct AsynchronousCopy {
  Action action;
  shadow::Ticket ticket;
  bool done;
};

// A copy from shared to global memory: two steps, each as late as a wait allows.
struct BulkStore {
  Action read, write;
  shadow::Ticket ticket;
  Where where;
};

// One CUDA thread: one fiber.
struct Thread : ThreadView {
  Block* block = nullptr;
  unsigned id = 0;  // linear index inside its cluster
  void* stack_pointer = nullptr;
  char* stack = nullptr;            // low end
  void* fake_stack = nullptr;       // AddressSanitizer's
  const char* waits_for = nullptr;  // what it is blocked on, for the deadlock report
  Where where;
  bool exited = false;
  Votes votes{};
  uint64_t cluster_phase = 0;                              // in which it arrived last
  std::vector<AsynchronousCopy> copies;                    // cp.async that belong to no group yet
  std::vector<std::vector<AsynchronousCopy>> copy_groups;  // oldest first
  std::vector<BulkStore> bulk_stores;
  std::vector<std::vector<BulkStore>> bulk_groups;
  size_t bulk_groups_read = 0;  // of bulk_groups, how many have their sources read
  shadow::ThreadState shadow;
};

struct Products;  // the asynchronous matrix products of a warp (wgmma.cpp)

// The products that the four warps of a warpgroup have issued: all must issue the same.
struct WgmmaLog {
  std::deque<std::array<uint64_t, 3>> products;  // those that not every warp has issued yet
  size_t issued[4] = {};
  size_t first() const { return *std::min_element(issued, issued + 4); }  // number of the first in `products`
};

struct Warp {
  struct Arrival {
    unsigned mask = 0;
    WarpOperation operation = nullptr;
    void* args = nullptr;
  } arrivals[32];
  unsigned waiting = 0;  // lanes that have arrived
  Thread* lanes[32] = {};
  Products* products = nullptr;
};

struct Barrier {
  unsigned arrived = 0, expected = 0;  // expected 0: all threads that have not exited
  Votes votes{false, true, 0};
  std::vector<Thread*> waiting;
  shadow::Clock clock;
};

// The state of an mbarrier. Shared memory holds a mark in its place.
struct MBarrier {
  struct Waiting {
    Thread* thread;
    uint64_t phase;
  };
  unsigned arrivals = 0, pending = 0;
  int64_t bytes = 0;  // announced, not yet come
  uint64_t phase = 0;
  std::vector<Waiting> waiting;
  shadow::Clock clock, completed;
};

// One thread block (CTA).
struct Block {
  uint3 index;
  unsigned rank = 0;  // inside its cluster
  unsigned live_threads = 0;
  std::vector<Warp> warps;
  Barrier barriers[16];
  unsigned char* shared = nullptr;  // address 0; the dynamic part begins at kDynamicShared
  size_t shared_top = 0;            // end of the part in use
  std::vector<void*> static_shared;
  std::unordered_map<uint32_t, MBarrier> mbarriers;
  std::map<unsigned, WgmmaLog> wgmma_logs;  // by warpgroup
  shadow::BlockState shadow;
};

constexpr size_t kDynamicShared = 1024;         // addresses below are reserved, as on Hopper
constexpr size_t kSharedCapacity = 512 * 1024;  // room for the red zones too
constexpr int kUnwrittenByte = 0xff;            // NaN in every floating type: a read of unwritten memory shows
constexpr int kClusterShift = 24;               // a cluster address is rank + 1 in the bits from here on

// Bytes [offset, offset + bytes) of the dynamic shared memory.
struct Range {
  size_t offset, bytes;
};

struct Launch {
  LaunchShape shape;
  void (*invoke)(void**);
  void** args;
  uint64_t seed;
  bool checked;             // the kernels were compiled with calls before each access
  int sum_bits, sum_depth;  // of tensor cores (cut_sums.h); no bits: sums of plain float32
  double timeout_s;
  std::vector<Range> red_zones;  // between the members of the kernel's storage
  std::vector<Range> padding;    // inside of members: it is copied with them, and holds no value that anybody uses
  std::atomic<uint64_t> next_cluster{0};
  std::mutex mutex;
  std::string error;
  std::atomic<bool> failed{false};
};

struct Worker {
  Launch* launch = nullptr;
  std::vector<Thread> threads;
  std::vector<Block> blocks;
  std::vector<Thread*> ready, polling;
  std::vector<Action> pending;  // asynchronous operations that nobody waits for by name: done when nobody can run
  std::vector<char*> stacks;
  unsigned char* shared = nullptr;  // of all blocks of the cluster, kSharedCapacity each
  shadow::ClusterState shadow;
  Barrier cluster_barrier;
  uint64_t cluster_phase = 0;
  shadow::Clock cluster_clock;    // of its last completed phase
  void* stack_pointer = nullptr;  // of the scheduling loop
  void* fake_stack = nullptr;
  const void* stack_low = nullptr;
  size_t stack_bytes = 0;
  uint64_t random_state = 0;
  unsigned live = 0;
};

extern thread_local Worker* worker __attribute__((tls_model("initial-exec")));

// The addresses whose accesses are checked.
struct Window {
  uintptr_t base = 0;
  size_t bytes = 0;
};
extern thread_local Window window __attribute__((tls_model("initial-exec")));

inline Thread& self() { return *static_cast<Thread*>(current); }
inline Block& block() { return *self().block; }
inline Warp& warp() { return block().warps[current->rank / kWarpSize]; }

unsigned random_below(unsigned bound);
inline void make_ready(Thread* thread) { worker->ready.push_back(thread); }
void block_current(const char* waits_for, Where where);  // sleeps until make_ready is called on this thread
// Adds an operation that the program waits for through an mbarrier: done when no thread can run otherwise.
void start_asynchronous(Action action);
void set_error(Launch& launch, const std::string& text);

void arrive(Barrier& barrier, unsigned id, unsigned threads, bool predicate, Where where);
void complete_if_full(Barrier& barrier, unsigned live_threads);
void complete_cluster_if_full();
// Shared memory of a block before and after it runs.
void begin_shared(Block& block);
void end_shared(Block& block);
// Check that the running thread leaves nothing in flight.
void check_copies();
void check_products();
void check_warpgroups(const Block& block);  // after its end
void release_products(Warp& warp);

// An address of the cluster means a block, and an address there.
Block& block_of_address(uint32_t address, Where where);
uint32_t local_address(uint32_t address);

}  // namespace cpu_device
