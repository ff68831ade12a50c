// Where the forward kernel's results pass through shared memory.
#pragma once
#include "staged_rows.cuh"

// A panel of each warp's rows.
struct Staging {
  alignas(sizeof(Vector)) unsigned char rows[STAGING ? BLOCK_M : 1][ROW_BYTES];
};
