#include "cpu/shared_sum.h"

namespace trunkline {

const SumTable& sum_table(CpuLevel level) { TRUNKLINE_RETURN_AT(level, kSumTable); }

}  // namespace trunkline
