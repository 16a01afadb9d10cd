// What adapters add to a linear op (`adapters.h`).

#include "adapters.h"

#include <cstring>

#include "ops.h"

namespace trunkline {
namespace {

constexpr int64_t kSlackBytes = 64;  // a vector's lanes behind the last value

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }
int64_t adapter_element_bytes(DenseType type) { return type == DenseType::kFloat32 ? 4 : 2; }

}  // namespace

Addend adapter_addend(CpuContext& context, const LinearLayer& layer, const OpAdapters& adapted, size_t site,
                      const void* x) {
  if (adapted.rows == nullptr) return {};
  const AdaptedRows& rows = *adapted.rows;
  const auto layer_of = [&](const AdaptedRows::Group& group) { return adapted.layer(group.adapter, site); };
  const int64_t element_bytes = adapter_element_bytes(layer.type);
  const int64_t row_bytes = layer.in_features * element_bytes;
  const int64_t width = layer.activation == Activation::kNone ? layer.out_features : 2 * layer.out_features;
  int64_t inner_bytes = 0;
  for (const auto& group : rows.groups) {
    const AdapterLayer own = layer_of(group);
    if (own.down != nullptr) {
      inner_bytes += rounded((group.stop - group.start) * own.down->out_features * element_bytes);
    }
  }
  if (inner_bytes == 0) return {};
  const auto count = static_cast<int64_t>(rows.rows.size());
  const int64_t gathered_bytes = rounded(count * row_bytes), value_bytes = rounded(count * width * 4);
  char* gathered =
      context.adapters.reserve(static_cast<size_t>(gathered_bytes + inner_bytes + value_bytes + kSlackBytes));
  char* inner = gathered + gathered_bytes;
  auto* values = reinterpret_cast<float*>(inner + inner_bytes);
  std::vector<LinearCall> downs, ups;
  for (const auto& group : rows.groups) {
    const AdapterLayer own = layer_of(group);
    const int64_t first = rows.rows[static_cast<size_t>(group.start)], own_rows = group.stop - group.start;
    if (own.down == nullptr) {
      std::memset(values + group.start * width, 0, static_cast<size_t>(own_rows * width * 4));
      continue;
    }
    const auto* from = static_cast<const char*>(x);
    const char* own_x = from + first * row_bytes;
    if (rows.rows[static_cast<size_t>(group.stop - 1)] - first != own_rows - 1) {  // they are not side by side
      own_x = gathered + group.start * row_bytes;
      for (int64_t i = group.start; i < group.stop; ++i) {
        const int64_t row = rows.rows[static_cast<size_t>(i)];
        std::memcpy(gathered + i * row_bytes, from + row * row_bytes, static_cast<size_t>(row_bytes));
      }
    }
    downs.push_back({own.down, own_x, inner, false, own_rows});
    ups.push_back({own.up, inner, values + group.start * width, true, own_rows});
    inner += rounded(own_rows * own.down->out_features * element_bytes);
  }
  run_linears(context, downs.data(), downs.size());
  run_linears(context, ups.data(), ups.size());
  return {values, rows.place.data(), width};
}

Addend adapter_addend(CpuContext& context, const OpAdapters& adapted, const std::vector<AdaptedRun>& runs,
                      int64_t width, DenseType type, const void* x, int64_t rows, std::vector<int32_t>& place) {
  place.assign(static_cast<size_t>(rows), -1);
  int64_t count = 0, inner_bytes = 0;
  for (const AdaptedRun& run : runs) {
    const AdapterLayer own = adapted.layer(run.adapter, run.site);
    if (own.down == nullptr) continue;
    for (int64_t row = run.start; row < run.stop; ++row) {
      place[static_cast<size_t>(row)] = static_cast<int32_t>(count++);
    }
    inner_bytes += rounded((run.stop - run.start) * own.down->out_features * adapter_element_bytes(type));
  }
  if (count == 0) return {};
  char* inner = context.adapters.reserve(static_cast<size_t>(inner_bytes + count * width * 4 + kSlackBytes));
  auto* values = reinterpret_cast<float*>(inner + inner_bytes);
  std::vector<LinearCall> downs, ups;
  for (const AdaptedRun& run : runs) {
    const AdapterLayer own = adapted.layer(run.adapter, run.site);
    if (own.down == nullptr) continue;
    const int64_t own_rows = run.stop - run.start;
    const char* own_x =
        static_cast<const char*>(x) + run.start * own.down->in_features * adapter_element_bytes(type);
    float* own_values = values + place[static_cast<size_t>(run.start)] * width;
    downs.push_back({own.down, own_x, inner, false, own_rows});
    ups.push_back({own.up, inner, own_values, true, own_rows});
    inner += rounded(own_rows * own.down->out_features * adapter_element_bytes(type));
  }
  run_linears(context, downs.data(), downs.size());
  run_linears(context, ups.data(), ups.size());
  return {values, place.data(), width};
}

}  // namespace trunkline
