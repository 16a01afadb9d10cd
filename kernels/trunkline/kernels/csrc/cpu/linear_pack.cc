// Packing of a weight into panels (the layout is described in linear.h), and the life of the packed layer.
//
// Loading a model packs all of it, so this runs at the speed of memory: blocks of 64 rows times one cache line are
// transposed, units of a panel go to all threads.

#include "linear_pack.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "common/exports.h"
#include "context.h"
#include "dense_checks.h"

namespace trunkline {
namespace {

// Where a panel's rows come from: rows [first, first + count) of the weight, the rest up to `width` zeros.
struct PanelRows {
  const char* weight;
  int64_t row_bytes;
  int64_t count;
  int width;
};

// Words of the panel: [steps][width]; a word is one element, or a pair of bf16. Steps behind the last input are zero.
// `tiled`: [steps / 16][width / 16][16 steps][16], of 32-bit words.
template <class Word>
void pack_panel(const PanelRows& rows, int64_t in_bytes, int64_t steps, bool tiled, Word* panel) {
  constexpr int64_t kWordBytes = sizeof(Word);
  constexpr int64_t kBlock = 64 / kWordBytes;  // steps of one cache line of the weight
  const int64_t whole = in_bytes / kWordBytes;
  for (int64_t start = 0; start < steps; start += kBlock) {
    Word block[kBlock][kPanelWidth] = {};
    const int64_t count = std::min(kBlock, whole - start);
    for (int64_t row = 0; row < rows.count; ++row) {
      const char* source = rows.weight + row * rows.row_bytes + start * kWordBytes;
      for (int64_t i = 0; i < count; ++i) std::memcpy(&block[i][row], source + i * kWordBytes, kWordBytes);
    }
    if (start + kBlock > whole && in_bytes > whole * kWordBytes) {  // half a pair is left
      for (int64_t row = 0; row < rows.count; ++row) {
        const char* source = rows.weight + row * rows.row_bytes + whole * kWordBytes;
        std::memcpy(&block[whole - start][row], source, static_cast<size_t>(in_bytes - whole * kWordBytes));
      }
    }
    const int64_t run = tiled ? kPanelQuantum : rows.width, taken = std::min(kBlock, steps - start);
    Word* to = panel + start * rows.width;
    for (int64_t lane = 0; lane < rows.width; lane += run) {
      for (int64_t i = 0; i < taken; ++i, to += run) {
        std::memcpy(to, block[i] + lane, static_cast<size_t>(run) * kWordBytes);
      }
    }
  }
}

// Bytes of an output in its panel.
int64_t lane_bytes(WeightForm form, DenseType type, int64_t in_features) {
  if (form == WeightForm::kInt8) return int8_inputs(in_features);
  if (type == DenseType::kFloat32) return in_features * 4;
  return type == DenseType::kFloat16 ? in_features * 2 : (in_features + 1) / 2 * 4;
}

void pack_any(const LinearLayer& layer, const PanelRows& rows, bool tiled, char* panel) {
  const int64_t in_bytes = layer.in_features * weight_bits(layer) / 8;
  const int64_t per_lane = lane_bytes(layer.form, layer.type, layer.in_features);
  if (layer.form == WeightForm::kInt8) {
    pack_panel(rows, in_bytes, per_lane, false, reinterpret_cast<uint8_t*>(panel));
  } else if (layer.type == DenseType::kFloat16) {
    pack_panel(rows, in_bytes, per_lane / 2, false, reinterpret_cast<uint16_t*>(panel));
  } else {
    pack_panel(rows, in_bytes, per_lane / 4, tiled, reinterpret_cast<uint32_t*>(panel));
  }
}

WeightForm weight_form(const TensorView& weight) {
  return has_dtype(weight, kDLInt, 8) ? WeightForm::kInt8 : WeightForm::kPlain;
}

// The type of a plain weight, or `type_of_x` of an int8 one.
DenseType weight_type(const TensorView& weight, int64_t parts, int64_t type_of_x) {
  const bool host = weight.device().device_type == kDLCPU;
  if (!host || weight.ndim() != 2 || weight.size(0) % parts != 0 ||
      (weight.size(1) > 1 && weight.stride(1) != 1)) {
    TVM_FFI_THROW(ValueError) << "weight is " << described(weight) << "; allowed is a matrix in host memory with "
                              << "contiguous rows" << (parts == 2 ? ", an even number of them" : "");
  }
  if (weight.size(1) == 0) TVM_FFI_THROW(ValueError) << "weight is " << described(weight) << "; it has no inputs";
  if (weight_form(weight) == WeightForm::kInt8) {
    if (type_of_x >= 0 && type_of_x < kDenseTypes) return static_cast<DenseType>(type_of_x);
    TVM_FFI_THROW(ValueError) << "an int8 weight is for x of a type, there is no type " << type_of_x;
  }
  if (is_bfloat16(weight)) return DenseType::kBFloat16;
  if (is_float32(weight)) return DenseType::kFloat32;
  if (is_float16(weight)) return DenseType::kFloat16;
  TVM_FFI_THROW(ValueError) << "weight is " << described(weight)
                            << "; allowed are float32, bfloat16 and float16, and int8 with scales";
  return DenseType::kFloat32;  // not reached
}

// Bytes that `linear_pack` needs for a weight.
int64_t linear_packed_bytes(TensorView weight, int64_t gated) {
  const int64_t parts = gated != 0 ? 2 : 1;
  const DenseType type = weight_type(weight, parts, 0);  // an int8 weight is as large whatever x is
  return parts * padded_lanes(weight.size(0) / parts) * lane_bytes(weight_form(weight), type, weight.size(1));
}

void fill_panels(CpuContext& shared, const TensorView& weight, int64_t parts, const LinearLayer& layer,
                 char* data) {
  const int64_t row_bytes = weight.stride(0) * weight_bits(layer) / 8;
  const int64_t per_lane = lane_bytes(layer.form, layer.type, layer.in_features);
  const int64_t panels = (layer.out_features + kPanelWidth - 1) / kPanelWidth;
  shared.pool.run(panels * parts, [&](int64_t unit, int) {
    const PanelPlace place = panel_place(layer.out_features, parts, unit);
    PanelRows rows{};
    rows.weight = static_cast<const char*>(weight.data_ptr()) + place.first * row_bytes;
    rows.row_bytes = row_bytes;
    rows.count = place.count;
    rows.width = place.width;
    pack_any(layer, rows, layer.in_tiles, data + place.lanes_before * per_lane);
  });
}

// Packs `weight` into `data` and returns the layer's handle; `data` must live as long as it. `bias` may be empty;
// `scale` and `type_of_x` are read for an int8 weight.
int64_t linear_pack(int64_t context, TensorView weight, TensorView scale, TensorView bias, int64_t type_of_x,
                    int64_t activation, TensorView data) {
  if (activation < 0 || activation > static_cast<int64_t>(Activation::kClampedSilu)) {
    TVM_FFI_THROW(ValueError) << "there is no activation " << activation;
  }
  const int64_t parts = activation == 0 ? 1 : 2;
  const int64_t bytes = linear_packed_bytes(weight, activation);
  check_panel_memory(data, bytes);
  auto layer = std::make_unique<PackedLayer>();
  layer->type = weight_type(weight, parts, type_of_x);
  layer->form = weight_form(weight);
  layer->activation = static_cast<Activation>(activation);
  layer->in_features = weight.size(1);
  layer->out_features = weight.size(0) / parts;
  layer->panels = data.data_ptr();
  layer->groups = nullptr;
  layer->scale = layer->bias = nullptr;
  if (bias.numel() > 0) {
    layer->padded_bias = in_lanes(bias, "bias", parts, layer->out_features);
    layer->bias = layer->padded_bias.data();
  }
  if (layer->form == WeightForm::kInt8) {
    layer->padded_scale = in_lanes(scale, "scale", parts, layer->out_features);
    layer->scale = layer->padded_scale.data();
  }
  const ContextUse use(context);
  layer->in_tiles = packs_tiles(use.context().level, *layer);
  fill_panels(use.context(), weight, parts, *layer, static_cast<char*>(data.data_ptr()));
  return reinterpret_cast<int64_t>(layer.release());
}

void linear_delete(int64_t handle) { delete reinterpret_cast<PackedLayer*>(handle); }

}  // namespace

std::vector<float> in_lanes(const TensorView& tensor, const char* name, int64_t parts, int64_t out_features) {
  const bool fits = tensor.ndim() == 1 && tensor.size(0) == out_features * parts;
  if (!fits || !is_float32(tensor) || !tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << name << " is " << described(tensor) << "; expected is a contiguous float32 ["
                              << out_features * parts << "]";
  }
  const auto* values = static_cast<const float*>(tensor.data_ptr());
  std::vector<float> lanes(static_cast<size_t>(parts * padded_lanes(out_features)), 0.0f);
  for (int64_t unit = 0; unit < parts * ((out_features + kPanelWidth - 1) / kPanelWidth); ++unit) {
    const PanelPlace place = panel_place(out_features, parts, unit);
    std::copy_n(values + place.first, place.count, lanes.begin() + place.lanes_before);
  }
  return lanes;
}

void check_panel_memory(const TensorView& data, int64_t bytes) {
  if (data.numel() != bytes || !has_dtype(data, kDLUInt, 8) || !data.IsContiguous() ||
      reinterpret_cast<uintptr_t>(data.data_ptr()) % 64 != 0) {
    TVM_FFI_THROW(ValueError) << "data must be an aligned uint8 tensor of " << bytes << " bytes";
  }
}

const char* dense_type_name(DenseType type) {
  return type == DenseType::kFloat32 ? "float32" : type == DenseType::kBFloat16 ? "bfloat16" : "float16";
}

}  // namespace trunkline

TRUNKLINE_EXPORT(linear_packed_bytes, trunkline::linear_packed_bytes)
TRUNKLINE_EXPORT(linear_pack, trunkline::linear_pack)
TRUNKLINE_EXPORT(linear_delete, trunkline::linear_delete)
