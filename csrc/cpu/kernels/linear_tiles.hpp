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
  int rows;           // rows that exist: R, or fewer in the last tile
  int columns;        // columns that exist: 16, or fewer in the last panel
};

template <int R>
OCTAVO_INLINE void store_panel(const PanelOut& to, const F32x16 (&acc)[R]) {
  for (int row = 0; row < R && row < to.rows; ++row) {
    const F32x16 sum = to.bias ? add(acc[row], load_f32x16(to.bias)) : acc[row];
    float* out = to.out + row * to.stride;
    if (to.columns == kPanel) {
      store(out, sum);
    } else {
      float whole[kPanel];
      store(whole, sum);
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

  void next_group(int rows) {
    quants += rows * kGroup;
    scales += rows;
    sums += rows;
  }
};

template <int R>
OCTAVO_INLINE void clear(F32x16 (&acc)[R]) {
  for (int row = 0; row < R; ++row) acc[row] = zero_f32x16();
}
template <int R>
OCTAVO_INLINE void clear(I32x16 (&dot)[R]) {
  for (int row = 0; row < R; ++row) dot[row] = zero_i32x16();
}

// acc = fma(float(sum_k q * i), d * s, acc), for R rows and 16 outputs.
template <int R>
OCTAVO_INLINE void add_scaled(F32x16 (&acc)[R], const I32x16 (&dot)[R], const Half* weight_scales,
                              const float* row_scales) {
  const F32x16 scales = load_f32x16(weight_scales);
OCTAVO_UNROLL(12)
  for (int row = 0; row < R; ++row) {
    acc[row] = fma(to_float(dot[row]), mul(scales, row_scales[row]), acc[row]);
  }
}

// acc = fma(m, c, acc), for R rows and 16 outputs.
template <int R>
OCTAVO_INLINE void add_mins(F32x16 (&acc)[R], const Half* weight_mins, const float* row_sums) {
  const F32x16 mins = load_f32x16(weight_mins);
OCTAVO_UNROLL(12)
  for (int row = 0; row < R; ++row) acc[row] = fma(mins, row_sums[row], acc[row]);
}

// Ask for the block that a pass over a panel reads soon.
template <class Block>
OCTAVO_INLINE void prefetch_ahead(const Block& block) {
  constexpr int kBlocks = 6;
  const char* ahead = reinterpret_cast<const char*>(&block + kBlocks);
  for (size_t line = 0; line < sizeof block; line += kAlignment) prefetch(ahead + line);
}

// -- dot products of one group ------------------------------------------------------------------

// Where a product takes long, a few rows are summed in several chains each (chains_for).

template <int C, int R>
OCTAVO_INLINE void start_from(const I32x16 (&dot)[R], I32x16 (&chains)[C][R]) {
  for (int c = 0; c < C; ++c) {
    for (int row = 0; row < R; ++row) chains[c][row] = c == 0 ? dot[row] : zero_i32x16();
  }
}

template <int C, int R>
OCTAVO_INLINE void add_up(const I32x16 (&chains)[C][R], I32x16 (&dot)[R]) {
  for (int row = 0; row < R; ++row) {
    dot[row] = chains[0][row];
    for (int c = 1; c < C; ++c) dot[row] = add(dot[row], chains[c][row]);
  }
}

// Each adds to what `dot` holds.

// Nibbles, int16 activations in q4m's order.
template <int R>
OCTAVO_INLINE void dot_nibbles(const uint8_t (*quants)[4 * kPanel], const int16_t* x,
                               I32x16 (&dot)[R]) {
  constexpr int kChains = chains_for(R);
  I32x16 chains[kChains][R];
  start_from(dot, chains);
OCTAVO_UNROLL(4)
  for (int eight = 0; eight < kGroup / 8; ++eight) {
    const Bytes64 both = load_bytes(quants[eight]);
    const Words32 weights[4] = {low_even(both), low_odd(both), high_even(both), high_odd(both)};
OCTAVO_UNROLL(4)
    for (int pair = 0; pair < 4; ++pair) {
      I32x16(&sum)[R] = chains[pair % kChains];
OCTAVO_UNROLL(12)
      for (int row = 0; row < R; ++row) {
        sum[row] = multiply_add(weights[pair], x + row * kGroup + 8 * eight + 2 * pair, sum[row]);
      }
    }
  }
  add_up(chains, dot);
}

// Nibbles, int8 activations.
template <int R>
OCTAVO_INLINE void dot_nibbles(const uint8_t (*quants)[4 * kPanel], const int8_t* x,
                               I32x16 (&dot)[R]) {
  QuadSums sums[R];
  for (int row = 0; row < R; ++row) sums[row] = start_quad_sums(dot[row]);
OCTAVO_UNROLL(4)
  for (int eight = 0; eight < kGroup / 8; ++eight) {
    const Bytes64 both = load_bytes(quants[eight]);
    const Bytes64 low = low_nibbles(both);
OCTAVO_UNROLL(12)
    for (int row = 0; row < R; ++row) {
      sums[row] = multiply_add(low, x + row * kGroup + 8 * eight, sums[row]);
    }
    const Bytes64 high = high_nibbles(both);
OCTAVO_UNROLL(12)
    for (int row = 0; row < R; ++row) {
      sums[row] = multiply_add(high, x + row * kGroup + 8 * eight + 4, sums[row]);
    }
  }
  for (int row = 0; row < R; ++row) dot[row] = end_quad_sums(dot[row], sums[row]);
}

// Bytes, the first `pairs` of two k's. x is R rows of a whole group.
template <int R>
OCTAVO_INLINE void dot_bytes(const int8_t (*quants)[2 * kPanel], int pairs, const int16_t* x,
                             I32x16 (&dot)[R]) {
  constexpr int kChains = chains_for(R);
  I32x16 chains[kChains][R];
  start_from(dot, chains);
OCTAVO_UNROLL(16)
  for (int pair = 0; pair < pairs; ++pair) {
    const Words32 weights = load_widened(quants[pair]);
    I32x16(&sum)[R] = chains[pair % kChains];
OCTAVO_UNROLL(12)
    for (int row = 0; row < R; ++row) {
      sum[row] = multiply_add(weights, x + row * kGroup + 2 * pair, sum[row]);
    }
  }
  add_up(chains, dot);
}

// -- tiles --------------------------------------------------------------------------------------

// T: int16_t or int8_t, what activations were quantised to.
template <int R, class T>
OCTAVO_INLINE void quantized_tile(const Q4mBlock* panel, int groups, TileRows<T> rows,
                                  const PanelOut& to) {
  F32x16 acc[R];
  clear(acc);
  for (int group = 0; group < groups; ++group) {
    const Q4mBlock& block = panel[group];
    prefetch_ahead(block);
    I32x16 dot[R];
    clear(dot);
    dot_nibbles<R>(block.quants, rows.quants, dot);
    add_scaled<R>(acc, dot, block.scales, rows.scales);
    add_mins<R>(acc, block.mins, rows.sums);
    rows.next_group(R);
  }
  store_panel<R>(to, acc);
}

// q - 8 for q: sum_k (q - 8) * i = sum_k q * i - 8 * sum_k i, in integers.
template <int R, class T>
OCTAVO_INLINE void quantized_tile(const Q4Block* panel, int groups, TileRows<T> rows,
                                  const PanelOut& to) {
  F32x16 acc[R];
  clear(acc);
  for (int group = 0; group < groups; ++group) {
    const Q4Block& block = panel[group];
    prefetch_ahead(block);
    I32x16 dot[R];
    for (int row = 0; row < R; ++row) dot[row] = broadcast_i32x16(rows.sums + row);
    dot_nibbles<R>(block.quants, rows.quants, dot);
    add_scaled<R>(acc, dot, block.scales, rows.scales);
    rows.next_group(R);
  }
  store_panel<R>(to, acc);
}

template <int R>
OCTAVO_INLINE void quantized_tile(const Q8Block* panel, int groups, TileRows<int16_t> rows,
                                  const PanelOut& to) {
  F32x16 acc[R];
  clear(acc);
  for (int group = 0; group < groups; ++group) {
    const Q8Block& block = panel[group];
    prefetch_ahead(block);
    I32x16 dot[R];
    clear(dot);
    dot_bytes<R>(block.quants, kGroup / 2, rows.quants, dot);
    add_scaled<R>(acc, dot, block.scales, rows.scales);
    rows.next_group(R);
  }
  store_panel<R>(to, acc);
}

// Each half of a group has its own scale.
template <int R>
OCTAVO_INLINE void quantized_tile(const Q8g16Block* panel, int groups, TileRows<int16_t> rows,
                                  const PanelOut& to) {
  constexpr int kHalf = kGroup / 2;
  F32x16 acc[R];
  clear(acc);
  for (int group = 0; group < groups; ++group) {
    const Q8g16Block& block = panel[group];
    prefetch_ahead(block);
    for (int half = 0; half < 2; ++half) {
      I32x16 dot[R];
      clear(dot);
      dot_bytes<R>(block.quants + half * kHalf / 2, kHalf / 2, rows.quants + half * kHalf, dot);
      add_scaled<R>(acc, dot, block.scales[half], rows.scales);
    }
    rows.next_group(R);
  }
  store_panel<R>(to, acc);
}

// f32, f16, bf16. x is rows of `width` floats, one after the other; panel is [width][16]. Rows of
// the tile that don't exist repeat the last one.
template <int R, class Plain>
OCTAVO_INLINE void plain_tile(const Plain* panel, int width, const float* x, const PanelOut& to) {
  constexpr int kAhead = 1024 / sizeof(Plain);  // a KiB: what a pass over a panel reads soon
  const float* from[R];
  for (int row = 0; row < R; ++row) {
    from[row] = x + static_cast<size_t>(smaller_of(row, to.rows - 1)) * width;
  }
  F32x16 acc[R];
  clear(acc);
  for (int k = 0; k < width; ++k, panel += kPanel) {
    prefetch(panel + kAhead);
    const F32x16 weights = load_f32x16(panel);
OCTAVO_UNROLL(12)
    for (int row = 0; row < R; ++row) acc[row] = fma(weights, from[row][k], acc[row]);
  }
  store_panel<R>(to, acc);
}

}  // namespace octavo::OCTAVO_ISA
