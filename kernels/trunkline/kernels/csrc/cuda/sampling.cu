// Drawing a token from each row of logits, without sorting and without asking the host. What is drawn is defined by
// `trunkline/kernels/reference_sampling.py`, bit for bit; cpu/sampling.h does the same on CPUs.
//
//      scan     (slice of a row)  largest logit, largest score, the token that wins with noise; per 64 tokens the
//                                 largest score
//      weigh    (slice of a row)  rows with top-p: the weight before the winner, and of all
//      finish   (row)             puts the slices together, keeps to the limits
//
// Noise: the hash of a token bounds its noise from above, so logarithms are taken of a few tokens per slice only.
//
// Limits: top-k, top-p and min-p leave the tokens whose rank (`rank_of`) is at most some number `stop`. The winner of
// all tokens is drawn if it is among these: for top-p one sum of weights says so. If it is not, the winner among the
// tokens before it is looked for, and so on; that is rare, and each time at most half of the tokens are left on
// average. Top-k's `stop` comes first, by a radix selection: the k-th of the largest scores of 64 tokens leaves
// little more than k tokens to select from. Blocks of 64 tokens that lie behind `stop` are not read.
#include "sampling_row.cuh"

namespace trunkline::cuda {
namespace {

constexpr int kFinishThreads = 1024;
constexpr int kSliceQuads = kSliceTokens / (kScanThreads * kQuad);
constexpr int kPeakQuads = kPeakTokens / kQuad;
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr float kWeightless = 25.0f;  // e^-25 < 2^-35: such tokens weigh nothing
static_assert(kWarpLanes % kPeakQuads == 0 && kDigits % kWarpLanes == 0 && kSliceTokens % kPeakTokens == 0);

__device__ __forceinline__ int quad_start(int slice, int quad) {
  return slice * kSliceTokens + (quad * kScanThreads + static_cast<int>(threadIdx.x)) * kQuad;
}

__global__ void __launch_bounds__(kScanThreads) scan_kernel(const __grid_constant__ DrawCall call) {
  const Scratch scratch(call.scratch, call.rows, call.vocab_size);
  const int row_index = static_cast<int>(blockIdx.x) / scratch.slices;
  const int slice = static_cast<int>(blockIdx.x) - row_index * scratch.slices;
  const Row row(call, row_index);
  // Top-k leaves so few tokens that the winner of all is of no use.
  const bool draws = !row.is_greedy() && row.top_k == 0;
  auto* shared = reinterpret_cast<Found*>(dynamic_shared());

  float scores[kSliceQuads * kQuad], bounds[kSliceQuads * kQuad];
  Found found = nothing_found();
  for (int quad = 0; quad < kSliceQuads; ++quad) {
    const int first = quad_start(slice, quad);
    float x[kQuad], peak = kMinusInfinity;
    row.load(first, x);
    for (int j = 0; j < kQuad; ++j) {
      const auto token = static_cast<uint32_t>(first + j);
      const float score = row.score(x[j]);
      const uint64_t greedy = rank_of(x[j], token), rank = rank_of(score, token);
      if (greedy < found.greedy) found.greedy = greedy;
      if (rank < found.peak) found.peak = rank;
      peak = fmaxf(peak, score);
      if (!draws) continue;
      const float bound = score + noise_bound(row.token_hash(first + j));
      found.winner.take({static_cast<double>(bound), rank_of(bound, token)});
      scores[quad * kQuad + j] = score;
      bounds[quad * kQuad + j] = bound;
    }
    for (int mask = kPeakQuads / 2; mask > 0; mask /= 2) peak = fmaxf(peak, shuffle_xor(peak, mask));
    if (threadIdx.x % kPeakQuads == 0 && first < call.vocab_size) {
      scratch.peaks[static_cast<int64_t>(row_index) * scratch.blocks + first / kPeakTokens] = peak;
    }
  }
  if (draws) {
    // The winner of the bounds is the likeliest token: its sum is what others have to exceed.
    found = block_take<kScanThreads>(found, shared);
    const int token = id_of_rank(found.winner.rank);
    Winner best = {-__builtin_inf(), kNoRank};
    if (score_of_rank(found.peak) > kMinusInfinity) {
      best = row.sum(row.score(row.logit(token)), token);
      float limit = limit_below(best.sum);
      for (int quad = 0; quad < kSliceQuads; ++quad) {
        for (int j = 0; j < kQuad; ++j) {
          const int i = quad * kQuad + j;
          if (!(bounds[i] > limit)) continue;
          best.take(row.sum(scores[i], quad_start(slice, quad) + j));
          limit = limit_below(best.sum);
        }
      }
    }
    found.winner = best;
  }
  found = block_take<kScanThreads>(found, shared);
  if (threadIdx.x == 0) scratch.found[static_cast<int64_t>(row_index) * scratch.slices + slice] = found;
}

__global__ void __launch_bounds__(kScanThreads) weigh_kernel(const __grid_constant__ DrawCall call) {
  const Scratch scratch(call.scratch, call.rows, call.vocab_size);
  const int row_index = static_cast<int>(blockIdx.x) / scratch.slices;
  const int slice = static_cast<int>(blockIdx.x) - row_index * scratch.slices;
  const Row row(call, row_index);
  if (row.is_greedy() || row.top_k > 0 || !row.has_top_p()) return;
  const Found* slices = scratch.found + static_cast<int64_t>(row_index) * scratch.slices;
  auto* shared = reinterpret_cast<Found*>(dynamic_shared());
  const Found found = combine_slices<kScanThreads>(slices, scratch.slices, nothing_found(), shared);
  const float* peaks = scratch.peaks + static_cast<int64_t>(row_index) * scratch.blocks;
  const float largest = score_of_rank(found.peak);
  Weights weights{0, 0};
  for (int quad = 0; quad < kSliceQuads; ++quad) {
    const int first = quad_start(slice, quad);
    if (first >= call.vocab_size || !(peaks[first / kPeakTokens] > largest - kWeightless)) continue;
    float x[kQuad];
    row.load(first, x);
    for (int j = 0; j < kQuad; ++j) {
      const float score = row.score(x[j]);
      const uint64_t weight = weight_of(score - largest);
      weights.all += weight;
      if (rank_of(score, static_cast<uint32_t>(first + j)) < found.winner.rank) weights.before += weight;
    }
  }
  weights = block_take<kScanThreads>(weights, reinterpret_cast<Weights*>(shared));
  if (threadIdx.x == 0) scratch.weights[static_cast<int64_t>(row_index) * scratch.slices + slice] = weights;
}

struct Sum {
  uint64_t value;
  __device__ void take(const Sum& other) { value += other.value; }
};

// One row's tokens up to a rank, for a whole thread block; all threads call the same functions together.
class Finisher {
 public:
  __device__ Finisher(const Row& row, const float* peaks, int blocks, uint64_t peak)
      : row_(row),
        peaks_(peaks),
        blocks_(blocks),
        peak_(peak),
        largest_(score_of_rank(peak)),
        shared_(reinterpret_cast<uint64_t*>(dynamic_shared())) {}

