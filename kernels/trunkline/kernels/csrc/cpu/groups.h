// Weights as codes in groups, on one level: reading a panel's stream of scales and codes (`GroupForm` in linear.h), and
// the two products over it.
#pragma once

#include "linear_unit.h"
#include "simd_integers.h"

namespace trunkline::TRUNKLINE_NAMESPACE {
namespace {

// Inputs that are read at a time: their codes, unpacked, and scales fit the first-level cache. They are so many units
// (`GroupForm::unit`) at most.
constexpr int kBlockInputs = 256;
constexpr int kUnits = kBlockInputs / 16;
constexpr int kUnitInputs = 32;  // at most

// Inputs of one group for all lanes of a panel, where the panel has them.
struct CodeUnit {
  const uint8_t* words;
  const uint8_t* scale;      // [width], then offsets if there are any, in their type
  const uint8_t* sub_scale;  // likewise, int8; only on two levels
};

// Lanes of scales or offsets in their type.
TRUNKLINE_INLINE Vec load_number(ScaleType type, const uint8_t* from, int lane) {
  if (type == ScaleType::kFloat32) return load(reinterpret_cast<const float*>(from) + lane);
  const uint16_t* half = reinterpret_cast<const uint16_t*>(from) + lane;
  return type == ScaleType::kFloat16 ? load_f16(half) : load_bf16(half);
}

// Lanes of a unit's scales (`number` 0) or offsets (1), of both levels.
TRUNKLINE_INLINE Vec unit_number(const GroupForm& form, const CodeUnit& unit, int number, int width, int lane) {
  const Vec first = load_number(form.scale_type, unit.scale + number * width * form.scale_bytes(), lane);
  if (!form.has_levels) return first;
  return mul(first, load_int8(reinterpret_cast<const int8_t*>(unit.sub_scale) + number * width + lane));
}

// Walks over a panel from its first unit to its last.
class GroupStream {
 public:
  GroupStream(const GroupForm& form, const void* panel, int width)
      : form_(form), at_(static_cast<const uint8_t*>(panel)), width_(width), unit_(form.unit()) {}

  // The next `count` units.
  void next(CodeUnit* units, int count) {
    const long bytes = static_cast<long>(unit_) * form_.bits / 8 * width_;
    for (int i = 0; i < count; ++i) {
      if (inputs_left_ == 0) next_group();
      units[i] = {at_, scale_, sub_scale_};
      at_ += bytes;
      inputs_left_ -= unit_;
    }
  }

  // What comes next.
  const char* at() const { return reinterpret_cast<const char*>(at_); }

 private:
  void next_group() {
    if (groups_left_ == 0) {
      scale_ = at_;
      at_ += width_ * form_.scale_bytes() * form_.numbers();
      groups_left_ = form_.groups_per_scale;
    }
    --groups_left_;
    inputs_left_ = form_.group;
    sub_scale_ = at_;
    if (form_.has_levels) at_ += width_ * form_.numbers();
  }

