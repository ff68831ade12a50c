// Fibers, barriers, shared memory and the launch loop of the CPU test device.
#include "runtime.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace cpu_device {

thread_local Thread* current = nullptr;
thread_local const LaunchShape* shape = nullptr;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kPage = 4096;
constexpr int kUnwritten = 0xff;  // NaN in every floating type: a read of unwritten shared memory shows

struct Launch {
  LaunchShape shape;
  void (*invoke)(void**);
  void** args;
  uint64_t seed;
  std::atomic<uint64_t> next_cluster{0};
  std::mutex mutex;
  std::string error;
  std::atomic<bool> failed{false};
};

// What one OS thread holds while it runs blocks: the fibers of one cluster at a time.
struct Worker {
  Launch* launch;
  std::vector<Thread> threads;
  std::vector<Block> blocks;
  std::vector<Thread*> ready;
  std::vector<char*> stacks;
  std::vector<unsigned char*> shared;
  void* scheduler_stack_pointer = nullptr;
  uint64_t random_state = 0;
  unsigned live = 0;
};

thread_local Worker* worker = nullptr;

#if defined(__x86_64__)
// Pushes the callee-saved registers, stores the stack pointer and goes on on another stack.
asm(R"(
.text
.type cpu_device_switch, @function
cpu_device_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cpu_device_switch, . - cpu_device_switch
)");
extern "C" void cpu_device_switch(void** save, void* load);
#else
#error "the CPU test device switches fibers on x86-64 only"
#endif

void switch_to(void** save, Thread* next) {
  current = next;
  cpu_device_switch(save, next ? next->stack_pointer : worker->scheduler_stack_pointer);
}

Thread* take_random_ready() {
  auto& ready = worker->ready;
  if (ready.empty()) return nullptr;
  std::swap(ready[random_below(ready.size())], ready.back());
  Thread* next = ready.back();
  ready.pop_back();
  return next;
}

// Leaves the running fiber for a random ready one, or for the scheduler when there is none.
void leave() {
  Thread* self = current;
  Thread* next = take_random_ready();
  if (next == self) return;
  switch_to(&self->stack_pointer, next);
}

void release(Barrier& barrier) {
  for (Thread* thread : barrier.waiting) make_ready(thread);
  barrier.waiting.clear();
  barrier.arrived = 0;
  barrier.any = barrier.count = 0;
  barrier.all = 1;
}

void complete_if_full(Block& block, Barrier& barrier) {
  if (barrier.arrived == 0) return;
  if (barrier.arrived < (barrier.expected ? barrier.expected : block.live_threads)) return;
  for (Thread* thread : barrier.waiting)
    thread->barrier_result = (barrier.any ? 1 : 0) | (barrier.all ? 2 : 0) | (barrier.count << 2);
  release(barrier);
}

void arrive(Barrier& barrier, unsigned id, unsigned threads, int predicate, Where where) {
  if (barrier.arrived && barrier.expected != threads)
    fail(where, "barrier %u: %u threads expected here, %u by those that arrived before", id, threads, barrier.expected);
  barrier.expected = threads;
  barrier.arrived++;
  barrier.any |= predicate != 0;
  barrier.all &= predicate != 0;
  barrier.count += predicate != 0;
}

[[noreturn]] void fiber_main() {
  worker->launch->invoke(worker->launch->args);
  Block& mine = block();
  current->exited = true;
  mine.live_threads--;
  worker->live--;
  complete_if_full(mine, mine.barriers[0]);
  leave();
  __builtin_unreachable();
}

