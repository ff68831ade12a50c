#include "shadow.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "worker.h"

namespace cpu_device {
namespace shadow {

namespace {

constexpr size_t kCell = 4;
constexpr int kLineShift = 48;  // pointers have 47 bits; a Place with a line is a Where

// device.py turns {library+offset} into a file and a line.
std::string describe(Place place) {
  char text[600];
  if (place >> kLineShift) {
    snprintf(text, sizeof text, "%s:%d", reinterpret_cast<const char*>(place & ((1ull << kLineShift) - 1)),
             int(place >> kLineShift));
  } else {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(place), &info);
    snprintf(text, sizeof text, "{%s+0x%llx}", info.dli_fname ? info.dli_fname : "?",
             static_cast<unsigned long long>(place - reinterpret_cast<uint64_t>(info.dli_fbase)) - 1);
  }
  return text;
}

[[noreturn]] void report(Place place, const char* what, size_t offset, size_t bytes, Place other = 0) {
  const std::string here = describe(place), there = other ? ", the other at " + describe(other) : "";
  fail(Where("", 0), "%s: %s (shared address %zu, %zu bytes%s)", here.c_str(), what, offset, bytes, there.c_str());
}

// Whether the thread has seen what `id` did at `clock`.
bool ordered(const Thread& thread, unsigned id, uint32_t clock) { return thread.shadow.clock[id] >= clock; }

void check_states(Block& block, size_t offset, size_t bytes, bool write, Place place) {
  for (size_t i = offset; i < offset + bytes; i++) {
    const uint8_t state = i < block.shadow.states.size() ? block.shadow.states[i] : uint8_t(kRedZone);
    if (state == kRedZone) report(place, "shared memory out of bounds", i, bytes);
    if (state == kInFlight) report(place, "an asynchronous copy to this shared memory is in flight", i, bytes);
    if (!write && state == kUnwritten) report(place, "uninitialised shared memory is read", i, bytes);
  }
}

// Calls f(cell, mask, offset of the cell) for the cells of a range.
template <class F>
void for_cells(Block& block, size_t offset, size_t bytes, F f) {
  for (size_t at = offset / kCell * kCell; at < offset + bytes; at += kCell) {
    const size_t from = std::max(at, offset) - at, to = std::min(at + kCell, offset + bytes) - at;
    f(block.shadow.cells[at / kCell], uint8_t(((1u << to) - 1) & ~((1u << from) - 1)), at);
  }
}

void record(Cell& cell, bool write, uint8_t mask, unsigned id, uint32_t clock, Place place, uint16_t fence) {
  if (write) {
    const bool same = cell.writer == id && cell.write_clock == clock;
    cell.write_mask = same ? cell.write_mask | mask : mask;
    cell.writer = id;
    cell.write_clock = clock;
    cell.write_place = place;
    cell.fence = fence;
  } else {
    const bool same = cell.reader == id && cell.read_clock == clock;
    cell.read_mask = same ? cell.read_mask | mask : mask;
    cell.reader = id;
    cell.read_clock = clock;
    cell.read_place = place;
  }
}

const char* kRace = "two threads touch this shared memory, one of them writes, and nothing orders them";

}  // namespace

bool enabled() { return worker->shadow.enabled; }

Place place_of(const Where& where) {
  return reinterpret_cast<uint64_t>(where.file) | uint64_t(where.line) << kLineShift;
}
Place place_of(const void* return_address) { return reinterpret_cast<uint64_t>(return_address); }

void begin_block(Block& block) {
  if (!enabled()) return;
  const size_t dynamic_end = kDynamicShared + worker->launch->shape.dynamic_shared;
  auto& states = block.shadow.states;
  states.assign(kDynamicShared, kRedZone);
  states.resize(dynamic_end, kUnwritten);
  for (const RedZone& zone : worker->launch->red_zones)
    std::fill_n(states.begin() + kDynamicShared + zone.offset, zone.bytes, kRedZone);
  block.shadow.cells.assign(dynamic_end / kCell + 1, Cell{});
}

void begin_thread(Thread& thread) {
  if (!enabled()) return;
  thread.shadow.clock.assign(2 * worker->shadow.threads, 0);
  thread.shadow.clock[thread.id] = 1;
}

void add_variable(Block& block, size_t offset, size_t bytes) {
  if (!enabled()) return;
  block.shadow.states.resize(offset, kRedZone);
  block.shadow.states.resize(offset + bytes, kUnwritten);
  block.shadow.cells.resize((offset + bytes) / kCell + 1);
}

void release(Thread& thread, Clock& into) {
  if (!enabled()) return;
  settle(thread);
  Clock& mine = thread.shadow.clock;
  if (into.empty()) into.assign(mine.size(), 0);
  for (size_t i = 0; i < mine.size(); i++) into[i] = std::max(into[i], mine[i]);
  mine[thread.id]++;
}

void acquire(Thread& thread, const Clock& from) {
  Clock& mine = thread.shadow.clock;
  for (size_t i = 0; i < from.size(); i++) mine[i] = std::max(mine[i], from[i]);
}

Ticket issue(Thread& thread) { return {worker->shadow.threads + thread.id, ++thread.shadow.asynchronous_clock}; }

void release(Ticket ticket, Clock& into) {
  if (!enabled()) return;
  if (into.empty()) into.assign(2 * worker->shadow.threads, 0);
  into[ticket.id] = std::max(into[ticket.id], ticket.clock);
}

void acquire(Thread& thread, Ticket ticket) {
  if (!enabled()) return;
  uint32_t& mine = thread.shadow.clock[ticket.id];
  mine = std::max(mine, ticket.clock);
}

void access(Block& block, size_t offset, size_t bytes, bool write, Thread& thread, Place place) {
  settle(thread);
  check_states(block, offset, bytes, write, place);
  for_cells(block, offset, bytes, [&](Cell& cell, uint8_t mask, size_t at) {
    if (cell.write_mask & mask && cell.writer != thread.id && !ordered(thread, cell.writer, cell.write_clock)) {
      if (!write || bytes > sizeof thread.shadow.doubtful.old) report(place, kRace, at, bytes, cell.write_place);
      DoubtfulWrite& doubtful = thread.shadow.doubtful;
      doubtful.pointer = block.shared + offset;
      doubtful.bytes = bytes;
      memcpy(doubtful.old, doubtful.pointer, bytes);
      doubtful.place = place;
      doubtful.other = cell.write_place;
    }
    if (write && cell.read_mask & mask && cell.reader != thread.id && !ordered(thread, cell.reader, cell.read_clock))
      report(place, kRace, at, bytes, cell.read_place);
    record(cell, write, mask, thread.id, thread.shadow.clock[thread.id], place, thread.shadow.fence);
  });
  if (write) std::fill_n(block.shadow.states.begin() + offset, bytes, kValid);
}

void check_initialised(Block& block, size_t offset, size_t bytes, Where where) {
  check_states(block, offset, bytes, false, place_of(where));
}

void settle(Thread& thread) {
  DoubtfulWrite& doubtful = thread.shadow.doubtful;
  if (!doubtful.pointer) return;
  const void* pointer = doubtful.pointer;
  doubtful.pointer = nullptr;
  if (memcmp(pointer, doubtful.old, doubtful.bytes) == 0) return;
  report(doubtful.place, kRace, static_cast<const unsigned char*>(pointer) - thread.block->shared, doubtful.bytes,
         doubtful.other);
}

void asynchronous_read(Block& block, size_t offset, size_t bytes, Thread& issuer, Ticket ticket, Where where) {
  if (!enabled()) return;
  settle(issuer);
  const Place place = place_of(where);
  check_states(block, offset, bytes, false, place);
  for_cells(block, offset, bytes, [&](Cell& cell, uint8_t mask, size_t at) {
    if (cell.write_mask & mask) {
      if (!ordered(issuer, cell.writer, cell.write_clock)) report(place, kRace, at, bytes, cell.write_place);
      const unsigned threads = worker->shadow.threads;
      if (cell.writer < threads && worker->threads[cell.writer].shadow.fence == cell.fence)
        report(place, "ordinary stores are read by an asynchronous operation without fence.proxy.async", at, bytes,
               cell.write_place);
    }
    record(cell, false, mask, ticket.id, ticket.clock, place, 0);
  });
}

void begin_write(Block& block, size_t offset, size_t bytes, Thread& issuer, Ticket ticket, Where where) {
  if (!enabled()) return;
  const Place place = place_of(where);
  settle(issuer);
  check_states(block, offset, bytes, true, place);
  for_cells(block, offset, bytes, [&](Cell& cell, uint8_t mask, size_t at) {
    if (cell.write_mask & mask && !ordered(issuer, cell.writer, cell.write_clock))
      report(place, kRace, at, bytes, cell.write_place);
    if (cell.read_mask & mask && !ordered(issuer, cell.reader, cell.read_clock))
      report(place, kRace, at, bytes, cell.read_place);
    record(cell, true, mask, ticket.id, ticket.clock, place, 0);
  });
  std::fill_n(block.shadow.states.begin() + offset, bytes, kInFlight);
}

void end_write(Block& block, size_t offset, size_t bytes) {
  if (enabled()) std::fill_n(block.shadow.states.begin() + offset, bytes, kValid);
}

}  // namespace shadow
}  // namespace cpu_device
