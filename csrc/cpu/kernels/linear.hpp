// linear: out = x W^T + bias. Threads claim panels of W; rows of x come in tiles of kRowTile.
#pragma once

#include "linear_tiles.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kMostPanels = 16;      // that a thread claims at once
constexpr size_t kRowBlockBytes = 200000;  // of x, kept in L2 while a claim's panels pass over it

OCTAVO_INLINE PanelOut panel_out(const OctavoOp& op, int first_row, int rows, int64_t panel) {
  const int64_t column = panel * kPanel;
  return {op.out + static_cast<size_t>(first_row) * op.out_width + column,
          static_cast<size_t>(op.out_width), op.bias ? op.bias + column : nullptr, rows,
          static_cast<int>(smaller_of<int64_t>(kPanel, op.out_width - column))};
}

// Call f(panel, first row, rows) for each tile of the output this thread claims: rows in blocks
// that stay in L2, then panels, then the block's tiles.
template <class F>
OCTAVO_INLINE void for_each_tile(const OctavoOp& op, int num_rows, size_t row_nbytes,
                                 Worker& worker, F f) {
  const int64_t panels = ceil_div(op.out_width, kPanel);
  const int64_t chunk = claim_chunk(panels, worker, kMostPanels);
  const int tiles_in_block = larger_of(1, static_cast<int>(kRowBlockBytes / (row_nbytes * kRowTile)));
  const int block = tiles_in_block * kRowTile;
  for (Range range{}; claim(worker, panels, chunk, &range);) {
    for (int block_begin = 0; block_begin < num_rows; block_begin += block) {
      const int block_end = smaller_of(num_rows, block_begin + block);
      for (int64_t panel = range.begin; panel < range.end; ++panel) {
        for (int row = block_begin; row < block_end; row += kRowTile) {
          f(panel, row, smaller_of(kRowTile, block_end - row));
        }
      }
    }
  }
}

template <class Kind>
OCTAVO_INLINE void quantize_rows(const QuantizedRows<Kind>& to, const float* x, Worker& worker) {
  for_each_row(to.num_tiles(), worker,
               [&](int64_t tile) { quantize_tile(to, static_cast<int>(tile), x); });
  end_phase(worker);
}

template <class Kind>
OCTAVO_INLINE TileRows<typename Kind::Quant> tile_rows(const QuantizedRows<Kind>& from,
                                                       int first_row) {
  const size_t per_group = static_cast<size_t>(first_row) * from.groups();
  return {from.quants + static_cast<size_t>(first_row) * from.width, from.scales + per_group,
          from.sums + per_group};
}

// tile(Rows<R>, panel's blocks, groups, rows, where to)
template <class Kind, class Block, class Tile>
OCTAVO_INLINE void linear_quantized(const OctavoOp& op, const Step& step, Worker& worker, Tile tile) {
  const int num_rows = rows_of(op, step);
  const QuantizedRows<Kind> x(op.scratch, num_rows, op.in_width);
  const int groups = x.groups();
  quantize_rows(x, op.x, worker);

  const Block* weight = static_cast<const Block*>(op.weight);
  for_each_tile(op, num_rows, op.in_width * sizeof(typename Kind::Quant), worker,
                [&](int64_t panel, int row, int rows) {
                  with_tile_rows(rows, [&](auto r) {
                    tile(r, weight + panel * groups, groups, tile_rows(x, row),
                         panel_out(op, row, rows, panel));
                  });
                });
}

template <class Kind>
OCTAVO_INLINE void linear_q4m(const OctavoOp& op, const Step& step, Worker& worker) {
  using T = typename Kind::Quant;
  linear_quantized<Kind, Q4mBlock>(
      op, step, worker,
      [](auto r, const Q4mBlock* panel, int groups, const TileRows<T>& rows, const PanelOut& to) {
        q4m_tile<decltype(r)::value>(panel, groups, rows, to);
      });
}

static void linear_q8(const OctavoOp& op, const Step& step, Worker& worker) {
  linear_quantized<ForQ8, Q8Block>(
      op, step, worker,
      [](auto r, const Q8Block* panel, int groups, const TileRows<int16_t>& rows,
         const PanelOut& to) { q8_tile<decltype(r)::value>(panel, groups, rows, to); });
}

template <class Kind>
OCTAVO_INLINE void linear_q4(const OctavoOp& op, const Step& step, Worker& worker) {
  using T = typename Kind::Quant;
  linear_quantized<Kind, Q4Block>(
      op, step, worker,
      [](auto r, const Q4Block* panel, int groups, const TileRows<T>& rows, const PanelOut& to) {
        q4_tile<decltype(r)::value>(panel, groups, rows, to);
      });
}

static void linear_q8g16(const OctavoOp& op, const Step& step, Worker& worker) {
  linear_quantized<ForQ8, Q8g16Block>(
      op, step, worker,
      [](auto r, const Q8g16Block* panel, int groups, const TileRows<int16_t>& rows,
         const PanelOut& to) { q8g16_tile<decltype(r)::value>(panel, groups, rows, to); });
}

template <class Plain>
OCTAVO_INLINE void linear_plain(const OctavoOp& op, const Step& step, Worker& worker) {
  const int num_rows = rows_of(op, step);
  const size_t width = op.in_width;
  const Plain* weight = static_cast<const Plain*>(op.weight);
  for_each_tile(
      op, num_rows, width * sizeof(float), worker, [&](int64_t panel, int row, int rows) {
        with_tile_rows(rows, [&](auto r) {
          plain_tile<decltype(r)::value>(weight + panel * width * kPanel, op.in_width,
                                         op.x + row * width, panel_out(op, row, rows, panel));
        });
      });
}

static void linear(const OctavoOp& op, const Step& step, Worker& worker) {
  switch (op.format) {
    case OCTAVO_FORMAT_Q4:
      return op.activation_bits == 8 ? linear_q4<RoughForQ4>(op, step, worker)
                                     : linear_q4<ForQ4>(op, step, worker);
    case OCTAVO_FORMAT_Q4M:
      return op.activation_bits == 8 ? linear_q4m<RoughForQ4m>(op, step, worker)
                                     : linear_q4m<ForQ4m>(op, step, worker);
    case OCTAVO_FORMAT_Q8: return linear_q8(op, step, worker);
    case OCTAVO_FORMAT_Q8G16: return linear_q8g16(op, step, worker);
    case OCTAVO_FORMAT_F16: return linear_plain<Half>(op, step, worker);
    case OCTAVO_FORMAT_BF16: return linear_plain<Bf16>(op, step, worker);
    default: return linear_plain<float>(op, step, worker);
  }
}

}  // namespace octavo::OCTAVO_ISA
