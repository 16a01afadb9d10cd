// Sampling: checks at the boundary to Python, sparse changes of logits, and the split of the rows over the threads.

#include "sampling.h"

#include <algorithm>

#include "common/checks.h"
#include "common/exports.h"
#include "context.h"

namespace trunkline {

const SamplingTable& sampling_table(CpuLevel level) { TRUNKLINE_RETURN_AT(level, kSamplingTable); }

void keep_smallest(uint64_t* ranks, int64_t n, int64_t count) {
  std::nth_element(ranks, ranks + count - 1, ranks + n);
}

namespace {

template <class T>
T* column(const TensorView& tensor, const char* name, int code, int64_t length) {
  if (!has_dtype(tensor, code, 8 * static_cast<int>(sizeof(T))) || !tensor.IsContiguous() ||
      tensor.device().device_type != kDLCPU || tensor.numel() != length) {
    TVM_FFI_THROW(ValueError) << name << " must be a contiguous tensor of " << length << " elements of "
                              << 8 * sizeof(T) << " bits in host memory";
  }
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
const T* integers(const TensorView& tensor, const char* name, int64_t length) {
  return column<const T>(tensor, name, kDLInt, length);
}

float* floats(const TensorView& tensor, const char* name, int64_t length) {
  return column<float>(tensor, name, kDLFloat, length);
}

// Logits `[rows, vocabulary]`, of which each row is contiguous.
struct Logits {
  float* data;
  int64_t rows;
  int64_t vocab_size;
  int64_t stride;

  explicit Logits(const TensorView& tensor) {
    require(is_float32(tensor) && tensor.ndim() == 2 && tensor.device().device_type == kDLCPU,
            "logits must be a float32 matrix in host memory");
    rows = tensor.size(0);
    vocab_size = tensor.size(1);
    require(vocab_size > 0 && vocab_size < INT32_MAX, "logits must have columns");
    require(tensor.stride(1) == 1 || vocab_size == 1, "the rows of logits must be contiguous");
    data = static_cast<float*>(tensor.data_ptr());
    stride = tensor.stride(0);
  }

  float* row(int64_t index) const { return data + index * stride; }
};

void check_within(const int32_t* values, int64_t length, int64_t stop, const char* name) {
  for (int64_t i = 0; i < length; ++i) {
    if (values[i] < 0 || values[i] >= stop) {
      TVM_FFI_THROW(ValueError) << name << " has " << values[i] << "; allowed are 0 to " << stop - 1;
    }
  }
}

void sample_bias(TensorView logits, TensorView rows, TensorView tokens, TensorView values) {
  const Logits to(logits);
  const int64_t count = rows.numel();
  const int32_t* row = integers<int32_t>(rows, "rows", count);
  const int32_t* token = integers<int32_t>(tokens, "tokens", count);
  const float* value = floats(values, "values", count);
  check_within(row, count, to.rows, "rows");
  check_within(token, count, to.vocab_size, "tokens");
  for (int64_t i = 0; i < count; ++i) to.row(row[i])[token[i]] += value[i];
}

void sample_mask(int64_t context, TensorView logits, TensorView rows, TensorView words) {
  const Logits to(logits);
  const int64_t count = rows.numel(), row_words = (to.vocab_size + 31) / 32;
  const int32_t* row = integers<int32_t>(rows, "rows", count);
  const int32_t* word = integers<int32_t>(words, "words", count * row_words);
  check_within(row, count, to.rows, "rows");
  const ContextUse use(context);
  const SamplingTable& table = sampling_table(use.context().level);
  use.context().pool.run(count, [&](int64_t i, int) {
    table.mask(to.row(row[i]), reinterpret_cast<const uint32_t*>(word + i * row_words), to.vocab_size);
  });
}

// `indptr`: where the tokens of each penalised row begin. `factors`: repetition, frequency, presence of each.
void sample_penalise(TensorView logits, TensorView rows, TensorView indptr, TensorView tokens, TensorView counts,
                     TensorView factors) {
  const Logits to(logits);
  const int64_t count = rows.numel(), entries = tokens.numel();
  const int32_t* row = integers<int32_t>(rows, "rows", count);
  const int64_t* begin = integers<int64_t>(indptr, "indptr", count + 1);
  const int32_t* token = integers<int32_t>(tokens, "tokens", entries);
  const int32_t* times = integers<int32_t>(counts, "counts", entries);
  const float* factor = floats(factors, "factors", 3 * count);
  check_within(row, count, to.rows, "rows");
  check_within(token, entries, to.vocab_size, "tokens");
  require(begin[0] == 0 && begin[count] == entries && std::is_sorted(begin, begin + count + 1),
          "indptr must ascend from 0 to the number of tokens");
  for (int64_t i = 0; i < count; ++i) {
    float* x = to.row(row[i]);
    const float repetition = factor[3 * i], frequency = factor[3 * i + 1], presence = factor[3 * i + 2];
    for (int64_t entry = begin[i]; entry < begin[i + 1]; ++entry) {
      const float value = x[token[entry]];
      const float repeated = value > 0.0f ? value / repetition : value * repetition;
      const float taken = frequency * static_cast<float>(times[entry]);
      x[token[entry]] = repeated - (taken + (times[entry] > 0 ? presence : 0.0f));
    }
  }
}

size_t scratch_bytes(int64_t vocab_size) { return static_cast<size_t>(17 * (vocab_size + 64)); }

SampleScratch scratch_at(char* memory, int64_t vocab_size) {
  const int64_t room = vocab_size + 64;
  auto* floats = reinterpret_cast<float*>(memory + 8 * room);
  return {reinterpret_cast<uint64_t*>(memory), floats, reinterpret_cast<int32_t*>(floats + room),
          floats + 2 * room};
}

void sample_draw(int64_t context, TensorView logits, TensorView keys, TensorView seeds, TensorView output_index,
                 TensorView top_k, TensorView factors, TensorView out) {
  const Logits from(logits);
  const int64_t rows = from.rows;
  const auto* key = reinterpret_cast<const uint64_t*>(integers<int64_t>(keys, "keys", from.vocab_size));
  const auto* seed = reinterpret_cast<const uint64_t*>(integers<int64_t>(seeds, "seeds", rows));
  const auto* index = reinterpret_cast<const uint64_t*>(integers<int64_t>(output_index, "output_index", rows));
  const int32_t* k = integers<int32_t>(top_k, "top_k", rows);
  const float* temperature = floats(factors, "factors", 3 * rows);
  const float* top_p = temperature + rows;
  const float* log_min_p = top_p + rows;
  int64_t* drawn = column<int64_t>(out, "out", kDLInt, rows);
  const ContextUse use(context);
  CpuContext& shared = use.context();
  shared.reserve_scratch(scratch_bytes(from.vocab_size));
  const SamplingTable& table = sampling_table(shared.level);
  shared.pool.run(rows, [&](int64_t i, int thread) {
    DrawRow row{};
    row.logits = from.row(i);
    row.vocab_size = from.vocab_size;
    row.keys = key;
    row.row_hash = mix_bits(mix_bits(seed[i]) + (index[i] + 1) * kGolden);
    row.temperature = temperature[i];
    row.top_k = k[i];
    row.top_p = top_p[i];
    row.log_min_p = log_min_p[i];
    drawn[i] = table.draw(row, scratch_at(shared.scratch(thread), from.vocab_size));
  });
}

// Log-probabilities of `rows`: that of a chosen token, and the largest `top_ids.size(1)` of each.
void sample_report(int64_t context, TensorView logits, TensorView rows, TensorView chosen, TensorView log_probs,
                   TensorView top_ids, TensorView top_log_probs) {
  const Logits from(logits);
  const int64_t reported = rows.numel();
  const int32_t* row = integers<int32_t>(rows, "rows", reported);
  const int32_t* token = integers<int32_t>(chosen, "chosen", reported);
  float* own = floats(log_probs, "log_probs", reported);
  require(top_ids.ndim() == 2, "top_ids must be a matrix");
  const int64_t count = top_ids.size(1);
  int32_t* id = column<int32_t>(top_ids, "top_ids", kDLInt, reported * count);
  float* value = floats(top_log_probs, "top_log_probs", reported * count);
  check_within(row, reported, from.rows, "rows");
  check_within(token, reported, from.vocab_size, "chosen");
  require(count <= from.vocab_size, "more tokens are asked for than there are");
  const ContextUse use(context);
  CpuContext& shared = use.context();
  shared.reserve_scratch(scratch_bytes(from.vocab_size));
  const SamplingTable& table = sampling_table(shared.level);
  shared.pool.run(reported, [&](int64_t i, int thread) {
    const float* x = from.row(row[i]);
    const SampleScratch scratch = scratch_at(shared.scratch(thread), from.vocab_size);
    const double total = table.log_sum(x, from.vocab_size, scratch);
    const auto log_prob = [&](float logit) { return static_cast<float>(static_cast<double>(logit) - total); };
    own[i] = log_prob(x[token[i]]);
    if (count == 0) return;
    table.best_ranks(x, from.vocab_size, count, scratch);
    std::sort(scratch.ranks, scratch.ranks + count);
    for (int64_t j = 0; j < count; ++j) {
      const int32_t best = static_cast<int32_t>(scratch.ranks[j] & 0xffffffffu);
      id[i * count + j] = best;
      value[i * count + j] = log_prob(x[best]);
    }
  });
}

}  // namespace
}  // namespace trunkline

TRUNKLINE_EXPORT(sample_bias, trunkline::sample_bias)
TRUNKLINE_EXPORT(sample_mask, trunkline::sample_mask)
TRUNKLINE_EXPORT(sample_penalise, trunkline::sample_penalise)
TRUNKLINE_EXPORT(sample_draw, trunkline::sample_draw)
TRUNKLINE_EXPORT(sample_report, trunkline::sample_report)
