// The inner loops of linear: R rows of x by one panel of 16 outputs, for each weight format.
//
// Every output element is one chain over K in the order of the contract, whatever R is; integer
// sums within a group are exact.
#pragma once

#include "quantize.hpp"

namespace octavo::OCTAVO_ISA {

// Where a tile's 16 columns go.
struct PanelOut {
  float* out;         // first row, first column of the panel
  size_t stride;      // floats from row to row
  const float* bias;  // 16 of them, or null
  int columns;        // columns that exist: 16, or fewer in the last panel
};

template <int R>
OCTAVO_INLINE void store_panel(const PanelOut& to, const F8 (&acc)[R][2]) {
  for (int row = 0; row < R; ++row) {
    F8 low = acc[row][0];
    F8 high = acc[row][1];
    if (to.bias) {
      low = add(low, load(to.bias));
      high = add(high, load(to.bias + 8));
    }
    float* out = to.out + row * to.stride;
    if (to.columns == kPanel) {
      store(out, low);
      store(out + 8, high);
    } else {
      float whole[kPanel];
      store(whole, low);
      store(whole + 8, high);
      memcpy(out, whole, to.columns * sizeof(float));
    }
  }
}

// The rows a tile multiplies, as QuantizedRows lays them out.
template <class T>
struct TileRows {
  const T* quants;
  const float* scales;
  const float* sums;
};

// acc = fma(float(sum_k q * i), d * s, acc), for R rows and 16 outputs.
template <int R>
OCTAVO_INLINE void add_scaled(F8 (&acc)[R][2], const I32x8 (&dot)[R][2], const Half* weight_scales,
                              const float* row_scales) {
  const F8 low = load(weight_scales);
  const F8 high = load(weight_scales + 8);
  for (int row = 0; row < R; ++row) {
    const F8 scale = broadcast(row_scales[row]);
    acc[row][0] = fma(to_float(dot[row][0]), mul(low, scale), acc[row][0]);
    acc[row][1] = fma(to_float(dot[row][1]), mul(high, scale), acc[row][1]);
  }
}

// Ask for the block that a pass over a panel reads next but one.
template <class Block>
OCTAVO_INLINE void prefetch_ahead(const Block& block) {
  constexpr int kBlocks = 2;
  const char* ahead = reinterpret_cast<const char*>(&block + kBlocks);
  for (size_t line = 0; line < sizeof block; line += kAlignment) prefetch(ahead + line);
}

// acc = fma(m, c, acc), for R rows and 16 outputs.
template <int R>
OCTAVO_INLINE void add_mins(F8 (&acc)[R][2], const Half* mins, const float* row_sums) {
  const F8 low = load(mins);
  const F8 high = load(mins + 8);
  for (int row = 0; row < R; ++row) {
    const F8 sum = broadcast(row_sums[row]);
    acc[row][0] = fma(low, sum, acc[row][0]);
    acc[row][1] = fma(high, sum, acc[row][1]);
  }
}

// -- q4m, int16 activations ---------------------------------------------------------------------

template <int R>
OCTAVO_INLINE void q4m_tile(const Q4mBlock* panel, int groups, TileRows<int16_t> rows,
                            const PanelOut& to) {
  F8 acc[R][2];
  for (int row = 0; row < R; ++row) acc[row][0] = acc[row][1] = zero();

  for (int group = 0; group < groups; ++group) {
    const Q4mBlock& block = panel[group];
    prefetch_ahead(block);
    I32x8 dot[R][2];
    for (int row = 0; row < R; ++row) dot[row][0] = dot[row][1] = zero_i32();
OCTAVO_UNROLL(8)
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      const Bytes32 both = load_bytes(block.quants[quad]);
      const Words16 low[2] = {low_even(both), low_odd(both)};
      const Words16 high[2] = {high_even(both), high_odd(both)};
OCTAVO_UNROLL(4)
      for (int row = 0; row < R; ++row) {
        for (int odd = 0; odd < 2; ++odd) {
          const Words16 x = broadcast_pair(rows.quants + row * kGroup + 4 * quad + 2 * odd);
          dot[row][0] = multiply_add(low[odd], x, dot[row][0]);
          dot[row][1] = multiply_add(high[odd], x, dot[row][1]);
        }
      }
    }
    add_scaled<R>(acc, dot, block.scales, rows.scales);
    add_mins<R>(acc, block.mins, rows.sums);
    rows.quants += R * kGroup;
    rows.scales += R;
    rows.sums += R;
  }
  store_panel<R>(to, acc);
}

// -- q4m, int8 activations ----------------------------------------------------------------------

// The nibbles of one block as bytes: [k / 4][n / 8][32], twice the size of Q4mBlock::quants.
constexpr size_t kUnpackedBlock = 2 * sizeof(Q4mBlock::quants);

