#include "cpu_level.h"

namespace trunkline {
namespace {

// As bits, and with each level those below it.
int levels_of_machine() {
#if TRUNKLINE_LEVELS > 1
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return 1;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return 3;
  const bool products = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  return products ? 15 : 7;
#else
  return 1;
#endif
}

}  // namespace

bool runs_here(int64_t level) {
  return level >= 0 && level < 4 && (TRUNKLINE_LEVELS & levels_of_machine()) >> level & 1;
}

CpuLevel best_cpu_level() {
  int level = static_cast<int>(CpuLevel::kAvx512Bf16);
  while (!runs_here(level)) --level;
  return static_cast<CpuLevel>(level);
}

}  // namespace trunkline
