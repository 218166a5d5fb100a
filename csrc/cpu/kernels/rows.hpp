// Ops that work on rows one by one and hold no state: embedding, sums, norms, scaled logits, gather.
#pragma once

#include "math.hpp"

namespace octavo::OCTAVO_ISA {

// -- embedding ----------------------------------------------------------------------------------

// The 4-bit integer of output `lane` and input k, in a row of quants that holds k.
OCTAVO_INLINE int nibble_of(const uint8_t* quants, int lane, int k) {
  const uint8_t both = quants[lane * 4 + k % 4];
  return k % 8 < 4 ? both & 15 : both >> 4;
}

// Dequantise row n of a q4m weight: lane n % 16 of panel n / 16.
OCTAVO_INLINE void read_row(const Q4mBlock* weight, int n, int width, float* out) {
  const int groups = width / kGroup;
  const int lane = n % kPanel;
  const Q4mBlock* panel = weight + static_cast<size_t>(n / kPanel) * groups;
  for (int k = 0; k < width; ++k) {
    const Q4mBlock& block = panel[k / kGroup];
    const int quant = nibble_of(block.quants[k % kGroup / 8], lane, k);
    const float scaled = to_float(block.scales[lane]) * static_cast<float>(quant);
    out[k] = scaled + to_float(block.mins[lane]);
  }
}

OCTAVO_INLINE void read_row(const Q4Block* weight, int n, int width, float* out) {
  const int groups = width / kGroup;
  const int lane = n % kPanel;
  const Q4Block* panel = weight + static_cast<size_t>(n / kPanel) * groups;
  for (int k = 0; k < width; ++k) {
    const Q4Block& block = panel[k / kGroup];
    const int quant = nibble_of(block.quants[k % kGroup / 8], lane, k) - 8;
    out[k] = to_float(block.scales[lane]) * static_cast<float>(quant);
  }
}

OCTAVO_INLINE void read_row(const Q8Block* weight, int n, int width, float* out) {
  const int groups = width / kGroup;
  const int lane = n % kPanel;
  const Q8Block* panel = weight + static_cast<size_t>(n / kPanel) * groups;
  for (int k = 0; k < width; ++k) {
    const Q8Block& block = panel[k / kGroup];
    const int quant = block.quants[k % kGroup / 2][lane * 2 + k % 2];
    out[k] = to_float(block.scales[lane]) * static_cast<float>(quant);
  }
}

OCTAVO_INLINE void read_row(const Q8g16Block* weight, int n, int width, float* out) {
  const int groups = width / kGroup;
  const int lane = n % kPanel;
  const Q8g16Block* panel = weight + static_cast<size_t>(n / kPanel) * groups;
  for (int k = 0; k < width; ++k) {
    const Q8g16Block& block = panel[k / kGroup];
    const int quant = block.quants[k % kGroup / 2][lane * 2 + k % 2];
    out[k] = to_float(block.scales[k % kGroup / 16][lane]) * static_cast<float>(quant);
  }
}

template <class Plain>
OCTAVO_INLINE void read_row(const Plain* weight, int n, int width, float* out) {
  const Plain* panel = weight + static_cast<size_t>(n / kPanel) * width * kPanel;
  for (int k = 0; k < width; ++k) {
    out[k] = to_float(panel[static_cast<size_t>(k) * kPanel + n % kPanel]);
  }
}

template <class Weight>
OCTAVO_INLINE void embed(const OctavoOp& op, const Step& step, Worker& worker) {
  const Weight* weight = static_cast<const Weight*>(op.weight);
  for_each_row(step.num_tokens, worker, [&](int64_t row) {
    float* out = op.out + row * op.out_width;
    read_row(weight, step.inputs.token_ids[row], op.out_width, out);
    if (op.scale != 1.0f) {
      for (int k = 0; k < op.out_width; ++k) out[k] = op.scale * out[k];
    }
  });
}

static void embedding(const OctavoOp& op, const Step& step, Worker& worker) {
  switch (op.format) {
    case OCTAVO_FORMAT_Q4M: return embed<Q4mBlock>(op, step, worker);
    case OCTAVO_FORMAT_Q4: return embed<Q4Block>(op, step, worker);
    case OCTAVO_FORMAT_Q8: return embed<Q8Block>(op, step, worker);
    case OCTAVO_FORMAT_Q8G16: return embed<Q8g16Block>(op, step, worker);
    case OCTAVO_FORMAT_F16: return embed<Half>(op, step, worker);
    case OCTAVO_FORMAT_BF16: return embed<Bf16>(op, step, worker);
    default: return embed<float>(op, step, worker);
  }
}

// -- sums and norms -----------------------------------------------------------------------------

// out = (x * r) * w with r = 1 / sqrt(mean(x * x) + eps); width is a multiple of 8.
OCTAVO_INLINE void normalize(const float* x, const float* weight, float eps, int width, float* out) {
  F8 lanes = zero();
  for (int k = 0; k < width; k += 8) {
    const F8 v = load(x + k);
    lanes = fma(v, v, lanes);
  }
  const float mean = sum_lanes(lanes) / static_cast<float>(width);
  const F8 r = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  for (int k = 0; k < width; k += 8) {
    store(out + k, mul(mul(load(x + k), r), load(weight + k)));
  }
}

static void rms_norm(const OctavoOp& op, const Step& step, Worker& worker) {
  const float* weight = static_cast<const float*>(op.weight);
  for_each_row(rows_of(op, step), worker, [&](int64_t row) {
    const size_t at = row * op.out_width;
    normalize(op.x + at, weight, op.eps, op.out_width, op.out + at);
  });
}

// out = residual + scale * x, for one row; out may be residual.
OCTAVO_INLINE void add_row(const OctavoOp& op, size_t at, float* out) {
  const F8 scale = broadcast(op.scale);
  for (int k = 0; k < op.out_width; k += 8) {
    store(out + at + k, add(load(op.residual + at + k), mul(load(op.x + at + k), scale)));
  }
}

static void add(const OctavoOp& op, const Step& step, Worker& worker) {
  for_each_row(rows_of(op, step), worker,
               [&](int64_t row) { add_row(op, row * op.out_width, op.out); });
}

static void add_rms_norm(const OctavoOp& op, const Step& step, Worker& worker) {
  const float* weight = static_cast<const float*>(op.weight);
  for_each_row(rows_of(op, step), worker, [&](int64_t row) {
    const size_t at = row * op.out_width;
    add_row(op, at, op.out_sum);
    normalize(op.out_sum + at, weight, op.eps, op.out_width, op.out + at);
  });
}

// A row is q [q_heads][head_dim], k [kv_heads][head_dim] and v, which is copied.
static void qk_norm(const OctavoOp& op, const Step& step, Worker& worker) {
  const int q_width = op.q_heads * op.head_dim;
  const int k_width = op.kv_heads * op.head_dim;
  const float* q_weight = static_cast<const float*>(op.weight);
  for_each_row(rows_of(op, step), worker, [&](int64_t row) {
    const float* x = op.x + row * op.in_width;
    float* out = op.out + row * op.out_width;
    const int q_step = op.norm_together ? q_width : op.head_dim;
    for (int d = 0; d < q_width; d += q_step) normalize(x + d, q_weight, op.eps, q_step, out + d);
    x += q_width;
    out += q_width;
    const int k_step = op.norm_together ? k_width : op.head_dim;
    for (int d = 0; d < k_width; d += k_step) {
      normalize(x + d, op.k_weight, op.eps, k_step, out + d);
    }
    memcpy(out + k_width, x + k_width, k_width * sizeof(float));
  });
}

// -- logits -------------------------------------------------------------------------------------

OCTAVO_INLINE F8 scaled_logits(F8 x, const OctavoOp& op) {
  const F8 scaled = mul(x, broadcast(op.scale));
  return op.softcap > 0.0f ? soften(scaled, op.softcap) : scaled;
}

// Rows are as long as the vocabulary, which may be no multiple of 8; out may be x.
static void scale_logits(const OctavoOp& op, const Step& step, Worker& worker) {
  const int width = op.out_width;
  const int whole = width / 8 * 8;
  for_each_row(rows_of(op, step), worker, [&](int64_t row) {
    const float* x = op.x + row * width;
    float* out = op.out + row * width;
    for (int k = 0; k < whole; k += 8) store(out + k, scaled_logits(load(x + k), op));
    float last[8] = {};
    memcpy(last, x + whole, (width - whole) * sizeof(float));
    store(last, scaled_logits(load(last), op));
    memcpy(out + whole, last, (width - whole) * sizeof(float));
  });
}

// -- gather -------------------------------------------------------------------------------------

static void gather_rows(const OctavoOp& op, const Step& step, Worker& worker) {
  const size_t width = op.out_width;
  for_each_row(step.num_sampled, worker, [&](int64_t row) {
    const size_t from = step.inputs.sampled_rows[row];
    memcpy(op.out + row * width, op.x + from * width, width * sizeof(float));
  });
}

}  // namespace octavo::OCTAVO_ISA