  // The rank up to which there are `top_k` tokens.
  __device__ uint64_t select_top(int top_k) const {
    uint64_t bound = kNoRank;
    if (top_k <= blocks_) {
      const auto each_peak = [this](auto visit) {
        for (int i = static_cast<int>(threadIdx.x); i < blocks_; i += kFinishThreads) {
          visit(rank_of(peaks_[i], static_cast<uint32_t>(i)));
        }
      };
      bound = select(each_peak, top_k) | 0xffffffffu;  // all tokens with that score
    }
    const auto each = [&](auto visit) {
      each_token(bound, kMinusInfinity, [&](float, uint64_t rank) { visit(rank); });
    };
    const uint64_t stop = select(each, top_k);
    return stop < bound ? stop : bound;  // nothing was said of the tokens behind the bound
  }

  // Of the tokens up to `stop`, the winner's rank.
  __device__ uint64_t draw(uint64_t stop) const {
    Winner best = row_.sum(largest_, id_of_rank(peak_));
    float limit = limit_below(best.sum);
    each_token(stop, limit - kNoiseMax, [&](float score, uint64_t rank) {
      if (!(score + noise_bound(row_.token_hash(id_of_rank(rank))) > limit)) return;
      best.take(row_.sum(score, id_of_rank(rank)));
      limit = limit_below(best.sum);
    });
    return block_take<kFinishThreads>(best, reinterpret_cast<Winner*>(shared_)).rank;
  }

