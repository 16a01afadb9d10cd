// Into latent attention and out of it (`trunkline/kernels/latent.py`): layers that each head has for itself.
//
// Plain data only.
#pragma once

#include <cstdint>

#include "linear.h"

namespace trunkline {

// out[row, head] = layer of the head (x[row, head]), of numbers that adjoin within a head.
struct HeadsCall {
  const LinearLayer* const* layers;  // [heads], all of the same type and widths
  int64_t heads, rows;
  const char* x;
  int64_t x_row, x_head;  // bytes from row to row, from head to head
  char* out;
  int64_t out_row, out_head;
};

// Row by row: for each head the rotary part of its query and its layer of the rest; then the rotary part of the key and
// the latent.
struct AbsorbCall {
  const LinearLayer* const* layers;  // [heads]
  int64_t heads, rows;
  const char* queries;  // [rows, heads, rotary and plain part]
  const char* rotary;   // [rows, rotary]
  const char* latent;   // [rows, latent]
  char* out;            // [rows, heads + 1, rotary and latent]
  int64_t query_bytes, rotary_bytes, latent_bytes;
};

}  // namespace trunkline
