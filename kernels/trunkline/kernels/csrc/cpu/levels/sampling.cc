// Drawing tokens on one level (`cpu/sampling.h`). Compiled without contraction of products and sums: weights and
// noise are chains of single operations that every level, and the reference, must round alike.

#include "cpu/sampling.h"

#include "cpu/simd.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

constexpr int kBlock = kSampleBlock;
constexpr double kLn2 = 0.6931471805599453;
// No noise is larger: -log(-log(1 - 2^-53)).
constexpr float kNoiseMax = 36.75f;

// Tokens of one row: all of them, or a list in ascending order of their ids.
struct Tokens {
  const float* scores;
  const int32_t* ids;  // null: score i is that of token i, a logit to be divided by the temperature
  int64_t count;
  float temperature;
  float* peaks;  // largest score of each block, as far as `find_peaks` has written it
};

// A token and its place among the `Tokens`.
struct Place {
  int64_t index;
  float score;
};

TRUNKLINE_INLINE int block_size(const Tokens& tokens, int64_t begin) {
  const int64_t left = tokens.count - begin;
  return left < kBlock ? static_cast<int>(left) : kBlock;
}

// Scores of a block, padded with -infinity, which also stands for what is no number.
TRUNKLINE_INLINE void load_scores(const Tokens& tokens, int64_t begin, float* s) {
  const float* from = tokens.scores + begin;
  alignas(64) float padded[kBlock];
  const int size = block_size(tokens, begin);
  if (size < kBlock) {
    for (int j = 0; j < kBlock; ++j) padded[j] = j < size ? from[j] : kMinusInfinity;
    from = padded;
  }
  if (tokens.ids == nullptr && tokens.temperature != 1.0f) {
    for (int j = 0; j < kBlock; ++j) {
      const float x = from[j] / tokens.temperature;
      s[j] = x == x ? x : kMinusInfinity;
    }
  } else {
    for (int j = 0; j < kBlock; ++j) s[j] = from[j] == from[j] ? from[j] : kMinusInfinity;
  }
}

TRUNKLINE_INLINE bool any_above(const float* s, float limit) {
  int32_t found = 0;
  for (int j = 0; j < kBlock; ++j) found |= s[j] > limit ? -1 : 0;
  return found != 0;
}

TRUNKLINE_INLINE float peak_of(const float* s) {
  Vec peak = load(s);
  for (int j = kLanes; j < kBlock; j += kLanes) peak = max(peak, load(s + j));
  return reduce_max(peak);
}

// Writes the peaks; returns the first of the largest scores, index 0 if all are -infinity.
Place find_peaks(const Tokens& tokens) {
  Place best{0, kMinusInfinity};
  alignas(64) float s[kBlock];
  for (int64_t begin = 0; begin < tokens.count; begin += kBlock) {
    load_scores(tokens, begin, s);
    const float peak = peak_of(s);
    tokens.peaks[begin / kBlock] = peak;
    if (peak > best.score) best = {begin, peak};
  }
  load_scores(tokens, best.index, s);
  for (int j = 0; s[j] != best.score; ++j) ++best.index;
  return best;
}

double noise_of(uint64_t hash) {
  const double bits = static_cast<double>(hash >> 11) + 0.5;
  const double uniform = (bits < 9007199254740991.0 ? bits : 9007199254740991.0) * 0x1p-53;
  return -__builtin_log(-__builtin_log(uniform));
}

TRUNKLINE_INLINE uint64_t hash_of(const Tokens& tokens, const DrawRow& row, int64_t index) {
  const int64_t id = tokens.ids == nullptr ? index : tokens.ids[index];
  return mix_bits(row.row_hash ^ row.keys[id]);
}

// Upper bounds of score + noise of a block. With c = 1 - u rounded down to 24 bits, the noise -log(-log u) is at
// most -log c, and a float's bits, read as an integer, are at most 2^23 (127 + log2 of it).
TRUNKLINE_INLINE void bound_sums(const Tokens& tokens, const DrawRow& row, int64_t begin, const float* s,
                                 float* upper) {
  alignas(64) uint64_t hash[kBlock];
  const int size = block_size(tokens, begin);
  if (tokens.ids == nullptr && size == kBlock) {
    const uint64_t* keys = row.keys + begin;
    for (int j = 0; j < kBlock; ++j) hash[j] = mix_bits(row.row_hash ^ keys[j]);
  } else {
    for (int j = 0; j < kBlock; ++j) hash[j] = j < size ? hash_of(tokens, row, begin + j) : 0;
  }
  constexpr float kScale = static_cast<float>(kLn2 / (1 << 23));
  constexpr float kOffset = static_cast<float>((24 + 127) * kLn2);
  for (int j = 0; j < kBlock; ++j) {
    const float c = static_cast<float>(static_cast<int32_t>(~hash[j] >> 40));
    const float log_c = static_cast<float>(static_cast<int32_t>(bits_of_float(c)));
    upper[j] = s[j] + (kOffset - log_c * kScale);
  }
}

