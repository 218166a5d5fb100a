// The inner loop of linear on q8g16: q8's, where each half of a group is scaled by itself.
#pragma once

#include "linear_tiles.hpp"

namespace octavo::OCTAVO_ISA {

template <int R>
OCTAVO_INLINE void q8g16_tile(const Q8g16Block* panel, int groups, TileRows<int16_t> rows,
                              const PanelOut& to) {
  constexpr int kHalfPairs = kGroup / 4;
  F8 acc[R][2];
  for (int row = 0; row < R; ++row) acc[row][0] = acc[row][1] = zero();

  for (int group = 0; group < groups; ++group) {
    const Q8g16Block& block = panel[group];
    prefetch_ahead(block);
    for (int half = 0; half < 2; ++half) {
      const int8_t(*quants)[32] = block.quants + half * kHalfPairs;
      const int16_t* x_half = rows.quants + half * 2 * kHalfPairs;
      I32x8 dot[R][2];
      for (int row = 0; row < R; ++row) dot[row][0] = dot[row][1] = zero_i32();
OCTAVO_UNROLL(8)
      for (int pair = 0; pair < kHalfPairs; ++pair) {
        const Words16 low = load_widened(quants[pair]);
        const Words16 high = load_widened(quants[pair] + 16);
OCTAVO_UNROLL(4)
        for (int row = 0; row < R; ++row) {
          const Words16 x = broadcast_pair(x_half + row * kGroup + 2 * pair);
          dot[row][0] = multiply_add(low, x, dot[row][0]);
          dot[row][1] = multiply_add(high, x, dot[row][1]);
        }
      }
      add_scaled<R>(acc, dot, block.scales[half], rows.scales);
    }
    rows.quants += R * kGroup;
    rows.scales += R;
  }
  store_panel<R>(to, acc);
}

}  // namespace octavo::OCTAVO_ISA
