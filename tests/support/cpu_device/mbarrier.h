// Asynchronous copies ask this of mbarriers.
#pragma once
#include "worker.h"

namespace cpu_device {

// Bytes have come: what complete_tx does. The barrier is at a local address of the block.
void mbarrier_complete(Block& block, uint32_t address, unsigned bytes, shadow::Ticket ticket);
// An arrival on behalf of asynchronous copies.
void mbarrier_arrive_for(Block& block, uint32_t address, const std::vector<shadow::Ticket>& tickets, Where where);
// The barrier at an address, which must have been initialised.
MBarrier& mbarrier_at(uint32_t address, Where where);

}  // namespace cpu_device
