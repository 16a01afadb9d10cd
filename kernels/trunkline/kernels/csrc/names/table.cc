// The table of names under the router's index of chunks (`router/routing/native_table.py`), which says what the bits
// mean. `DictTable` is the same in Python, and says what each function does.
//
// Names are divided among 256 shards by their first byte, so that none is long in growing. A shard is a list of
// entries in the order in which they came, and a hash table of their places in it:
//
//     places  | 0 | 4 | 0 | 2 | 1 | ...      0: none; 1: one that has left; else 2 + the entry's place
//     entries | name, bits | name, bits | ...
//
// Entries that have left stay as holes until the list is full; then it is written anew. Places are at most half full.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kNameBytes = 16;
constexpr int kShards = 256;
constexpr uint32_t kNone = 0, kLeft = 1, kFirst = 2;
// Bits of column 0, which no controller owns.
constexpr uint8_t kUsed = 1, kHere = 2;
constexpr int kTierBits = 4;
constexpr uint8_t kTold = 0b0111, kExpected = 0b1000;
constexpr int64_t kAhead = 16;  // names of which memory is fetched while others are looked up

struct Bits {
  int64_t byte;
  int shift;

  explicit Bits(int64_t column) : byte(column * kTierBits / 8), shift(static_cast<int>(column * kTierBits % 8)) {}
};

inline uint64_t hash_of(const uint8_t* name, uint64_t key) {
  uint64_t halves[2];
  std::memcpy(halves, name, sizeof halves);
  uint64_t mixed =
      (halves[0] ^ key) * (halves[1] | 1);  // the key is secret, or prompts could be made that collide
  return (mixed ^ mixed >> 29) * 0x9e3779b97f4a7c15;
}

class Shard {
 public:
  int64_t live = 0;

  void fetch_place(uint64_t hash) const { __builtin_prefetch(&places_[hash >> shift_]); }

  void fetch_entry(uint64_t hash) const {
    uint32_t place = places_[hash >> shift_];
    if (place != kLeft) __builtin_prefetch(entry(place == kNone ? count_ : place - kFirst));
  }

  // The bits of a name; null: it is not here.
  uint8_t* find(const uint8_t* name, uint64_t hash) {
    for (size_t at = hash >> shift_;; at = (at + 1) & (places_.size() - 1)) {
      uint32_t place = places_[at];
      if (place == kNone) return nullptr;
      if (place >= kFirst && !std::memcmp(entry(place - kFirst), name, kNameBytes)) {
        return entry(place - kFirst) + kNameBytes;
      }
    }
  }

  // Adds a name that is not here, with no bits. Its bits are valid until the next one is added.
  uint8_t* add(const uint8_t* name, uint64_t key, int64_t width) {
    if (count_ == room_) rebuild(live + live / 2 + 16, key, width);
    uint8_t* made = entry(count_);
    std::memcpy(made, name, kNameBytes);
    std::memset(made + kNameBytes, 0, width_);
    made[kNameBytes] = kHere;
    put(count_++, key);
    ++live;
    return made + kNameBytes;
  }

  void remove(uint8_t* bits, uint64_t key) {
    auto number = static_cast<uint32_t>((bits - kNameBytes - entries_.data()) / stride());
    size_t at = hash_of(bits - kNameBytes, key) >> shift_;
    while (places_[at] != number + kFirst) at = (at + 1) & (places_.size() - 1);
    places_[at] = kLeft;
    *bits = 0;
    --live;
  }

  void remove_if_empty(uint8_t* bits, uint64_t key) {
    if (*bits & ~(kUsed | kHere)) return;
    for (int64_t at = 1; at < width_; ++at) {
      if (bits[at]) return;
    }
    remove(bits, key);
  }

  // Has room for bits of so many bytes from now on.
  void widen(uint64_t key, int64_t width) {
    if (width_ < width) rebuild(std::max<int64_t>(room_, 16), key, width);
  }

  void wipe(const uint8_t* gone, int64_t gone_bytes, uint64_t key) {
    int64_t bytes = std::min(gone_bytes, width_);
    for (int64_t number = 0; number < count_; ++number) {
      uint8_t* bits = entry(number) + kNameBytes;
      if (!(*bits & kHere)) continue;
      uint8_t had = 0;
      for (int64_t at = 0; at < bytes; ++at) {
        had |= bits[at] & gone[at];
        bits[at] &= static_cast<uint8_t>(~gone[at]);
      }
      if (had) remove_if_empty(bits, key);
    }
  }

