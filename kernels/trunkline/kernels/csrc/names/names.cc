// The names of a prompt's chunks: a chain of BLAKE2b hashes (RFC 7693), as `trunkline.kvstore.chunks.chain` makes it.
//
// Each hash begins with the name before it, so nothing runs side by side but the four columns of BLAKE2b's state:
// they are the words of one vector. A library of its own, with a C interface: routers load neither torch nor the
// kernels.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

constexpr int64_t kNameBytes = 16;
constexpr int64_t kBlockBytes = 128;

using Row = uint64_t __attribute__((vector_size(32)));

constexpr Row kLow = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1};
constexpr Row kHigh = {0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
// The first word of the parameter block: no key, fan-out and depth 1, the length of the digest.
constexpr uint64_t kParameters = 0x01010000 ^ kNameBytes;

// The order in which a round takes the words of the block (RFC 7693, 2.7); rounds 10 and 11 are as 0 and 1.
constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

struct State {
  Row a, b, c, d;
};

// The words of the block that the four columns take.
template <int kRound, int kFirst>
inline Row words(const uint64_t* m) {
  constexpr const uint8_t* o = kOrder[kRound % 10] + kFirst;
  return Row{m[o[0]], m[o[2]], m[o[4]], m[o[6]]};
}

// G, for all columns at once (RFC 7693, 3.1).
inline void mix(State& s, Row x, Row y) {
  s.a += s.b + x;
  s.d ^= s.a;
  s.d = s.d >> 32 | s.d << 32;
  s.c += s.d;
  s.b ^= s.c;
  s.b = s.b >> 24 | s.b << 40;
  s.a += s.b + y;
  s.d ^= s.a;
  s.d = s.d >> 16 | s.d << 48;
  s.c += s.d;
  s.b ^= s.c;
  s.b = s.b >> 63 | s.b << 1;
}

template <int kRound>
inline void round(State& s, const uint64_t* m) {
  mix(s, words<kRound, 0>(m), words<kRound, 1>(m));
  s.b = __builtin_shufflevector(s.b, s.b, 1, 2, 3, 0);  // now the diagonals stand in columns
  s.c = __builtin_shufflevector(s.c, s.c, 2, 3, 0, 1);
  s.d = __builtin_shufflevector(s.d, s.d, 3, 0, 1, 2);
  mix(s, words<kRound, 8>(m), words<kRound, 9>(m));
  s.b = __builtin_shufflevector(s.b, s.b, 3, 0, 1, 2);
  s.c = __builtin_shufflevector(s.c, s.c, 2, 3, 0, 1);
  s.d = __builtin_shufflevector(s.d, s.d, 1, 2, 3, 0);
}

struct Hash {
  Row low = kLow ^ Row{kParameters, 0, 0, 0};
  Row high = kHigh;

  // Takes in a block. `total`: bytes up to its end, without padding.
  void add(const uint8_t* block, int64_t total, bool is_last) {
    uint64_t m[16];
    std::memcpy(m, block, sizeof m);
    State s = {low, high, kLow, kHigh ^ Row{static_cast<uint64_t>(total), 0, is_last ? ~uint64_t{0} : 0, 0}};
    [&]<int... kRounds>(std::integer_sequence<int, kRounds...>) {
      (round<kRounds>(s, m), ...);
    }(std::make_integer_sequence<int, 12>{});
    low ^= s.a ^ s.c;
    high ^= s.b ^ s.d;
  }
};

// Writes the hash of `head` and then `tokens` to `name`. `head_bytes` is less than a block.
void write_name(const uint8_t* head, int64_t head_bytes, const uint8_t* tokens, int64_t token_bytes,
                uint8_t* name) {
  Hash hash;
  uint8_t block[kBlockBytes] = {};
  std::memcpy(block, head, head_bytes);
  int64_t filled = head_bytes, total = head_bytes;
  // The last block is hashed as such even if it is full, so that a block is taken in only when more follows.
  while (token_bytes > kBlockBytes - filled) {
    int64_t taken = kBlockBytes - filled;
    std::memcpy(block + filled, tokens, taken);
    total += taken;
    hash.add(block, total, false);
    tokens += taken;
    token_bytes -= taken;
    filled = 0;
  }
  std::memcpy(block + filled, tokens, token_bytes);
  std::memset(block + filled + token_bytes, 0, kBlockBytes - filled - token_bytes);
  hash.add(block, total + token_bytes, true);
  std::memcpy(name, &hash.low, kNameBytes);
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Whether this machine has what the library was compiled for.
EXPORTED int32_t trunkline_names_run_here() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0;
#else
  return 1;
#endif
}

// Writes the names of the chunks of `tokens` to `names`, 16 bytes each: of `start`, `marker` and the first
// `chunk_bytes` bytes of `tokens`; of that name, `marker` and the next ones; and so on. The last chunk may be
// shorter. `start` has 16 bytes, `marker` at most 64.
EXPORTED void trunkline_write_names(const uint8_t* start, const uint8_t* marker, int64_t marker_bytes,
                                    const uint8_t* tokens, int64_t token_bytes, int64_t chunk_bytes,
                                    uint8_t* names) {
  uint8_t head[kBlockBytes];
  std::memcpy(head, start, kNameBytes);
  std::memcpy(head + kNameBytes, marker, marker_bytes);
  for (int64_t at = 0; at < token_bytes; at += chunk_bytes, names += kNameBytes) {
    int64_t taken = token_bytes - at < chunk_bytes ? token_bytes - at : chunk_bytes;
    write_name(head, kNameBytes + marker_bytes, tokens + at, taken, names);
    std::memcpy(head, names, kNameBytes);
  }
}
