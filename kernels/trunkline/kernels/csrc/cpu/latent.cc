// Products of each head with a layer of its own: all heads' units in one list.
//
// A layer takes rows that adjoin. One row's heads are read and written where they are; of several rows each head's
// numbers are brought together before the products, and results go back to their rows behind them.

#include "latent.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops.h"

namespace trunkline {
namespace {

constexpr int64_t kRowsPerUnit = 16;

// Calls `body(row)` for all rows, on all threads.
template <class Body>
void for_rows(CpuContext& context, int64_t rows, Body&& body) {
  context.pool.run((rows + kRowsPerUnit - 1) / kRowsPerUnit, [&](int64_t unit, int) {
    const int64_t stop = std::min(rows, (unit + 1) * kRowsPerUnit);
    for (int64_t row = unit * kRowsPerUnit; row < stop; ++row) body(row);
  });
}

}  // namespace

void run_heads(CpuContext& context, const HeadsCall& call) {
  if (call.rows == 0) return;
  const LinearLayer& first = *call.layers[0];
  const int64_t element_bytes = first.type == DenseType::kFloat32 ? 4 : 2;
  const int64_t in_bytes = first.in_features * element_bytes, out_bytes = first.out_features * element_bytes;
  const bool is_alone = call.rows == 1;
  char* x = nullptr;
  char* made = nullptr;
  if (!is_alone) {
    const int64_t x_bytes = (call.heads * call.rows * in_bytes + 63) / 64 * 64;
    x = context.experts.reserve(static_cast<size_t>(x_bytes + call.heads * call.rows * out_bytes));
    made = x + x_bytes;
    for_rows(context, call.rows, [&](int64_t row) {
      for (int64_t head = 0; head < call.heads; ++head) {
        std::memcpy(x + (head * call.rows + row) * in_bytes, call.x + row * call.x_row + head * call.x_head,
                    static_cast<size_t>(in_bytes));
      }
    });
  }
  std::vector<LinearCall> calls(static_cast<size_t>(call.heads));
  for (int64_t head = 0; head < call.heads; ++head) {
    LinearCall& own = calls[static_cast<size_t>(head)];
    own.layer = call.layers[head], own.rows = call.rows;
    own.x = is_alone ? call.x + head * call.x_head : x + head * call.rows * in_bytes;
    own.out = is_alone ? call.out + head * call.out_head : made + head * call.rows * out_bytes;
  }
  run_linears(context, calls.data(), calls.size());
  if (is_alone) return;
  for_rows(context, call.rows, [&](int64_t row) {
    for (int64_t head = 0; head < call.heads; ++head) {
      std::memcpy(call.out + row * call.out_row + head * call.out_head,
                  made + (head * call.rows + row) * out_bytes, static_cast<size_t>(out_bytes));
    }
  });
}

void run_absorb(CpuContext& context, const AbsorbCall& call) {
  const int64_t width = call.rotary_bytes + call.latent_bytes;
  const auto rotary = static_cast<size_t>(call.rotary_bytes), latent = static_cast<size_t>(call.latent_bytes);
  for_rows(context, call.rows, [&](int64_t row) {
    const char* query = call.queries + row * call.heads * call.query_bytes;
    char* to = call.out + row * (call.heads + 1) * width;
    for (int64_t head = 0; head < call.heads; ++head, query += call.query_bytes, to += width) {
      std::memcpy(to, query, rotary);
    }
    std::memcpy(to, call.rotary + row * call.rotary_bytes, rotary);
    std::memcpy(to + rotary, call.latent + row * call.latent_bytes, latent);
  });
  HeadsCall heads{};
  heads.layers = call.layers, heads.heads = call.heads, heads.rows = call.rows;
  heads.x = call.queries + rotary, heads.x_row = call.heads * call.query_bytes, heads.x_head = call.query_bytes;
  heads.out = call.out + rotary, heads.out_row = (call.heads + 1) * width, heads.out_head = width;
  run_heads(context, heads);
}

}  // namespace trunkline
