// Activations as integers, a scale per row and group of 32: what quantised weights multiply.
#pragma once

#include "math.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int kRowTile = kRowTiles[sizeof kRowTiles / sizeof *kRowTiles - 1];

// The smallest of kRowTiles that holds `rows`, or the largest.
OCTAVO_INLINE int tile_rows_for(int rows) {
  for (const int tile : kRowTiles) {
    if (tile >= rows) return tile;
  }
  return kRowTile;
}

// Call f(Rows<R>{}) with the R of kRowTiles that `rows` is.
template <int I = 0, class F>
OCTAVO_INLINE void with_tile_rows(int rows, F f) {
  if constexpr (kRowTiles[I] < kRowTile) {
    if (rows > kRowTiles[I]) return with_tile_rows<I + 1>(rows, f);
  }
  f(Rows<kRowTiles[I]>{});
}

// What a row of activations is quantised to. A group's sum of products with its weights stays below
// 2^24 in each, so it converts to float exactly.
struct RoughForQ4m {
  using Quant = int8_t;
  static constexpr float kLargest = 127.0f;
  static constexpr bool kSwapMiddle = false;
  static constexpr bool kOffsets = false;
};
struct ForQ4m {
  using Quant = int16_t;
  static constexpr float kLargest = 32767.0f;
  static constexpr bool kSwapMiddle = true;  // each four stored as 0 2 1 3: q4m's nibbles in words
  static constexpr bool kOffsets = false;
};
struct ForQ8 {
  using Quant = int16_t;
  static constexpr float kLargest = 4095.0f;
  static constexpr bool kSwapMiddle = false;
  static constexpr bool kOffsets = false;
};
// q4's weights are q - 8: its dot products start from -8 * sum(quants).
struct RoughForQ4 : RoughForQ4m {
  static constexpr bool kOffsets = true;
};
struct ForQ4 : ForQ4m {
  static constexpr bool kOffsets = true;
};

// Quantised rows, in tiles of kRowTile rows. The last tile has the R of kRowTiles that holds what is
// left; rows of it that don't exist are zeros.
//
//   quants  tile [group][R][32]     the order in which a pass over a panel reads them
//   scales  tile [group][R]
//   sums    tile [group][R]         scale * sum(quants), what a weight's min multiplies; for q4,
//                                   -8 * sum(quants), the bits of an int32
template <class Kind>
struct QuantizedRows {
  using T = typename Kind::Quant;

  T* quants;
  float* scales;
  float* sums;
  int num_rows;
  int width;

  // Lay out rows in scratch memory.
  QuantizedRows(void* scratch, int num_rows, int width) : num_rows(num_rows), width(width) {
    const size_t padded = num_rows + kMostPaddedRows;
    char* at = static_cast<char*>(scratch);
    quants = reinterpret_cast<T*>(at);
    at += align_up(padded * width * sizeof(T));
    scales = reinterpret_cast<float*>(at);
    at += align_up(padded * groups() * sizeof(float));
    sums = reinterpret_cast<float*>(at);
  }

  int groups() const { return width / kGroup; }
  int rows_in_tile(int tile) const { return tile_rows_for(num_rows - tile * kRowTile); }
};

// One group: s = max|x| / Q, i = rint(x * (Q / max|x|)). A group so small that Q / max|x| overflows
// counts as zeros. A group with an infinity or a NaN becomes NaN: scale and sum carry it on.
template <class Kind>
OCTAVO_INLINE void quantize_group(const float* x, typename Kind::Quant* quants, float* scale,
                                  float* sum) {
  constexpr float kLargestFloat = 0x1.fffffep127f;
  constexpr float largest = Kind::kLargest;
  F8 v[4];
  I32x8 top = zero_i32();
  for (int i = 0; i < 4; ++i) {
    v[i] = load(x + 8 * i);
    top = max(top, magnitude_bits(v[i]));
  }
  const int32_t top_bits = max_lanes(top);
  float magnitude;
  memcpy(&magnitude, &top_bits, sizeof magnitude);

  const float inverse = largest / magnitude;
  const bool finite = magnitude <= kLargestFloat;
  if (!finite || inverse > kLargestFloat) {
    memset(quants, 0, kGroup * sizeof *quants);
    *scale = *sum = finite ? 0.0f : __builtin_nanf("");
    return;
  }
  I32x8 q[4];
  I32x8 total = zero_i32();
  for (int i = 0; i < 4; ++i) {
    q[i] = round_to_int(mul(v[i], broadcast(inverse)));
    total = add(total, q[i]);
    if (Kind::kSwapMiddle) q[i] = swap_middle(q[i]);
  }
  store_narrow(quants, q);
  *scale = magnitude / largest;
  const int32_t whole = sum_lanes(total);
  if (Kind::kOffsets) {
    const int32_t offset = -8 * whole;
    memcpy(sum, &offset, sizeof offset);
  } else {
    *sum = *scale * static_cast<float>(whole);
  }
}

template <class Kind>
OCTAVO_INLINE void quantize_tile(const QuantizedRows<Kind>& to, int tile, const float* x) {
  const int rows = to.rows_in_tile(tile);
  const size_t first = static_cast<size_t>(tile) * kRowTile;
  const size_t per_group = first * to.groups();
  auto* quants = to.quants + first * to.width;
  for (int row = 0; row < rows; ++row) {
    const bool exists = first + row < static_cast<size_t>(to.num_rows);
    const float* from = x + (first + row) * to.width;
    for (int group = 0; group < to.groups(); ++group) {
      const size_t at = static_cast<size_t>(group) * rows + row;
      float* scale = to.scales + per_group + at;
      float* sum = to.sums + per_group + at;
      if (exists) {
        quantize_group<Kind>(from + group * kGroup, quants + at * kGroup, scale, sum);
      } else {
        memset(quants + at * kGroup, 0, kGroup * sizeof *quants);
        *scale = *sum = 0.0f;
      }
    }
  }
}

}  // namespace octavo::OCTAVO_ISA
