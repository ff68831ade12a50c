// TMA: boxes of a tensor in global memory from and to shared memory.
#include "tensor_map.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "copies.h"
#include "instructions.h"
#include "mbarrier.h"
#include "swizzle.h"

namespace cpu_device {

namespace {

constexpr size_t kMapAlignment = 64;
constexpr size_t kBoxAlignment = 128;
constexpr int64_t kPieceBytes = 16;  // what swizzling moves as a whole

struct Box {
  TensorMap map;
  int at[5];
  size_t bytes;
};

Box box_of(const void* map, const int* coordinates, int rank, Where where) {
  if (reinterpret_cast<uintptr_t>(map) % kMapAlignment) fail(where, "TMA: the tensor map is not aligned to 64 bytes");
  Box box{};
  memcpy(&box.map, map, sizeof box.map);
  if (box.map.mark != kTensorMapMark) fail(where, "TMA: no tensor map of the CPU device stands at %p", map);
  if (box.map.rank != rank) fail(where, "TMA: %d coordinates for a map of rank %d", rank, box.map.rank);
  box.bytes = box.map.element_bytes;
  for (int d = 0; d < rank; d++) {
    box.at[d] = coordinates[d];
    box.bytes *= box.map.box[d];
  }
  if (box.at[0] * box.map.element_bytes % kPieceBytes)
    fail(where, "TMA: the innermost coordinate %d is no multiple of 16 bytes, an illegal instruction on a GPU",
         box.at[0]);
  return box;
}

// Swizzle patterns go by addresses: a box may start amid one.
unsigned char* box_memory(const Box& box, uint32_t shared, Where where) {
  return shared_memory(shared, box.bytes, kBoxAlignment, "TMA", where);
}

// 16 bytes of a box: bytes [from, to) of them are inside of the tensor.
struct Piece {
  unsigned char* global;  // of the first of the 16, inside or not
  size_t offset;          // in the box
  size_t from, to;
};

// Calls f for every piece of the box.
template <class F>
void for_pieces(const Box& box, F f) {
  const TensorMap& m = box.map;
  const int64_t row_bytes = int64_t(m.box[0]) * m.element_bytes;
  for (size_t row = 0; row < box.bytes / row_bytes; row++) {
    size_t rest = row;
    uint64_t address = m.address;
    bool inside = true;
    for (int d = 1; d < m.rank; d++) {
      const int64_t at = box.at[d] + int64_t(rest % m.box[d]);
      rest /= m.box[d];
      inside &= at >= 0 && at < m.extents[d];
      address += at * m.strides[d];
    }
    for (int64_t column = 0; column < row_bytes; column += kPieceBytes) {
      const int64_t at = int64_t(box.at[0]) * m.element_bytes + column;  // in bytes of the tensor's row
      const int64_t end = int64_t(m.extents[0]) * m.element_bytes - at;
      const size_t from = std::min<int64_t>(std::max<int64_t>(-at, 0), kPieceBytes);
      const size_t to = std::max<int64_t>(std::min<int64_t>(end, kPieceBytes), from);
      f(Piece{reinterpret_cast<unsigned char*>(address + at), row * row_bytes + column, from, inside ? to : from});
    }
  }
}

void load_into(Block& target, uint32_t shared, const Box& box, uint32_t mbarrier, shadow::Ticket ticket) {
  for_pieces(box, [&](const Piece& piece) {
    unsigned char* to = target.shared + swizzled(shared + piece.offset, Swizzle(box.map.swizzle));
    memset(to, 0, kPieceBytes);
    memcpy(to + piece.from, piece.global + piece.from, piece.to - piece.from);
  });
  shadow::end_write(target, shared, box.bytes);
  mbarrier_complete(target, mbarrier, box.bytes, ticket);
}

void start_tensor_load(Block& target, uint32_t shared, const Box& box, uint32_t mbarrier, Where where) {
  const shadow::Ticket ticket = shadow::issue(self());
  start_load(target, shared, box.bytes, ticket, where);
  start_asynchronous([=, &target] { load_into(target, shared, box, mbarrier, ticket); });
}

// Nobody has to write what lies beyond the tensor.
void check_stored(const Box& box, uint32_t address, Where where) {
  for_pieces(box, [&](const Piece& piece) {
    const uint32_t at = swizzled(address + piece.offset, Swizzle(box.map.swizzle));
    if (piece.from < piece.to) shadow::check_initialised(block(), at, kPieceBytes, where);
  });
}

// A piece that begins inside of the tensor is stored whole, even if a row ends within it, as an H200 does.
void store_box(const Box& box, const std::vector<unsigned char>& data, Reduction reduction) {
  for_pieces(box, [&](const Piece& piece) {
    if (piece.from == piece.to) return;
    const unsigned char* from = &data[piece.offset];
    if (reduction == Reduction::kNone) {
      memcpy(piece.global, from, kPieceBytes);
      return;
    }
    for (size_t at = 0; at < kPieceBytes; at += sizeof(float)) {
      float x;
      memcpy(&x, from + at, sizeof x);
      add_to_global(reinterpret_cast<float*>(piece.global + at), x);
    }
  });
}

}  // namespace

void tensor_load(uint32_t shared, const void* map, uint32_t mbarrier, const int* coordinates, int rank, Where where) {
  const Box box = box_of(map, coordinates, rank, where);
  box_memory(box, shared, where);
  mbarrier_at(mbarrier, where);
  Block& target = block_of_address(shared, where);
  if (&target != &block_of_address(mbarrier, where))
    fail(where, "TMA: data and mbarrier are in different blocks of the cluster");
  start_tensor_load(target, local_address(shared), box, local_address(mbarrier), where);
}

void tensor_load_multicast(uint32_t shared, const void* map, uint32_t mbarrier, unsigned ctas, const int* coordinates,
                           int rank, Where where) {
  const Box box = box_of(map, coordinates, rank, where);
  if (ctas == 0 || ctas >> worker->blocks.size())
    fail(where, "TMA: multicast to blocks %x of a cluster of %zu", ctas, worker->blocks.size());
  for (unsigned c = 0; c < worker->blocks.size(); c++) {
    if (!(ctas >> c & 1)) continue;
    box_memory(box, cluster_address(shared, c, where), where);
    mbarrier_at(cluster_address(mbarrier, c, where), where);
    start_tensor_load(worker->blocks[c], local_address(shared), box, local_address(mbarrier), where);
  }
}

void tensor_store(const void* map, uint32_t shared, const int* coordinates, int rank, Reduction reduction,
                  Where where) {
  const Box box = box_of(map, coordinates, rank, where);
  for (int d = 0; d < rank; d++) {
    if (box.at[d] < 0)
      fail(where, "TMA: a store at the negative coordinate %d, an illegal instruction on an H200", box.at[d]);
  }
  if (reduction != Reduction::kNone && !(box.map.is_float && box.map.element_bytes == sizeof(float)))
    fail(where, "TMA: sums of float32 only");
  box_memory(box, shared, where);
  const uint32_t address = local_address(shared);
  const unsigned char* memory = block().shared;
  const shadow::Ticket ticket = shadow::issue(self());
  shadow::asynchronous_read(block(), address, box.bytes, self(), ticket, where, shadow::Written::kNone);
  if (shadow::enabled()) check_stored(box, address, where);
  auto data = std::make_shared<std::vector<unsigned char>>(box.bytes);
  self().bulk_stores.push_back({[=] {
                                  for_pieces(box, [&](const Piece& piece) {
                                    memcpy(&(*data)[piece.offset],
                                           memory + swizzled(address + piece.offset, Swizzle(box.map.swizzle)),
                                           kPieceBytes);
                                  });
                                },
                                [=] { store_box(box, *data, reduction); }, ticket, where});
}

}  // namespace cpu_device
