#include "cpu_level.h"

namespace trunkline {

CpuLevel best_cpu_level() {
#if TRUNKLINE_LEVELS > 1
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return CpuLevel::kPortable;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return CpuLevel::kAvx2;
  const bool products = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  return products ? CpuLevel::kAvx512Bf16 : CpuLevel::kAvx512;
#else
  return CpuLevel::kPortable;
#endif
}

}  // namespace trunkline
