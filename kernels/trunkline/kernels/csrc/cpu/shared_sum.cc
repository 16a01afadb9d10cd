#include "cpu/shared_sum.h"

namespace trunkline {

const SumTable& sum_table(CpuLevel level) {
#if TRUNKLINE_LEVELS > 1
  switch (level) {
    case CpuLevel::kAvx2: return avx2::kSumTable;
    case CpuLevel::kAvx512: return avx512::kSumTable;
    case CpuLevel::kAvx512Bf16: return avx512bf16::kSumTable;
    case CpuLevel::kPortable: break;
  }
#else
  static_cast<void>(level);
#endif
  return portable::kSumTable;
}

}  // namespace trunkline