  const GroupForm& form_;
  const uint8_t* at_;
  const uint8_t* scale_ = nullptr;
  const uint8_t* sub_scale_ = nullptr;
  const int width_, unit_;
  int64_t inputs_left_ = 0;  // of the group
  int64_t groups_left_ = 0;  // of the scale
};

// Calls `take(index, bytes)` for each word of four codes of a unit of 6 bits, in order, for NV vectors of lanes.
template <int NV, class Take>
TRUNKLINE_INLINE void each_of_six_bits(const uint8_t* words, int unit, int width, const Take& take) {
  const Bits low = set1_word(0x3f3f3f3f);
  for (int k = 0; k < unit; k += 16) {
    Bits bytes[NV], rest[NV];  // `rest`: upper two bits of the words so far, those of the last one uppermost
    for (int word = 0; word < 3; ++word, words += width * 4) {
      for (int v = 0; v < NV; ++v) {
        const Bits codes = load_words(words + v * kLanes * 4);
        bytes[v] = bits_and(codes, low);
        rest[v] = word == 0 ? codes : bits_select(low, shift_right(rest[v], 2), codes);
      }
      take(k / 4 + word, bytes);
    }
    for (int v = 0; v < NV; ++v) bytes[v] = bits_and(shift_right(rest[v], 2), low);
    take(k / 4 + 3, bytes);
  }
}

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
    const Vec scale = unit_number(form, unit, 0, width, lane);
    const Vec offset = form.has_offset ? sub(zero(), unit_number(form, unit, 1, width, lane)) : zero();
    float* to = out + lane;
    const auto put_bytes = [&](int, const Bits(&codes)[1]) {
      for (int i = 0; i < 4; ++i, to += width) {
        const Bits code = bits_and(shift_right(codes[0], 8 * i), set1_word(0xff));
        store(to, fma(scale, sub(float_of_integers(code), zero_code), offset));
      }
    };
    for (int word = 0; word < words; ++word) {
      const uint8_t* from = unit.words + (word * width + lane) * 4;
      prefetch(from + kAheadBytes);
      if (form.bits == 6) continue;
      const Bits codes[1] = {load_words(from)};
      if (form.bits == 8) {
        put_bytes(word, codes);
        continue;
      }
      for (int i = 0; i < 8; ++i, to += width) {
        const Vec value = table_floats(values, shift_right(codes[0], i % 4 * 8 + i / 4 * 4));
        store(to, fma(scale, value, offset));
      }
    }
    if (form.bits == 6) each_of_six_bits<1>(unit.words + lane * 4, form.unit(), width, put_bytes);
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
enum class Codes { kBytes, kSixBits, kNibbles, kTable };

// Lines of memory that a tile asks for at each unit, in the order of memory and for the second-level cache: of those
// of the first few may be under way, and asked for in another order they do not look like a stream to the processor,
// which then does not fetch on its own.
struct Ahead {
  const char* at;
  int lines;
};

// MR rows times NV vectors of lanes of some units, added to C, which has rows of a panel's width.
template <Codes kCodes, int MR, int NV>
[[gnu::noinline]] void int8_tile(const GroupForm& form, const Int8Row* rows, int64_t first_unit,
                                 const CodeUnit* units, int count, int lane, int width, float* c, Ahead ahead) {
  constexpr int kPerWord = kCodes == Codes::kBytes ? 4 : 8;
  const int unit = form.unit();
  Vec acc[MR][NV];
  for (int m = 0; m < MR; ++m) {
    for (int v = 0; v < NV; ++v) acc[m][v] = load(c + m * kPanelWidth + v * kLanes);
  }
  for (int u = 0; u < count; ++u) {
    const int64_t index = first_unit + u;
    const uint32_t* x[MR];
    Bits dots[MR][NV];
    for (int m = 0; m < MR; ++m) {
      x[m] = rows[m].codes + index * (unit / 4) * kDotWords;
      for (int v = 0; v < NV; ++v) dots[m][v] = set1_word(static_cast<uint32_t>(rows[m].start[index]));
    }
    for (int line = 0; line < ahead.lines; ++line, ahead.at += 64) prefetch_second(ahead.at);
    const uint8_t* words = units[u].words + lane * 4;
    if constexpr (kCodes == Codes::kSixBits) {
      each_of_six_bits<NV>(words, unit, width, [&](int word, const Bits(&bytes)[NV]) {
        for (int m = 0; m < MR; ++m) {
          for (int v = 0; v < NV; ++v) dots[m][v] = dot_bytes(dots[m][v], bytes[v], x[m] + word * kDotWords);
        }
      });
    }
    for (int k = 0; kCodes != Codes::kSixBits && k < unit; k += kPerWord, words += width * 4) {
      Bits codes[NV];
      for (int v = 0; v < NV; ++v) {
        codes[v] = load_words(words + v * kLanes * 4);
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
      const Vec scale = unit_number(form, units[u], 0, width, lane + v * kLanes);
      for (int m = 0; m < MR; ++m) {
        const Vec factor = set1(rows[m].factor[index]);
        acc[m][v] = fma(mul(float_of_integers(dots[m][v]), factor), scale, acc[m][v]);
      }
    }
    if (!form.has_offset) continue;
    for (int v = 0; v < NV; ++v) {
      const Vec offset = unit_number(form, units[u], 1, width, lane + v * kLanes);
      for (int m = 0; m < MR; ++m) acc[m][v] = fma(set1(-rows[m].sum[index]), offset, acc[m][v]);
    }
  }
  for (int m = 0; m < MR; ++m) {
    for (int v = 0; v < NV; ++v) store(c + m * kPanelWidth + v * kLanes, acc[m][v]);
  }
}

// Rows and vectors of a tile, as many as there are registers for sums.
#if TRUNKLINE_LEVEL >= 2
constexpr int kInt8Rows = 3, kInt8Vectors = 4;
#else
constexpr int kInt8Rows = 2, kInt8Vectors = 2;
#endif

// One tile of rows over all lanes of a panel.
template <Codes kCodes, int MR>
void int8_lanes(const GroupForm& form, const Int8Row* rows, int64_t first_unit, const CodeUnit* units, int count,
                int width, float* c, Ahead ahead) {
  int lane = 0;
  for (; lane + kInt8Vectors * kLanes <= width; lane += kInt8Vectors * kLanes) {
    int8_tile<kCodes, MR, kInt8Vectors>(form, rows, first_unit, units, count, lane, width, c + lane, ahead);
    ahead.at += static_cast<long>(count) * ahead.lines * 64;
  }
  for (; lane < width; lane += kLanes) {
    int8_tile<kCodes, MR, 1>(form, rows, first_unit, units, count, lane, width, c + lane, {nullptr, 0});
  }
}

template <Codes kCodes, int MR = kInt8Rows>
void int8_rows(int count_of_rows, const GroupForm& form, const Int8Row* rows, int64_t first_unit,
               const CodeUnit* units, int count, int width, float* c, Ahead ahead) {
  if constexpr (MR > 1) {
    if (count_of_rows < MR) {
      return int8_rows<kCodes, MR - 1>(count_of_rows, form, rows, first_unit, units, count, width, c, ahead);
    }
  }
  int8_lanes<kCodes, MR>(form, rows, first_unit, units, count, width, c, ahead);
}

// Units whose codes are bytes and whose scales are float32 on one level.
struct UnpackedUnits {
  alignas(64) uint8_t words[kBlockInputs * kPanelWidth];
  alignas(64) float numbers[kUnits][2 * kPanelWidth];
  alignas(64) float first_level[2 * kPanelWidth];
  const uint8_t* first_level_of = nullptr;

  // Codes of 8 bits stay where they are.
  void take(const GroupForm& form, CodeUnit* units, int count, int width) {
    for (int i = 0; i < count; ++i) {
      take_numbers(form, units[i], form.numbers() * width, numbers[i]);
      if (form.bits < 8) {
        uint8_t* own = words + i * form.unit() * kPanelWidth;
        unpack(form, units[i], width, own);
        units[i].words = own;
      }
      units[i].scale = reinterpret_cast<const uint8_t*>(numbers[i]);
    }
  }

  void take_numbers(const GroupForm& form, const CodeUnit& unit, int count, float* out) {
    if (!form.has_levels) return load_numbers(form, unit.scale, count, out);
    if (unit.scale != first_level_of) load_numbers(form, unit.scale, count, first_level);
    first_level_of = unit.scale;
    const auto* second = reinterpret_cast<const int8_t*>(unit.sub_scale);
    for (int lane = 0; lane < count; lane += kLanes)
      store(out + lane, mul(load(first_level + lane), load_int8(second + lane)));
  }

  static void load_numbers(const GroupForm& form, const uint8_t* from, int count, float* out) {
    for (int lane = 0; lane < count; lane += kLanes) store(out + lane, load_number(form.scale_type, from, lane));
  }

  static void unpack(const GroupForm& form, const CodeUnit& unit, int width, uint8_t* out) {
    if (form.bits == 6) {
      for (int lane = 0; lane < width; lane += kLanes) {
        each_of_six_bits<1>(unit.words + lane * 4, form.unit(), width, [&](int word, const Bits(&bytes)[1]) {
          store_words(out + (word * width + lane) * 4, bytes[0]);
        });
      }
      return;
    }
    for (int k = 0; k < form.unit(); k += 8) {
      const uint8_t* from = unit.words + k / 8 * width * 4;
      for (int half = 0; half < 2; ++half, out += width * 4) {
        for (int lane = 0; lane < width; lane += kLanes) {
          Bits bytes = bits_and(shift_right(load_words(from + lane * 4), 4 * half), set1_word(0x0f0f0f0f));
          if (form.has_table) bytes = table_bytes(form.table, bytes);
          store_words(out + lane * 4, bytes);
        }
      }
    }
  }

  static GroupForm form_of(GroupForm form) {
    form.bits = 8;
    form.scale_type = ScaleType::kFloat32;
    form.has_levels = form.has_table = false;
    return form;
  }
};

// Lanes that one pass of a tile takes, in passes over a panel.
TRUNKLINE_INLINE int lane_passes(int width) {
  const int passes = width / (kInt8Vectors * kLanes);
  return passes > 0 ? passes : 1;
}

// Lines that each of `passes` passes over `count` units asks for at each, of all lines in some bytes.
TRUNKLINE_INLINE int lines_each(long bytes, int passes, int count) {
  return static_cast<int>((bytes / 64 + passes * count - 1) / (passes * count));
}

// Tiles of rows that read codes where they lie: for more it is faster to unpack them once for all.
TRUNKLINE_INLINE int tiles_in_place(int bits) {
  if (bits == 6) return kDotWords == 1 ? 2 : 1;
  return bits == 8 ? 1 : 4;
}

// A tile of rows over some units whose codes are packed in the form's own way.
void packed_rows(int count_of_rows, const GroupForm& form, const Int8Row* rows, int64_t first_unit,
                 const CodeUnit* units, int count, int width, float* c, Ahead ahead) {
  if (form.bits == 8)
    return int8_rows<Codes::kBytes>(count_of_rows, form, rows, first_unit, units, count, width, c, ahead);
  if (form.bits == 6)
    return int8_rows<Codes::kSixBits>(count_of_rows, form, rows, first_unit, units, count, width, c, ahead);
  if (form.has_table)
    return int8_rows<Codes::kTable>(count_of_rows, form, rows, first_unit, units, count, width, c, ahead);
  int8_rows<Codes::kNibbles>(count_of_rows, form, rows, first_unit, units, count, width, c, ahead);
}

// A few tiles of rows times a panel: codes and scales are read where they lie.
void multiply_int8_few(int count_of_rows, const Int8Row* rows, const GroupForm& form, const void* panel, int width,
                       int64_t inputs, float* sums) {
  constexpr int kFewUnits = 4;
  GroupStream stream(form, panel, width);
  const int tiles = (count_of_rows + kInt8Rows - 1) / kInt8Rows, passes = lane_passes(width);
  const int64_t all = inputs / form.unit();
  for (int64_t first = 0; first < all; first += kFewUnits) {
    const int count = smaller(kFewUnits, all - first);
    const char* begin = stream.at();
    CodeUnit units[kFewUnits];
    stream.next(units, count);
    Ahead ahead{begin + kAheadBytes, lines_each(stream.at() - begin, passes * tiles, count)};
    for (int tile = 0; tile < tiles; ++tile) {
      const int from = count_of_rows * tile / tiles, to = count_of_rows * (tile + 1) / tiles;
      packed_rows(to - from, form, rows + from, first, units, count, width, sums + from * kPanelWidth, ahead);
      ahead.at += static_cast<long>(passes) * count * ahead.lines * 64;
    }
  }
}

// More rows times a panel: they pass over blocks of units, which are unpacked once, and meanwhile ask for the next
// block.
void multiply_int8_many(int count_of_rows, const Int8Row* rows, const GroupForm& form, const void* panel,
                        int width, int64_t inputs, float* sums) {
  UnpackedUnits unpacked;
  const GroupForm plain = UnpackedUnits::form_of(form);
  GroupStream stream(form, panel, width);
  const int tiles = (count_of_rows + kInt8Rows - 1) / kInt8Rows, passes = lane_passes(width);
  const int64_t all = inputs / form.unit(), most = kBlockInputs / form.unit();
  for (int64_t first = 0; first < all; first += most) {
    const int count = smaller(most, all - first);
    const char* begin = stream.at();
    CodeUnit units[kUnits];
    stream.next(units, count);
    Ahead ahead{stream.at(), lines_each(stream.at() - begin, passes * tiles, count)};
    unpacked.take(form, units, count, width);
    for (int tile = 0; tile < tiles; ++tile) {
      const int from = count_of_rows * tile / tiles, to = count_of_rows * (tile + 1) / tiles;
      int8_rows<Codes::kBytes>(to - from, plain, rows + from, first, units, count, width,
                               sums + from * kPanelWidth, ahead);
      ahead.at += static_cast<long>(passes) * count * ahead.lines * 64;
    }
  }
}

// Rows times a panel. Sums are the same however many rows there are: of integers within a unit, whose result is
// added as a float, units in order.
void multiply_int8(int count_of_rows, const Int8Row* rows, const GroupForm& form, const void* panel, int width,
                   int64_t inputs, float* sums) {
  std::memset(sums, 0, static_cast<size_t>(count_of_rows) * kPanelWidth * sizeof(*sums));
  const bool are_few = count_of_rows <= tiles_in_place(form.bits) * kInt8Rows;
  const auto multiply = are_few ? multiply_int8_few : multiply_int8_many;
  multiply(count_of_rows, rows, form, panel, width, inputs, sums);
}

}  // namespace
}  // namespace trunkline::TRUNKLINE_NAMESPACE
