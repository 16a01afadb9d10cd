// What a core can do at best, measured beside the kernels: reading memory, and gemm.h's product from the
// first-level cache.
#include "cpu/attention.h"

#include "cpu/gemm.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// The exclusive or of all words: a sum that the compiler cannot skip, as cheap as reading can be.
uint32_t read_words(const uint32_t* words, int64_t count) {
  constexpr int kStreams = 8;
  uint32_t folded[kStreams][16] = {};
  int64_t i = 0;
  for (; i + kStreams * 16 <= count; i += kStreams * 16) {
    prefetch(words + i + 1024);
    for (int s = 0; s < kStreams; ++s) {
      for (int lane = 0; lane < 16; ++lane) folded[s][lane] ^= words[i + s * 16 + lane];
    }
  }
  uint32_t result = 0;
  for (; i < count; ++i) result ^= words[i];
  for (int s = 0; s < kStreams; ++s) {
    for (int lane = 0; lane < 16; ++lane) result ^= folded[s][lane];
  }
  return result;
}

template <class T>
double multiply(int64_t repeats, char* scratch) {
  constexpr int kRows = 4 * kMaxRows, kSteps = 64, kColumns = kMaxVectors * kLanes;
  auto* a = reinterpret_cast<typename T::A*>(scratch);
  auto* b = reinterpret_cast<typename T::B*>(scratch + kRows * kSteps * 8);
  auto* c = reinterpret_cast<float*>(scratch + kRows * kSteps * 8 + kSteps * kColumns * 4);
  const typename T::A* rows[kRows];
  for (int i = 0; i < kRows; ++i) rows[i] = a + i * kSteps * T::kWords;
  for (int64_t i = 0; i < repeats; ++i) {
    gemm_blocks<T, kMaxVectors, kMaxRows>(kRows, rows, b, kColumns, kSteps, c, kColumns, false, 0);
  }
  return 2.0 * kRows * kColumns * kSteps * T::kStep * static_cast<double>(repeats);
}

constexpr LimitTable kTable = {read_words, {multiply<Float32>, multiply<Float16>, multiply<BFloat16>}};

}  // namespace

const LimitTable& limit_table() { return kTable; }

}  // namespace trunkline::TRUNKLINE_NAMESPACE
