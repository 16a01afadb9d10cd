// The hardware operations of csrc/cuda/device/primitives.cuh for the emulated device, written from the PTX
// manual's tables of fragments and not from fragments.h, which they are here to check.
#pragma once

#include "cuda_runtime.h"

namespace trunkline::cuda {

constexpr int kWarpLanes = emulation::kLanes;

struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

template <class To, class From>
To bit_copy(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return bit_copy<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(Fp16 x) { return static_cast<float>(bit_copy<_Float16>(x.bits)); }

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline Fp16 from_float<Fp16>(float x) {
  return Fp16{bit_copy<uint16_t>(static_cast<_Float16>(x))};
}
template <>
inline Bf16 from_float<Bf16>(float x) {
  const uint32_t bits = bit_copy<uint32_t>(x);
  if (std::isnan(x)) return Bf16{0x7fff};
  return Bf16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <class T>
uint32_t pack2(float low, float high) {
  return static_cast<uint32_t>(from_float<T>(high).bits) << 16 | from_float<T>(low).bits;
}

inline unsigned char* dynamic_shared() { return emulation::block().shared(); }

inline void check_alignment(const void* address, uintptr_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) emulation::fail("a misaligned address");
}

inline void copy_async_16(void* shared, const void* global, int bytes) {
  check_alignment(shared, 16);
  check_alignment(global, 16);
  std::memset(shared, 0xff, 16);
  emulation::block().current().groups.back().push_back({shared, global, bytes});
}
inline void copy_async_commit() { emulation::block().current().groups.emplace_back(); }
template <int Pending>
void copy_async_wait() {
  auto& groups = emulation::block().current().groups;
  while (groups.size() > Pending + 1) {  // the open group is not among the pending ones
    for (const emulation::PendingCopy& copy : groups.front()) {
      std::memset(copy.target, 0, 16);
      std::memcpy(copy.target, copy.source, static_cast<size_t>(copy.bytes));
    }
    groups.erase(groups.begin());
  }
}

template <bool Transposed>
void combine_load_matrices(emulation::Fiber* lanes[32]) {
  uint16_t matrix[4][8][8];
  for (int i = 0; i < 32; ++i) {
    const void* address;
    std::memcpy(&address, lanes[i]->in, sizeof(address));
    std::memcpy(matrix[i / 8][i % 8], address, 16);
  }
  for (int i = 0; i < 32; ++i) {
    uint32_t r[4];
    for (int m = 0; m < 4; ++m) {
      const int a = i / 4, b = i % 4 * 2;
      const uint16_t low = Transposed ? matrix[m][b][a] : matrix[m][a][b];
      const uint16_t high = Transposed ? matrix[m][b + 1][a] : matrix[m][a][b + 1];
      r[m] = static_cast<uint32_t>(high) << 16 | low;
    }
    std::memcpy(lanes[i]->out, r, sizeof(r));
  }
}

template <bool Transposed>
void load_matrices_of(uint32_t (&r)[4], const void* shared) {
  check_alignment(shared, 16);
  emulation::Fiber& fiber = emulation::block().current();
  std::memcpy(fiber.in, &shared, sizeof(shared));
  emulation::block().warp_operation(combine_load_matrices<Transposed>);
  std::memcpy(r, fiber.out, sizeof(r));
}
inline void load_matrices(uint32_t (&r)[4], const void* shared) { load_matrices_of<false>(r, shared); }
inline void load_matrices_transposed(uint32_t (&r)[4], const void* shared) { load_matrices_of<true>(r, shared); }

struct MultiplyInput {
  float c[4];
  uint32_t a[4];
  uint32_t b[2];
};

template <class T>
float half_of(uint32_t pair, int index) {
  return to_float(T{static_cast<uint16_t>(pair >> (16 * index))});
}

// PTX manual, "Matrix Fragments for mma.m16n8k16 with floating point type".
template <class T>
void combine_multiply_add(emulation::Fiber* lanes[32]) {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    MultiplyInput in;
    std::memcpy(&in, lanes[lane]->in, sizeof(in));
    const int group = lane >> 2, member = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
      const int column = member * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      a[row][column] = half_of<T>(in.a[i / 2], i & 1);
    }
    for (int i = 0; i < 4; ++i) b[member * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = half_of<T>(in.b[i / 2], i & 1);
    for (int i = 0; i < 4; ++i) c[i < 2 ? group : group + 8][member * 2 + (i & 1)] = in.c[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      for (int k = 0; k < 16; ++k) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float out[4];
    for (int i = 0; i < 4; ++i) out[i] = c[i < 2 ? lane >> 2 : (lane >> 2) + 8][lane % 4 * 2 + (i & 1)];
    std::memcpy(lanes[lane]->out, out, sizeof(out));
  }
}

template <class T>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::Fiber& fiber = emulation::block().current();
  const MultiplyInput in{{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  std::memcpy(fiber.in, &in, sizeof(in));
  emulation::block().warp_operation(combine_multiply_add<T>);
  std::memcpy(c, fiber.out, sizeof(c));
}

struct Shuffle {
  uint64_t value;
  int mask;
};

inline void combine_shuffle(emulation::Fiber* lanes[32]) {
  for (int lane = 0; lane < 32; ++lane) {
    Shuffle own, other;
    std::memcpy(&own, lanes[lane]->in, sizeof(own));
    std::memcpy(&other, lanes[lane ^ own.mask]->in, sizeof(other));
    if (own.mask != other.mask) emulation::fail("lanes of a warp in different shuffles");
    std::memcpy(lanes[lane]->out, &other.value, sizeof(other.value));
  }
}

inline void combine_pick(emulation::Fiber* lanes[32]) {
  for (int lane = 0; lane < 32; ++lane) {
    Shuffle own, other;
    std::memcpy(&own, lanes[lane]->in, sizeof(own));
    if (own.mask < 0 || own.mask > 31) emulation::fail("a shuffle from a lane that is none");
    std::memcpy(&other, lanes[own.mask]->in, sizeof(other));
    std::memcpy(lanes[lane]->out, &other.value, sizeof(other.value));
  }
}

template <class T>
T shuffled(T x, int mask, void (*combine)(emulation::Fiber* [32])) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  emulation::Fiber& fiber = emulation::block().current();
  Shuffle in{0, mask};
  std::memcpy(&in.value, &x, sizeof(x));
  std::memcpy(fiber.in, &in, sizeof(in));
  emulation::block().warp_operation(combine);
  std::memcpy(&x, fiber.out, sizeof(x));
  return x;
}

template <class T>
T shuffle_xor(T x, int mask) {
  return shuffled(x, mask, combine_shuffle);
}

template <class T>
T shuffle(T x, int lane) {
  return shuffled(x, lane, combine_pick);
}

inline void combine_nothing(emulation::Fiber* [32]) {}
inline void sync_warp() { emulation::block().warp_operation(combine_nothing); }

inline uint32_t bits_of(float x) { return bit_copy<uint32_t>(x); }
inline float float_of(uint32_t bits) { return bit_copy<float>(bits); }

// PTX manual, "prmt", its default mode without copies of a sign.
inline uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t chosen) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = chosen >> (4 * i) & 0xfu;
    if (digit > 7) emulation::fail("a byte that is none of eight");
    result |= static_cast<uint32_t>(bytes >> (8 * digit) & 0xffu) << (8 * i);
  }
  return result;
}

