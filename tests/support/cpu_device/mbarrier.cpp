// mbarriers: barriers in shared memory that also count the bytes of asynchronous copies.
#include "mbarrier.h"

#include <cstring>

#include "instructions.h"

namespace cpu_device {

namespace {

constexpr uint64_t kMark = 0x6d62617272696572;  // stands in shared memory where a barrier lives
constexpr unsigned kMaxArrivals = (1u << 20) - 1;
constexpr int64_t kMaxBytes = (1 << 20) - 1;

void complete_if_done(MBarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase++;
  barrier.pending = barrier.arrivals;
  barrier.completed = std::move(barrier.clock);
  barrier.clock = {};
  auto waiting = std::move(barrier.waiting);
  barrier.waiting = {};
  for (const MBarrier::Waiting& w : waiting) {
    shadow::acquire(*w.thread, barrier.completed);
    make_ready(w.thread);
  }
}

void count_arrival(MBarrier& barrier, Where where) {
  if (barrier.pending == 0)
    fail(where, "mbarrier: more than the %u arrivals of a phase (those of the last phase are in, its bytes not)",
         barrier.arrivals);
  barrier.pending--;
  complete_if_done(barrier);
}

}  // namespace

MBarrier& mbarrier_at(uint32_t address, Where where) {
  Block& target = block_of_address(address, where);
  const unsigned char* memory = shared_memory(address, 8, 8, "mbarrier", where);
  on_read(memory, 8, where);
  const auto found = target.mbarriers.find(local_address(address));
  if (found == target.mbarriers.end())
    fail(where, "mbarrier: the one at shared address %u is not initialised", local_address(address));
  if (memcmp(memory, &kMark, sizeof kMark))
    fail(where, "mbarrier: the one at shared address %u has been overwritten", local_address(address));
  return found->second;
}

void mbarrier_init(uint32_t address, unsigned arrivals, Where where) {
  unsigned char* memory = shared_memory(address, 8, 8, "mbarrier.init", where);
  if (arrivals == 0 || arrivals > kMaxArrivals) fail(where, "mbarrier.init: %u arrivals", arrivals);
  on_write(memory, 8, where);
  memcpy(memory, &kMark, sizeof kMark);
  MBarrier barrier;
  barrier.arrivals = barrier.pending = arrivals;
  block_of_address(address, where).mbarriers[local_address(address)] = barrier;
}

void mbarrier_arrive(uint32_t address, Where where) {
  MBarrier& barrier = mbarrier_at(address, where);
  shadow::release(self(), barrier.clock);
  count_arrival(barrier, where);
}

void mbarrier_expect(uint32_t address, unsigned bytes, Where where) {
  MBarrier& barrier = mbarrier_at(address, where);
  barrier.bytes += bytes;
  if (barrier.bytes > kMaxBytes) fail(where, "mbarrier: %ld bytes announced, at most 2^20 - 1", long(barrier.bytes));
}

bool mbarrier_wait(uint32_t address, unsigned parity, Where where) {
  MBarrier& barrier = mbarrier_at(address, where);
  if (parity > 1) fail(where, "mbarrier.try_wait: parity %u", parity);
  if ((barrier.phase & 1) != parity) {
    shadow::acquire(self(), barrier.completed);
    return true;
  }
  const uint64_t phase = barrier.phase;
  barrier.waiting.push_back({&self(), phase});
  block_current("an mbarrier", where);
  // A phase later the parity would say no again: nothing held the others back until this thread had looked.
  if (barrier.phase > phase + 1)
    fail(where, "mbarrier: the phase after the one waited for has ended already; on a GPU this thread would hang");
  return true;
}

void mbarrier_complete(Block& block, uint32_t address, unsigned bytes, shadow::Ticket ticket) {
  MBarrier& barrier = block.mbarriers.at(address);
  shadow::release(ticket, barrier.clock);
  barrier.bytes -= bytes;
  complete_if_done(barrier);
}

void mbarrier_arrive_for(Block& block, uint32_t address, const std::vector<shadow::Ticket>& tickets, Where where) {
  MBarrier& barrier = block.mbarriers.at(address);
  for (const shadow::Ticket& ticket : tickets) shadow::release(ticket, barrier.clock);
  count_arrival(barrier, where);
}

}  // namespace cpu_device