  // Gives the first names a second chance or removes them. Returns how many it removed.
  int64_t evict(int64_t share, uint64_t key) {
    if (room_ - count_ < share) rebuild(live + live / 2 + 16 + share, key, width_);
    int64_t removed = 0;
    for (int64_t number = 0; share && number < count_; ++number) {
      uint8_t* bits = entry(number) + kNameBytes;
      if (!(*bits & kHere)) continue;
      --share;
      uint8_t first = *bits;
      remove(bits, key);
      if (first & kUsed) {
        uint8_t* made = entry(count_);
        std::memcpy(made, entry(number), static_cast<size_t>(stride()));
        made[kNameBytes] = static_cast<uint8_t>(first & ~kUsed);
        put(count_++, key);
        ++live;
      } else {
        ++removed;
      }
    }
    return removed;
  }

  int64_t width() const { return width_; }
  int64_t held_bytes() const { return static_cast<int64_t>(entries_.capacity() + places_.capacity() * 4); }

 private:
  int64_t stride() const { return kNameBytes + width_; }
  uint8_t* entry(int64_t number) { return entries_.data() + number * stride(); }
  const uint8_t* entry(int64_t number) const { return entries_.data() + number * stride(); }

  void put(int64_t number, uint64_t key) {
    size_t at = hash_of(entry(number), key) >> shift_;
    while (places_[at] != kNone) at = (at + 1) & (places_.size() - 1);
    places_[at] = static_cast<uint32_t>(number) + kFirst;
  }

  void rebuild(int64_t room, uint64_t key, int64_t width) {
    std::vector<uint8_t> old = std::move(entries_);
    int64_t old_stride = stride(), old_count = count_, kept = std::min(width, width_);
    width_ = width;
    room_ = room;
    count_ = 0;
    entries_.assign(static_cast<size_t>(room * stride()), 0);
    int log = 1;
    while (int64_t{1} << log < 2 * room) ++log;
    shift_ = 64 - log;
    places_.assign(size_t{1} << log, kNone);
    for (int64_t number = 0; number < old_count; ++number) {
      const uint8_t* from = old.data() + number * old_stride;
      if (!(from[kNameBytes] & kHere)) continue;
      std::memcpy(entry(count_), from, static_cast<size_t>(kNameBytes + kept));
      put(count_++, key);
    }
  }

  int64_t width_ = 0, room_ = 0, count_ = 0;
  int shift_ = 63;
  std::vector<uint8_t> entries_;
  std::vector<uint32_t> places_ = std::vector<uint32_t>(2, kNone);
};

struct Table {
  uint64_t key;
  int64_t width;
  Shard shards[kShards];

  Shard& shard(const uint8_t* name) { return shards[*name]; }

  // Asks for the memory that looking up some names will need.
  void fetch(const uint8_t* names, int64_t count, uint64_t* hashes) {
    for (int64_t at = 0; at < count; ++at) {
      hashes[at] = hash_of(names + at * kNameBytes, key);
      shard(names + at * kNameBytes).fetch_place(hashes[at]);
    }
    for (int64_t at = 0; at < count; ++at) shard(names + at * kNameBytes).fetch_entry(hashes[at]);
  }
};

