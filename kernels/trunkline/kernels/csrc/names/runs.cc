// The runs of a text, written into the tables in which drafts are looked for: what `TextIndex.extend` in
// `controller/drafts/text_index.py` does in NumPy, where a call takes longer than most texts.

#include <algorithm>
#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t kBase = 0x100000001B3, kMix = 0x9E3779B97F4A7C15;

}  // namespace

// Appends `n` tokens to a ring `[2^bits]` that has got `count` so far, and writes behind which position each run of
// them stood last into its length's table: `runs` `[tables_count]`, `tables` `[tables_count, 2^(bits + 1)]`. No run
// begins before the oldest token that the ring has in the end. `n` is at most 2^bits.
EXPORTED void trunkline_index_runs(int32_t* ring, int32_t* tables, const int32_t* runs, int64_t tables_count,
                                   int64_t bits, int64_t count, const int32_t* tokens, int64_t n) {
  const int64_t mask = (int64_t{1} << bits) - 1, oldest = std::max<int64_t>(0, count + n - mask - 1);
  const int shift = static_cast<int>(64 - bits - 1);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t stop = count + i + 1;
    ring[(stop - 1) & mask] = tokens[i];
    for (int64_t table = 0; table < tables_count; ++table) {
      const int64_t start = stop - runs[table];
      if (start < oldest) continue;
      uint64_t sum = 0;
      for (int64_t at = start; at < stop; ++at)
        sum = sum * kBase + static_cast<uint64_t>(int64_t{ring[at & mask]});
      tables[(table << (bits + 1)) + static_cast<int64_t>(sum * kMix >> shift)] = static_cast<int32_t>(stop);
    }
  }
}
