// Sums for the shared-memory all-reduce on one level: half types are added in float32 and rounded once, to nearest
// even, subnormal numbers included, so that levels and ranks agree to the last bit.

#include "cpu/shared_sum.h"

#include "cpu/simd.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

constexpr int64_t kBlock = 512;  // elements summed before they are stored: stays in the first-level cache

// How arrays of a type are added to a block of sums (or become one: kFirst) and how sums become the type.
template <class Number>
struct Full {
  using Storage = Number;
  using Sum = Number;
  template <bool kFirst>
  static void accumulate(Sum* __restrict__ sums, const Storage* __restrict__ x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sums[i] = kFirst ? x[i] : sums[i] + x[i];
  }
  static void store(Storage* __restrict__ out, const Sum* __restrict__ sums, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = sums[i];
  }
};

struct BFloat16 {
  using Storage = uint16_t;
  using Sum = float;
  template <bool kFirst>
  static void accumulate(Sum* __restrict__ sums, const Storage* __restrict__ x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sums[i] = kFirst ? float_of_bf16(x[i]) : sums[i] + float_of_bf16(x[i]);
  }
  // Not the processor's conversion, which flushes subnormal numbers; and without a branch, so that the compiler
  // makes vectors of it.
  static void store(Storage* __restrict__ out, const Sum* __restrict__ sums, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = bits_of_float(sums[i]);
      const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      const uint32_t quiet = (bits >> 16) | 0x40u;
      out[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
    }
  }
};

struct Float16 {
  using Storage = uint16_t;
  using Sum = float;
  template <bool kFirst>
  static void accumulate(Sum* __restrict__ sums, const Storage* __restrict__ x, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const Vec value = load_f16(x + i);
      trunkline::TRUNKLINE_NAMESPACE::store(sums + i, kFirst ? value : add(load(sums + i), value));
    }
    for (; i < count; ++i) sums[i] = kFirst ? float_of_f16(x[i]) : sums[i] + float_of_f16(x[i]);
  }
  static void store(Storage* __restrict__ out, const Sum* __restrict__ sums, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store_f16(out + i, load(sums + i));
    for (; i < count; ++i) out[i] = f16_of_float(sums[i]);
  }
};

template <class T>
void sum(const void* const* sources, int count, void* out, int64_t elements) {
  using Storage = typename T::Storage;
  alignas(64) typename T::Sum sums[kBlock];
  for (int64_t at = 0; at < elements; at += kBlock) {
    const int64_t length = elements - at < kBlock ? elements - at : kBlock;
    T::template accumulate<true>(sums, static_cast<const Storage*>(sources[0]) + at, length);
    for (int source = 1; source < count; ++source) {
      T::template accumulate<false>(sums, static_cast<const Storage*>(sources[source]) + at, length);
    }
    T::store(static_cast<Storage*>(out) + at, sums, length);
  }
}

}  // namespace

const SumTable kSumTable = {{sum<Full<float>>, sum<BFloat16>, sum<Float16>, sum<Full<double>>}};

}  // namespace trunkline::TRUNKLINE_NAMESPACE