void prepare_stack(Thread& thread) {
  // The layout that cpu_device_switch pops: six registers, then the return address; the stack is then aligned as
  // after a call.
  void** top = reinterpret_cast<void**>(thread.stack + kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  thread.stack_pointer = top;
}

char* new_stack() {
  void* memory = mmap(nullptr, kStackBytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kPage, PROT_NONE);  // a stack overflow faults
  return static_cast<char*>(memory) + kPage;
}

uint3 unravel(uint64_t linear, dim3 extent) {
  return {unsigned(linear % extent.x), unsigned(linear / extent.x % extent.y), unsigned(linear / extent.x / extent.y)};
}

uint64_t volume(dim3 extent) { return uint64_t(extent.x) * extent.y * extent.z; }

void prepare_block(Block& block, unsigned rank, uint3 index) {
  const LaunchShape& s = worker->launch->shape;
  const unsigned n = volume(s.block);
  block.index = index;
  block.num_threads = block.live_threads = n;
  block.warps.resize((n + kWarpSize - 1) / kWarpSize);
  block.shared = worker->shared[rank];
  block.shared_top = kDynamicShared + s.dynamic_shared;
  memset(block.shared, kUnwritten, block.shared_top);
  for (unsigned t = 0; t < n; t++) {
    Thread& thread = worker->threads[rank * n + t];
    thread = Thread{};
    thread.index = unravel(t, s.block);
    thread.rank = t;
    thread.block = &block;
    thread.stack = worker->stacks[rank * n + t];
    prepare_stack(thread);
    block.threads.push_back(&thread);
    block.warps[t / kWarpSize].lanes[t % kWarpSize] = &thread;
    worker->ready.push_back(&thread);
  }
}

std::string describe_deadlock() {
  std::string text = "deadlock:";
  const char* last_what = nullptr;
  int last_line = -1, shown = 0;
  for (Thread& thread : worker->threads) {
    if (thread.exited || shown == 8) continue;
    if (thread.waits_for == last_what && thread.where.line == last_line) continue;
    last_what = thread.waits_for;
    last_line = thread.where.line;
    char line[512];
    snprintf(line, sizeof line, " thread %u of block (%u, %u, %u) waits for %s at %s:%d;", thread.rank,
             thread.block->index.x, thread.block->index.y, thread.block->index.z, thread.waits_for, thread.where.file,
             thread.where.line);
    text += line;
    shown++;
  }
  return text;
}

void set_error(Launch& launch, const std::string& text) {
  std::lock_guard<std::mutex> lock(launch.mutex);
  if (launch.error.empty()) launch.error = text;
  launch.failed = true;
}

void run_cluster(uint64_t number) {
  Launch& launch = *worker->launch;
  const dim3 c = launch.shape.cluster, g = launch.shape.grid;
  const uint3 at = unravel(number, dim3{g.x / c.x, g.y / c.y, g.z / c.z});
  worker->random_state = launch.seed * 0x9e3779b97f4a7c15u + number * 0xbf58476d1ce4e5b9u + 1;
  worker->blocks.assign(volume(c), Block{});
  worker->ready.clear();
  worker->live = worker->threads.size();
  for (unsigned rank = 0; rank < volume(c); rank++) {
    const uint3 in = unravel(rank, c);
    prepare_block(worker->blocks[rank], rank, {at.x * c.x + in.x, at.y * c.y + in.y, at.z * c.z + in.z});
  }
  while (worker->live && !launch.failed) {
    Thread* next = take_random_ready();
    if (!next) return set_error(launch, describe_deadlock());
    switch_to(&worker->scheduler_stack_pointer, next);
  }
}

void run_worker(Launch& launch) {
  Worker mine{};
  mine.launch = &launch;
  worker = &mine;
  shape = &launch.shape;
  const size_t ctas = volume(launch.shape.cluster), fibers = ctas * volume(launch.shape.block);
  const uint64_t clusters = volume(launch.shape.grid) / ctas;
  mine.threads.resize(fibers);
  while (mine.stacks.size() < fibers) mine.stacks.push_back(new_stack());
  while (mine.shared.size() < ctas)
    mine.shared.push_back(static_cast<unsigned char*>(aligned_alloc(1024, kSharedCapacity)));
  for (uint64_t n; (n = launch.next_cluster++) < clusters && !launch.failed;) run_cluster(n);
  for (char* stack : mine.stacks) munmap(stack - kPage, kStackBytes + kPage);
  for (unsigned char* memory : mine.shared) free(memory);
  worker = nullptr;
  shape = nullptr;
}

}  // namespace

