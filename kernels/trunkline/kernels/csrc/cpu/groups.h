// Weights as codes in groups, on one level: reading a panel's stream of scales and codes (`GroupForm` in linear.h), and
// the two products over it.
#pragma once

#include "linear_unit.h"
#include "simd_integers.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// Units (`GroupForm::unit`) that are read at a time: their codes, unpacked, and scales fit the first-level cache.
constexpr int kUnits = 8;
constexpr int kFewUnits = 2;
constexpr int kUnitInputs = 32;  // at most

// Inputs of one group for all lanes of a panel.
struct CodeUnit {
  const uint8_t* words;       // as the panel has them
  const float* scale;         // [width]
  const float* minus_offset;  // [width]; null: none
};

// Reads a panel from its first unit to its last.
class GroupStream {
 public:
  GroupStream(const GroupForm& form, const void* panel, int width)
      : form_(form), at_(static_cast<const uint8_t*>(panel)), width_(width), unit_(form.unit()) {}

  // The next `count` units, at most kUnits; those before are no longer valid.
  void next(CodeUnit* units, int count) {
    const long bytes = static_cast<long>(unit_) * form_.bits / 8 * width_;
    for (int i = 0; i < count; ++i) {
      if (inputs_left_ == 0) {
        const uint8_t* begin = at_;
        read_scales(i);
        // Where codes are, the products ask for what comes; no line may be left out.
        for (; begin < at_; begin += 64) prefetch(begin + kAheadBytes);
      } else if (i == 0 && slot_ > 0) {  // a group goes on
        std::memcpy(scale_[0], scale_[slot_], sizeof(scale_[0]));
        std::memcpy(offset_[0], offset_[slot_], sizeof(offset_[0]));
        slot_ = 0;
      }
      units[i] = {at_, scale_[slot_], form_.has_offset ? offset_[slot_] : nullptr};
      at_ += bytes;
      inputs_left_ -= unit_;
    }
  }

 private:
  void read_numbers(float* out, bool negative) {
    const Vec sign = set1(negative ? -1.0f : 1.0f);
    for (int lane = 0; lane < width_; lane += kLanes) {
      Vec x;
      switch (form_.scale_type) {
        case ScaleType::kFloat16: x = load_f16(reinterpret_cast<const uint16_t*>(at_) + lane); break;
        case ScaleType::kBFloat16: x = load_bf16(reinterpret_cast<const uint16_t*>(at_) + lane); break;
        default: x = load(reinterpret_cast<const float*>(at_) + lane);
      }
      store(out + lane, mul(x, sign));
    }
    at_ += width_ * form_.scale_bytes();
  }

  void read_second_level(const float* first, float* out) {
    for (int lane = 0; lane < width_; lane += kLanes) {
      store(out + lane, mul(load(first + lane), load_int8(reinterpret_cast<const int8_t*>(at_) + lane)));
    }
    at_ += width_;
  }

  void read_scales(int slot) {
    slot_ = slot;
    inputs_left_ = form_.group;
    float* scale = form_.has_levels ? first_scale_ : scale_[slot];
    float* offset = form_.has_levels ? first_offset_ : offset_[slot];
    if (groups_left_ == 0) {
      read_numbers(scale, false);
      if (form_.has_offset) read_numbers(offset, true);
      groups_left_ = form_.groups_per_scale;
    }
    --groups_left_;
    if (!form_.has_levels) return;
    read_second_level(first_scale_, scale_[slot]);
    if (form_.has_offset) read_second_level(first_offset_, offset_[slot]);
  }

  const GroupForm& form_;
  const uint8_t* at_;
  const int width_, unit_;
  int64_t inputs_left_ = 0;  // of the group
  int64_t groups_left_ = 0;  // of the scale
  int slot_ = 0;
  alignas(64) float first_scale_[kPanelWidth], first_offset_[kPanelWidth];
  alignas(64) float scale_[kUnits][kPanelWidth], offset_[kUnits][kPanelWidth];
};

// Exact products: codes become floats.

// Inputs of a block of weights in float32, in the first-level cache.
constexpr int kExactInputs = 64;

// `value(code) - zero` of the codes of 4 bits.
TRUNKLINE_INLINE void code_values(const GroupForm& form, float* values) {
  for (int code = 0; code < 16; ++code) {
    values[code] = static_cast<float>((form.has_table ? form.table[code] : code) - form.zero);
  }
}

