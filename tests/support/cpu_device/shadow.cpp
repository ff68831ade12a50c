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
constexpr const char* kUninitialised = "uninitialised shared memory is read";
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

// Whether the thread has seen what the stamp is of.
bool ordered(const Thread& thread, const Stamp& stamp) {
  return stamp.id == thread.id || thread.shadow.clock[stamp.id] >= stamp.clock;
}

// The write, or an echo of it, that the thread has seen; null if none. What a cell holds is known after any of them.
const Stamp* seen_write(const Thread& thread, const Cell& cell) {
  if (ordered(thread, cell.write)) return &cell.write;
  for (int e = 0; e < cell.num_echoes; e++)
    if (ordered(thread, cell.echoes[e])) return &cell.echoes[e];
  return nullptr;
}

// Whether the thread may overwrite what the write and its echoes left.
bool all_writes_seen(const Thread& thread, const Cell& cell) {
  bool seen = ordered(thread, cell.write);
  for (int e = 0; e < cell.num_echoes; e++) seen &= ordered(thread, cell.echoes[e]);
  return seen;
}

void check_states(Block& block, size_t offset, size_t bytes, Written written, Place place) {
  size_t unwritten = 0;
  for (size_t i = offset; i < offset + bytes; i++) {
    const uint8_t state = i < block.shadow.states.size() ? block.shadow.states[i] : uint8_t(kRedZone);
    if (state == kRedZone) report(place, "shared memory out of bounds", i, bytes);
    if (state == kInFlight) report(place, "an asynchronous copy to this shared memory is in flight", i, bytes);
    unwritten += state == kUnwritten;
    if (written == Written::kAll && unwritten > 0) report(place, kUninitialised, i, bytes);
  }
  if (written == Written::kSome && unwritten == bytes) report(place, kUninitialised, offset, bytes);
}

// Calls f(cell, mask, offset of the cell) for the cells of a range.
template <class F>
void for_cells(Block& block, size_t offset, size_t bytes, F f) {
  for (size_t at = offset / kCell * kCell; at < offset + bytes; at += kCell) {
    const size_t from = std::max(at, offset) - at, to = std::min(at + kCell, offset + bytes) - at;
    f(block.shadow.cells[at / kCell], uint8_t(((1u << to) - 1) & ~((1u << from) - 1)), at);
  }
}

void record_write(Cell& cell, uint8_t mask, Stamp stamp, Place place) {
  const bool same = cell.write.id == stamp.id && cell.write.clock == stamp.clock;
  cell.write_mask = same ? cell.write_mask | mask : mask;
  cell.write = stamp;
  cell.write_place = place;
  cell.num_echoes = 0;
}

void record_read(Cell& cell, uint8_t mask, Stamp stamp, Place place) {
  const bool same = cell.read.id == stamp.id && cell.read.clock == stamp.clock;
  cell.read_mask = same ? cell.read_mask | mask : mask;
  cell.read = stamp;
  cell.read_place = place;
}

Stamp stamp_of(const Thread& thread) {
  return {thread.shadow.clock[thread.id], uint16_t(thread.id), thread.shadow.fence};
}

Stamp stamp_of(Ticket ticket) { return {ticket.clock, uint16_t(ticket.id), 0}; }

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
  // Compilers copy a struct whole, and write its members.
  for (const Range& padding : worker->launch->padding)
    std::fill_n(states.begin() + kDynamicShared + padding.offset, padding.bytes, kValid);
  for (const Range& zone : worker->launch->red_zones)
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