// In float32, where sums and products of the kernels' whole numbers are exact.
template <class T>
uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
  const auto half = [&](int i) { return std::fma(half_of<T>(a, i), half_of<T>(b, i), half_of<T>(c, i)); };
  return pack2<T>(half(0), half(1));
}

// Fibers run one at a time, up to the next barrier or warp operation.
inline void atomic_add_shared(uint32_t* word, uint32_t value) { *word += value; }

inline float exp2_approximate(float x) { return std::exp2(x); }
inline float reciprocal_approximate(float x) { return 1.0f / x; }
inline void sine_cosine(float x, float& sine, float& cosine) {
  sine = std::sin(x);
  cosine = std::cos(x);
}

inline void allow_next_launch() {}
inline void wait_for_launch_before() {}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, void*,
                   const Arguments&... arguments) {
  return emulation::launch(reinterpret_cast<const void*>(kernel), grid, threads, shared_bytes,
                           [&] { kernel(arguments...); });
}

// One launch after the other.
inline bool launches_early() { return false; }

template <class Kernel, class... Arguments>
cudaError_t launch_with(bool, Kernel kernel, const Arguments&... arguments) {
  return launch(kernel, arguments...);
}

template <class Kernel, class... Arguments>
cudaError_t launch_early(Kernel kernel, const Arguments&... arguments) {
  return launch(kernel, arguments...);
}

}  // namespace trunkline::cuda
