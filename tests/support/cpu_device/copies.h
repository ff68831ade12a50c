// Between the kinds of asynchronous copies.
#pragma once
#include "worker.h"

namespace cpu_device {

// Marks the destination of a load in flight and fills it with garbage.
void start_load(Block& target, uint32_t address, size_t bytes, shadow::Ticket ticket, Where where);
void add_to_global(float* address, float x);

}  // namespace cpu_device
