// Packing of codes in groups into panels (`GroupForm` in linear.h).

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "common/exports.h"
#include "context.h"
#include "dense_checks.h"
#include "linear_pack.h"

namespace trunkline {
namespace {

// The parts of a weight, as Python hands them over; empty tensors where there is none.
struct GroupTensors {
  TensorView codes;       // uint8 [out, in]
  TensorView scale;       // [out, scales]
  TensorView sub_scale;   // int8 [out, groups]
  TensorView offset;      // like scale
  TensorView sub_offset;  // like sub_scale
  TensorView table;       // uint8 [16]
};

// Throws a ValueError unless `tensor` is a matrix in host memory with these rows and columns, without gaps.
void check_matrix(const TensorView& tensor, const char* name, int64_t rows, int64_t columns, int code, int bits) {
  if (tensor.device().device_type == kDLCPU && tensor.ndim() == 2 && tensor.size(0) == rows &&
      tensor.size(1) == columns && tensor.IsContiguous() && has_dtype(tensor, code, bits)) {
    return;
  }
  TVM_FFI_THROW(ValueError) << name << " is " << described(tensor) << "; expected is a contiguous matrix [" << rows
                            << ", " << columns << "] in host memory";
}

ScaleType scale_type(const TensorView& scale) {
  if (is_float16(scale)) return ScaleType::kFloat16;
  if (is_bfloat16(scale)) return ScaleType::kBFloat16;
  if (is_float32(scale)) return ScaleType::kFloat32;
  TVM_FFI_THROW(ValueError) << "scale is " << described(scale) << "; allowed are float16, bfloat16 and float32";
  return ScaleType::kFloat32;  // not reached
}

// The form of a weight; refuses parts that do not fit each other.
GroupForm group_form(const GroupTensors& from, int64_t parts, int64_t bits, int64_t group, int64_t zero,
                     int64_t floats) {
  require(from.codes.ndim() == 2 && from.scale.ndim() == 2, "codes and scales are matrices");
  const int64_t rows = from.codes.size(0), width = from.codes.size(1), scales = from.scale.size(1);
  check_matrix(from.codes, "codes", rows, width, kDLUInt, 8);
  require(rows % parts == 0, "a gated layer has an even number of rows");
  require(bits == 4 || bits == 6 || bits == 8, "codes have 4, 6 or 8 bits");
  require(group > 0 && group % 16 == 0 && width % group == 0, "rows are whole groups of a multiple of 16 inputs");
  require(zero >= 0 && zero <= 255, "zero is between 0 and 255");
  const int64_t groups = width / group;
  require(scales > 0 && groups % scales == 0, "there is a scale for each of so many groups");
  GroupForm form{};
  form.group = group;
  form.groups_per_scale = groups / scales;
  form.bits = static_cast<int>(bits);
  form.scale_type = scale_type(from.scale);
  form.has_levels = from.sub_scale.numel() > 0;
  form.has_offset = from.offset.numel() > 0;
  form.has_table = from.table.numel() > 0;
  form.zero = static_cast<int>(zero);
  form.is_float = floats != 0;
  require(form.has_levels || form.groups_per_scale == 1, "scales of several groups need a second level");
  const bool plain = bits == 8 && zero == 0 && !form.has_levels && !form.has_offset;
  require(!form.is_float || (plain && form.scale_type == ScaleType::kFloat32),
          "floats of 8 bits have a float32 scale for each group and nothing else");
  const int code = from.scale.dtype().code, scale_bits = from.scale.dtype().bits;
  check_matrix(from.scale, "scale", rows, scales, code, scale_bits);
  if (form.has_offset) check_matrix(from.offset, "offset", rows, scales, code, scale_bits);
  if (form.has_levels) check_matrix(from.sub_scale, "sub_scale", rows, groups, kDLInt, 8);
  if (form.has_levels && form.has_offset) check_matrix(from.sub_offset, "sub_offset", rows, groups, kDLInt, 8);
  if (form.has_table) {
    require(bits == 4 && has_dtype(from.table, kDLUInt, 8) && from.table.numel() == 16, "a table has 16 bytes");
    std::memcpy(form.table, from.table.data_ptr(), 16);
  }
  return form;
}

// Elements [row, column] of a matrix for the rows of a panel, at one column; padded with zeros.
template <class Element>
char* put_lanes(const TensorView& matrix, const PanelPlace& place, int64_t column, char* out) {
  const int64_t stride = matrix.size(1);
  const auto* from = static_cast<const Element*>(matrix.data_ptr()) + place.first * stride + column;
  auto* lanes = reinterpret_cast<Element*>(out);
  for (int64_t i = 0; i < place.count; ++i) lanes[i] = from[i * stride];
  std::fill(lanes + place.count, lanes + place.width, Element{0});
  return out + place.width * static_cast<int64_t>(sizeof(Element));
}

char* put_scales(const GroupForm& form, const TensorView& scales, const PanelPlace& place, int64_t column,
                 char* out) {
  if (form.scale_bytes() == 4) return put_lanes<uint32_t>(scales, place, column, out);
  return put_lanes<uint16_t>(scales, place, column, out);
}

// The next codes of a lane as words; returns the number of words.
int64_t words_of(const GroupForm& form, const uint8_t* codes, uint32_t* words) {
  uint32_t read[4];
  if (form.bits == 6) {
    std::memcpy(read, codes, 16);
    for (int i = 0; i < 3; ++i) words[i] = (read[i] & 0x3f3f3f3fu) | (read[3] >> 2 * i & 0x03030303u) << 6;
    return 3;
  }
  if (form.bits == 4) {
    std::memcpy(read, codes, 8);
    words[0] = (read[0] & 0x0f0f0f0fu) | (read[1] & 0x0f0f0f0fu) << 4;
    return 1;
  }
  std::memcpy(words, codes, 4);
  if (form.is_float) words[0] = (words[0] & 0xff0000ffu) | (words[0] & 0xff00u) << 8 | (words[0] >> 8 & 0xff00u);
  return 1;
}

// The codes of a group, in words.
char* put_codes(const GroupForm& form, const TensorView& codes, const PanelPlace& place, int64_t first,
                char* out) {
  const int64_t stride = codes.size(1), step = form.bits == 8 ? 4 : form.bits == 6 ? 16 : 8;
  const int64_t bytes = form.group * form.bits / 8 * place.width;
  const auto* from = static_cast<const uint8_t*>(codes.data_ptr()) + place.first * stride + first;
  std::memset(out, 0, static_cast<size_t>(bytes));
  for (int64_t row = 0; row < place.count; ++row, from += stride) {
    auto* lane = reinterpret_cast<uint32_t*>(out) + row;
    for (int64_t i = 0; i < form.group; i += step) {
      uint32_t words[3];
      for (int64_t word = 0, count = words_of(form, from + i, words); word < count; ++word, lane += place.width)
        *lane = words[word];
    }
  }
  return out + bytes;
}

void fill_panel(const GroupForm& form, const GroupTensors& from, const PanelPlace& place, char* out) {
  const int64_t scales = from.scale.size(1);
  for (int64_t scale = 0; scale < scales; ++scale) {
    out = put_scales(form, from.scale, place, scale, out);
    if (form.has_offset) out = put_scales(form, from.offset, place, scale, out);
    for (int64_t i = 0; i < form.groups_per_scale; ++i) {
      const int64_t group = scale * form.groups_per_scale + i;
      if (form.has_levels) out = put_lanes<uint8_t>(from.sub_scale, place, group, out);
      if (form.has_levels && form.has_offset) out = put_lanes<uint8_t>(from.sub_offset, place, group, out);
      out = put_codes(form, from.codes, place, group * form.group, out);
    }
  }
}

// Bytes of the panels of a weight; the arguments are those of `linear_pack_groups`.
int64_t linear_groups_bytes(TensorView codes, TensorView scale, TensorView sub_scale, TensorView offset,
                            TensorView sub_offset, TensorView table, int64_t bits, int64_t group, int64_t zero,
                            int64_t floats, int64_t gated) {
  const int64_t parts = gated != 0 ? 2 : 1;
  const GroupForm form =
      group_form({codes, scale, sub_scale, offset, sub_offset, table}, parts, bits, group, zero, floats);
  return parts * padded_lanes(codes.size(0) / parts) * form.lane_bytes(codes.size(1));
}

// Packs a weight in groups into `data` and returns the layer's handle; `data` must live as long as it. `numbers`:
// int64 [7], bits, group, zero, whether codes are floats, type of x, activation, whether inputs are rounded to int8.
int64_t linear_pack_groups(int64_t context, TensorView codes, TensorView scale, TensorView sub_scale,
                           TensorView offset, TensorView sub_offset, TensorView table, TensorView bias,
                           TensorView numbers, TensorView data) {
  std::array<int64_t, 7> given{};
  if (numbers.numel() != 7 || !has_dtype(numbers, kDLInt, 64))
    TVM_FFI_THROW(ValueError) << "numbers are seven int64";
  std::memcpy(given.data(), numbers.data_ptr(), sizeof(given));
  const auto [bits, group, zero, floats, type_of_x, activation, int8_inputs] = given;
  require(floats == 0 || int8_inputs == 0, "floats of 8 bits are not multiplied with rounded inputs");
  if (activation < 0 || activation > static_cast<int64_t>(Activation::kClampedSilu) || type_of_x < 0 ||
      type_of_x >= kDenseTypes) {
    TVM_FFI_THROW(ValueError) << "there is no activation " << activation << " or no type " << type_of_x;
  }
  const int64_t parts = activation == 0 ? 1 : 2;
  const GroupTensors from{codes, scale, sub_scale, offset, sub_offset, table};
  auto layer = std::make_unique<PackedLayer>();
  layer->group_form = group_form(from, parts, bits, group, zero, floats);
  const GroupForm& form = layer->group_form;
  layer->groups = &form;
  layer->type = static_cast<DenseType>(type_of_x);
  layer->form = int8_inputs != 0 ? WeightForm::kGroupsInt8 : WeightForm::kGroups;
  layer->activation = static_cast<Activation>(activation);
  layer->in_features = codes.size(1);
  layer->out_features = codes.size(0) / parts;
  layer->panels = data.data_ptr();
  layer->scale = layer->bias = nullptr;
  check_panel_memory(data, parts * padded_lanes(layer->out_features) * form.lane_bytes(layer->in_features));
  if (bias.numel() > 0) {
    layer->padded_bias = in_lanes(bias, "bias", parts, layer->out_features);
    layer->bias = layer->padded_bias.data();
  }
  const ContextUse use(context);
  const int64_t panels = (layer->out_features + kPanelWidth - 1) / kPanelWidth;
  use.context().pool.run(panels * parts, [&](int64_t unit, int) {
    const PanelPlace place = panel_place(layer->out_features, parts, unit);
    auto* panel = static_cast<char*>(data.data_ptr()) + place.lanes_before * form.lane_bytes(layer->in_features);
    fill_panel(form, from, place, panel);
  });
  return reinterpret_cast<int64_t>(layer.release());
}

}  // namespace
}  // namespace trunkline

TRUNKLINE_EXPORT(linear_groups_bytes, trunkline::linear_groups_bytes)
TRUNKLINE_EXPORT(linear_pack_groups, trunkline::linear_pack_groups)
