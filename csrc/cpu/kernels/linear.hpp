// linear: out = x W^T + bias. Threads claim panels of W; rows of x come in tiles of kRowTile.
#pragma once

#include "linear_tiles.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kMostPanels = 16;      // that a thread claims at once
constexpr size_t kRowBlockBytes = 200000;  // of x, kept in L2 while a claim's panels pass over it
constexpr int kUnpackRows = 2 * kRowTile;  // more rows than this repay unpacking a q4m panel first

// A matrix product out = x W^T + bias: what a linear op does, or one expert of many.
struct Product {
  int format;           // OctavoFormat
  int activation_bits;  // on q4m
  int width;            // columns of x
  int64_t columns;      // of out
  const void* weight;
  const float* bias;  // or null
  int num_rows;
  const float* x;  // [num_rows][width]
  float* out;      // [num_rows][stride]
  size_t stride;
  void* prepared;     // rows as the weight's format multiplies them: prepare_tile writes, multiply reads
  uint8_t* unpacked;  // a panel's bytes, one thread's; null to do without
};

// A product of this weight, whose rows and output are still to be named.
OCTAVO_INLINE Product product_of(int format, int activation_bits, int width, const void* weight,
                                 const float* bias) {
  Product p{};
  p.format = format;
  p.activation_bits = activation_bits;
  p.width = width;
  p.weight = weight;
  p.bias = bias;
  return p;
}

// Bytes of 16 rows of a weight.
OCTAVO_INLINE size_t panel_nbytes(int format, int width) {
  switch (format) {
    case OCTAVO_FORMAT_Q4M: return width / kGroup * sizeof(Q4mBlock);
    case OCTAVO_FORMAT_Q8: return width / kGroup * sizeof(Q8Block);
    case OCTAVO_FORMAT_F16:
    case OCTAVO_FORMAT_BF16: return static_cast<size_t>(width) * kPanel * sizeof(Half);
    default: return static_cast<size_t>(width) * kPanel * sizeof(float);
  }
}

// -- preparing rows -----------------------------------------------------------------------------

OCTAVO_INLINE bool wants_prepared_rows(int format) {
  return format == OCTAVO_FORMAT_Q4M || format == OCTAVO_FORMAT_Q8;
}

template <class Kind>
OCTAVO_INLINE QuantizedRows<Kind> quantized_rows(const Product& p) {
  return {p.prepared, p.num_rows, p.width};
}

OCTAVO_INLINE int num_tiles(const Product& p) {
  return static_cast<int>(ceil_div(p.num_rows, kRowTile));
}

static void prepare_tile(const Product& p, int tile) {
  if (p.format == OCTAVO_FORMAT_Q8) return quantize_tile(quantized_rows<ForQ8>(p), tile, p.x);
  if (p.format != OCTAVO_FORMAT_Q4M) return;
  if (p.activation_bits == 8) return quantize_tile(quantized_rows<RoughForQ4m>(p), tile, p.x);
  quantize_tile(quantized_rows<ForQ4m>(p), tile, p.x);
}

// -- multiplying --------------------------------------------------------------------------------

OCTAVO_INLINE PanelOut panel_out(const Product& p, int first_row, int64_t panel) {
  const int64_t column = panel * kPanel;
  return {p.out + static_cast<size_t>(first_row) * p.stride + column, p.stride,
          p.bias ? p.bias + column : nullptr,
          static_cast<int>(smaller_of<int64_t>(kPanel, p.columns - column))};
}

// Call f(panel, first row, rows) for each tile of the output in `panels`: rows in blocks that stay
// in L2, then panels, then the block's tiles. `before_panel` runs once a block and panel.
template <class BeforePanel, class F>
OCTAVO_INLINE void for_each_tile(const Product& p, Range panels, size_t row_nbytes,
                                 BeforePanel before_panel, F f) {
  const int tiles_in_block = larger_of(1, static_cast<int>(kRowBlockBytes / (row_nbytes * kRowTile)));
  const int block = tiles_in_block * kRowTile;
  for (int block_begin = 0; block_begin < p.num_rows; block_begin += block) {
    const int block_end = smaller_of(p.num_rows, block_begin + block);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      before_panel(panel);
      for (int row = block_begin; row < block_end; row += kRowTile) {
        f(panel, row, smaller_of(kRowTile, block_end - row));
      }
    }
  }
}

template <class Kind>
OCTAVO_INLINE TileRows<typename Kind::Quant> tile_rows(const QuantizedRows<Kind>& from,
                                                       int first_row) {
  const size_t per_group = static_cast<size_t>(first_row) * from.groups();
  return {from.quants + static_cast<size_t>(first_row) * from.width, from.scales + per_group,
          from.sums + per_group};
}