// The weights of a unit, `[unit][width]`.
void dequantise(const GroupForm& form, const float* values, const CodeUnit& unit, int width, float* out) {
  const int words = form.unit() * form.bits / 32;
  const Vec zero_code = set1(static_cast<float>(form.zero));
  for (int lane = 0; lane < width; lane += kLanes) {
    const Vec scale = load(unit.scale + lane);
    const Vec offset = unit.minus_offset == nullptr ? zero() : load(unit.minus_offset + lane);
    float* to = out + lane;
    for (int word = 0; word < words; ++word) {
      const uint8_t* from = unit.words + (word * width + lane) * 4;
      const Bits codes = load_words(from);
      prefetch(from + kAheadBytes);
      if (form.bits == 4) {
        for (int i = 0; i < 8; ++i, to += width) {
          const Vec value = table_floats(values, shift_right(codes, i % 4 * 8 + i / 4 * 4));
          store(to, fma(scale, value, offset));
        }
      } else {
        for (int i = 0; i < 4; ++i, to += width) {
          const Bits code = bits_and(shift_right(codes, 8 * i), set1_word(0xff));
          store(to, fma(scale, sub(float_of_integers(code), zero_code), offset));
        }
      }
    }
  }
}

// Rows times a panel, block by block.
void multiply_exact(int rows, const float* a, long lda, const GroupForm& form, const void* panel, int width,
                    int64_t inputs, float* sums) {
  alignas(64) float block[kExactInputs * kPanelWidth];
  float values[16];
  code_values(form, values);
  GroupStream stream(form, panel, width);
  const int unit = form.unit(), tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t start = 0; start < inputs; start += kExactInputs) {
    const int count = smaller(kExactInputs, inputs - start);
    CodeUnit units[kUnits];
    stream.next(units, count / unit);
    for (int i = 0; i < count / unit; ++i) dequantise(form, values, units[i], width, block + i * unit * width);
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
      linear_rows<Float32, 0>(last - first, a + first * lda + start, lda, block, width, count,
                              sums + first * kPanelWidth, start > 0, reinterpret_cast<const char*>(block));
    }
  }
}

// Products with int8 inputs.

// A row that is rounded to int8, in words of 32 bits: integers as `dot_bytes` takes them; by unit their factor, the
// factor times their sum, and minus zero times their sum, as integer.
struct Int8Row {
  const uint32_t* codes;
  const float* factor;
  const float* sum;
  const int32_t* start;

  TRUNKLINE_INLINE Int8Row(const uint32_t* row, int64_t inputs, int64_t units)
      : codes(row),
        factor(reinterpret_cast<const float*>(row + inputs / 4 * kDotWords)),
        sum(factor + units),
        start(reinterpret_cast<const int32_t*>(sum + units)) {}
};

TRUNKLINE_INLINE int64_t int8_row_words(int64_t inputs, int unit) {
  return inputs / 4 * kDotWords + 3 * (inputs / unit);
}

// Groups whose largest magnitude is not above this count as zeros: its inverse would be infinite.
constexpr float kLeastInput = 0x1p-100f;

// Rounds inputs `[count]`, at most 32, to integers; returns their factor, NaN if one is infinite or NaN.
template <class T>
float round_inputs(const typename T::Storage* x, int count, int8_t* out) {
  Vec largest = zero(), check = zero();
  for (int i = 0; i < count; i += kLanes) {
    const Vec part = T::load_floats(x + i);
    largest = max(largest, max(part, sub(zero(), part)));
    check = fma(part, zero(), check);  // not a number of an infinite one
  }
  const float magnitude = reduce_max(largest);
  const bool counts = magnitude > kLeastInput;
  const Vec inverse = set1(counts ? 127.0f / magnitude : 0.0f);
  for (int i = 0; i < count; i += kLanes) store_int8(out + i, mul(T::load_floats(x + i), inverse));
  return (counts ? magnitude * (1.0f / 127.0f) : 0.0f) + reduce_add(check);
}

