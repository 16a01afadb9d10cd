#include "cpu/shared_group.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <exception>
#include <new>
#include <system_error>

namespace trunkline {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMagic = 0x31505247534c5254;  // "TRLSGRP1"
constexpr std::chrono::microseconds kPollFor{50};
// Waking a sleeper takes longer than a decoder's ops between two collectives: two ranks that sleep for each other
// once would go on doing so at every call. So a wait first yields its core to other threads, and looks again.
constexpr std::chrono::microseconds kYield{2000};
constexpr int kPausesPerLook = 16;  // looks at the clock are dearer than looks at the counter
constexpr std::chrono::milliseconds kCheckPeersEvery{100};
constexpr int kCpuWords = 16;
constexpr size_t kPageBytes = 4096;
// From here on two rounds with less reading beat one round, measured with 4 and with 8 ranks.
constexpr int64_t kPartsBytesMin = 32 * 1024;

// A counter's word: the round in the upper 31 bits, and whether the rank has left. One word, so that a rank that
// is about to sleep on it misses neither.
constexpr uint32_t kLeft = 1;
constexpr uint32_t kOneRound = 2;

bool reached(uint32_t word, uint32_t round) {
  return static_cast<int32_t>((word & ~kLeft) - round * kOneRound) >= 0;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

[[noreturn]] void throw_errno(int code, const std::string& what) {
  throw std::system_error(code, std::generic_category(), what);
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  // Not the private variant: the word is in memory of several processes.
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// An empty tensor has no address, which memcpy does not allow even for nothing.
void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

const char* name_of(Collective collective) {
  constexpr const char* kNames[] = {"no collective", "all_reduce", "all_gather", "gather_columns", "broadcast"};
  return kNames[static_cast<uint32_t>(collective)];
}

const char* name_of(ElementType type) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "float64", "bytes"};
  return kNames[static_cast<uint32_t>(type)];
}

class OpenFile {
 public:
  OpenFile(const std::string& path, int flags)
      : descriptor_(open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600)) {
    if (descriptor_ < 0) throw_errno(errno, "cannot open " + path);
  }
  ~OpenFile() { close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  operator int() const { return descriptor_; }

 private:
  int descriptor_;
};

}  // namespace

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

struct SharedGroup::FileHeader {
  uint64_t magic;
  uint32_t size;
  uint32_t rank_state_bytes;  // differs if a rank was compiled against another C library
  int64_t slot_bytes;
};

// What a rank tells the others. All of the first line changes hands in one transfer per round.
struct alignas(128) SharedGroup::RankState {
  std::atomic<uint32_t> word{0};
  std::atomic<uint32_t> sleepers{0};  // on `word`
  Call calls[2];                      // of the rounds whose data are in the slots
  alignas(128) pthread_mutex_t life;  // held as long as the rank lives
  std::atomic<uint64_t> cpus[kCpuWords];
};

