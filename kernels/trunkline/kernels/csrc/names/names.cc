// The names of a prompt's chunks: a chain of BLAKE2b hashes (RFC 7693), as `trunkline.kvstore.chunks.chain` makes it.
//
// The name before it is the salt of each, so nothing runs side by side but the four columns of BLAKE2b's state: they
// are the lanes of one vector. A library of its own, with a C interface: routers load neither torch nor the
// kernels.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

constexpr int64_t kNameBytes = 16;
constexpr int64_t kBlockBytes = 128;

using Row = uint64_t __attribute__((vector_size(32)));
using Bytes = uint8_t __attribute__((vector_size(32)));

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

// The words of the block that the four lanes take in one half of a mixing of a round's `kOrder`.
template <int kRound, int kFirst, int kSecond, int kThird, int kFourth>
inline Row words(const uint64_t* m) {
  constexpr const uint8_t* o = kOrder[kRound % 10];
  return Row{m[o[kFirst]], m[o[kSecond]], m[o[kThird]], m[o[kFourth]]};
}

// The words of a vector in another order.
template <int... kFrom, typename Vector>
inline Vector shuffled(Vector x) {
#if defined(__clang__)
  return __builtin_shufflevector(x, x, kFrom...);
#else
  return __builtin_shuffle(x, Vector{kFrom...});
#endif
}

template <int... kFrom>
inline Row shuffled_bytes(Row x) {
  return reinterpret_cast<Row>(shuffled<kFrom...>(reinterpret_cast<Bytes>(x)));
}

inline Row right_by_24(Row x) {
  return shuffled_bytes<3, 4, 5, 6, 7, 0, 1, 2, 11, 12, 13, 14, 15, 8, 9, 10, 19, 20, 21, 22, 23, 16, 17, 18, 27,
                        28, 29, 30, 31, 24, 25, 26>(x);
}

inline Row right_by_16(Row x) {
  return shuffled_bytes<2, 3, 4, 5, 6, 7, 0, 1, 10, 11, 12, 13, 14, 15, 8, 9, 18, 19, 20, 21, 22, 23, 16, 17, 26,
                        27, 28, 29, 30, 31, 24, 25>(x);
}

inline Row right_by_32(Row x) {
  return shuffled_bytes<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11, 20, 21, 22, 23, 16, 17, 18, 19, 28,
                        29, 30, 31, 24, 25, 26, 27>(x);
}

// G, for all lanes at once (RFC 7693, 3.1). `b` is what comes last, so it is added last.
inline void mix(State& s, Row x, Row y) {
  s.a = s.a + x + s.b;
  s.d = right_by_32(s.d ^ s.a);
  s.c += s.d;
  s.b = right_by_24(s.b ^ s.c);
  s.a = s.a + y + s.b;
  s.d = right_by_16(s.d ^ s.a);
  s.c += s.d;
  s.b ^= s.c;
  s.b = s.b >> 63 | s.b << 1;
}

template <int kRound>
inline void round(State& s, const uint64_t* m) {
  mix(s, words<kRound, 0, 2, 4, 6>(m), words<kRound, 1, 3, 5, 7>(m));
  // The diagonals, in the lanes in which their `b` is: what waits for `b` need not wait for its move.
  s.a = shuffled<3, 0, 1, 2>(s.a);
  s.c = shuffled<1, 2, 3, 0>(s.c);
  s.d = shuffled<2, 3, 0, 1>(s.d);
  mix(s, words<kRound, 14, 8, 10, 12>(m), words<kRound, 15, 9, 11, 13>(m));
  s.a = shuffled<1, 2, 3, 0>(s.a);
  s.c = shuffled<3, 0, 1, 2>(s.c);
  s.d = shuffled<2, 3, 0, 1>(s.d);
}

struct Hash {
  Row low = kLow ^ Row{kParameters, 0, 0, 0};
  Row high;

  explicit Hash(const uint8_t* salt) {
    uint64_t words[2];
    std::memcpy(words, salt, sizeof words);
    high = kHigh ^ Row{words[0], words[1], 0, 0};
  }

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

// Writes the hash of `marker` and then `tokens`, salted with `parent`, to `name`. `marker_bytes` is less than a block.
void write_name(const uint8_t* parent, const uint8_t* marker, int64_t marker_bytes, const uint8_t* tokens,
                int64_t token_bytes, uint8_t* name) {
  Hash hash(parent);
  uint8_t block[kBlockBytes] = {};
  std::memcpy(block, marker, marker_bytes);
  int64_t filled = marker_bytes, total = marker_bytes;
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

// Writes the names of the chunks of `tokens` to `names`, 16 bytes each: of `marker` and the first `chunk_bytes` bytes
// of `tokens`, salted with `start`; of `marker` and the next ones, salted with that name; and so on. The last chunk may
// be shorter. `start` has 16 bytes, `marker` at most 64.
EXPORTED void trunkline_chain_names(const uint8_t* start, const uint8_t* marker, int64_t marker_bytes,
                                    const uint8_t* tokens, int64_t token_bytes, int64_t chunk_bytes,
                                    uint8_t* names) {
  const uint8_t* parent = start;
  for (int64_t at = 0; at < token_bytes; at += chunk_bytes, names += kNameBytes) {
    int64_t taken = token_bytes - at < chunk_bytes ? token_bytes - at : chunk_bytes;
    write_name(parent, marker, marker_bytes, tokens + at, taken, names);
    parent = names;
  }
}
