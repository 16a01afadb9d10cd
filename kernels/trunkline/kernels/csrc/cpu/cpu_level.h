// Which compiled level of the kernels runs on this machine.
#pragma once

namespace trunkline {

// The numbers of TRUNKLINE_LEVEL in simd.h.
enum class CpuLevel : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

// The highest level that was compiled and that this processor and its operating system can run.
CpuLevel best_cpu_level();

}  // namespace trunkline