void fail(Where where, const char* format, ...) {
  char text[1024], message[1400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  snprintf(message, sizeof message, "%s:%d: %s (thread %u of block (%u, %u, %u))", where.file, where.line, text,
           current->rank, block().index.x, block().index.y, block().index.z);
  set_error(*worker->launch, message);
  switch_to(&current->stack_pointer, nullptr);
  __builtin_unreachable();
}

unsigned random_below(unsigned bound) {
  uint64_t& s = worker->random_state;  // xorshift64*
  s ^= s >> 12;
  s ^= s << 25;
  s ^= s >> 27;
  return (s * 0x2545f4914f6cdd1du >> 32) * bound >> 32;
}

void make_ready(Thread* thread) {
  thread->waits_for = nullptr;
  worker->ready.push_back(thread);
}

void block_current(const char* waits_for, Where where) {
  current->waits_for = waits_for;
  current->where = where;
  leave();
}

void yield(const char* waits_for, Where where) {
  make_ready(current);
  block_current(waits_for, where);
}

void warp_collective(unsigned mask, WarpOperation operation, void* args, const char* name, Where where) {
  Warp& w = warp();
  const unsigned self = lane();
  if (!(mask >> self & 1)) fail(where, "%s: lane %u is not in its own mask %08x", name, self, mask);
  w.arrivals[self] = {mask, operation, args};
  for (unsigned l = 0; l < kWarpSize; l++) {
    if (!(mask >> l & 1)) continue;
    if (!w.lanes[l] || w.lanes[l]->exited) fail(where, "%s: mask %08x names lane %u, which has exited", name, mask, l);
    if (w.arrivals[l].mask == mask) continue;
    return block_current(name, where);
  }
  void* all_args[32] = {};
  for (unsigned l = 0; l < kWarpSize; l++) {
    if (!(mask >> l & 1)) continue;
    if (w.arrivals[l].operation != operation)
      fail(where, "%s: lane %u of the warp is at another instruction (%s:%d)", name, l, w.lanes[l]->where.file,
           w.lanes[l]->where.line);
    all_args[l] = w.arrivals[l].args;
  }
  operation(all_args, mask);
  for (unsigned l = 0; l < kWarpSize; l++) {
    if (!(mask >> l & 1)) continue;
    w.arrivals[l].mask = 0;
    if (l != self) make_ready(w.lanes[l]);
  }
}

int barrier_sync(unsigned id, unsigned threads, int predicate, const char* name, Where where) {
  Barrier& barrier = block().barriers[id];
  arrive(barrier, id, threads, predicate, where);
  barrier.waiting.push_back(current);
  complete_if_full(block(), barrier);
  block_current(name, where);
  return current->barrier_result;
}

void barrier_arrive(unsigned id, unsigned threads, Where where) {
  Barrier& barrier = block().barriers[id];
  arrive(barrier, id, threads, 0, where);
  complete_if_full(block(), barrier);
}

void* dynamic_shared() { return block().shared + kDynamicShared; }

int new_static_slot() {
  static std::atomic<int> slots{0};
  return slots++;
}

void* static_shared(int slot, size_t bytes, size_t alignment) {
  Block& b = block();
  if (b.static_shared.size() <= size_t(slot)) b.static_shared.resize(slot + 1);
  if (!b.static_shared[slot]) {
    b.shared_top = (b.shared_top + alignment - 1) / alignment * alignment;
    b.static_shared[slot] = b.shared + b.shared_top;
    b.shared_top += bytes;
    if (b.shared_top > kSharedCapacity) fail({}, "shared memory: more than %zu bytes", kSharedCapacity);
    memset(b.static_shared[slot], kUnwritten, bytes);
  }
  return b.static_shared[slot];
}

uint32_t shared_address(const void* pointer) {
  const Block& b = block();
  const auto* p = static_cast<const unsigned char*>(pointer);
  if (p < b.shared || p >= b.shared + kSharedCapacity) fail({}, "a pointer into shared memory was expected");
  return p - b.shared;
}

void* shared_pointer(uint32_t address) { return block().shared + address; }

}  // namespace cpu_device

// Runs a grid; returns 0, or 1 with the message in error.
extern "C" int cpu_device_launch(void (*invoke)(void**), void** args, const unsigned* grid, const unsigned* block,
                                 const unsigned* cluster, size_t dynamic_shared, uint64_t seed, unsigned workers,
                                 char* error, size_t error_capacity) {
  using namespace cpu_device;
  Launch launch{};
  launch.shape = {dim3{grid[0], grid[1], grid[2]}, dim3{block[0], block[1], block[2]},
                  dim3{cluster[0], cluster[1], cluster[2]}, dynamic_shared};
  launch.invoke = invoke;
  launch.args = args;
  launch.seed = seed;
  std::vector<std::thread> threads;
  for (unsigned w = 0; w < workers; w++) threads.emplace_back([&] { run_worker(launch); });
  for (std::thread& thread : threads) thread.join();
  if (!launch.failed) return 0;
  snprintf(error, error_capacity, "%s", launch.error.c_str());
  return 1;
}
