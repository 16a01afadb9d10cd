// Sums of equally long arrays, element by element: what an all-reduce computes. One table per level.
#pragma once

#include <cstdint>

#include "cpu/cpu_level.h"

namespace trunkline {

enum class ElementType : uint32_t { kFloat32, kBFloat16, kFloat16, kFloat64, kBytes };

static constexpr int64_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat32: return 4;
    case ElementType::kBFloat16:
    case ElementType::kFloat16: return 2;
    case ElementType::kFloat64: return 8;
    case ElementType::kBytes: break;
  }
  return 1;
}

// `out` = sources[0] + sources[1] + ..., from left to right, rounded once; `out` may be one of the sources.
using SumFunction = void (*)(const void* const* sources, int count, void* out, int64_t elements);

struct SumTable {
  SumFunction by_type[4];
};

namespace portable {
extern const SumTable kSumTable;
}
namespace avx2 {
extern const SumTable kSumTable;
}
namespace avx512 {
extern const SumTable kSumTable;
}
namespace avx512bf16 {
extern const SumTable kSumTable;
}
namespace amx {
using avx512bf16::kSumTable;
}

const SumTable& sum_table(CpuLevel level);

}  // namespace trunkline
