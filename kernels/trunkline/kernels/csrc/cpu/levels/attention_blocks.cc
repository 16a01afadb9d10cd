// Writing tokens into blocks and permuting tiles, at one level.
//
// One pass over a token's heads: norm (optional), rotation, store (PagedAttention §4.3 and §5.1: fused reshape
// and block write). Computed in float32, rounded once.
#include "cpu/attention.h"

#include "cpu/quantised_kv.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// 1 / sqrt(mean of squares + eps).
template <class T>
float inverse_rms(const typename T::Storage* x, long n, float eps) {
  Vec sums = zero();
  long i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = T::load_floats(x + i);
    sums = fma(v, v, sums);
  }
  float sum = reduce_add(sums);
  for (; i < n; ++i) sum += T::to_float(x[i]) * T::to_float(x[i]);
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
}

// One head, in place. `weight` null: no norm. `cos` null: no rotation.
template <class T>
TRUNKLINE_INLINE void prepare_head(typename T::Storage* x, long d, const typename T::Storage* weight, float eps,
                                   const float* cos, const float* sin, long rotary) {
  const float inverse = weight == nullptr ? 1.0f : inverse_rms<T>(x, d, eps);
  const Vec factor = set1(inverse);
  const auto value = [&](long i) {
    const float plain = T::to_float(x[i]);
    return weight == nullptr ? plain : plain * inverse * T::to_float(weight[i]);
  };
  const auto vector = [&](long i) {
    const Vec plain = T::load_floats(x + i);
    return weight == nullptr ? plain : mul(mul(plain, factor), T::load_floats(weight + i));
  };
  const long half = cos == nullptr ? 0 : rotary / 2;
  long i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = vector(i), b = vector(i + half);
    T::store_floats(x + i, fma(a, load(cos + i), mul(b, load(sin + i))));
    T::store_floats(x + i + half, fma(b, load(cos + i + half), mul(a, load(sin + i + half))));
  }
  for (; i < half; ++i) {
    const float a = value(i), b = value(i + half);
    x[i] = T::from_float(a * cos[i] + b * sin[i]);
    x[i + half] = T::from_float(b * cos[i + half] + a * sin[i + half]);
  }
  if (weight == nullptr) return;
  for (i = 2 * half; i + kLanes <= d; i += kLanes) T::store_floats(x + i, vector(i));
  for (; i < d; ++i) x[i] = T::from_float(value(i));
}

template <class T>
const float* widened(const char* factors, int64_t token, long rotary, bool wide, float* to) {
  if (wide) return reinterpret_cast<const float*>(factors) + token * rotary;
  const auto* from = reinterpret_cast<const typename T::Storage*>(factors) + token * rotary;
  long i = 0;
  for (; i + kLanes <= rotary; i += kLanes) store(to + i, T::load_floats(from + i));
  for (; i < rotary; ++i) to[i] = T::to_float(from[i]);
  return to;
}

template <class T>
void write_token(const WriteCall& call, int64_t token, char* scratch) {
  using Storage = typename T::Storage;
  const PoolView& pool = call.pool;
  const long d = pool.head_dim, rotary = call.rotary_dim;
  const float *cos = nullptr, *sin = nullptr;
  if (call.cos != nullptr) {
    float* angles = reinterpret_cast<float*>(scratch);
    cos = widened<T>(call.cos, token, rotary, call.wide_angles, angles);
    sin = widened<T>(call.sin, token, rotary, call.wide_angles, angles + rotary);
  }
  Storage* x = reinterpret_cast<Storage*>(call.qkv) + token * (call.heads + pool.bands * pool.kv_heads) * d;
  const auto* q_weight = reinterpret_cast<const Storage*>(call.q_weight);
  const auto* k_weight = reinterpret_cast<const Storage*>(call.k_weight);
  for (int head = 0; head < call.heads; ++head, x += d) {
    prepare_head<T>(x, d, q_weight, call.eps, cos, sin, rotary);
  }
  Storage* keys = x;
  for (int head = 0; head < pool.kv_heads; ++head, x += d) {
    prepare_head<T>(x, d, k_weight, call.eps, cos, sin, rotary);
  }
  const int32_t slot = call.slots[token];
  if (slot < 0) return;
  const int64_t block = slot / pool.chunk, offset = slot % pool.chunk;
  const int64_t tiles = pool.bands * pool.kv_heads;
  char* to = pool.data + (block * pool.layers + call.layer) * tiles * pool.tile_bytes + offset * pool.row_bytes;
  for (int64_t i = 0; i < tiles; ++i) {  // keys of all heads, then values of all heads
    if constexpr (kIsQuantisedKv<T>) {
      if (const long two = pool.rotary_integers(); two != 0) {
        store_latent_row<T>(keys, two / 2, pool.value_dim, to);
      } else {
        store_byte_row<T>(keys + i * d, d, to + i * pool.tile_bytes);
      }
    } else {
      std::memcpy(to + i * pool.tile_bytes, keys + i * d, static_cast<size_t>(d) * sizeof(Storage));
    }
  }
}

