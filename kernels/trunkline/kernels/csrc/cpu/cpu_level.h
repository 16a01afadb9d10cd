// Which compiled levels of the kernels run on this machine.
#pragma once

#include <cstdint>

namespace trunkline {

// The numbers of TRUNKLINE_LEVEL in simd.h.
enum class CpuLevel : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

// The highest level that was compiled and that this processor and its operating system can run.
CpuLevel best_cpu_level();

// Whether a level was compiled and can run.
bool runs_here(int64_t level);

}  // namespace trunkline

// Returns `what` of a level's namespace: portable::what, avx2::what, and so on. TRUNKLINE_LEVELS has a bit for each
// level that was compiled; the callers' level is one of these.
#define TRUNKLINE_RETURN_AT(level, what) \
  switch (level) {                       \
    TRUNKLINE_CASE_AVX2(what)            \
    TRUNKLINE_CASE_AVX512(what)          \
    TRUNKLINE_CASE_AVX512BF16(what)      \
    TRUNKLINE_CASE_AMX(what)             \
    default: return portable::what;      \
  }
#if TRUNKLINE_LEVELS & 2
#define TRUNKLINE_CASE_AVX2(what) \
  case CpuLevel::kAvx2: return avx2::what;
#else
#define TRUNKLINE_CASE_AVX2(what)
#endif
#if TRUNKLINE_LEVELS & 4
#define TRUNKLINE_CASE_AVX512(what) \
  case CpuLevel::kAvx512: return avx512::what;
#else
#define TRUNKLINE_CASE_AVX512(what)
#endif
#if TRUNKLINE_LEVELS & 8
#define TRUNKLINE_CASE_AVX512BF16(what) \
  case CpuLevel::kAvx512Bf16: return avx512bf16::what;
#else
#define TRUNKLINE_CASE_AVX512BF16(what)
#endif
#if TRUNKLINE_LEVELS & 16
#define TRUNKLINE_CASE_AMX(what) \
  case CpuLevel::kAmx: return amx::what;
#else
#define TRUNKLINE_CASE_AMX(what)
#endif