OCTAVO_INLINE void unpack_panel(const Q4mBlock* panel, int groups, uint8_t* unpacked) {
  for (int group = 0; group < groups; ++group, unpacked += kUnpackedBlock) {
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      const Bytes32 both = load_bytes(panel[group].quants[quad]);
      store_bytes(unpacked + 64 * quad, low_nibbles(both));
      store_bytes(unpacked + 64 * quad + 32, high_nibbles(both));
    }
  }
}

// `unpacked` is the panel's nibbles as bytes, or null to take them from the panel itself.
template <int R, bool kUnpacked>
OCTAVO_INLINE void q4m_rough_tile(const Q4mBlock* panel, const uint8_t* unpacked, int groups,
                                  TileRows<int8_t> rows, const PanelOut& to) {
  F8 acc[R][2];
  for (int row = 0; row < R; ++row) acc[row][0] = acc[row][1] = zero();

  for (int group = 0; group < groups; ++group) {
    const Q4mBlock& block = panel[group];
    if (!kUnpacked) prefetch_ahead(block);
    I16x16 sum[R][2];
    for (int row = 0; row < R; ++row) sum[row][0] = sum[row][1] = zero_i16();
OCTAVO_UNROLL(8)
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      Bytes32 low;
      Bytes32 high;
      if (kUnpacked) {
        low = load_bytes(unpacked + 64 * quad);
        high = load_bytes(unpacked + 64 * quad + 32);
      } else {
        const Bytes32 both = load_bytes(block.quants[quad]);
        low = low_nibbles(both);
        high = high_nibbles(both);
      }
OCTAVO_UNROLL(4)
      for (int row = 0; row < R; ++row) {
        const Bytes32 x = broadcast_quad(rows.quants + row * kGroup + 4 * quad);
        sum[row][0] = multiply_add(low, x, sum[row][0]);
        sum[row][1] = multiply_add(high, x, sum[row][1]);
      }
    }
    I32x8 dot[R][2];
    for (int row = 0; row < R; ++row) {
      dot[row][0] = add_pairs(sum[row][0]);
      dot[row][1] = add_pairs(sum[row][1]);
    }
    add_scaled<R>(acc, dot, block.scales, rows.scales);
    add_mins<R>(acc, block.mins, rows.sums);
    rows.quants += R * kGroup;
    rows.scales += R;
    rows.sums += R;
    if (kUnpacked) unpacked += kUnpackedBlock;
  }
  store_panel<R>(to, acc);
}

// -- q8 -----------------------------------------------------------------------------------------

template <int R>
OCTAVO_INLINE void q8_tile(const Q8Block* panel, int groups, TileRows<int16_t> rows,
                           const PanelOut& to) {
  F8 acc[R][2];
  for (int row = 0; row < R; ++row) acc[row][0] = acc[row][1] = zero();

  for (int group = 0; group < groups; ++group) {
    const Q8Block& block = panel[group];
    prefetch_ahead(block);
    I32x8 dot[R][2];
    for (int row = 0; row < R; ++row) dot[row][0] = dot[row][1] = zero_i32();
OCTAVO_UNROLL(16)
    for (int pair = 0; pair < kGroup / 2; ++pair) {
      const Words16 low = load_widened(block.quants[pair]);
      const Words16 high = load_widened(block.quants[pair] + 16);
OCTAVO_UNROLL(4)
      for (int row = 0; row < R; ++row) {
        const Words16 x = broadcast_pair(rows.quants + row * kGroup + 2 * pair);
        dot[row][0] = multiply_add(low, x, dot[row][0]);
        dot[row][1] = multiply_add(high, x, dot[row][1]);
      }
    }
    add_scaled<R>(acc, dot, block.scales, rows.scales);
    rows.quants += R * kGroup;
    rows.scales += R;
  }
  store_panel<R>(to, acc);
}

// -- f32, f16, bf16 -----------------------------------------------------------------------------

// x is R rows of `width` floats, one after the other; panel is [width][16].
template <int R, class Plain>
OCTAVO_INLINE void plain_tile(const Plain* panel, int width, const float* x, const PanelOut& to) {
  constexpr int kAhead = 1024 / sizeof(Plain);  // a KiB: what a pass over a panel reads soon
  F8 acc[R][2];
  for (int row = 0; row < R; ++row) acc[row][0] = acc[row][1] = zero();
  for (int k = 0; k < width; ++k, panel += kPanel) {
    prefetch(panel + kAhead);
    const F8 low = load(panel);
    const F8 high = load(panel + 8);
OCTAVO_UNROLL(4)
    for (int row = 0; row < R; ++row) {
      const F8 a = broadcast(x[static_cast<size_t>(row) * width + k]);
      acc[row][0] = fma(low, a, acc[row][0]);
      acc[row][1] = fma(high, a, acc[row][1]);
    }
  }
  store_panel<R>(to, acc);
}

}  // namespace octavo::OCTAVO_ISA