template <class T>
void pack_tile(char* tile, bool is_value, int64_t chunk, int64_t d, char* scratch) {
  using Storage = typename T::Storage;
  const Storage* plain = reinterpret_cast<const Storage*>(tile);
  if (!is_value) {
    pack_keys(plain, chunk, d, reinterpret_cast<typename T::B*>(scratch), chunk);
  } else if constexpr (T::kStep == 2) {
    uint32_t* words = reinterpret_cast<uint32_t*>(scratch);
    for (int64_t pair = 0; pair < chunk / 2; ++pair) {
      interleave(plain + 2 * pair * d, plain + (2 * pair + 1) * d, words + pair * d, d);
    }
  } else {
    return;
  }
  std::memcpy(tile, scratch, static_cast<size_t>(chunk * d) * sizeof(Storage));
}

template <class T>
void unpack_tile(const char* tile, char* plain, bool is_value, int64_t chunk, int64_t d) {
  using Storage = typename T::Storage;
  Storage* to = reinterpret_cast<Storage*>(plain);
  if (!is_value) {
    unpack_keys(reinterpret_cast<const typename T::B*>(tile), chunk, d, to);
  } else if constexpr (T::kStep == 2) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
    for (int64_t pair = 0; pair < chunk / 2; ++pair) {
      split_pairs(words + pair * d, to + 2 * pair * d, to + (2 * pair + 1) * d, d);
    }
  } else {
    std::memcpy(plain, tile, static_cast<size_t>(chunk * d) * sizeof(Storage));
  }
}

template <class Bytes>
void pack_bytes(char* tile, bool is_value, int64_t chunk, int64_t d, char* scratch) {
  pack_byte_tile<Bytes>(tile, is_value, chunk, d, scratch);
  std::memcpy(tile, scratch, static_cast<size_t>(chunk * (d + kScaleBytes)));
}

template <class Bytes>
void unpack_bytes(const char* tile, char* plain, bool is_value, int64_t chunk, int64_t d) {
  unpack_byte_tile<Bytes>(tile, is_value, chunk, d, plain);
}

constexpr BlockTable kTable = {
    {write_token<Float32>, write_token<Float16>, write_token<BFloat16>, write_token<Int8Kv<Float32>>,
     write_token<Int8Kv<Float16>>, write_token<Int8Kv<BFloat16>>, write_token<Float8Kv<Float32>>,
     write_token<Float8Kv<Float16>>, write_token<Float8Kv<BFloat16>>},
    {pack_tile<Float32>, pack_tile<Float16>, pack_tile<BFloat16>, pack_bytes<Int8Bytes>, pack_bytes<Int8Bytes>,
     pack_bytes<Int8Bytes>, pack_bytes<Float8Bytes>, pack_bytes<Float8Bytes>, pack_bytes<Float8Bytes>},
    {unpack_tile<Float32>, unpack_tile<Float16>, unpack_tile<BFloat16>, unpack_bytes<Int8Bytes>,
     unpack_bytes<Int8Bytes>, unpack_bytes<Int8Bytes>, unpack_bytes<Float8Bytes>, unpack_bytes<Float8Bytes>,
     unpack_bytes<Float8Bytes>},
};

}  // namespace

const BlockTable& block_table() { return kTable; }

}  // namespace trunkline::TRUNKLINE_NAMESPACE