template <class T>
void round_row(const GroupForm& form, const typename T::Storage* x, int64_t inputs, uint32_t* row) {
  const int unit = form.unit();
  const int64_t units = inputs / unit;
  float* factors = reinterpret_cast<float*>(row + inputs / 4 * kDotWords);
  float* sums = factors + units;
  auto* starts = reinterpret_cast<int32_t*>(sums + units);
  for (int64_t first = 0; first < inputs; first += kUnitInputs) {
    const int count = smaller(kUnitInputs, inputs - first);
    alignas(32) int8_t codes[kUnitInputs];
    const float factor = round_inputs<T>(x + first, count, codes);
    for (int begin = 0; begin < count; begin += unit) {
      int32_t sum = 0;
      for (int i = begin; i < begin + unit; ++i) sum += codes[i];
      const int64_t index = (first + begin) / unit;
      factors[index] = factor;
      sums[index] = factor * static_cast<float>(sum);
      starts[index] = -form.zero * sum;
    }
    uint32_t* words = row + first / 4 * kDotWords;
    if constexpr (kDotWords == 1) {
      std::memcpy(words, codes, static_cast<size_t>(count));
    } else {
      for (int i = 0; i < count; i += 4, words += 2) {
        const int16_t pairs[4] = {codes[i], codes[i + 2], codes[i + 1], codes[i + 3]};
        std::memcpy(words, pairs, 8);
      }
    }
  }
}

// How codes lie in the words that a tile reads.
enum class Codes { kBytes, kNibbles, kTable };

// MR rows times NV vectors of lanes of some units; C in rows of a panel's width.
template <Codes kCodes, bool kFetches, int MR, int NV>
[[gnu::noinline]] void int8_tile(const GroupForm& form, const Int8Row* rows, int64_t first_unit,
                                 const CodeUnit* units, int count, int lane, int width, float* c,
                                 bool accumulate) {
  constexpr int kPerWord = kCodes == Codes::kBytes ? 4 : 8;
  const int unit = form.unit();
  Vec acc[MR][NV];
  for (int m = 0; m < MR; ++m) {
    for (int v = 0; v < NV; ++v) acc[m][v] = accumulate ? load(c + m * kPanelWidth + v * kLanes) : zero();
  }
  for (int u = 0; u < count; ++u) {
    const int64_t index = first_unit + u;
    const uint32_t* x[MR];
    Bits dots[MR][NV];
    for (int m = 0; m < MR; ++m) {
      x[m] = rows[m].codes + index * (unit / 4) * kDotWords;
      for (int v = 0; v < NV; ++v) dots[m][v] = set1_word(static_cast<uint32_t>(rows[m].start[index]));
    }
    const uint8_t* words = units[u].words + lane * 4;
    for (int k = 0; k < unit; k += kPerWord, words += width * 4) {
      Bits codes[NV];
      for (int v = 0; v < NV; ++v) {
        const uint8_t* from = words + v * kLanes * 4;
        codes[v] = load_words(from);
        if (kFetches && (kLanes == 16 || v % (16 / kLanes) == 0)) prefetch(from + kAheadBytes);
      }
      for (int half = 0; half < kPerWord / 4; ++half) {
        for (int v = 0; v < NV; ++v) {
          Bits bytes = codes[v];
          if constexpr (kCodes != Codes::kBytes)
            bytes = bits_and(shift_right(bytes, 4 * half), set1_word(0x0f0f0f0f));
          if constexpr (kCodes == Codes::kTable) bytes = table_bytes(form.table, bytes);
          for (int m = 0; m < MR; ++m)
            dots[m][v] = dot_bytes(dots[m][v], bytes, x[m] + (k / 4 + half) * kDotWords);
        }
      }
    }
    for (int v = 0; v < NV; ++v) {
      const Vec scale = load(units[u].scale + lane + v * kLanes);
      for (int m = 0; m < MR; ++m) {
        const Vec factor = set1(rows[m].factor[index]);
        acc[m][v] = fma(mul(float_of_integers(dots[m][v]), factor), scale, acc[m][v]);
      }
    }
    if (units[u].minus_offset == nullptr) continue;
    for (int v = 0; v < NV; ++v) {
      const Vec offset = load(units[u].minus_offset + lane + v * kLanes);
      for (int m = 0; m < MR; ++m) acc[m][v] = fma(set1(rows[m].sum[index]), offset, acc[m][v]);
    }
  }
  for (int m = 0; m < MR; ++m) {
    for (int v = 0; v < NV; ++v) store(c + m * kPanelWidth + v * kLanes, acc[m][v]);
  }
}

// Rows and vectors of a tile, as many as there are registers for sums of both kinds.
#if TRUNKLINE_LEVEL >= 2
constexpr int kInt8Rows = 3, kInt8Vectors = 4;
#else
constexpr int kInt8Rows = 2, kInt8Vectors = 2;
#endif

