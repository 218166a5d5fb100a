// Small functions that kernels share: ranges, exp, reductions of the contract.
#pragma once

#include "../worker.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_ISA {

template <class T>
OCTAVO_INLINE T smaller_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
OCTAVO_INLINE T larger_of(T a, T b) {
  return a > b ? a : b;
}
OCTAVO_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
OCTAVO_INLINE size_t align_up(size_t nbytes) {
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

OCTAVO_INLINE int rows_of(const OctavoOp& op, const Step& step) {
  switch (op.rows) {
    case OCTAVO_ROWS_SEQS: return step.num_seqs;
    case OCTAVO_ROWS_SAMPLED: return step.num_sampled;
    default: return step.num_tokens;
  }
}

// How many of `total` equal items to claim at once: a few claims a thread, so that a thread that
// lost its core delays the others by little.
OCTAVO_INLINE int64_t claim_chunk(int64_t total, Worker& worker, int64_t most) {
  constexpr int kClaimsPerThread = 8;
  const int64_t chunk = total / (static_cast<int64_t>(worker.num_threads) * kClaimsPerThread);
  return smaller_of<int64_t>(larger_of<int64_t>(chunk, 1), most);
}

// Call f(row) for the rows this thread claims.
template <class F>
OCTAVO_INLINE void for_each_row(int num_rows, Worker& worker, F f) {
  constexpr int64_t kMostRows = 64;
  const int64_t chunk = claim_chunk(num_rows, worker, kMostRows);
  for (Range range{}; claim(worker, num_rows, chunk, &range);) {
    for (int64_t row = range.begin; row < range.end; ++row) f(row);
  }
}

// Call f with a number of rows, 1 to Most, as a compile-time constant: f(Rows<R>{}).
template <int R>
struct Rows {
  static constexpr int value = R;
};
template <int Most, class F>
OCTAVO_INLINE void with_rows(int rows, F f) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, f);
  }
  f(Rows<Most>{});
}

// exp(x) for x <= 88, 0 below -87, NaN for NaN. Cephes' expf: x = n ln 2 + r, |r| <= ln 2 / 2, and
// a polynomial in r; about 1 unit in the last place. F is F8 or F32x16.
template <class F>
OCTAVO_INLINE F exp_lanes(F x) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  const F n = round_even(mul(x, splat<F>(kLog2e)));
  F r = fma(n, splat<F>(-kLn2High), x);
  r = fma(n, splat<F>(-kLn2Low), r);
  F p = splat<F>(1.9875691500e-4f);
  p = fma(p, r, splat<F>(1.3981999507e-3f));
  p = fma(p, r, splat<F>(8.3334519073e-3f));
  p = fma(p, r, splat<F>(4.1665795894e-2f));
  p = fma(p, r, splat<F>(1.6666665459e-1f));
  p = fma(p, r, splat<F>(5.0000001201e-1f));
  p = fma(p, mul(r, r), r);
  p = add(p, splat<F>(1.0f));
  return zero_below(x, -87.0f, times_power_of_two(p, n));
}

OCTAVO_INLINE F8 exp(F8 x) { return exp_lanes(x); }
OCTAVO_INLINE F32x16 exp(F32x16 x) { return exp_lanes(x); }
OCTAVO_INLINE float exp(float x) { return first_lane(exp(broadcast(x))); }

OCTAVO_INLINE F8 negate(F8 x) { return mul(x, broadcast(-1.0f)); }

// (1 - e) / (1 + e) with e = exp(-2 |x|), negated where x < 0.
OCTAVO_INLINE F8 tanh(F8 x) {
  const F8 one = broadcast(1.0f);
  const F8 e = exp(mul(max(x, negate(x)), broadcast(-2.0f)));
  const F8 t = div(sub(one, e), add(one, e));
  return select(less(x, zero()), negate(t), t);
}

// cap * tanh(x / cap).
OCTAVO_INLINE F8 soften(F8 x, float cap) {
  return mul(tanh(div(x, broadcast(cap))), broadcast(cap));
}

OCTAVO_INLINE F32x16 soften(F32x16 x, float cap) {
  return join(soften(low_half(x), cap), soften(high_half(x), cap));
}

}  // namespace octavo::OCTAVO_ISA