// One call at a time; an error ends the rank's membership, so that the others stop waiting for it.
class SharedGroup::Use {
 public:
  explicit Use(SharedGroup& group) : group_(group), exceptions_(std::uncaught_exceptions()) {
    if (group.in_use_.exchange(true, std::memory_order_acquire)) {
      throw std::logic_error("two threads of a rank are in collectives of one group");
    }
  }
  ~Use() {
    if (std::uncaught_exceptions() > exceptions_) group_.leave();
    group_.in_use_.store(false, std::memory_order_release);
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  SharedGroup& group_;
  int exceptions_;
};

void SharedGroup::create(const std::string& path, int size, int64_t slot_bytes) {
  if (size < 1 || size > kRanksMax) throw std::invalid_argument("a group has 1 to 64 ranks");
  if (slot_bytes < 1 || slot_bytes % static_cast<int64_t>(kPageBytes) != 0) {
    throw std::invalid_argument("a slot has one or more whole pages");
  }
  const size_t states = round_up(kPageBytes + sizeof(RankState) * static_cast<size_t>(size), kPageBytes);
  const size_t bytes = states + static_cast<size_t>(slot_bytes) * 2 * static_cast<size_t>(size);
  const OpenFile file(path, O_RDWR | O_CREAT | O_EXCL);
  try {
    // Not ftruncate alone: on a full file system the first write would then kill the writer.
    int failure = 0;
    do {
      failure = posix_fallocate(file, 0, static_cast<off_t>(bytes));
    } while (failure == EINTR);
    if (failure != 0) throw_errno(failure, "no room for " + std::to_string(bytes) + " bytes in " + path);
    void* memory = mmap(nullptr, states, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) throw_errno(errno, "cannot map " + path);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    auto* ranks = reinterpret_cast<RankState*>(static_cast<std::byte*>(memory) + kPageBytes);
    for (int rank = 0; rank < size; ++rank) {
      pthread_mutex_init(&(new (&ranks[rank]) RankState)->life, &attributes);
    }
    pthread_mutexattr_destroy(&attributes);
    new (memory) FileHeader{kMagic, static_cast<uint32_t>(size), sizeof(RankState), slot_bytes};
    munmap(memory, states);
  } catch (...) {
    unlink(path.c_str());
    throw;
  }
}

SharedGroup::SharedGroup(const std::string& path, int rank, int size, CpuLevel level,
                         std::chrono::milliseconds timeout)
    : rank_(rank), size_(size), timeout_(timeout), sums_(sum_table(level)) {
  if (rank < 0 || rank >= size) throw std::invalid_argument("rank is not below size");
  map(path);
  RankState& own = ranks_[rank];
  const int failure = pthread_mutex_trylock(&own.life);
  if (failure != 0) {
    munmap(memory_, memory_bytes_);
    throw_errno(failure, "rank " + std::to_string(rank) + " has joined " + path + " before");
  }
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  static_assert(sizeof(cpus) == kCpuWords * sizeof(uint64_t));
  uint64_t words[kCpuWords] = {};
  // With more processors than the set holds the call fails: then there are enough of them.
  if (sched_getaffinity(0, sizeof(cpus), &cpus) != 0) std::memset(&cpus, 0xff, sizeof(cpus));
  std::memcpy(words, &cpus, sizeof(cpus));
  for (int i = 0; i < kCpuWords; ++i) own.cpus[i].store(words[i], std::memory_order_relaxed);
}

void SharedGroup::map(const std::string& path) {
  const OpenFile file(path, O_RDWR);
  struct stat status;
  if (fstat(file, &status) != 0) throw_errno(errno, "cannot stat " + path);
  memory_bytes_ = static_cast<size_t>(status.st_size);
  if (memory_bytes_ < kPageBytes) throw std::invalid_argument(path + " is not a group's file");
  // Populated, as a page fault in the first collectives would cost more than they do.
  memory_ = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (memory_ == MAP_FAILED) throw_errno(errno, "cannot map " + path);
  const auto* header = static_cast<const FileHeader*>(memory_);
  const size_t states = round_up(kPageBytes + sizeof(RankState) * static_cast<size_t>(size_), kPageBytes);
  if (header->magic != kMagic || header->size != static_cast<uint32_t>(size_) ||
      header->rank_state_bytes != sizeof(RankState) ||
      memory_bytes_ != states + static_cast<size_t>(header->slot_bytes) * 2 * static_cast<size_t>(size_)) {
    munmap(memory_, memory_bytes_);
    throw std::invalid_argument(path + " is not the file of a group of " + std::to_string(size_));
  }
  ranks_ = reinterpret_cast<RankState*>(static_cast<std::byte*>(memory_) + kPageBytes);
  slots_ = static_cast<std::byte*>(memory_) + states;
  slot_bytes_ = header->slot_bytes;
}

SharedGroup::~SharedGroup() {
  leave();
  // Only the thread that joined can give its mutex up. For any other the memory must stay: the C library's list
  // of the robust mutexes that a thread holds goes through it.
  if (pthread_mutex_unlock(&ranks_[rank_].life) == 0) munmap(memory_, memory_bytes_);
}

void SharedGroup::leave() {
  RankState& own = ranks_[rank_];
  if ((own.word.fetch_or(kLeft, std::memory_order_seq_cst) & kLeft) != 0) return;
  futex(&own.word, FUTEX_WAKE, INT_MAX, nullptr);
}

void SharedGroup::decide_to_spin() {
  int cpus = 0;
  for (int word = 0; word < kCpuWords; ++word) {
    uint64_t allowed = 0;
    for (int rank = 0; rank < size_; ++rank) allowed |= ranks_[rank].cpus[word].load(std::memory_order_relaxed);
    cpus += std::popcount(allowed);
  }
  spins_ = cpus >= size_;
}

std::byte* SharedGroup::slot(int rank, uint32_t round) const {
  return slots_ + slot_bytes_ * (2 * rank + static_cast<int>(round & 1));
}

// Afterwards this rank may write its slot.
uint32_t SharedGroup::begin_round(const Call& call) {
  if (round_ == 0) decide_to_spin();
  if (settled_ != round_) await_all(round_);
  RankState& own = ranks_[rank_];
  if ((own.word.load(std::memory_order_relaxed) & kLeft) != 0) throw PeerLost("this rank has left its group");
  own.calls[(round_ + 1) & 1] = call;
  return ++round_;
}

// Sequentially consistent, as is `sleepers`: either this rank sees the sleeper, or the sleeper sees the new word.
void SharedGroup::publish() {
  RankState& own = ranks_[rank_];
  own.word.fetch_add(kOneRound, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) futex(&own.word, FUTEX_WAKE, INT_MAX, nullptr);
}

void SharedGroup::await_all(uint32_t round) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) await(peer, round);
  }
  settled_ = round;
}