void access(Block& block, size_t offset, size_t bytes, bool write, Thread& thread, Place place, Written written) {
  settle(thread);
  check_states(block, offset, bytes, write ? Written::kNone : written, place);
  for_cells(block, offset, bytes, [&](Cell& cell, uint8_t mask, size_t at) {
    if (!write) {
      if (cell.write_mask & mask && !seen_write(thread, cell)) report(place, kRace, at, bytes, cell.write_place);
      return record_read(cell, mask, stamp_of(thread), place);
    }
    if (cell.read_mask & mask && !ordered(thread, cell.read)) report(place, kRace, at, bytes, cell.read_place);
    if (!(cell.write_mask & mask) || all_writes_seen(thread, cell))
      return record_write(cell, mask, stamp_of(thread), place);
    DoubtfulWrite& doubtful = thread.shadow.doubtful;
    if (bytes > sizeof doubtful.old) report(place, kRace, at, bytes, cell.write_place);
    doubtful.offset = offset;
    doubtful.bytes = bytes;
    memcpy(doubtful.old, block.shared + offset, bytes);
    doubtful.block = &block;
    doubtful.place = place;
    doubtful.other = cell.write_place;
  });
  if (write) std::fill_n(block.shadow.states.begin() + offset, bytes, kValid);
}

void settle(Thread& thread) {
  DoubtfulWrite& doubtful = thread.shadow.doubtful;
  if (!doubtful.block) return;
  Block& block = *doubtful.block;
  doubtful.block = nullptr;
  if (memcmp(block.shared + doubtful.offset, doubtful.old, doubtful.bytes))
    report(doubtful.place, kRace, doubtful.offset, doubtful.bytes, doubtful.other);
  for_cells(block, doubtful.offset, doubtful.bytes, [&](Cell& cell, uint8_t, size_t) {
    if (cell.write.id == thread.id) return;
    int e = 0;
    while (e < cell.num_echoes && cell.echoes[e].id != thread.id) e++;
    if (e == Cell::kEchoes) return;
    cell.echoes[e] = stamp_of(thread);
    cell.num_echoes = std::max<int>(cell.num_echoes, e + 1);
  });
}

void check_initialised(Block& block, size_t offset, size_t bytes, Where where) {
  check_states(block, offset, bytes, Written::kAll, place_of(where));
}

void asynchronous_read(Block& block, size_t offset, size_t bytes, Thread& issuer, Ticket ticket, Where where,
                       Written written) {
  if (!enabled()) return;
  settle(issuer);
  const Place place = place_of(where);
  check_states(block, offset, bytes, written, place);
  for_cells(block, offset, bytes, [&](Cell& cell, uint8_t mask, size_t at) {
    if (cell.write_mask & mask) {
      const Stamp* write = seen_write(issuer, cell);
      if (!write) report(place, kRace, at, bytes, cell.write_place);
      if (write->id < worker->shadow.threads && worker->threads[write->id].shadow.fence == write->fence)
        report(place, "ordinary stores are read by an asynchronous operation without fence.proxy.async", at, bytes,
               cell.write_place);
    }
    record_read(cell, mask, stamp_of(ticket), place);
  });
}

void begin_write(Block& block, size_t offset, size_t bytes, Thread& issuer, Ticket ticket, Where where) {
  if (!enabled()) return;
  const Place place = place_of(where);
  settle(issuer);
  check_states(block, offset, bytes, Written::kNone, place);
  for_cells(block, offset, bytes, [&](Cell& cell, uint8_t mask, size_t at) {
    if (cell.write_mask & mask && !all_writes_seen(issuer, cell)) report(place, kRace, at, bytes, cell.write_place);
    if (cell.read_mask & mask && !ordered(issuer, cell.read)) report(place, kRace, at, bytes, cell.read_place);
    record_write(cell, mask, stamp_of(ticket), place);
  });
  std::fill_n(block.shadow.states.begin() + offset, bytes, kInFlight);
}

void end_write(Block& block, size_t offset, size_t bytes) {
  if (enabled()) std::fill_n(block.shadow.states.begin() + offset, bytes, kValid);
}

void end_copy(Block& block, size_t offset, size_t bytes, const Block& source, size_t from) {
  if (enabled()) std::copy_n(source.shadow.states.begin() + from, bytes, block.shadow.states.begin() + offset);
}

}  // namespace shadow
}  // namespace cpu_device