// A float that every sum not below `best` exceeds when it is bounded and rounded as above.
TRUNKLINE_INLINE float limit_below(double best) {
  return static_cast<float>(best - (1e-3 + 1e-6 * (best < 0 ? -best : best)));
}

// The first token with the largest sum of score and noise. `largest` has the largest score, above -infinity.
Place draw_from(const Tokens& tokens, const DrawRow& row, Place largest) {
  Place found = largest;
  double best = static_cast<double>(largest.score) + noise_of(hash_of(tokens, row, largest.index));
  float limit = limit_below(best);
  alignas(64) float s[kBlock];
  alignas(64) float upper[kBlock];
  for (int64_t begin = 0; begin < tokens.count; begin += kBlock) {
    if (!(tokens.peaks[begin / kBlock] > limit - kNoiseMax)) continue;
    load_scores(tokens, begin, s);
    bound_sums(tokens, row, begin, s, upper);
    if (!any_above(upper, limit)) continue;
    for (int j = 0; j < kBlock; ++j) {
      if (!(upper[j] > limit)) continue;
      const double sum = static_cast<double>(s[j]) + noise_of(hash_of(tokens, row, begin + j));
      if (sum > best || (sum == best && begin + j < found.index)) {
        found = {begin + j, s[j]};
        best = sum;
        limit = limit_below(best);
      }
    }
  }
  return found;
}

