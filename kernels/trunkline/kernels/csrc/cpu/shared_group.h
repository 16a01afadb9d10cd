// Collectives of the ranks of one host through shared memory.
//
// A tensor-parallel decoder (PagedAttention §4.6) needs 2 L + 1 all-reduces per step. A step of one row moves a
// few kilobytes, so latency is all that counts: a rank writes its part into its own slot, advances its own counter
// and reads the others' slots as their counters arrive. No message, no copy by the kernel, no lock.
//
//      file    | header | rank 0: counter, calls, mutex | rank 1 ... | slots of rank 0: A B | of rank 1: A B | ...
//
// Rounds. Every collective is one or more rounds; in round k a rank writes slot k mod 2, then sets its counter to
// k ("reaches" k). What keeps a slot from being overwritten while a peer reads it:
//
//      a rank writes in round k only after every peer has reached k - 1, and a rank reaches k - 1 only after it
//      has read all that it wanted of round k - 2, which is the last to have used the slot.
//
// Order and equality. Sums are taken in the order of ranks and in float32 (float64 for float64), whichever rank
// takes them, so every rank gets the same bits. Beside the slot stands the call that it belongs to; every rank
// that waits compares it with its own call.
//
// Waiting. A rank spins for at most 50 us (not at all with fewer cores than ranks), then yields its core between
// looks for at most 2 ms, then sleeps on the counter it waits for (a futex); only then does the counter's owner
// make a system call to wake it.
//
// Death. Every rank holds a robust mutex in the file. The kernel gives it up when the owner dies, zombie or not,
// and before it tears down the owner's memory, which takes seconds for a large KV pool (file locks and sockets are
// given up after that). Who sleeps looks every 100 ms. The thread that joins must therefore live as long as the
// group.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cpu/cpu_level.h"
#include "cpu/shared_sum.h"

namespace trunkline {

// A peer died, left, or did not come in time; nothing can be done with this group any more.
struct PeerLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The ranks called different collectives; the group is unusable then, too.
struct CallMismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Collective : uint32_t { kNone, kAllReduce, kAllGather, kGather, kBroadcast };

// One rank's view of a group. Calls must come from one thread at a time, in the same order on every rank; `leave`
// may come from any thread at any time.
class SharedGroup {
 public:
  static constexpr int kRanksMax = 64;

  // Makes the file. It may be unlinked as soon as all ranks have joined.
  static void create(const std::string& path, int size, int64_t slot_bytes);

  // Joins. No collective may be called before all ranks have joined.
  SharedGroup(const std::string& path, int rank, int size, CpuLevel level, std::chrono::milliseconds timeout);
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Sum over ranks, in place.
  void all_reduce(void* data, int64_t elements, ElementType type);
  // `all` gets `bytes` of every rank, one after the other.
  void all_gather(const void* part, int64_t bytes, void* all);
  // Rank 0 gets all ranks' rows side by side: `all` has rows of size() * row_bytes. Others pass null.
  void gather_columns(const void* part, int64_t rows, int64_t row_bytes, void* all);
  // Overwrites `data` with rank 0's.
  void broadcast(void* data, int64_t bytes);
  // Ranks that wait for this one, now or later, get PeerLost; so do later calls here. Idempotent.
  void leave();

 private:
  // Which collective a round belongs to; the same on every rank.
  struct Call {
    Collective collective = Collective::kNone;
    ElementType type = ElementType::kBytes;
    int64_t bytes = 0;
  };
  struct RankState;
  struct FileHeader;
  class Use;

  void map(const std::string& path);
  void decide_to_spin();
  uint32_t begin_round(const Call& call);
  void publish();
  void await(int peer, uint32_t round);
  bool spin_until_reached(int peer, uint32_t round);
  void sleep_until_reached(int peer, uint32_t round);
  void await_all(uint32_t round);
  void check_call(int peer, uint32_t round) const;
  void check_peers(uint32_t round);
  bool has_died(int peer);
  void reduce_whole(std::byte* data, int64_t bytes, const Call& call);
  void reduce_by_parts(std::byte* data, int64_t bytes, const Call& call);
  std::byte* slot(int rank, uint32_t round) const;

  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  const SumTable& sums_;
  void* memory_ = nullptr;
  size_t memory_bytes_ = 0;
  RankState* ranks_ = nullptr;
  std::byte* slots_ = nullptr;
  int64_t slot_bytes_ = 0;
  uint32_t round_ = 0;    // the last one that this rank began
  uint32_t settled_ = 0;  // every peer has reached it, with the same call
  bool spins_ = false;
  std::atomic<bool> in_use_{false};
};

}  // namespace trunkline