  // The weights of the tokens up to `stop`.
  __device__ uint64_t weigh(uint64_t stop) const {
    Sum sum{0};
    each_token(stop, largest_ - kWeightless,
               [&](float score, uint64_t) { sum.value += weight_of(score - largest_); });
    return block_take<kFinishThreads>(sum, reinterpret_cast<Sum*>(shared_)).value;
  }

 private:
  // Visits the tokens up to `stop`, but for blocks in which none has a score above `floor`, or it is not a number.
  // -infinity: all.
  template <class Visit>
  __device__ void each_token(uint64_t stop, float floor, Visit visit) const {
    constexpr int kStep = kFinishThreads / kPeakQuads;
    const int thread = static_cast<int>(threadIdx.x), offset = thread % kPeakQuads * kQuad;
    for (int block = thread / kPeakQuads; block < blocks_; block += kStep) {
      const float peak = peaks_[block];
      const int first = block * kPeakTokens;
      if (rank_of(peak, static_cast<uint32_t>(first)) > stop) continue;
      if (floor != kMinusInfinity && !(peak > floor)) continue;
      float x[kQuad];
      row_.load(first + offset, x);
      for (int j = 0; j < kQuad; ++j) {
        const int token = first + offset + j;
        const float score = row_.score(x[j]);
        const uint64_t rank = rank_of(score, static_cast<uint32_t>(token));
        if (token < row_.vocab_size && rank <= stop) visit(score, rank);
      }
    }
  }

  // A number up to which there are `count` of the ranks that `each` visits, digit by digit from the highest.
  template <class Each>
  __device__ uint64_t select(Each each, int count) const {
    auto* histogram = reinterpret_cast<uint32_t*>(shared_);  // [kDigits], and what the scan finds
    auto left = static_cast<uint32_t>(count);
    uint64_t prefix = 0;
    for (int shift = 64 - kDigitBits;; shift -= kDigitBits) {
      for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += kFinishThreads) histogram[i] = 0;
      __syncthreads();
      const uint64_t above = shift + kDigitBits == 64 ? 0 : ~uint64_t{0} << (shift + kDigitBits);
      each([&](uint64_t rank) {
        if (((rank ^ prefix) & above) == 0) atomic_add_shared(&histogram[(rank >> shift) & (kDigits - 1)], 1);
      });
      __syncthreads();
      if (threadIdx.x < kWarpLanes) find_digit(histogram, left);
      __syncthreads();
      const uint32_t digit = histogram[kDigits], before = histogram[kDigits + 1], here = histogram[digit];
      __syncthreads();  // the next pass clears them
      prefix |= static_cast<uint64_t>(digit) << shift;
      left -= before;
      if (left == here || shift == 0) return prefix | ((uint64_t{1} << shift) - 1);
    }
  }

  // By one warp: which digit the `left`-th visited rank has, and how many ranks have smaller ones.
  __device__ static void find_digit(uint32_t* histogram, uint32_t left) {
    constexpr int kEach = kDigits / kWarpLanes;
    const int lane = static_cast<int>(threadIdx.x);
    uint32_t total = 0, before = 0;  // of the lanes up to 2 * mask; of those before this one
    for (int i = 0; i < kEach; ++i) total += histogram[lane * kEach + i];
    for (int mask = 1; mask < kWarpLanes; mask *= 2) {
      const uint32_t other = shuffle_xor(total, mask);
      if ((lane & mask) != 0) before += other;
      total += other;
    }
    for (int i = 0; i < kEach; ++i) {
      const uint32_t here = histogram[lane * kEach + i];
      if (before < left && left <= before + here) {
        histogram[kDigits] = static_cast<uint32_t>(lane * kEach + i);
        histogram[kDigits + 1] = before;
      }
      before += here;
    }
  }

