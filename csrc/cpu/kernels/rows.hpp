// Ops that work on rows one by one and hold no state: embedding, norms, gated activation, gather.
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

// -- norms --------------------------------------------------------------------------------------

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

static void add_rms_norm(const OctavoOp& op, const Step& step, Worker& worker) {
  const float* weight = static_cast<const float*>(op.weight);
  for_each_row(rows_of(op, step), worker, [&](int64_t row) {
    const size_t at = row * op.out_width;
    for (int k = 0; k < op.out_width; k += 8) {
      store(op.out_sum + at + k, add(load(op.residual + at + k), load(op.x + at + k)));
    }
    normalize(op.out_sum + at, weight, op.eps, op.out_width, op.out + at);
  });
}

// -- gated activation ---------------------------------------------------------------------------

// silu(x[:, :F]) * x[:, F:], silu(g) = g / (1 + exp(-g)); F is a multiple of 8.
static void gated_silu(const OctavoOp& op, const Step& step, Worker& worker) {
  const int width = op.out_width;
  const F8 one = broadcast(1.0f);
  const F8 largest_exponent = broadcast(87.0f);
  for_each_row(rows_of(op, step), worker, [&](int64_t row) {
    const float* gate = op.x + row * op.in_width;
    const float* up = gate + width;
    float* out = op.out + row * width;
    for (int k = 0; k < width; k += 8) {
      const F8 g = load(gate + k);
      const F8 e = exp(min(sub(zero(), g), largest_exponent));
      store(out + k, mul(div(g, add(one, e)), load(up + k)));
    }
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
