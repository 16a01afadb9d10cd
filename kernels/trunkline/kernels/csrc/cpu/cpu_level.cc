#include "cpu_level.h"

#if TRUNKLINE_LEVELS & 16
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace trunkline {
namespace {

#if TRUNKLINE_LEVELS & 16
// Whether there are matrix registers for bfloat16 and the kernel lets this process use them. It has to be asked once,
// for all threads and processes that come from this one: their 8 KB of a thread's state are not saved otherwise.
bool may_use_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBFloat16 = 1u << 22, kTiles = 1u << 24;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBFloat16) == 0 || (d & kTiles) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

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
  if (!products) return 7;
#if TRUNKLINE_LEVELS & 16
  if (may_use_tiles()) return 31;
#endif
  return 15;
#else
  return 1;
#endif
}

}  // namespace

bool runs_here(int64_t level) {
  return level >= 0 && level < 5 && (TRUNKLINE_LEVELS & levels_of_machine()) >> level & 1;
}

CpuLevel best_cpu_level() {
  int level = static_cast<int>(CpuLevel::kAmx);
  while (!runs_here(level)) --level;
  return static_cast<CpuLevel>(level);
}

}  // namespace trunkline
