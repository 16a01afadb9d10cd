// Products of rows with one of several matrices each, as a mixture of experts has them: rows are sorted by matrix, and
// only the device knows how many each matrix has.
//
//      out[r] = x[r] · W[m]ᵀ      for rows r from stops[m - 1] up to stops[m]
//
// A linear layer over codes is the same with one matrix, for few rows.
//
// Matrices are 16-bit numbers, or codes of 8 bits (e4m3 or int8) with a scale for each group of inputs. Codes become
// 16-bit numbers in registers, exactly; a group's sum, in float32, is multiplied by its scale. So nothing is rounded
// but the result, and a decode step reads each code once.
//
// A *tile* is up to 16 or 64 rows of one matrix; tiles are counted along the matrices, and thread block (x, y) makes 64
// outputs of tile y. There are as many thread blocks as there could be tiles, those without one end at once: so a
// captured graph serves any choice of matrices.
//
// Which four inputs a lane multiplies at once is free, as long as rows and weights agree: of 16 inputs lane t takes 4t
// to 4t + 3, where mma.sync's tables (fragments.h) say 2t, 2t + 1, 2t + 8 and 2t + 9. So it reads them in one piece.
#include <primitives.cuh>

#include "api.h"
#include "fragments.h"

namespace trunkline::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr int kColumnTiles = 2;  // of 8 outputs, for each warp
constexpr int kOutputs = kWarps * kColumnTiles * 8;
constexpr int kStep = 64;    // inputs that are copied to shared memory at once
constexpr int kInputs = 16;  // of one product of matrix units
constexpr int kSharedMax = 48 << 10;
constexpr int kUnit = 16;  // bytes of one asynchronous copy
// Elements from row to row of x in shared memory: eight rows of four lanes with 8 bytes each meet no bank twice.
constexpr int kRowStride = kStep + 16;

// A lane's four weights as two pairs of 16-bit numbers.
template <class T>
struct Numbers {
  static constexpr int kBytes = 2;
  static constexpr int kStride = kRowStride * kBytes;  // from output to output, in bytes
  static constexpr bool kHasScales = false;
  __device__ static void read(const unsigned char* from, uint32_t (&pairs)[2]) {
    const uint64_t four = *reinterpret_cast<const uint64_t*>(from);
    pairs[0] = static_cast<uint32_t>(four);
    pairs[1] = static_cast<uint32_t>(four >> 32);
  }
};

template <class T, class Code>
struct Codes {
  static constexpr int kBytes = 1;
  static constexpr int kStride = kStep + 16;
  static constexpr bool kHasScales = true;
  __device__ static void read(const unsigned char* from, uint32_t (&pairs)[2]) {
    const uint32_t four = *reinterpret_cast<const uint32_t*>(from);
    pairs[0] = pack2<T>(Code::value(four & 0xffu), Code::value(four >> 8 & 0xffu));
    pairs[1] = pack2<T>(Code::value(four >> 16 & 0xffu), Code::value(four >> 24));
  }
};

struct Float8 {
  // The bits of exponent and fraction stand in a float32 where its own do; the difference of biases is a factor.
  __device__ static float value(uint32_t code) {
    return __fmul_rn(float_of((code & 0x80u) << 24 | (code & 0x7fu) << 20), 0x1p120f);
  }
};

struct Int8 {
  __device__ static float value(uint32_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};

struct Tile {
  int matrix;  // -1: there is no such tile
  int start, stop;
};

// Where the rows of a matrix end.
__device__ __forceinline__ int stop_of(const GroupedCall& call, int matrix) {
  return call.stops == nullptr ? call.rows : call.stops[matrix];
}

// Tile number blockIdx.y. The first warp looks for it: each lane counts the tiles of some matrices one after the other.
template <int Rows>
__device__ Tile find_tile(const GroupedCall& call, int* found) {
  if (threadIdx.x < kWarpLanes) {
    const int lane = static_cast<int>(threadIdx.x), each = (call.matrices + kWarpLanes - 1) / kWarpLanes;
    const int first = min(lane * each, call.matrices), last = min(first + each, call.matrices);
    const int begin = first > 0 ? stop_of(call, first - 1) : 0;
    int own = 0;
    for (int m = first, start = begin; m < last; ++m) {
      const int stop = stop_of(call, m);
      own += (stop - start + Rows - 1) / Rows;
      start = stop;
    }
    int before = 0, total = own;  // tiles of the lanes before; of the lanes that have been added so far
    for (int mask = 1; mask < kWarpLanes; mask *= 2) {
      const int other = shuffle_xor(total, mask);
      if ((lane & mask) != 0) before += other;
      total += other;
    }
    const int wanted = static_cast<int>(blockIdx.y);
    if (lane == 0 && wanted >= total) found[0] = -1;
    if (wanted >= before && wanted < before + own) {
      int left = wanted - before, m = first, start = begin;
      for (;; ++m) {
        const int tiles = (stop_of(call, m) - start + Rows - 1) / Rows;
        if (left < tiles) break;
        left -= tiles;
        start = stop_of(call, m);
      }
      found[0] = m;
      found[1] = start + left * Rows;
      found[2] = min(stop_of(call, m), found[1] + Rows);
    }
  }
  __syncthreads();
  return {found[0], found[1], found[2]};
}

template <class T, class Weights, int RowTiles>
class Product {
 public:
  static constexpr int kRows = 16 * RowTiles;
  static constexpr int kRowBytes = kRowStride * 2;
  static constexpr int kStageBytes = kRows * kRowBytes + kOutputs * Weights::kStride;
  static constexpr int kFit = (kSharedMax - kUnit) / kStageBytes;
  static constexpr int kStages = kFit < 4 ? kFit : 4;
  static constexpr int kSharedBytes = kStages * kStageBytes + kUnit;  // behind the stages: which tile it is
  static_assert(kStages >= 2);

