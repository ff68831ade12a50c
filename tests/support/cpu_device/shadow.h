// The checked mode knows this of each byte of shared memory: whether it holds a value, and who touched it last.
//
// Order among threads is kept in vector clocks (FastTrack, Flanagan and Freund 2009, with one reader remembered a
// cell). Asynchronous operations have clocks of their own, so that a program is wrong until it has waited for them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cpu_device {

struct Where;
struct Block;
struct Thread;

namespace shadow {

using Clock = std::vector<uint32_t>;  // by id: the threads of the cluster, then their asynchronous operations
using Place = uint64_t;               // a Where or a return address, packed

enum State : uint8_t { kUnwritten, kValid, kInFlight, kRedZone };

// Which bytes of an access must hold a value.
enum class Written { kAll, kSome, kNone };

// Stamp is what a thread or an asynchronous operation did, and when.
struct Stamp {
  uint32_t clock = 0;
  uint16_t id = 0;
  uint16_t fence = 0;  // the writer's count of proxy fences
};

// Four bytes of shared memory. Masks say which of the four.
struct Cell {
  static constexpr int kEchoes = 3;
  Stamp write, read;
  Place write_place = 0, read_place = 0;
  Stamp echoes[kEchoes];  // of threads that stored, unordered, the value that the write had left there
  uint8_t write_mask = 0, read_mask = 0, num_echoes = 0;
};

struct BlockState {
  std::vector<uint8_t> states;
  std::vector<Cell> cells;
};

struct ClusterState {
  bool enabled = false;
  unsigned threads = 0;
};

// A write that met another thread's unordered write: a defect, unless it stores the value that stands there.
struct DoubtfulWrite {
  Block* block = nullptr;
  size_t offset = 0, bytes = 0;
  unsigned char old[16];
  Place place = 0, other = 0;
};

struct ThreadState {
  Clock clock;
  uint32_t asynchronous_clock = 0;
  uint16_t fence = 0;
  DoubtfulWrite doubtful;
};

// One asynchronous operation of a thread.
struct Ticket {
  unsigned id = 0;
  uint32_t clock = 0;
};

bool enabled();
void begin_block(Block& block);  // all of it unwritten, red zones set
void begin_thread(Thread& thread);
void add_variable(Block& block, size_t offset, size_t bytes);  // a static variable with red zones around it

void release(Thread& thread, Clock& into);
void acquire(Thread& thread, const Clock& from);
Ticket issue(Thread& thread);
void release(Ticket ticket, Clock& into);
void acquire(Thread& thread, Ticket ticket);

void access(Block& block, size_t offset, size_t bytes, bool write, Thread& thread, Place place,
            Written written = Written::kAll);                                    // of reads
void check_initialised(Block& block, size_t offset, size_t bytes, Where where);  // and in bounds
void settle(Thread& thread);                                                     // decides about its doubtful write
// An asynchronous operation: checked against what its issuer knows, recorded as of the ticket.
void asynchronous_read(Block& block, size_t offset, size_t bytes, Thread& issuer, Ticket ticket, Where where,
                       Written written = Written::kAll);
void begin_write(Block& block, size_t offset, size_t bytes, Thread& issuer, Ticket ticket, Where where);
void end_write(Block& block, size_t offset, size_t bytes);
// The end of a copy in shared memory: bytes that nobody has written are none where they arrive, either.
void end_copy(Block& block, size_t offset, size_t bytes, const Block& source, size_t from);

Place place_of(const Where& where);
Place place_of(const void* return_address);

}  // namespace shadow
}  // namespace cpu_device
