// Barriers and warp collectives.
#include "instructions.h"
#include "worker.h"

namespace cpu_device {

void arrive(Barrier& barrier, unsigned id, unsigned threads, bool predicate, Where where) {
  if (barrier.arrived && barrier.expected != threads)
    fail(where, "barrier %u: %u threads expected here, %u by those that came before", id, threads, barrier.expected);
  barrier.expected = threads;
  barrier.arrived++;
  barrier.votes.any |= predicate;
  barrier.votes.all &= predicate;
  barrier.votes.count += predicate;
  shadow::release(self(), barrier.clock);
}

void complete_if_full(Barrier& barrier, unsigned live_threads) {
  if (barrier.arrived == 0) return;
  if (barrier.arrived < (barrier.expected ? barrier.expected : live_threads)) return;
  for (Thread* thread : barrier.waiting) {
    thread->votes = barrier.votes;
    shadow::acquire(*thread, barrier.clock);
    make_ready(thread);
  }
  barrier = Barrier{};
}

namespace {

Barrier& named(unsigned id, unsigned threads, Where where) {
  if (id >= 16) fail(where, "barrier %u: there are 16", id);
  if (threads % kWarpSize) fail(where, "barrier %u: %u threads are no whole warps", id, threads);
  return block().barriers[id];
}

}  // namespace

Votes barrier_sync(unsigned id, unsigned threads, bool predicate, const char* name, Where where) {
  Barrier& barrier = named(id, threads, where);
  arrive(barrier, id, threads, predicate, where);
  barrier.waiting.push_back(&self());
  complete_if_full(barrier, block().live_threads);
  block_current(name, where);
  return self().votes;
}

void barrier_arrive(unsigned id, unsigned threads, Where where) {
  Barrier& barrier = named(id, threads, where);
  arrive(barrier, id, threads, false, where);
  complete_if_full(barrier, block().live_threads);
}

void complete_cluster_if_full() {
  Barrier& barrier = worker->cluster_barrier;
  if (barrier.arrived == 0 || barrier.arrived < worker->live) return;
  worker->cluster_phase++;
  worker->cluster_clock = barrier.clock;
  complete_if_full(barrier, worker->live);
}

void cluster_arrive(Where where) {
  self().cluster_phase = worker->cluster_phase;
  arrive(worker->cluster_barrier, 0, 0, false, where);
  complete_cluster_if_full();
}

void cluster_wait(Where where) {
  if (self().cluster_phase == worker->cluster_phase) {
    worker->cluster_barrier.waiting.push_back(&self());
    block_current("the cluster's barrier", where);
  }
  shadow::acquire(self(), worker->cluster_clock);
}

unsigned existing_lanes() {
  unsigned lanes = 0;
  for (unsigned l = 0; l < kWarpSize; l++) {
    const Thread* thread = warp().lanes[l];
    lanes |= unsigned(thread && !thread->exited) << l;
  }
  return lanes;
}

void warp_collective(unsigned mask, WarpOperation operation, void* args, const char* name, Where where) {
  Warp& w = warp();
  const unsigned self_lane = lane();
  if (!(mask >> self_lane & 1)) fail(where, "%s: lane %u is not in its own mask %08x", name, self_lane, mask);
  w.arrivals[self_lane] = {mask, operation, args};
  w.waiting |= 1u << self_lane;
  if (const unsigned missing = mask & ~w.waiting) {
    const int l = __builtin_ctz(missing);
    if (!w.lanes[l] || w.lanes[l]->exited) fail(where, "%s: mask %08x names lane %u, which has exited", name, mask, l);
    return block_current(name, where);
  }
  void* all_args[kWarpSize] = {};
  for (unsigned l = 0; l < kWarpSize; l++) {
    if (!(mask >> l & 1)) continue;
    if (w.arrivals[l].mask != mask) return block_current(name, where);
    all_args[l] = w.arrivals[l].args;
  }
  for (unsigned l = 0; l < kWarpSize; l++)
    if (mask >> l & 1 && w.arrivals[l].operation != operation)
      fail(where, "%s: lane %u of the warp is at another instruction, %s at %s:%d", name, l, w.lanes[l]->waits_for,
           w.lanes[l]->where.file, w.lanes[l]->where.line);
  operation(all_args, mask);
  w.waiting &= ~mask;
  for (unsigned l = 0; l < kWarpSize; l++)
    if (mask >> l & 1 && l != self_lane) make_ready(w.lanes[l]);
}

void warp_sync(unsigned mask, Where where) {
  // Some lanes of a block's last, ragged warp do not exist.
  mask &= existing_lanes();
  warp_collective(
      mask,
      [](void* const*, unsigned lanes) {
        shadow::Clock clock;
        for (unsigned l = 0; l < kWarpSize; l++)
          if (lanes >> l & 1) shadow::release(*warp().lanes[l], clock);
        for (unsigned l = 0; l < kWarpSize; l++)
          if (lanes >> l & 1) shadow::acquire(*warp().lanes[l], clock);
      },
      nullptr, "__syncwarp", where);
}

unsigned cluster_rank() { return block().rank; }

int load_acquire(const int* address, Where where) {
  poll("ld.acquire", where);
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

int load_volatile(const int* address, Where where) {
  poll("ld.volatile", where);
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

void add_release(int* address, int value) { __atomic_fetch_add(address, value, __ATOMIC_RELEASE); }

void memory_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

void fence_async_shared() {
  shadow::settle(self());
  self().shadow.fence++;
}

}  // namespace cpu_device
