// The launch: the blocks of a grid, over OS threads.
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "fibers.h"

namespace cpu_device {
namespace {

uint3 unravel(uint64_t linear, dim3 extent) {
  return {unsigned(linear % extent.x), unsigned(linear / extent.x % extent.y), unsigned(linear / extent.x / extent.y)};
}

uint64_t volume(dim3 extent) { return uint64_t(extent.x) * extent.y * extent.z; }

void prepare_block(unsigned rank, uint3 index) {
  const LaunchShape& s = worker->launch->shape;
  const unsigned n = volume(s.block);
  Block& block = worker->blocks[rank];
  block.index = index;
  block.rank = rank;
  block.live_threads = n;
  block.warps.resize((n + kWarpSize - 1) / kWarpSize);
  block.shared = worker->shared + rank * kSharedCapacity;
  block.shared_top = kDynamicShared + s.dynamic_shared;
  begin_shared(block);
  for (unsigned t = 0; t < n; t++) {
    Thread& thread = worker->threads[rank * n + t];
    char* const stack = thread.stack;
    thread = Thread{};
    thread.stack = stack;
    thread.thread_index = unravel(t, s.block);
    thread.block_index = index;
    thread.rank = t;
    thread.id = rank * n + t;
    thread.block = &block;
    prepare_stack(thread);
    shadow::begin_thread(thread);
    block.warps[t / kWarpSize].lanes[t % kWarpSize] = &thread;
    make_ready(&thread);
  }
}

void run_cluster(uint64_t number) {
  Launch& launch = *worker->launch;
  const dim3 c = launch.shape.cluster, g = launch.shape.grid;
  const uint3 at = unravel(number, dim3{g.x / c.x, g.y / c.y, g.z / c.z});
  worker->random_state = launch.seed * 0x9e3779b97f4a7c15u + number * 0xbf58476d1ce4e5b9u + 1;
  worker->blocks.assign(volume(c), Block{});
  worker->ready.clear();
  worker->polling.clear();
  worker->pending.clear();
  worker->cluster_barrier = Barrier{};
  worker->cluster_phase = 0;
  worker->live = worker->threads.size();
  for (unsigned rank = 0; rank < volume(c); rank++) {
    const uint3 in = unravel(rank, c);
    prepare_block(rank, {at.x * c.x + in.x, at.y * c.y + in.y, at.z * c.z + in.z});
  }
  run_fibers();
  for (Block& block : worker->blocks) {
    end_shared(block);
    if (!launch.failed) check_warpgroups(block);
    for (Warp& warp : block.warps) release_products(warp);
  }
  if (!launch.failed && !worker->pending.empty())
    set_error(launch, "a block has ended while a copy into its shared memory was in flight");
}

void find_own_stack() {
  pthread_attr_t attributes;
  void* low;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &low, &worker->stack_bytes);
  pthread_attr_destroy(&attributes);
  worker->stack_low = low;
}

void run_worker(Launch& launch) {
  Worker mine{};
  mine.launch = &launch;
  worker = &mine;
  shape = &launch.shape;
  find_own_stack();
  const size_t ctas = volume(launch.shape.cluster), fibers = ctas * volume(launch.shape.block);
  const uint64_t clusters = volume(launch.shape.grid) / ctas;
  mine.shadow = {launch.checked, unsigned(fibers)};
  mine.threads.resize(fibers);
  for (Thread& thread : mine.threads) thread.stack = new_stack();
  mine.shared = static_cast<unsigned char*>(aligned_alloc(1024, ctas * kSharedCapacity));
  window = {reinterpret_cast<uintptr_t>(mine.shared), launch.checked ? ctas * kSharedCapacity : 0};
  for (uint64_t n; (n = launch.next_cluster++) < clusters && !launch.failed;) run_cluster(n);
  for (Thread& thread : mine.threads) free_stack(thread.stack);
  free(mine.shared);
  window = {};
  worker = nullptr;
  shape = nullptr;
}

}  // namespace
}  // namespace cpu_device

// Runs a grid; returns 0, or 1 with a message in `error`. device.py has the same list of fields.
struct LaunchRequest {
  void (*invoke)(void**);
  void** args;
  unsigned grid[3], block[3], cluster[3];
  unsigned workers;
  int sum_bits, sum_depth;
  uint64_t dynamic_shared, seed;
  uint64_t checked;
  double timeout_s;
  const uint64_t* red_zones;  // pairs of offset and bytes
  uint64_t num_red_zones;
  const uint64_t* padding;  // likewise
  uint64_t num_padding;
  char* error;
  uint64_t error_capacity;
};

extern "C" int cpu_device_launch(const LaunchRequest* r) {
  using namespace cpu_device;
  Launch launch{};
  launch.shape = {dim3{r->grid[0], r->grid[1], r->grid[2]}, dim3{r->block[0], r->block[1], r->block[2]},
                  dim3{r->cluster[0], r->cluster[1], r->cluster[2]}, r->dynamic_shared};
  launch.invoke = r->invoke;
  launch.args = r->args;
  launch.seed = r->seed;
  launch.checked = r->checked;
  launch.sum_bits = r->sum_bits;
  launch.sum_depth = r->sum_depth;
  launch.timeout_s = r->timeout_s;
  for (uint64_t z = 0; z < r->num_red_zones; z++)
    launch.red_zones.push_back({r->red_zones[2 * z], r->red_zones[2 * z + 1]});
  for (uint64_t z = 0; z < r->num_padding; z++) launch.padding.push_back({r->padding[2 * z], r->padding[2 * z + 1]});
  std::vector<std::thread> threads;
  for (unsigned w = 0; w < r->workers; w++) threads.emplace_back([&] { run_worker(launch); });
  for (std::thread& thread : threads) thread.join();
  if (!launch.failed) return 0;
  snprintf(r->error, r->error_capacity, "%s", launch.error.c_str());
  return 1;
}