void SharedGroup::await(int peer, uint32_t round) {
  if (!reached(ranks_[peer].word.load(std::memory_order_acquire), round) && !spin_until_reached(peer, round)) {
    sleep_until_reached(peer, round);
  }
  check_call(peer, round);
}

bool SharedGroup::spin_until_reached(int peer, uint32_t round) {
  const std::atomic<uint32_t>& word = ranks_[peer].word;
  const auto start = Clock::now();
  for (auto now = start; now < start + kYield; now = Clock::now()) {
    if (spins_ && now < start + kPollFor) {
      for (int i = 0; i < kPausesPerLook; ++i) relax();
    } else {
      sched_yield();
    }
    if (reached(word.load(std::memory_order_acquire), round)) return true;
  }
  return false;
}

void SharedGroup::sleep_until_reached(int peer, uint32_t round) {
  struct Sleeper {
    explicit Sleeper(std::atomic<uint32_t>& counter) : count(counter) {
      count.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Sleeper() { count.fetch_sub(1, std::memory_order_relaxed); }
    std::atomic<uint32_t>& count;
  };
  RankState& state = ranks_[peer];
  const Sleeper sleeper(state.sleepers);
  const timespec nap{0, std::chrono::nanoseconds(kCheckPeersEvery).count()};
  const auto give_up = Clock::now() + timeout_;
  auto next_check = Clock::now() + kCheckPeersEvery;
  for (;;) {
    const uint32_t word = state.word.load(std::memory_order_seq_cst);
    if (reached(word, round)) return;
    if ((word & kLeft) != 0) throw PeerLost("rank " + std::to_string(peer) + " has left the group");
    futex(&state.word, FUTEX_WAIT, word, &nap);
    const auto now = Clock::now();
    if (now < next_check) continue;
    next_check = now + kCheckPeersEvery;
    check_peers(round);
    if (now > give_up) {
      throw PeerLost("rank " + std::to_string(peer) + " lives, but did not come within " +
                     std::to_string(timeout_.count()) + " ms");
    }
  }
}

// Checks all peers, not only the awaited one, which may itself wait, or be about to wait, for a dead one.
void SharedGroup::check_peers(uint32_t round) {
  if ((ranks_[rank_].word.load(std::memory_order_relaxed) & kLeft) != 0) {
    throw PeerLost("this rank has left its group");
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const bool died = has_died(peer);
    const uint32_t word = ranks_[peer].word.load(std::memory_order_acquire);
    if ((word & kLeft) != 0) {
      if (!reached(word, round)) throw PeerLost("rank " + std::to_string(peer) + " has left the group");
    } else if (died) {
      throw PeerLost("rank " + std::to_string(peer) + " has died");
    }
  }
}

bool SharedGroup::has_died(int peer) {
  pthread_mutex_t* life = &ranks_[peer].life;
  const int state = pthread_mutex_trylock(life);
  // After the death of its owner, giving it up without repair makes the mutex unusable: a mark for the others.
  if (state == 0 || state == EOWNERDEAD) pthread_mutex_unlock(life);
  return state == EOWNERDEAD || state == ENOTRECOVERABLE;
}

void SharedGroup::check_call(int peer, uint32_t round) const {
  const Call& mine = ranks_[rank_].calls[round & 1];
  const Call& theirs = ranks_[peer].calls[round & 1];
  if (mine.collective == theirs.collective && mine.type == theirs.type && mine.bytes == theirs.bytes) return;
  const auto describe = [](int rank, const Call& call) {
    return "rank " + std::to_string(rank) + " is in " + name_of(call.collective) + " of " +
           std::to_string(call.bytes) + " bytes (" + name_of(call.type) + ")";
  };
  throw CallMismatch("the ranks of a group differ: " + describe(rank_, mine) + ", " + describe(peer, theirs));
}

void SharedGroup::all_reduce(void* data, int64_t elements, ElementType type) {
  const Use use(*this);
  const int64_t bytes = elements * element_bytes(type);
  const Call call{Collective::kAllReduce, type, bytes};
  const bool by_parts = size_ > 2 && bytes >= kPartsBytesMin;
  auto* at = static_cast<std::byte*>(data);
  int64_t left = bytes;
  do {
    const int64_t length = std::min(left, slot_bytes_);
    if (by_parts) {
      reduce_by_parts(at, length, call);
    } else {
      reduce_whole(at, length, call);
    }
    at += length;
    left -= length;
  } while (left > 0);
}

// Every rank sums everything: one round.
void SharedGroup::reduce_whole(std::byte* data, int64_t bytes, const Call& call) {
  const uint32_t round = begin_round(call);
  copy_bytes(slot(rank_, round), data, bytes);
  publish();
  await_all(round);
  const void* sources[kRanksMax];
  for (int rank = 0; rank < size_; ++rank) sources[rank] = rank == rank_ ? data : slot(rank, round);
  sums_.by_type[static_cast<int>(call.type)](sources, size_, data, bytes / element_bytes(call.type));
}

// Rank r sums the r-th part and the others copy it: two rounds, but each rank reads 2 instead of size() - 1 times
// the data.
void SharedGroup::reduce_by_parts(std::byte* data, int64_t bytes, const Call& call) {
  constexpr int64_t kLine = 64;
  const int64_t part = (bytes + size_ * kLine - 1) / (size_ * kLine) * kLine;
  const auto begin_of = [&](int rank) { return std::min(bytes, rank * part); };
  const int64_t own = begin_of(rank_);
  const int64_t own_bytes = begin_of(rank_ + 1) - own;

  uint32_t round = begin_round(call);
  std::byte* mine = slot(rank_, round);
  copy_bytes(mine, data, own);
  copy_bytes(mine + own + own_bytes, data + own + own_bytes, bytes - own - own_bytes);
  publish();
  await_all(round);
  const void* sources[kRanksMax];
  for (int rank = 0; rank < size_; ++rank) sources[rank] = (rank == rank_ ? data : slot(rank, round)) + own;
  sums_.by_type[static_cast<int>(call.type)](sources, size_, data + own, own_bytes / element_bytes(call.type));

  round = begin_round(call);
  copy_bytes(slot(rank_, round), data + own, own_bytes);
  publish();
  await_all(round);
  for (int rank = 0; rank < size_; ++rank) {
    const int64_t begin = begin_of(rank);
    if (rank != rank_) copy_bytes(data + begin, slot(rank, round), begin_of(rank + 1) - begin);
  }
}

void SharedGroup::all_gather(const void* part, int64_t bytes, void* all) {
  const Use use(*this);
  const Call call{Collective::kAllGather, ElementType::kBytes, bytes};
  const auto* from = static_cast<const std::byte*>(part);
  auto* to = static_cast<std::byte*>(all);
  int64_t at = 0;
  do {
    const int64_t length = std::min(bytes - at, slot_bytes_);
    const uint32_t round = begin_round(call);
    copy_bytes(slot(rank_, round), from + at, length);
    publish();
    await_all(round);
    for (int rank = 0; rank < size_; ++rank) {
      const std::byte* source = rank == rank_ ? from + at : slot(rank, round);
      copy_bytes(to + rank * bytes + at, source, length);
    }
    at += length;
  } while (at < bytes);
}

void SharedGroup::gather_columns(const void* part, int64_t rows, int64_t row_bytes, void* all) {
  const Use use(*this);
  const int64_t bytes = rows * row_bytes;
  const Call call{Collective::kGather, ElementType::kBytes, bytes};
  const auto* from = static_cast<const std::byte*>(part);
  auto* to = static_cast<std::byte*>(all);
  int64_t at = 0;
  do {
    const int64_t length = std::min(bytes - at, slot_bytes_);
    const uint32_t round = begin_round(call);
    if (rank_ != 0) copy_bytes(slot(rank_, round), from + at, length);
    publish();
    if (rank_ == 0) await_all(round);
    for (int rank = 0; rank_ == 0 && rank < size_; ++rank) {
      const std::byte* source = rank == 0 ? from + at : slot(rank, round);
      // A slot may begin and end within a row.
      for (int64_t i = at; i < at + length;) {
        const int64_t row = i / row_bytes, column = i % row_bytes;
        const int64_t run = std::min(row_bytes - column, at + length - i);
        copy_bytes(to + (row * size_ + rank) * row_bytes + column, source + (i - at), run);
        i += run;
      }
    }
    at += length;
  } while (at < bytes);
}

void SharedGroup::broadcast(void* data, int64_t bytes) {
  const Use use(*this);
  const Call call{Collective::kBroadcast, ElementType::kBytes, bytes};
  auto* place = static_cast<std::byte*>(data);
  int64_t at = 0;
  do {
    const int64_t length = std::min(bytes - at, slot_bytes_);
    const uint32_t round = begin_round(call);
    if (rank_ == 0) copy_bytes(slot(0, round), place + at, length);
    publish();
    if (rank_ != 0) {
      await(0, round);
      copy_bytes(place + at, slot(0, round), length);
    }
    at += length;
  } while (at < bytes);
}

}  // namespace trunkline
