// Drawing tokens from rows of logits: calls, and the table of functions per level. What is computed is defined by
// `trunkline/kernels/reference_sampling.py`, bit for bit; this is how to find the same token while a row is read
// once or twice:
//
// - Gumbel-max without the noise of every token. Its generator is hashed for a block of tokens at a time, and the
//   hash bounds the noise from above. Only where score + bound could win, the noise itself is computed (some tens
//   of tokens per row).
// - Limits without sorting. What top-p and min-p leave is a prefix of the tokens in descending order of score. So the
//   best of all tokens is the best of the prefix if it lies in it, which takes the summed weight of the tokens
//   before it. If it does not, everything behind it is out as well, and the search goes on among those before it.
// - The largest score of each block of 64 tokens is kept, so that later readings skip blocks that cannot matter.
//   Top-k, which comes first, takes its threshold from these.
//
// Plain data only: this header is compiled once per level.
#pragma once

#include <cstdint>

#include "cpu/cpu_level.h"

namespace trunkline {

constexpr int kSampleBlock = 64;

struct DrawRow {
  const float* logits;
  int64_t vocab_size;
  const uint64_t* keys;  // hashes of the token ids
  uint64_t row_hash;     // of seed and output index
  float temperature;     // 0: the first largest logit
  int32_t top_k;         // 0: no limit
  float top_p;           // 1 or more: no limit
  float log_min_p;       // -infinity: no limit
};

// A thread's memory for rows of up to `vocab_size` tokens.
struct SampleScratch {
  uint64_t* ranks;  // [vocab_size + 64]
  float* scores;    // [vocab_size + 64]
  int32_t* ids;     // [vocab_size + 64]
  float* peaks;     // [vocab_size / kSampleBlock + 1], all that temperature 0 needs
};

struct SamplingTable {
  int64_t (*draw)(const DrawRow& row, const SampleScratch& scratch);
  // Keeps the logits whose bit is set, brought between -1e20 and 1e20; others become -infinity.
  void (*mask)(float* logits, const uint32_t* words, int64_t vocab_size);
  // Natural logarithm of the sum of exp(logit). It leaves the largest logit of each block in `scratch.peaks`.
  double (*log_sum)(const float* logits, int64_t vocab_size, const SampleScratch& scratch);
  // Writes numbers that order the `count` best tokens, best first, to `scratch.ranks`; their low halves are the ids.
  // To be called behind `log_sum` of the same row.
  void (*best_ranks)(const float* logits, int64_t vocab_size, int64_t count, const SampleScratch& scratch);
};

namespace portable {
extern const SamplingTable kSamplingTable;
}
namespace avx2 {
extern const SamplingTable kSamplingTable;
}
namespace avx512 {
extern const SamplingTable kSamplingTable;
}
namespace avx512bf16 {
extern const SamplingTable kSamplingTable;
}
namespace amx {
using avx512bf16::kSamplingTable;
}

const SamplingTable& sampling_table(CpuLevel level);

// Moves the `count` smallest of `n` ranks to the front; the largest of these is at `count - 1`. 0 < count <= n.
void keep_smallest(uint64_t* ranks, int64_t n, int64_t count);

// 64-bit finaliser (MurmurHash3, SplitMix64): `mix_bits` of reference_sampling.py.
static constexpr uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

}  // namespace trunkline