// One tile of rows over all lanes of a panel.
template <Codes kCodes, bool kFetches, int MR>
void int8_lanes(const GroupForm& form, const Int8Row* rows, int64_t first_unit, const CodeUnit* units, int count,
                int width, float* c, bool accumulate) {
  int lane = 0;
  for (; lane + kInt8Vectors * kLanes <= width; lane += kInt8Vectors * kLanes) {
    int8_tile<kCodes, kFetches, MR, kInt8Vectors>(form, rows, first_unit, units, count, lane, width, c + lane,
                                                  accumulate);
  }
  for (; lane < width; lane += kLanes) {
    int8_tile<kCodes, kFetches, MR, 1>(form, rows, first_unit, units, count, lane, width, c + lane, accumulate);
  }
}

template <Codes kCodes, bool kFetches>
void int8_rows(int count_of_rows, const GroupForm& form, const Int8Row* rows, int64_t first_unit,
               const CodeUnit* units, int count, int width, float* c, bool accumulate) {
  switch (count_of_rows) {
    case 1: return int8_lanes<kCodes, kFetches, 1>(form, rows, first_unit, units, count, width, c, accumulate);
    case 2: return int8_lanes<kCodes, kFetches, 2>(form, rows, first_unit, units, count, width, c, accumulate);
    default:
      return int8_lanes<kCodes, kFetches, kInt8Rows>(form, rows, first_unit, units, count, width, c, accumulate);
  }
}

// Values of codes of 4 bits as bytes, `[unit / 4][width]` words.
void unpack(const GroupForm& form, const CodeUnit& unit, int width, uint8_t* out) {
  for (int k = 0; k < form.unit(); k += 8) {
    const uint8_t* words = unit.words + k / 8 * width * 4;
    for (int half = 0; half < 2; ++half, out += width * 4) {
      for (int lane = 0; lane < width; lane += kLanes) {
        if (half == 0) prefetch(words + lane * 4 + kAheadBytes);
        Bits bytes = bits_and(shift_right(load_words(words + lane * 4), 4 * half), set1_word(0x0f0f0f0f));
        if (form.has_table) bytes = table_bytes(form.table, bytes);
        store_words(out + lane * 4, bytes);
      }
    }
  }
}

// Rows times a panel, block by block: a tile of rows reads the codes from memory; for more rows they are unpacked
// once. The sums are the same: of integers within a unit, whose result is added as a float, units in order.
void multiply_int8(int count_of_rows, const Int8Row* rows, const GroupForm& form, const void* panel, int width,
                   int64_t inputs, float* sums) {
  alignas(64) uint8_t unpacked[kUnits * kUnitInputs * kPanelWidth];
  GroupStream stream(form, panel, width);
  const int unit = form.unit(), tiles = (count_of_rows + kInt8Rows - 1) / kInt8Rows;
  const bool unpacks = form.bits == 4 && tiles > 1;
  // One tile needs no blocks; the scales that it reads must be near the codes that were asked for.
  const int block = tiles == 1 ? kFewUnits : kUnits;
  for (int64_t first = 0; first < inputs / unit; first += block) {
    const int count = smaller(block, inputs / unit - first);
    CodeUnit units[kUnits];
    stream.next(units, count);
    for (int i = 0; unpacks && i < count; ++i) {
      uint8_t* bytes = unpacked + static_cast<long>(i) * unit * width;
      unpack(form, units[i], width, bytes);
      units[i].words = bytes;
    }
    for (int tile = 0; tile < tiles; ++tile) {
      const int begin = count_of_rows * tile / tiles, end = count_of_rows * (tile + 1) / tiles;
      float* c = sums + begin * kPanelWidth;
      const Int8Row* tile_rows = rows + begin;
      if (unpacks || (form.bits == 8 && tile > 0)) {
        int8_rows<Codes::kBytes, false>(end - begin, form, tile_rows, first, units, count, width, c, first > 0);
      } else if (form.bits == 8) {
        int8_rows<Codes::kBytes, true>(end - begin, form, tile_rows, first, units, count, width, c, first > 0);
      } else if (form.has_table) {
        int8_rows<Codes::kTable, true>(end - begin, form, tile_rows, first, units, count, width, c, first > 0);
      } else {
        int8_rows<Codes::kNibbles, true>(end - begin, form, tile_rows, first, units, count, width, c, first > 0);
      }
    }
  }
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