  const Row& row_;
  const float* peaks_;
  int blocks_;
  uint64_t peak_;
  float largest_;
  uint64_t* shared_;
};

__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ DrawCall call) {
  const Scratch scratch(call.scratch, call.rows, call.vocab_size);
  const int64_t index = blockIdx.x;
  const Row row(call, static_cast<int>(blockIdx.x));
  const Found found = combine_slices<kFinishThreads>(scratch.found + index * scratch.slices, scratch.slices,
                                                     nothing_found(), reinterpret_cast<Found*>(dynamic_shared()));
  const auto write = [&](uint64_t rank) {
    if (threadIdx.x == 0) call.out[index] = id_of_rank(rank);
  };
  const float largest = score_of_rank(found.peak);
  if (row.is_greedy() || !(largest > kMinusInfinity)) return write(found.greedy);
  if (call.limited == 0) return write(found.winner.rank);

  const Finisher tokens(row, scratch.peaks + index * scratch.blocks, scratch.blocks, found.peak);
  const uint64_t top = row.top_k > 0 ? tokens.select_top(row.top_k) : kNoRank;
  const float floor = largest + row.log_min_p;
  uint64_t stop = floor == floor ? rank_of(floor, 0xffffffffu) : found.peak;
  if (top < stop) stop = top;
  if (stop < found.peak) stop = found.peak;  // the most likely token stays, whatever the parameters
  const bool is_known = row.top_k == 0 && found.winner.rank <= stop;
  uint64_t rank = is_known ? found.winner.rank : tokens.draw(stop);
  if (!row.has_top_p()) return write(rank);

  Weights weights{0, 0};
  if (row.top_k == 0) {
    weights = combine_slices<kFinishThreads>(scratch.weights + index * scratch.slices, scratch.slices, weights,
                                             reinterpret_cast<Weights*>(dynamic_shared()));
  } else {
    weights.all = tokens.weigh(top);
  }
  if (!is_known) weights.before = tokens.weigh(rank - 1);
  const double kept = static_cast<double>(row.top_p) * sum_of_weights(weights.all);
  while (rank != found.peak && !(sum_of_weights(weights.before) < kept)) {
    rank = tokens.draw(rank - 1);
    weights.before = tokens.weigh(rank - 1);
  }
  write(rank);
}

}  // namespace

extern "C" {

int32_t trunkline_draw_scratch_bytes(int32_t rows, int32_t vocab_size, int64_t* bytes) {
  if (rows < 0 || vocab_size < 1) return cudaErrorInvalidValue;
  *bytes = Scratch::bytes(rows, vocab_size);
  return cudaSuccess;
}

int32_t trunkline_draw(const DrawCall* call, void* stream) {
  if (call->rows == 0) return cudaSuccess;
  const int64_t slices = Scratch(nullptr, 0, call->vocab_size).slices;
  const dim3 grid(static_cast<unsigned>(slices * call->rows));
  constexpr size_t kScanShared = kScanThreads / kWarpLanes * sizeof(Found);
  constexpr size_t kFinishShared = kFinishThreads / kWarpLanes * sizeof(Found) + kDigits * sizeof(uint32_t);
  cudaError_t error = launch(scan_kernel, grid, kScanThreads, kScanShared, stream, *call);
  if (error == cudaSuccess && call->limited != 0) {
    error = launch(weigh_kernel, grid, kScanThreads, kScanShared, stream, *call);
  }
  if (error != cudaSuccess) return error;
  const dim3 rows(static_cast<unsigned>(call->rows));
  return launch(finish_kernel, rows, kFinishThreads, kFinishShared, stream, *call);
}

}  // extern "C"
}  // namespace trunkline::cuda
