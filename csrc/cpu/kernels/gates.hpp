// gated_activation: out = act(x[:, :F]) * x[:, F:], a few functions of eight lanes.
#pragma once

#include "math.hpp"

namespace octavo::OCTAVO_ISA {

// g / (1 + exp(-slope * g)); exp's argument is at most 87.
OCTAVO_INLINE F8 logistic(F8 g, float slope) {
  const F8 e = exp(min(mul(g, broadcast(-slope)), broadcast(87.0f)));
  return div(g, add(broadcast(1.0f), e));
}

OCTAVO_INLINE F8 gated_silu(F8 g, F8 up) { return mul(logistic(g, 1.0f), up); }

OCTAVO_INLINE F8 gated_gelu_tanh(F8 g, F8 up) {
  constexpr float kRootOfTwoOverPi = 0.797884583f;
  const F8 cube = mul(mul(mul(g, g), g), broadcast(0.044715f));
  const F8 inner = mul(add(g, cube), broadcast(kRootOfTwoOverPi));
  return mul(mul(mul(g, broadcast(0.5f)), add(broadcast(1.0f), tanh(inner))), up);
}

// The limits stand first in min and max: a NaN in second place stays a NaN.
OCTAVO_INLINE F8 gated_clamped_swiglu(F8 g, F8 up) {
  const F8 limit = broadcast(7.0f);
  const F8 clamped = max(broadcast(-7.0f), min(limit, up));
  return mul(add(clamped, broadcast(1.0f)), logistic(min(limit, g), 1.702f));
}

// x is the gate's `width` values, then as many of up; width is a multiple of 8.
template <class Gate>
OCTAVO_INLINE void gate_row(const float* x, int width, float* out, Gate gate) {
  for (int k = 0; k < width; k += 8) store(out + k, gate(load(x + k), load(x + width + k)));
}

static void gate_row(int activation, const float* x, int width, float* out) {
  switch (activation) {
    case OCTAVO_ACTIVATION_GELU_TANH:
      return gate_row(x, width, out, [](F8 g, F8 up) { return gated_gelu_tanh(g, up); });
    case OCTAVO_ACTIVATION_CLAMPED_SWIGLU:
      return gate_row(x, width, out, [](F8 g, F8 up) { return gated_clamped_swiglu(g, up); });
    default: return gate_row(x, width, out, [](F8 g, F8 up) { return gated_silu(g, up); });
  }
}

static void gated_activation(const OctavoOp& op, const Step& step, Worker& worker) {
  for_each_row(rows_of(op, step), worker, [&](int64_t row) {
    gate_row(op.activation, op.x + row * op.in_width, op.out_width, op.out + row * op.out_width);
  });
}

}  // namespace octavo::OCTAVO_ISA
