// linear: out = x W^T + bias. Threads claim panels of W; rows of x come in tiles of kRowTile.
#pragma once

#include "linear_tiles.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kMostPanels = 16;      // that a thread claims at once
constexpr size_t kRowBlockBytes = 200000;  // of x, kept in L2 while a claim's panels pass over it

// A matrix product out = x W^T + bias: what a linear op does, or one expert of many.
struct Product {
  int format;           // OctavoFormat
  int activation_bits;  // on q4m and q4
  int width;            // columns of x
  int64_t columns;      // of out
  const void* weight;
  const float* bias;  // or null
  int num_rows;
  const float* x;  // [num_rows][width]
  float* out;      // [num_rows][stride]
  size_t stride;
  void* prepared;  // QuantizedRows, where the weight is quantised: prepare_tile writes, multiply reads
  void* own;       // memory of this thread to prepare kRowsAlone rows in, or null
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

// -- formats ------------------------------------------------------------------------------------

// A quantised format: its blocks, and what rows of x become to meet them.
template <class RowKind, class WeightBlock>
struct Quantized {
  using Kind = RowKind;
  using Block = WeightBlock;
};

// Call f(Quantized<..>{}) with a quantised format's, or return false.
template <class F>
OCTAVO_INLINE bool with_quantized(int format, int activation_bits, F f) {
  const bool rough = activation_bits == 8;
  switch (format) {
    case OCTAVO_FORMAT_Q4:
      rough ? f(Quantized<RoughForQ4, Q4Block>{}) : f(Quantized<ForQ4, Q4Block>{});
      return true;
    case OCTAVO_FORMAT_Q4M:
      rough ? f(Quantized<RoughForQ4m, Q4mBlock>{}) : f(Quantized<ForQ4m, Q4mBlock>{});
      return true;
    case OCTAVO_FORMAT_Q8: f(Quantized<ForQ8, Q8Block>{}); return true;
    case OCTAVO_FORMAT_Q8G16: f(Quantized<ForQ8, Q8g16Block>{}); return true;
    default: return false;
  }
}

// Bytes of 16 rows of a weight.
OCTAVO_INLINE size_t panel_nbytes(const Product& p) {
  const size_t width = p.width;
  size_t nbytes = width * kPanel * (p.format == OCTAVO_FORMAT_F32 ? sizeof(float) : sizeof(Half));
  with_quantized(p.format, p.activation_bits, [&](auto quantized) {
    nbytes = width / kGroup * sizeof(typename decltype(quantized)::Block);
  });
  return nbytes;
}

// Bytes that a row of x takes, prepared; 0 where it is multiplied as it is.
OCTAVO_INLINE size_t prepared_row_nbytes(const Product& p) {
  const size_t width = p.width;
  size_t nbytes = 0;
  with_quantized(p.format, p.activation_bits, [&](auto quantized) {
    using Kind = typename decltype(quantized)::Kind;
    nbytes = width * sizeof(typename Kind::Quant) + width / kGroup * 2 * sizeof(float);
  });
  return nbytes;
}

// -- rows ---------------------------------------------------------------------------------------

OCTAVO_INLINE int num_tiles(const Product& p) {
  return static_cast<int>(ceil_div(p.num_rows, kRowTile));
}

static void prepare_tile(const Product& p, int tile) {
  with_quantized(p.format, p.activation_bits, [&](auto quantized) {
    using Kind = typename decltype(quantized)::Kind;
    quantize_tile(QuantizedRows<Kind>(p.prepared, p.num_rows, p.width), tile, p.x);
  });
}

template <class Kind>
OCTAVO_INLINE TileRows<typename Kind::Quant> tile_rows(const QuantizedRows<Kind>& from,
                                                       int first_row) {
  const size_t per_group = static_cast<size_t>(first_row) * from.groups();
  return {from.quants + static_cast<size_t>(first_row) * from.width, from.scales + per_group,
          from.sums + per_group};
}

// -- panels -------------------------------------------------------------------------------------

OCTAVO_INLINE PanelOut panel_out(const Product& p, int first_row, int rows, int64_t panel) {
  const int64_t column = panel * kPanel;
  return {p.out + static_cast<size_t>(first_row) * p.stride + column, p.stride,
          p.bias ? p.bias + column : nullptr, rows,
          static_cast<int>(smaller_of<int64_t>(kPanel, p.columns - column))};
}

// Call f(panel, first row, rows) for each tile of the output in `panels`: rows in blocks that stay
// in L2, then panels, then the block's tiles.
template <class F>
OCTAVO_INLINE void for_each_tile(const Product& p, Range panels, size_t row_nbytes, F f) {
  const int tiles_in_block = larger_of(1, static_cast<int>(kRowBlockBytes / (row_nbytes * kRowTile)));
  const int block = tiles_in_block * kRowTile;
  for (int block_begin = 0; block_begin < p.num_rows; block_begin += block) {
    const int block_end = smaller_of(p.num_rows, block_begin + block);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      for (int row = block_begin; row < block_end; row += kRowTile) {
        f(panel, row, smaller_of(kRowTile, block_end - row));
      }
    }
  }
}

template <class Kind, class Block>
static void multiply_quantized(const Product& p, Range panels) {
  const QuantizedRows<Kind> x(p.prepared, p.num_rows, p.width);
  const int groups = x.groups();
  const Block* weight = static_cast<const Block*>(p.weight);
  for_each_tile(p, panels, p.width * sizeof(typename Kind::Quant),
                [&](int64_t panel, int row, int rows) {
                  with_tile_rows(rows, [&](auto r) {
                    quantized_tile<decltype(r)::value>(weight + panel * groups, groups,
                                                       tile_rows(x, row),
                                                       panel_out(p, row, rows, panel));
                  });
                });
}

template <class Plain>
static void multiply_plain(const Product& p, Range panels) {
  const size_t width = p.width;
  const Plain* weight = static_cast<const Plain*>(p.weight);
  for_each_tile(p, panels, width * sizeof(float), [&](int64_t panel, int row, int rows) {
    with_tile_rows(rows, [&](auto r) {
      plain_tile<decltype(r)::value>(weight + panel * width * kPanel, p.width, p.x + row * width,
                                     panel_out(p, row, rows, panel));
    });
  });
}

// All rows by the weight's panels [begin, end), when every tile of rows has been prepared.
static void multiply(const Product& p, Range panels) {
  const bool done = with_quantized(p.format, p.activation_bits, [&](auto quantized) {
    using Q = decltype(quantized);
    multiply_quantized<typename Q::Kind, typename Q::Block>(p, panels);
  });
  if (done) return;
  switch (p.format) {
    case OCTAVO_FORMAT_F16: return multiply_plain<Half>(p, panels);
    case OCTAVO_FORMAT_BF16: return multiply_plain<Bf16>(p, panels);
    default: return multiply_plain<float>(p, panels);
  }
}

// The whole product, up to its last phase.
static void run_product(Product p, Worker& worker) {
  if (p.own && p.num_rows <= kRowsAlone) {
    p.prepared = p.own;
    for (int tile = 0; tile < num_tiles(p); ++tile) prepare_tile(p, tile);
  } else if (prepared_row_nbytes(p)) {
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
  p.own = step.own_memory + worker.thread * step.own_nbytes;
  run_product(p, worker);
}

}  // namespace octavo::OCTAVO_ISA
