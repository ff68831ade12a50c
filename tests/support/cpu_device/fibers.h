// Between the launch loop and the fibers.
#pragma once
#include "worker.h"

namespace cpu_device {

constexpr size_t kStackBytes = 256 * 1024;

struct Stopped {};  // thrown by fail() where no fiber runs

char* new_stack();
void free_stack(char* stack);
void prepare_stack(Thread& thread);
// Runs the fibers of the worker's cluster until all have exited or the launch has failed.
void run_fibers();

}  // namespace cpu_device