// Counts of a chain of chunks by column and by the fastest tier in which each is, without gaps from the first one on.
void count_tiers(const uint8_t* rows, int64_t known, int64_t width, uint8_t* prefix, int64_t* counts) {
  std::memset(counts, 0, static_cast<size_t>(2 * width * kTierBits) * sizeof *counts);
  std::memset(prefix, 0xFF, static_cast<size_t>(width));
  prefix[0] = 0xF0;  // column 0 stands for controllers that the index does not know
  for (int64_t row = 0; row < known; ++row, rows += width) {
    for (int64_t at = 0; at < width; ++at) {
      int both = rows[at] & prefix[at];
      if (!both) {
        prefix[at] = 0;
        continue;
      }
      int low = both & 0xF, high = both >> 4;
      prefix[at] = static_cast<uint8_t>((low ? 0xF : 0) | (high ? 0xF0 : 0));
      int64_t* of = counts + 2 * kTierBits * at;
      if (low) ++of[__builtin_ctz(low)];
      if (high) ++of[kTierBits + __builtin_ctz(high)];
    }
  }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED Table* trunkline_table_new(uint64_t key, int64_t width) { return new Table{key, width, {}}; }

EXPORTED void trunkline_table_delete(Table* table) { delete table; }

EXPORTED void trunkline_table_set_width(Table* table, int64_t width) { table->width = width; }

EXPORTED int64_t trunkline_table_held_bytes(Table* table) {
  int64_t bytes = sizeof *table;
  for (const Shard& shard : table->shards) bytes += shard.held_bytes();
  return bytes;
}

EXPORTED int64_t trunkline_table_shard_size(Table* table, int64_t shard) { return table->shards[shard].live; }

// `rows`: [count, width], of which as many are written as are returned; `counts`: [2 * width, 4].
EXPORTED int64_t trunkline_table_look_up(Table* table, const uint8_t* names, int64_t count, uint8_t* rows,
                                         int64_t* counts) {
  uint64_t hashes[kAhead];
  int64_t known = 0, width = table->width;
  for (int64_t start = 0; start < count && known == start; start += kAhead) {
    int64_t stop = std::min(count, start + kAhead);
    table->fetch(names + start * kNameBytes, stop - start, hashes);
    for (; known < stop; ++known) {
      const uint8_t* name = names + known * kNameBytes;
      Shard& shard = table->shard(name);
      uint8_t* bits = shard.find(name, hashes[known - start]);
      if (!bits) break;
      *bits |= kUsed;
      int64_t has = std::min(width, shard.width());
      uint8_t* row = rows + known * width;
      std::memcpy(row, bits, static_cast<size_t>(has));
      std::memset(row + has, 0, static_cast<size_t>(width - has));
      row[0] &= 0xF0;
    }
  }
  std::vector<uint8_t> prefix(static_cast<size_t>(width));
  count_tiers(rows, known, width, prefix.data(), counts);
  return known;
}

// Returns how many names more there are than before.
EXPORTED int64_t trunkline_table_write(Table* table, int64_t column, const uint8_t* names, const uint8_t* tiers,
                                       int64_t count) {
  Bits place(column);
  int64_t added = 0;
  for (int64_t at = 0; at < count; ++at, names += kNameBytes) {
    Shard& shard = table->shard(names);
    uint8_t told = tiers[at] & kTold;
    uint8_t* bits = shard.find(names, hash_of(names, table->key));
    if (!bits && !told) continue;
    int64_t before = shard.live;
    if (!bits) {
      shard.widen(table->key, table->width);
      bits = shard.add(names, table->key, table->width);
    } else if (shard.width() <= place.byte) {
      if (!told) continue;
      shard.widen(table->key, table->width);
      bits = shard.find(names, hash_of(names, table->key));
    }
    bits[place.byte] = static_cast<uint8_t>((bits[place.byte] & ~(kTold << place.shift)) | told << place.shift);
    if (!told) shard.remove_if_empty(bits, table->key);
    added += shard.live - before;
  }
  return added;
}

// Writes to `found` of each name: 0: the controller has told of it; 1: it is expected now; 2: it was already.
// `though_told`: expects also what the controller has told of.
EXPORTED int64_t trunkline_table_expect(Table* table, int64_t column, const uint8_t* names, int64_t count,
                                        int64_t though_told, uint8_t* found) {
  Bits place(column);
  uint64_t hashes[kAhead];
  int64_t added = 0;
  for (int64_t at = 0; at < count; ++at, names += kNameBytes) {
    if (at % kAhead == 0) table->fetch(names, std::min(kAhead, count - at), hashes);
    Shard& shard = table->shard(names);
    shard.widen(table->key, table->width);
    uint8_t* bits = shard.find(names, hashes[at % kAhead]);
    if (!bits) {
      bits = shard.add(names, table->key, table->width);
      ++added;
    }
    uint8_t has = bits[place.byte] >> place.shift & 0xF;
    found[at] = has & kTold && !though_told ? 0 : has & kExpected ? 2 : 1;
    if (found[at] == 1) bits[place.byte] |= static_cast<uint8_t>(kExpected << place.shift);
  }
  return added;
}

// Returns how many names left.
EXPORTED int64_t trunkline_table_unexpect(Table* table, int64_t column, const uint8_t* names, int64_t count) {
  Bits place(column);
  int64_t removed = 0;
  for (int64_t at = 0; at < count; ++at, names += kNameBytes) {
    Shard& shard = table->shard(names);
    uint8_t* bits = shard.find(names, hash_of(names, table->key));
    if (!bits) continue;  // it was evicted
    int64_t before = shard.live;
    if (place.byte < shard.width()) bits[place.byte] &= static_cast<uint8_t>(~(kExpected << place.shift));
    shard.remove_if_empty(bits, table->key);
    removed += before - shard.live;
  }
  return removed;
}

EXPORTED int64_t trunkline_table_wipe(Table* table, int64_t shard, const uint8_t* gone, int64_t gone_bytes) {
  Shard& wiped = table->shards[shard];
  int64_t before = wiped.live;
  wiped.wipe(gone, gone_bytes, table->key);
  return before - wiped.live;
}

EXPORTED int64_t trunkline_table_evict(Table* table, int64_t shard, int64_t share) {
  return table->shards[shard].evict(share, table->key);
}