  __device__ Product(const GroupedCall& call, const Tile& tile)
      : call_(call),
        tile_(tile),
        first_output_(static_cast<int>(blockIdx.x) * kOutputs),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % kWarpLanes),
        warp_(thread_ / kWarpLanes),
        left_(call.group) {}

  __device__ void run() {
    const int steps = (call_.width + kStep - 1) / kStep;
    for (int step = 0; step < kStages - 1; ++step) fetch(step, steps);
    for (int step = 0; step < steps; ++step) {
      copy_async_wait<kStages - 2>();
      __syncthreads();
      fetch(step + kStages - 1, steps);
      multiply(step);
    }
    write();
  }

 private:
  __device__ unsigned char* rows_of(int step) { return dynamic_shared() + step % kStages * kStageBytes; }
  __device__ unsigned char* weights_of(int step) { return rows_of(step) + kRows * kRowBytes; }

  __device__ void fetch(int step, int steps) {
    if (step < steps) {
      const auto* x = static_cast<const unsigned char*>(call_.x);
      copy(rows_of(step), kRowBytes, 2, kRows, step, x, tile_.start, tile_.stop);
      const auto* weights = static_cast<const unsigned char*>(call_.weights) +
                            static_cast<int64_t>(tile_.matrix) * call_.outputs * call_.width * Weights::kBytes;
      copy(weights_of(step), Weights::kStride, Weights::kBytes, kOutputs, step, weights, first_output_,
           call_.outputs);
    }
    copy_async_commit();
  }

  // Copy this step's inputs of rows `first` to `first + rows` of an array; zeros for those from `stop` on.
  __device__ void copy(unsigned char* to, int stride, int bytes, int rows, int step, const unsigned char* from,
                       int first, int stop) {
    const int units = kStep * bytes / kUnit;
    for (int i = thread_; i < rows * units; i += kThreads) {
      const int row = i / units, unit = i % units;
      const int input = step * kStep + unit * kUnit / bytes;
      const bool present = first + row < stop && input < call_.width;
      const int64_t offset = (static_cast<int64_t>(first + row) * call_.width + input) * bytes;
      copy_async_16(to + row * stride + unit * kUnit, present ? from + offset : from, present ? kUnit : 0);
    }
  }

