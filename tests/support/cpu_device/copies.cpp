// Asynchronous copies by address: cp.async in groups of a thread, bulk copies with an mbarrier or in bulk groups.
//
// From its issue until it lands the destination of a load holds garbage; it lands when a wait covers it. A store reads
// its source when a wait asks for that, and writes when a wait asks for that, or when its thread exits.
#include <algorithm>
#include <cstring>
#include <memory>

#include "copies.h"
#include "instructions.h"
#include "mbarrier.h"

namespace cpu_device {

namespace {

constexpr unsigned kBulkAlignment = 16;

void check_bulk(const void* global, unsigned bytes, const char* name, Where where) {
  if (bytes == 0 || bytes % kBulkAlignment) fail(where, "%s: %u bytes are no positive multiple of 16", name, bytes);
  if (reinterpret_cast<uintptr_t>(global) % kBulkAlignment)
    fail(where, "%s: the global address %p is not a multiple of 16", name, global);
}

void perform(std::vector<AsynchronousCopy>& copies) {
  for (AsynchronousCopy& copy : copies) {
    if (copy.done) continue;
    copy.action();
    copy.done = true;
  }
}

void write_global(unsigned char* to, const std::vector<unsigned char>& bytes, Reduction reduction) {
  if (reduction == Reduction::kNone) {
    memcpy(to, bytes.data(), bytes.size());
    return;
  }
  for (size_t at = 0; at < bytes.size(); at += sizeof(float)) {
    float x;
    memcpy(&x, &bytes[at], sizeof x);
    add_to_global(reinterpret_cast<float*>(to + at), x);
  }
}

}  // namespace

void add_to_global(float* address, float x) {
  float old, sum;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do sum = old + x;
  while (!__atomic_compare_exchange(address, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

void start_load(Block& target, uint32_t address, size_t bytes, shadow::Ticket ticket, Where where) {
  shadow::begin_write(target, address, bytes, self(), ticket, where);
  memset(target.shared + address, kUnwrittenByte, bytes);
}

// ---- cp.async

void copy_async(uint32_t shared, const void* global, int size, int bytes, Where where) {
  unsigned char* to = shared_memory(shared, size, size, "cp.async", where);
  if (bytes < 0 || bytes > size) fail(where, "cp.async: %d of %d bytes", bytes, size);
  if (bytes && reinterpret_cast<uintptr_t>(global) % size)
    fail(where, "cp.async: the global address %p is not a multiple of %d", global, size);
  Thread& thread = self();
  Block& target = *thread.block;
  const uint32_t address = local_address(shared);
  const shadow::Ticket ticket = shadow::issue(thread);
  start_load(target, address, size, ticket, where);
  const Action action = [=, &target] {
    memset(to, 0, size);
    if (bytes) memcpy(to, global, bytes);
    shadow::end_write(target, address, size);
  };
  thread.copies.push_back({action, ticket, false});
}

void copy_async_commit() {
  self().copy_groups.push_back(std::move(self().copies));
  self().copies = {};
}

void copy_async_wait(int pending) {
  auto& groups = self().copy_groups;
  while (groups.size() > size_t(pending)) {
    perform(groups.front());
    for (const AsynchronousCopy& copy : groups.front()) shadow::acquire(self(), copy.ticket);
    groups.erase(groups.begin());
  }
}

void copy_async_arrive(uint32_t mbarrier, Where where) {
  mbarrier_at(mbarrier, where);
  Thread& thread = self();
  std::vector<shadow::Ticket> tickets;
  for (const auto& group : thread.copy_groups)
    for (const AsynchronousCopy& copy : group) tickets.push_back(copy.ticket);
  for (const AsynchronousCopy& copy : thread.copies) tickets.push_back(copy.ticket);
  start_asynchronous([=, &thread] {
    for (auto& group : thread.copy_groups) perform(group);
    perform(thread.copies);
    mbarrier_arrive_for(*thread.block, local_address(mbarrier), tickets, where);
  });
}

// ---- Bulk copies

void bulk_load(uint32_t shared, const void* global, unsigned bytes, uint32_t mbarrier, Where where) {
  check_bulk(global, bytes, "cp.async.bulk", where);
  unsigned char* to = shared_memory(shared, bytes, kBulkAlignment, "cp.async.bulk", where);
  mbarrier_at(mbarrier, where);
  Block& target = block_of_address(shared, where);
  const uint32_t address = local_address(shared);
  const shadow::Ticket ticket = shadow::issue(self());
  start_load(target, address, bytes, ticket, where);
  start_asynchronous([=, &target] {
    memcpy(to, global, bytes);
    shadow::end_write(target, address, bytes);
    mbarrier_complete(target, local_address(mbarrier), bytes, ticket);
  });
}

void bulk_store(void* global, uint32_t shared, unsigned bytes, Reduction reduction, Where where) {
  check_bulk(global, bytes, "cp.async.bulk", where);
  const unsigned char* from = shared_memory(shared, bytes, kBulkAlignment, "cp.async.bulk", where);
  const shadow::Ticket ticket = shadow::issue(self());
  shadow::asynchronous_read(block(), local_address(shared), bytes, self(), ticket, where);
  auto data = std::make_shared<std::vector<unsigned char>>();
  self().bulk_stores.push_back({[=] { data->assign(from, from + bytes); },
                                [=] { write_global(static_cast<unsigned char*>(global), *data, reduction); }, ticket,
                                where});
}

void bulk_copy_cluster(uint32_t to, uint32_t from, unsigned bytes, uint32_t mbarrier, Where where) {
  check_bulk(nullptr, bytes, "cp.async.bulk", where);
  unsigned char* destination = shared_memory(to, bytes, kBulkAlignment, "cp.async.bulk", where);
  const unsigned char* source = shared_memory(from, bytes, kBulkAlignment, "cp.async.bulk", where);
  mbarrier_at(mbarrier, where);
  Block &target = block_of_address(to, where), &signalled = block_of_address(mbarrier, where);
  if (&target != &signalled) fail(where, "cp.async.bulk: data and mbarrier are in different blocks of the cluster");
  const uint32_t address = local_address(to);
  const shadow::Ticket ticket = shadow::issue(self());
  const Block& sender = block();
  const uint32_t sent = local_address(from);
  shadow::asynchronous_read(block(), sent, bytes, self(), ticket, where, shadow::Written::kNone);
  start_load(target, address, bytes, ticket, where);
  start_asynchronous([=, &target, &sender] {
    memcpy(destination, source, bytes);
    shadow::end_copy(target, address, bytes, sender, sent);
    mbarrier_complete(target, local_address(mbarrier), bytes, ticket);
  });
}

void bulk_commit() {
  self().bulk_groups.push_back(std::move(self().bulk_stores));
  self().bulk_stores = {};
}

void bulk_wait(int pending, bool read_only) {
  Thread& thread = self();
  auto& groups = thread.bulk_groups;
  const size_t finished = groups.size() > size_t(pending) ? groups.size() - pending : 0;
  for (size_t g = thread.bulk_groups_read; g < finished; g++) {
    for (BulkStore& store : groups[g]) {
      store.read();
      shadow::acquire(thread, store.ticket);
    }
  }
  thread.bulk_groups_read = std::max(thread.bulk_groups_read, finished);
  if (read_only) return;
  for (size_t g = 0; g < finished; g++)
    for (BulkStore& store : groups[g]) store.write();
  groups.erase(groups.begin(), groups.begin() + finished);
  thread.bulk_groups_read -= finished;
}

void check_copies() {
  Thread& thread = self();
  if (!thread.bulk_stores.empty())
    fail(thread.bulk_stores[0].where, "the thread exits with a bulk store that it has not committed");
  if (thread.bulk_groups.size() > thread.bulk_groups_read)
    for (const BulkStore& store : thread.bulk_groups[thread.bulk_groups_read])
      fail(store.where, "the thread exits while its bulk store may still read shared memory");
  bulk_wait(0, false);
}

}  // namespace cpu_device