// The formats whose tiles want nothing but a panel and quantised rows.
template <class Kind, class Block, class Tile>
OCTAVO_INLINE void multiply_quantized(const Product& p, Range panels, Tile tile) {
  const QuantizedRows<Kind> x = quantized_rows<Kind>(p);
  const int groups = x.groups();
  const Block* weight = static_cast<const Block*>(p.weight);
  for_each_tile(
      p, panels, p.width * sizeof(typename Kind::Quant), [](int64_t) {},
      [&](int64_t panel, int row, int rows) {
        with_rows<kRowTile>(rows, [&](auto r) {
          tile(r, weight + panel * groups, groups, tile_rows(x, row), panel_out(p, row, panel));
        });
      });
}

static __attribute__((noinline)) void multiply_q4m(const Product& p, Range panels) {
  multiply_quantized<ForQ4m, Q4mBlock>(
      p, panels,
      [](auto r, const Q4mBlock* panel, int groups, TileRows<int16_t> rows, const PanelOut& to) {
        q4m_tile<decltype(r)::value>(panel, groups, rows, to);
      });
}

static __attribute__((noinline)) void multiply_q8(const Product& p, Range panels) {
  multiply_quantized<ForQ8, Q8Block>(
      p, panels,
      [](auto r, const Q8Block* panel, int groups, TileRows<int16_t> rows, const PanelOut& to) {
        q8_tile<decltype(r)::value>(panel, groups, rows, to);
      });
}

static __attribute__((noinline)) void multiply_q4m_rough(const Product& p, Range panels) {
  const QuantizedRows<RoughForQ4m> x = quantized_rows<RoughForQ4m>(p);
  const int groups = x.groups();
  const bool unpack = p.unpacked && p.num_rows > kUnpackRows;
  const Q4mBlock* weight = static_cast<const Q4mBlock*>(p.weight);
  for_each_tile(
      p, panels, p.width * sizeof(int8_t),
      [&](int64_t panel) {
        if (unpack) unpack_panel(weight + panel * groups, groups, p.unpacked);
      },
      [&](int64_t panel, int row, int rows) {
        with_rows<kRowTile>(rows, [&](auto r) {
          constexpr int R = decltype(r)::value;
          const Q4mBlock* blocks = weight + panel * groups;
          const PanelOut to = panel_out(p, row, panel);
          if (unpack) {
            q4m_rough_tile<R, true>(blocks, p.unpacked, groups, tile_rows(x, row), to);
          } else {
            q4m_rough_tile<R, false>(blocks, nullptr, groups, tile_rows(x, row), to);
          }
        });
      });
}

template <class Plain>
static __attribute__((noinline)) void multiply_plain(const Product& p, Range panels) {
  const size_t width = p.width;
  const Plain* weight = static_cast<const Plain*>(p.weight);
  for_each_tile(
      p, panels, width * sizeof(float), [](int64_t) {},
      [&](int64_t panel, int row, int rows) {
        with_rows<kRowTile>(rows, [&](auto r) {
          plain_tile<decltype(r)::value>(weight + panel * width * kPanel, p.width,
                                         p.x + row * width, panel_out(p, row, panel));
        });
      });
}

// All rows by the weight's panels [begin, end), when every tile of rows has been prepared.
static void multiply(const Product& p, Range panels) {
  switch (p.format) {
    case OCTAVO_FORMAT_Q4M:
      return p.activation_bits == 8 ? multiply_q4m_rough(p, panels) : multiply_q4m(p, panels);
    case OCTAVO_FORMAT_Q8: return multiply_q8(p, panels);
    case OCTAVO_FORMAT_F16: return multiply_plain<Half>(p, panels);
    case OCTAVO_FORMAT_BF16: return multiply_plain<Bf16>(p, panels);
    default: return multiply_plain<float>(p, panels);
  }
}

// The whole product, up to its last phase.
static void run_product(const Product& p, Worker& worker) {
  if (wants_prepared_rows(p.format)) {
    for_each_row(num_tiles(p), worker, [&](int64_t tile) { prepare_tile(p, static_cast<int>(tile)); });
    end_phase(worker);
  }
  const int64_t panels = ceil_div(p.columns, kPanel);
  const int64_t chunk = claim_chunk(panels, worker, kMostPanels);
  for (Range range{}; claim(worker, panels, chunk, &range);) multiply(p, range);
}

static void linear(const OctavoOp& op, const Step& step, Worker& worker) {
  Product p = product_of(op.format, op.activation_bits, op.in_width, op.weight, op.bias);
  p.columns = op.out_width;
  p.num_rows = rows_of(op, step);
  p.x = op.x;
  p.out = op.out;
  p.stride = op.out_width;
  p.prepared = op.scratch;
  if (op.format == OCTAVO_FORMAT_Q4M && op.activation_bits == 8) {
    const size_t nbytes = static_cast<size_t>(op.in_width / kGroup) * kUnpackedBlock;
    p.unpacked = static_cast<uint8_t*>(quantized_rows<RoughForQ4m>(p).end()) + worker.thread * nbytes;
  }
  run_product(p, worker);
}

}  // namespace octavo::OCTAVO_ISA
