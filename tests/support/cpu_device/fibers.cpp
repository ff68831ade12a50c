// Fibers: stacks, switching, and the random order in which threads run.
#include <sys/mman.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <new>
#include <thread>

#include "fibers.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN_FORGET(stack, size) __asan_unpoison_memory_region(stack, size)
#define ASAN_START_SWITCH(save, stack, size) __sanitizer_start_switch_fiber(save, stack, size)
#define ASAN_FINISH_SWITCH(restore) __sanitizer_finish_switch_fiber(restore, nullptr, nullptr)
#else
#define ASAN_START_SWITCH(save, stack, size) (void)(save)
#define ASAN_FINISH_SWITCH(restore) (void)(restore)
#define ASAN_FORGET(stack, size) (void)(stack)
#endif

namespace cpu_device {

thread_local ThreadView* current = nullptr;
thread_local const LaunchShape* shape = nullptr;
thread_local Worker* worker = nullptr;

namespace {

constexpr size_t kPage = 4096;

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
constexpr int kSavedRegisters = 6;
extern "C" void cpu_device_switch(void** save, void* load);
#else
#error "the CPU test device switches fibers on x86-64 only"
#endif

// To another fiber, or to the scheduling loop (null). An exiting fiber is never switched to again.
void switch_to(Thread* next, bool exiting = false) {
  Thread* from = static_cast<Thread*>(current);
  void** stack_pointer = from ? &from->stack_pointer : &worker->stack_pointer;
  void** fake_stack = from ? &from->fake_stack : &worker->fake_stack;
  current = next;
  ASAN_START_SWITCH(exiting ? nullptr : fake_stack, next ? next->stack : worker->stack_low,
                    next ? kStackBytes : worker->stack_bytes);
  cpu_device_switch(stack_pointer, next ? next->stack_pointer : worker->stack_pointer);
  ASAN_FINISH_SWITCH(*fake_stack);
}

Thread* take_random(std::vector<Thread*>& from) {
  std::swap(from[random_below(from.size())], from.back());
  Thread* thread = from.back();
  from.pop_back();
  return thread;
}

[[noreturn]] void fiber_main() {
  ASAN_FINISH_SWITCH(nullptr);
  worker->launch->invoke(worker->launch->args);
  Thread& mine = self();
  check_copies();
  check_products();
  mine.exited = true;
  mine.block->live_threads--;
  worker->live--;
  complete_if_full(mine.block->barriers[0], mine.block->live_threads);
  complete_cluster_if_full();
  switch_to(worker->ready.empty() ? nullptr : take_random(worker->ready), true);
  __builtin_unreachable();
}

std::string describe_deadlock() {
  std::string text = "deadlock:";
  const Thread* last = nullptr;
  int shown = 0;
  for (Thread& thread : worker->threads) {
    if (thread.exited || shown == 8) continue;
    if (last && thread.waits_for == last->waits_for && thread.where.line == last->where.line) continue;
    last = &thread;
    char line[512];
    snprintf(line, sizeof line, " thread %u of block (%u, %u, %u) waits for %s at %s:%d;", thread.rank,
             thread.block_index.x, thread.block_index.y, thread.block_index.z, thread.waits_for, thread.where.file,
             thread.where.line);
    text += line;
    shown++;
  }
  return text;
}

}  // namespace

char* new_stack() {
  void* memory =
      mmap(nullptr, kStackBytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kPage, PROT_NONE);  // a stack overflow faults
  return static_cast<char*>(memory) + kPage;
}

void free_stack(char* stack) {
  ASAN_FORGET(stack, kStackBytes);
  munmap(stack - kPage, kStackBytes + kPage);
}

void prepare_stack(Thread& thread) {
  ASAN_FORGET(thread.stack, kStackBytes);  // the frames of the fiber before were never left
  // The stack is as cpu_device_switch leaves it: the saved registers, then the return address; aligned as after a call.
  void** top = reinterpret_cast<void**>(thread.stack + kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < kSavedRegisters; i++) *--top = nullptr;
  thread.stack_pointer = top;
}

void run_fibers() {
  using Clock = std::chrono::steady_clock;
  Clock::time_point idle_since = Clock::now();
  while (worker->live && !worker->launch->failed) {
    if (!worker->ready.empty()) {
      switch_to(take_random(worker->ready));
      if (worker->polling.empty()) idle_since = Clock::now();
      continue;
    }
    // Nobody can run: now is as late as an asynchronous operation may happen.
    if (!worker->pending.empty()) {
      std::swap(worker->pending[random_below(worker->pending.size())], worker->pending.back());
      Action action = std::move(worker->pending.back());
      worker->pending.pop_back();
      try {
        action();
      } catch (const Stopped&) {
        return;
      }
      continue;
    }
    // Those that poll memory wait for another block, which may run on another OS thread.
    const std::chrono::duration<double> idle = Clock::now() - idle_since;
    if (worker->polling.empty() || idle.count() > worker->launch->timeout_s)
      return set_error(*worker->launch, describe_deadlock());
    std::this_thread::yield();
    worker->ready.swap(worker->polling);
  }
}

unsigned random_below(unsigned bound) {
  uint64_t& s = worker->random_state;  // xorshift64*
  s ^= s >> 12;
  s ^= s << 25;
  s ^= s >> 27;
  return (s * 0x2545f4914f6cdd1du >> 32) * bound >> 32;
}

void block_current(const char* waits_for, Where where) {
  Thread& mine = self();
  if (mine.shadow.doubtful.block) shadow::settle(mine);
  mine.waits_for = waits_for;
  mine.where = where;
  Thread* next = worker->ready.empty() ? nullptr : take_random(worker->ready);
  if (next != &mine) switch_to(next);
}

void poll(const char* waits_for, Where where) {
  worker->polling.push_back(&self());
  block_current(waits_for, where);
}

void start_asynchronous(Action action) { worker->pending.push_back(std::move(action)); }

void set_error(Launch& launch, const std::string& text) {
  std::lock_guard<std::mutex> lock(launch.mutex);
  if (launch.error.empty()) launch.error = text;
  launch.failed = true;
}

void fail(Where where, const char* format, ...) {
  char text[1400], message[2000], place[512] = "";
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (where.line) snprintf(place, sizeof place, "%s:%d: ", where.file, where.line);
  char thread[100] = "";
  if (current)
    snprintf(thread, sizeof thread, " (thread %u of block (%u, %u, %u))", current->rank, current->block_index.x,
             current->block_index.y, current->block_index.z);
  snprintf(message, sizeof message, "%s%s%s", place, text, thread);
  set_error(*worker->launch, message);
  if (!current) throw Stopped{};  // inside an asynchronous operation
  switch_to(nullptr, true);
  __builtin_unreachable();
}

}  // namespace cpu_device
