// The inner loops of linear on q4: those of q4m without mins, q - 8 for q.
//
// sum_k (q - 8) * i = sum_k q * i - 8 * sum_k i in integers: a dot product starts from its last term.
#pragma once

#include "linear_tiles.hpp"

namespace octavo::OCTAVO_ISA {

// -8 * sum_k i in each lane. A NaN, which the row's scale is then too, gives some integer.
OCTAVO_INLINE I32x8 offset_of(float row_sum) { return round_to_int(broadcast(-8.0f * row_sum)); }

// -- int16 activations --------------------------------------------------------------------------

template <int R>
OCTAVO_INLINE void q4_tile(const Q4Block* panel, int groups, TileRows<int16_t> rows,
                           const PanelOut& to) {
  F8 acc[R][2];
  for (int row = 0; row < R; ++row) acc[row][0] = acc[row][1] = zero();

  for (int group = 0; group < groups; ++group) {
    const Q4Block& block = panel[group];
    prefetch_ahead(block);
    I32x8 dot[R][2];
    for (int row = 0; row < R; ++row) dot[row][0] = dot[row][1] = offset_of(rows.sums[row]);
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
    rows.quants += R * kGroup;
    rows.scales += R;
    rows.sums += R;
  }
  store_panel<R>(to, acc);
}

// -- int8 activations ---------------------------------------------------------------------------

template <int R>
OCTAVO_INLINE void q4_rough_tile(const Q4Block* panel, int groups, TileRows<int8_t> rows,
                                 const PanelOut& to) {
  F8 acc[R][2];
  for (int row = 0; row < R; ++row) acc[row][0] = acc[row][1] = zero();

  for (int group = 0; group < groups; ++group) {
    const Q4Block& block = panel[group];
    prefetch_ahead(block);
    I16x16 sum[R][2];
    for (int row = 0; row < R; ++row) sum[row][0] = sum[row][1] = zero_i16();
OCTAVO_UNROLL(8)
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      const Bytes32 both = load_bytes(block.quants[quad]);
      const Bytes32 low = low_nibbles(both);
      const Bytes32 high = high_nibbles(both);
OCTAVO_UNROLL(4)
      for (int row = 0; row < R; ++row) {
        const Bytes32 x = broadcast_quad(rows.quants + row * kGroup + 4 * quad);
        sum[row][0] = multiply_add(low, x, sum[row][0]);
        sum[row][1] = multiply_add(high, x, sum[row][1]);
      }
    }
    I32x8 dot[R][2];
    for (int row = 0; row < R; ++row) {
      const I32x8 offset = offset_of(rows.sums[row]);
      dot[row][0] = add(add_pairs(sum[row][0]), offset);
      dot[row][1] = add(add_pairs(sum[row][1]), offset);
    }
    add_scaled<R>(acc, dot, block.scales, rows.scales);
    rows.quants += R * kGroup;
    rows.scales += R;
    rows.sums += R;
  }
  store_panel<R>(to, acc);
}

}  // namespace octavo::OCTAVO_ISA
