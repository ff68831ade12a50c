// wgmma: matrix products of four warps, of which each computes its 16 rows by itself.
//
// From its issue until the wait that covers it a product's result registers hold a mark, which is checked at the wait:
// reading them gives NaN and changing them is reported. Shared memory is read at the wait.
#include <algorithm>
#include <array>
#include <cstring>
#include <list>
#include <memory>

#include "cut_sums.h"
#include "formats.h"
#include "instructions.h"
#include "swizzle.h"
#include "worker.h"

namespace cpu_device {

namespace {

constexpr int kDepthBytes = 32;
constexpr uint32_t kMark = 0x7fc0cafe;  // a NaN that no arithmetic gives
constexpr int kPieceBytes = 16;
// Sums of products of e4m3 keep so many bits below the largest term's exponent (DeepSeek-V3, 2024, section 3.3.2).
constexpr int kBitsOfCodes = 13;

int element_bytes(Format format) { return format == Format::kE4m3 ? 1 : 2; }

// Operand is what a descriptor says: where the rows (M or N) and the depth (K) of an operand lie.
struct Operand {
  uint32_t start, leading, stride;
  Swizzle swizzle;
  bool transposed;  // rows are contiguous instead of the depth
  int size;         // bytes of an element

  // Address without swizzling of element (row, k); 16 bytes along the contiguous direction are together.
  uint32_t address(int row, int k) const {
    const int width_log = 4 + int(swizzle), width = 1 << width_log;  // of the bytes of a row of the pattern
    const int across = transposed ? k : row, along = (transposed ? row : k) * size;
    // Without a pattern the roles of the two offsets change in the transposed case.
    const bool exchanged = transposed && swizzle == Swizzle::kNone;
    const uint32_t along_offset = exchanged ? stride : leading, across_offset = exchanged ? leading : stride;
    return start + (along >> width_log) * along_offset + (across >> 3) * across_offset + (across & 7) * width +
           (along & (width - 1));
  }
};

Operand decode(uint64_t descriptor, bool transposed, Format format, Where where) {
  Operand operand{};
  operand.size = element_bytes(format);
  operand.start = (descriptor & 0x3fff) << 4;
  operand.leading = (descriptor >> 16 & 0x3fff) << 4;
  operand.stride = (descriptor >> 32 & 0x3fff) << 4;
  operand.transposed = transposed;
  if (descriptor >> 49 & 7) fail(where, "wgmma: a base offset is not modelled");
  const int kind = descriptor >> 62;  // 0 none, 1 of 128 bytes, 2 of 64, 3 of 32
  operand.swizzle = Swizzle(kind == 0 ? 0 : 4 - kind);
  const uint32_t rows = (1u << int(operand.swizzle)) - 1;
  if (operand.start >> 7 & rows)
    fail(where, "wgmma: the operand at shared address %u does not begin with a repetition of its swizzle pattern",
         operand.start);
  return operand;
}

// The result registers of a warp from the first product that changes them to the wait that covers the last one.
struct Accumulators {
  float* lanes[32];
  int columns;
  std::vector<float> values;  // kRows x columns
  int in_flight = 0;
  Where where;
};

struct Product {
  Wgmma what;
  uint8_t a[kRows][kDepthBytes];  // from registers
  Operand a_operand, b_operand;
  int first_row;
  Accumulators* d;
  shadow::Ticket ticket;
};

int row_of(int lane, int i) { return lane / 4 + (i / 2 % 2) * 8; }
int column_of(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

}  // namespace

struct Products {
  bool fenced = false;  // since the last wait
  std::list<Accumulators> accumulators;
  std::vector<Product> open;
  std::vector<std::vector<Product>> groups;
};

namespace {

Products& products() {
  if (!warp().products) warp().products = new Products;
  return *warp().products;
}

// Calls visit(row, k, address) for each piece of rows [first, first + count) of an operand, rows counted from `first`.
template <class Visit>
void for_each_piece(const Operand& operand, int first, int count, Visit visit) {
  const int piece = kPieceBytes / operand.size, depth = kDepthBytes / operand.size;
  for (int i = 0; i < count * depth / piece; i++) {
    const int row = operand.transposed ? i % (count / piece) * piece : i / (depth / piece);
    const int k = operand.transposed ? i / (count / piece) : i % (depth / piece) * piece;
    visit(row, k, swizzled(operand.address(first + row, k), operand.swizzle));
  }
}

// Reads these rows from shared memory piece by piece; out is [k][row].
template <Format format>
void read_operand(const Operand& operand, int first, int count, float* out, Where where) {
  const int step = operand.transposed ? 1 : count;
  for_each_piece(operand, first, count, [&](int row, int k, uint32_t address) {
    const auto* piece = static_cast<const uint8_t*>(shared_memory(address, kPieceBytes, kPieceBytes, "wgmma", where));
    for (int e = 0; e < kPieceBytes / kElementBytes<format>; e++)
      out[k * count + row + e * step] = element<format>(piece + e * kElementBytes<format>);
  });
}

void check_operand(const Operand& operand, int first, int count, shadow::Ticket ticket, Where where) {
  if (!shadow::enabled()) return;
  for_each_piece(operand, first, count, [&](int, int, uint32_t address) {
    shadow::asynchronous_read(block(), address, kPieceBytes, self(), ticket, where);
  });
}

template <Format format>
void compute(const Product& product) {
  const Wgmma& what = product.what;
  constexpr int depth = kDepthBytes / kElementBytes<format>;
  float a[kMaxDepth * kRows], b[kMaxDepth * kMaxColumns];
  if (what.a_registers) {
    for (int row = 0; row < kRows; row++)
      for (int k = 0; k < depth; k++) a[k * kRows + row] = element<format>(&product.a[row][k * kElementBytes<format>]);
  } else {
    read_operand<format>(product.a_operand, product.first_row, kRows, a, what.where);
  }
  read_operand<format>(product.b_operand, 0, what.columns, b, what.where);
  Cut cut{worker->launch->sum_bits, worker->launch->sum_depth};
  if (cut.bits > 0 && format == Format::kE4m3) cut = {kBitsOfCodes, depth};
  multiply(product.d->values.data(), what.accumulate, a, b, what.columns, depth, cut, format);
}

void compute(const Product& product) {
  switch (product.what.format) {
    case Format::kFloat16:
      return compute<Format::kFloat16>(product);
    case Format::kBfloat16:
      return compute<Format::kBfloat16>(product);
    case Format::kE4m3:
      return compute<Format::kE4m3>(product);
  }
}

Accumulators* accumulators_of(void* const all[32], Products& mine) {
  const Wgmma& first = *static_cast<Wgmma*>(all[0]);
  for (Accumulators& d : mine.accumulators)
    if (d.lanes[0] == first.d) return &d;
  if (!mine.fenced) fail(first.where, "wgmma: registers are used that no wgmma.fence has ordered since the last wait");
  Accumulators d{};
  d.columns = first.columns;
  d.values.resize(kRows * first.columns);
  d.where = first.where;
  for (int l = 0; l < 32; l++) {
    d.lanes[l] = static_cast<Wgmma*>(all[l])->d;
    for (int i = 0; i < first.columns / 2; i++) {
      d.values[row_of(l, i) * first.columns + column_of(l, i)] = d.lanes[l][i];
      memcpy(&d.lanes[l][i], &kMark, sizeof kMark);
    }
  }
  mine.accumulators.push_back(std::move(d));
  return &mine.accumulators.back();
}

void finish(Accumulators& d) {
  for (int l = 0; l < 32; l++) {
    for (int i = 0; i < d.columns / 2; i++) {
      if (memcmp(&d.lanes[l][i], &kMark, sizeof kMark))
        fail(d.where, "wgmma: result register %d of lane %d was changed before the wait", i, l);
      d.lanes[l][i] = d.values[row_of(l, i) * d.columns + column_of(l, i)];
    }
  }
}

void complete_oldest(Products& mine) {
  for (const Product& product : mine.groups.front()) {
    compute(product);
    for (Thread* thread : warp().lanes) shadow::acquire(*thread, product.ticket);
    if (--product.d->in_flight) continue;
    finish(*product.d);
    mine.accumulators.remove_if([&](const Accumulators& d) { return &d == product.d; });
  }
  mine.groups.erase(mine.groups.begin());
}

// common() gives what all warps of a warpgroup have alike of a product.
std::array<uint64_t, 3> common(const Wgmma& p) {
  const uint64_t flags = (p.accumulate ? 1 : 0) | (p.transposed_a ? 2 : 0) | (p.transposed_b ? 4 : 0) |
                         (p.a_registers ? 8 : 0) | uint64_t(p.format) << 4 | uint64_t(p.columns) << 8;
  return {p.a, p.b, flags};
}

void compare_with_other_warps(const Wgmma& product) {
  const unsigned number = current->rank / kWarpSize;
  WgmmaLog& log = block().wgmma_logs[number / 4];
  const size_t first = log.first(), mine = log.issued[number % 4]++;
  if (mine == first + log.products.size())
    log.products.push_back(common(product));
  else if (log.products[mine - first] != common(product))
    fail(product.where, "wgmma: the warps of a warpgroup issue different products");
  for (size_t n = log.first(); n > first; n--) log.products.pop_front();
}

void issue_operation(void* const all[32], unsigned) {
  const Wgmma& first = *static_cast<Wgmma*>(all[0]);
  for (int l = 0; l < 32; l++) {
    const Wgmma& other = *static_cast<Wgmma*>(all[l]);
    if (other.b != first.b || (!first.a_registers && other.a != first.a) || other.accumulate != first.accumulate)
      fail(first.where, "wgmma: the lanes of a warp pass different descriptors");
  }
  compare_with_other_warps(first);
  Products& mine = products();
  Product product{};
  product.what = first;
  product.ticket = shadow::issue(*warp().lanes[0]);
  product.first_row = current->rank / kWarpSize % 4 * kRows;
  if (first.a_registers) {
    for (int l = 0; l < 32; l++)
      for (int r = 0; r < 4; r++)
        memcpy(&product.a[l / 4 + r % 2 * 8][l % 4 * 4 + r / 2 * 16], &static_cast<Wgmma*>(all[l])->a_registers[r],
               sizeof(unsigned));
  } else {
    product.a_operand = decode(first.a, first.transposed_a, first.format, first.where);
    check_operand(product.a_operand, product.first_row, kRows, product.ticket, first.where);
  }
  product.b_operand = decode(first.b, first.transposed_b, first.format, first.where);
  check_operand(product.b_operand, 0, first.columns, product.ticket, first.where);
  product.d = accumulators_of(all, mine);
  product.d->in_flight++;
  mine.open.push_back(product);
}

struct WaitArgs {
  int pending;
};

void fence_operation(void* const*, unsigned) { products().fenced = true; }

void commit_operation(void* const*, unsigned) {
  Products& mine = products();
  mine.groups.push_back(std::move(mine.open));
  mine.open = {};
}

void wait_operation(void* const all[32], unsigned) {
  Products& mine = products();
  const size_t pending = static_cast<WaitArgs*>(all[0])->pending;
  while (mine.groups.size() > pending) complete_oldest(mine);
  mine.fenced = false;
}

}  // namespace

void wgmma_fence(Where where) { warp_collective(~0u, fence_operation, nullptr, "wgmma.fence", where); }

void wgmma(const Wgmma& product) {
  warp_collective(~0u, issue_operation, const_cast<Wgmma*>(&product), "wgmma", product.where);
}

void wgmma_commit(Where where) { warp_collective(~0u, commit_operation, nullptr, "wgmma.commit_group", where); }

void wgmma_wait(int pending, Where where) {
  WaitArgs args{pending};
  warp_collective(~0u, wait_operation, &args, "wgmma.wait_group", where);
}

void check_products() {
  const Products* mine = warp().products;
  if (mine && !mine->accumulators.empty())
    fail(mine->accumulators.front().where, "wgmma: the warp exits without having waited for it");
}

void check_warpgroups(const Block& block) {
  for (const auto& [warpgroup, log] : block.wgmma_logs)
    if (!log.products.empty())
      set_error(*worker->launch,
                "wgmma: some warps of warpgroup " + std::to_string(warpgroup) + " have issued more than others");
}

void release_products(Warp& warp) {
  delete warp.products;
  warp.products = nullptr;
}

}  // namespace cpu_device