  __device__ void multiply(int step) {
    const int group_row = fragment::c_row(lane_), member = lane_ % 4;
    const unsigned char* rows = rows_of(step) + group_row * kRowBytes + member * 8;
    const unsigned char* weights = weights_of(step) + (warp_ * kColumnTiles * 8 + group_row) * Weights::kStride +
                                   member * 4 * Weights::kBytes;
    for (int k = 0; k < kStep && step * kStep + k < call_.width; k += kInputs) {
      uint32_t b[kColumnTiles][2];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        Weights::read(weights + n * 8 * Weights::kStride + k * Weights::kBytes, b[n]);
      }
#pragma unroll
      for (int m = 0; m < RowTiles; ++m) {
        const uint64_t upper = *reinterpret_cast<const uint64_t*>(rows + m * 16 * kRowBytes + k * 2);
        const uint64_t lower = *reinterpret_cast<const uint64_t*>(rows + (m * 16 + 8) * kRowBytes + k * 2);
        const uint32_t a[4] = {static_cast<uint32_t>(upper), static_cast<uint32_t>(lower),
                               static_cast<uint32_t>(upper >> 32), static_cast<uint32_t>(lower >> 32)};
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) multiply_add<T>(part_[m][n], a, b[n][0], b[n][1]);
      }
      if constexpr (Weights::kHasScales) {
        left_ -= kInputs;
        if (left_ == 0) {
          add_group((step * kStep + k) / call_.group);
          left_ = call_.group;
        }
      }
    }
  }

  // Where a lane's sums are: two outputs beside each other of a tile of 8.
  __device__ int output(int n) const {
    return first_output_ + (warp_ * kColumnTiles + n) * 8 + fragment::c_column(lane_);
  }

  // Multiply the group's sums by its scales, add them to those of all groups.
  __device__ void add_group(int group) {
    const int groups = call_.width / call_.group;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      float scale[2] = {0.0f, 0.0f};
      if (output(n) < call_.outputs) {
        const float* own =
            call_.scale + (static_cast<int64_t>(tile_.matrix) * call_.outputs + output(n)) * groups + group;
        scale[0] = own[0];
        scale[1] = own[groups];
      }
#pragma unroll
      for (int m = 0; m < RowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum_[m][n][i] = __fmaf_rn(part_[m][n][i], scale[i % 2], sum_[m][n][i]);
          part_[m][n][i] = 0.0f;
        }
      }
    }
  }

  __device__ void write() const {
#pragma unroll
    for (int m = 0; m < RowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile_.start + m * 16 + half * 8 + fragment::c_row(lane_);
        if (row >= tile_.stop) continue;
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          if (output(n) >= call_.outputs) continue;
          const float (&sums)[4] = Weights::kHasScales ? sum_[m][n] : part_[m][n];
          const int64_t place = static_cast<int64_t>(row) * call_.outputs + output(n);
          if (call_.out_dtype == kFloat32) {
            float* out = static_cast<float*>(call_.out) + place;
            out[0] = sums[half * 2];
            out[1] = sums[half * 2 + 1];
          } else {
            *reinterpret_cast<uint32_t*>(static_cast<T*>(call_.out) + place) =
                pack2<T>(sums[half * 2], sums[half * 2 + 1]);
          }
        }
      }
    }
  }

  const GroupedCall& call_;
  const Tile tile_;
  const int first_output_, thread_, lane_, warp_;
  int left_;  // inputs of the group that are to come
  float part_[RowTiles][kColumnTiles][4] = {};
  float sum_[RowTiles][kColumnTiles][4] = {};
};

template <class T, class Weights, int RowTiles>
__global__ void __launch_bounds__(kThreads) product_kernel(const GroupedCall call) {
  using Shape = Product<T, Weights, RowTiles>;
  const Tile tile = find_tile<Shape::kRows>(
      call, reinterpret_cast<int*>(dynamic_shared() + Shape::kStages * Shape::kStageBytes));
  if (tile.matrix < 0) return;
  Product<T, Weights, RowTiles>(call, tile).run();
}

template <class T, class Weights, int RowTiles>
cudaError_t launch_tiles(const GroupedCall& call, void* stream) {
  using Shape = Product<T, Weights, RowTiles>;
  // Each matrix with rows has at most one tile that is not full.
  const int tiles = (call.matrices < call.rows ? call.matrices : call.rows) + call.rows / Shape::kRows;
  const dim3 grid(static_cast<unsigned>((call.outputs + kOutputs - 1) / kOutputs), static_cast<unsigned>(tiles));
  return launch(product_kernel<T, Weights, RowTiles>, grid, kThreads, Shape::kSharedBytes, stream, call);
}

template <class T, class Weights>
cudaError_t launch_product(const GroupedCall& call, void* stream) {
  // How many rows each matrix has is not known here; with 16 on average most fit one tile of 16.
  const bool few = call.rows <= 16 * static_cast<int64_t>(call.matrices);
  return few ? launch_tiles<T, Weights, 1>(call, stream) : launch_tiles<T, Weights, 4>(call, stream);
}

template <class T>
cudaError_t launch_weights(const GroupedCall& call, void* stream) {
  switch (call.weight_type) {
    case kWeightNumbers: return launch_product<T, Numbers<T>>(call, stream);
    case kWeightFloat8: return launch_product<T, Codes<T, Float8>>(call, stream);
    case kWeightInt8: return launch_product<T, Codes<T, Int8>>(call, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

extern "C" {

int32_t trunkline_grouped_products(const GroupedCall* call, void* stream) {
  if (call->rows == 0 || call->matrices == 0) return cudaSuccess;
  if (call->width % kInputs != 0 || call->outputs % 8 != 0 || call->group <= 0 || call->group % kInputs != 0 ||
      call->width % call->group != 0 || (call->stops == nullptr && call->matrices != 1) ||
      (call->out_dtype != call->dtype && call->out_dtype != kFloat32)) {
    return cudaErrorInvalidValue;
  }
  switch (call->dtype) {
    case kFloat16: return launch_weights<Fp16>(*call, stream);
    case kBfloat16: return launch_weights<Bf16>(*call, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // extern "C"
}  // namespace trunkline::cuda
