// A packed layer as Python holds it: by a handle; the panels lie in a tensor that Python owns.
#pragma once

#include <vector>

#include "dense_checks.h"
#include "linear.h"

namespace trunkline {

struct PackedLayer : LinearLayer {
  GroupForm group_form;             // what `groups` points to
  std::vector<float> padded_bias;   // what `bias` points to
  std::vector<float> padded_scale;  // what `scale` points to
};

// Bits of one element of the panels.
inline int64_t weight_bits(const LinearLayer& layer) {
  if (layer.groups != nullptr) return layer.groups->bits;
  if (layer.form == WeightForm::kInt8) return 8;
  return layer.type == DenseType::kFloat32 ? 32 : 16;
}

// Lanes of the panels of a layer, or of one part of a gated one.
inline int64_t padded_lanes(int64_t out_features) {
  return (out_features + kPanelQuantum - 1) / kPanelQuantum * kPanelQuantum;
}

// Rows of a weight that become the lanes of a panel.
struct PanelPlace {
  int64_t first;         // row of the weight
  int64_t count;         // rows; lanes behind them are padding
  int width;             // lanes
  int64_t lanes_before;  // of the layer
};

// `unit`: index among the panels' parts; `parts`: 2 if the layer is gated.
inline PanelPlace panel_place(int64_t out_features, int64_t parts, int64_t unit) {
  const int64_t panel = unit / parts, part = unit % parts;
  PanelPlace place{};
  place.first = part * out_features + panel * kPanelWidth;
  place.count = out_features - panel * kPanelWidth;
  if (place.count > kPanelWidth) place.count = kPanelWidth;
  place.width = panel_width(out_features, panel);
  place.lanes_before = parts * panel * kPanelWidth + part * place.width;
  return place;
}

// A value per output, in the order of the panels' lanes; refuses another tensor than float32 [outputs * parts].
std::vector<float> in_lanes(const TensorView& tensor, const char* name, int64_t parts, int64_t out_features);

// Refuses memory that is not `bytes` aligned bytes.
void check_panel_memory(const TensorView& data, int64_t bytes);

const char* dense_type_name(DenseType type);

}  // namespace trunkline