// exp(d) for d <= 0, rounded to a multiple of 2^-34: sums of such weights are exact in double, in any order.
TRUNKLINE_INLINE float weight_of(float d) {
  const float scaled = d * 1.44269504f;
  const float y = scaled > -64.0f ? scaled : -64.0f;
  const float whole = (y + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: the sum has no fraction left
  const float f = y - whole;
  float p = 1.54035304e-4f;
  p = p * f + 1.33335581e-3f;
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147181e-1f;
  p = p * f + 1.0f;
  const float power = float_of_bits(static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23);
  return (p * power + 0x1p-11f) - 0x1p-11f;
}

struct Weights {
  double before;  // of the tokens that come before a place in the order of scores
  double all;
};

// Sums of floats, in double. The compiler knows how to do this on each level, but not that it may keep an array of
// sums in registers.
struct Sums {
  static constexpr int kWidth = 8;
  typedef double Doubles __attribute__((vector_size(8 * kWidth)));
  typedef float Floats __attribute__((vector_size(4 * kWidth)));
  Doubles lanes = {};

  TRUNKLINE_INLINE void add(const float* values) {
    for (int j = 0; j < kBlock; j += kWidth) {
      Floats part;
      std::memcpy(&part, values + j, sizeof part);
      lanes += __builtin_convertvector(part, Doubles);
    }
  }

  TRUNKLINE_INLINE double total() const {
    double sum = 0.0;
    for (int i = 0; i < kWidth; ++i) sum += lanes[i];
    return sum;
  }
};

Weights sum_weights(const Tokens& tokens, float largest, Place place) {
  Sums before, all;
  alignas(64) float s[kBlock];
  alignas(64) float w[kBlock];
  for (int64_t begin = 0; begin < tokens.count; begin += kBlock) {
    const float peak = tokens.peaks[begin / kBlock];
    if (!(peak > largest - 25.0f)) continue;  // e^-25 < 2^-35: all of them weigh nothing
    load_scores(tokens, begin, s);
    for (int j = 0; j < kBlock; ++j) w[j] = weight_of(s[j] - largest);
    all.add(w);
    if (peak < place.score || (peak == place.score && begin > place.index)) continue;
    const int64_t earlier = place.index - begin;
    const int stop = earlier < kBlock ? static_cast<int>(earlier) : kBlock;
    for (int j = 0; j < kBlock; ++j) {
      const bool above = (s[j] > place.score) | ((s[j] == place.score) & (j < stop));
      w[j] = above ? w[j] : 0.0f;
    }
    before.add(w);
  }
  return {before.total(), all.total()};
}

// Ascending in the order of the limits: descending scores, ascending ids.
TRUNKLINE_INLINE uint64_t rank_of(float score, int64_t id) {
  const uint32_t bits = bits_of_float(score + 0.0f);  // no -0
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{~ascending} << 32 | static_cast<uint32_t>(id);
}

// A list of the tokens with larger scores, and of those with the same one whose index is below `stop`. The list may
// be the one that the tokens are.
Tokens take_from(const Tokens& tokens, float score, int64_t stop, const SampleScratch& scratch) {
  alignas(64) float s[kBlock];
  int64_t n = 0;
  for (int64_t begin = 0; begin < tokens.count; begin += kBlock) {
    const float peak = tokens.peaks[begin / kBlock];
    if (!(peak > score || (peak == score && begin < stop))) continue;
    load_scores(tokens, begin, s);
    const int size = block_size(tokens, begin);
    for (int j = 0; j < size; ++j) {  // no branch: it could not be predicted
      const int64_t index = begin + j;
      scratch.ids[n] = tokens.ids == nullptr ? static_cast<int32_t>(index) : tokens.ids[index];
      scratch.scores[n] = s[j];
      n += (s[j] > score) | ((s[j] == score) & (index < stop)) ? 1 : 0;
    }
  }
  return {scratch.scores, scratch.ids, n, tokens.temperature, tokens.peaks};
}

// A list of the `count` best tokens. As each peak is a token, the count-th largest peak is not above the last of
// them, and few tokens are not below it.
Tokens take_best(const Tokens& tokens, int64_t count, const SampleScratch& scratch) {
  const int64_t blocks = (tokens.count + kBlock - 1) / kBlock;
  float bound = kMinusInfinity;
  if (count <= blocks) {
    for (int64_t i = 0; i < blocks; ++i) scratch.ranks[i] = rank_of(tokens.peaks[i], i);
    keep_smallest(scratch.ranks, blocks, count);
    bound = tokens.peaks[scratch.ranks[count - 1] & 0xffffffffu];
  }
  const Tokens list = take_from(tokens, bound, tokens.count, scratch);
  if (list.count == count) return list;
  for (int64_t i = 0; i < list.count; ++i) scratch.ranks[i] = rank_of(list.scores[i], i);
  keep_smallest(scratch.ranks, list.count, count);
  const int64_t last = static_cast<int64_t>(scratch.ranks[count - 1] & 0xffffffffu);
  find_peaks(list);
  return take_from(list, list.scores[last], last + 1, scratch);
}

int64_t draw(const DrawRow& row, const SampleScratch& scratch) {
  Tokens tokens{row.logits, nullptr, row.vocab_size, 1.0f, scratch.peaks};
  if (row.temperature == 0.0f) return find_peaks(tokens).index;
  tokens.temperature = row.temperature;
  Place largest = find_peaks(tokens);
  if (!(largest.score > kMinusInfinity)) {
    tokens.temperature = 1.0f;  // the division may have made it of a number
    return find_peaks(tokens).index;
  }
  if (row.top_k > 0 && row.top_k < row.vocab_size) {
    tokens = take_best(tokens, row.top_k, scratch);
    largest = find_peaks(tokens);
  }
  const float floor = largest.score + row.log_min_p;
  double before_max = -1.0;  // top-p of the whole weight; negative: not yet known
  for (;;) {
    const Place found = draw_from(tokens, row, largest);
    bool inside = found.index == largest.index || (found.score >= floor && row.top_p >= 1.0f);
    if (!inside && row.top_p < 1.0f) {
      const Weights weights = sum_weights(tokens, largest.score, found);
      if (before_max < 0.0) before_max = static_cast<double>(row.top_p) * weights.all;
      inside = found.score >= floor && weights.before < before_max;
    }
    if (inside) return tokens.ids == nullptr ? found.index : tokens.ids[found.index];
    tokens = take_from(tokens, found.score, found.index, scratch);
    largest = find_peaks(tokens);
  }
}

void mask(float* logits, const uint32_t* words, int64_t vocab_size) {
  constexpr float kFiniteMax = 1e20f;
  for (int64_t begin = 0; begin < vocab_size; begin += 32) {
    const uint32_t word = words[begin / 32];
    float* x = logits + begin;
    const int64_t size = vocab_size - begin < 32 ? vocab_size - begin : 32;
    for (int j = 0; j < size; ++j) {
      const float above = x[j] > -kFiniteMax ? x[j] : -kFiniteMax;  // also what is no number
      const float bounded = above < kFiniteMax ? above : kFiniteMax;
      x[j] = (word >> j & 1u) != 0 ? bounded : kMinusInfinity;
    }
  }
}

double log_sum(const float* logits, int64_t vocab_size, const SampleScratch& scratch) {
  const Tokens tokens{logits, nullptr, vocab_size, 1.0f, scratch.peaks};
  const Place largest = find_peaks(tokens);
  const Weights weights = sum_weights(tokens, largest.score, largest);
  return static_cast<double>(largest.score) + __builtin_log(weights.all);
}

void best_ranks(const float* logits, int64_t vocab_size, int64_t count, const SampleScratch& scratch) {
  const Tokens tokens{logits, nullptr, vocab_size, 1.0f, scratch.peaks};
  const Tokens best = take_best(tokens, count, scratch);
  for (int64_t i = 0; i < count; ++i) scratch.ranks[i] = rank_of(best.scores[i], best.ids[i]);
}

}  // namespace

const SamplingTable kSamplingTable = {draw, mask, log_sum, best_ranks};

}  // namespace trunkline::TRUNKLINE_NAMESPACE
