// The 16-output types of simd.hpp on NEON: four registers for 16 outputs. Where the unit is compiled
// for CPUs with SDOT, products with int8 add up in int32 by themselves.
#pragma once

#include "panel_pairs.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int kRowTiles[] = {1, 2, 4};
constexpr int chains_for(int) { return 1; }

struct I32x16 {
  int32x4_t v[4];
};

OCTAVO_INLINE I32x16 zero_i32x16() {
  const int32x4_t none = vdupq_n_s32(0);
  return {{none, none, none, none}};
}
OCTAVO_INLINE I32x16 add(I32x16 a, I32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] = vaddq_s32(a.v[i], b.v[i]);
  return a;
}
// The int32 whose bits lie at p, in each lane.
OCTAVO_INLINE I32x16 broadcast_i32x16(const float* p) {
  const int32_t bits = dword_at(p);
  const int32x4_t lanes = vdupq_n_s32(bits);
  return {{lanes, lanes, lanes, lanes}};
}
OCTAVO_INLINE F32x16 to_float(I32x16 a) {
  return {{vcvtq_f32_s32(a.v[0]), vcvtq_f32_s32(a.v[1])},
          {vcvtq_f32_s32(a.v[2]), vcvtq_f32_s32(a.v[3])}};
}

// -- dot products of 4-bit weights with int8 activations ----------------------------------------

struct Bytes64 {
  uint8x16_t v[4];
};

OCTAVO_INLINE Bytes64 load_bytes(const uint8_t* p) {
  return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
}
OCTAVO_INLINE Bytes64 low_nibbles(Bytes64 a) {
  for (uint8x16_t& bytes : a.v) bytes = vandq_u8(bytes, vdupq_n_u8(15));
  return a;
}
OCTAVO_INLINE Bytes64 high_nibbles(Bytes64 a) {
  for (uint8x16_t& bytes : a.v) bytes = vshrq_n_u8(bytes, 4);
  return a;
}
// Four activations, in each of four dwords.
OCTAVO_INLINE int8x16_t broadcast_quad(const int8_t* quad) {
  const int32_t bits = dword_at(quad);
  return vreinterpretq_s8_s32(vdupq_n_s32(bits));
}

#if defined(__ARM_FEATURE_DOTPROD)
using QuadSums = I32x16;

OCTAVO_INLINE QuadSums start_quad_sums(I32x16 start) { return start; }
OCTAVO_INLINE QuadSums multiply_add(Bytes64 weights, const int8_t* quad, QuadSums sum) {
  const int8x16_t x = broadcast_quad(quad);
  for (int i = 0; i < 4; ++i) {
    sum.v[i] = vdotq_s32(sum.v[i], vreinterpretq_s8_u8(weights.v[i]), x);  // weights are 0 .. 15
  }
  return sum;
}
OCTAVO_INLINE I32x16 end_quad_sums(I32x16, QuadSums a) { return a; }
#else
struct QuadSums {
  int16x8_t v[4];  // pairs of products added
};

OCTAVO_INLINE QuadSums start_quad_sums(I32x16) {
  const int16x8_t none = vdupq_n_s16(0);
  return {{none, none, none, none}};
}
// sum + weights (0 .. 15) * quad (int8), adjacent pairs added. Cannot overflow within a group: 8
// quads of 2 * 15 * 127 are 30480.
OCTAVO_INLINE QuadSums multiply_add(Bytes64 weights, const int8_t* quad, QuadSums sum) {
  const int8x16_t x = broadcast_quad(quad);
  for (int i = 0; i < 4; ++i) {
    const int8x16_t w = vreinterpretq_s8_u8(weights.v[i]);
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
    sum.v[i] = vaddq_s16(sum.v[i], vpaddq_s16(low, vmull_high_s8(w, x)));
  }
  return sum;
}
// start plus the sums that were started from it.
OCTAVO_INLINE I32x16 end_quad_sums(I32x16 start, QuadSums a) {
  return add(start, {{vpaddlq_s16(a.v[0]), vpaddlq_s16(a.v[1]), vpaddlq_s16(a.v[2]), vpaddlq_s16(a.v[3])}});
}
#endif

// -- dot products with int16 activations --------------------------------------------------------

// Apart, so that each is multiplied with one activation: the 16 outputs' weights of the first k, and
// those of the second.
struct Words32 {
  int16x8_t first[2];
  int16x8_t second[2];
};

OCTAVO_INLINE Words32 take_apart(const int16x8_t (&words)[4]) {
  return {{vuzp1q_s16(words[0], words[1]), vuzp1q_s16(words[2], words[3])},
          {vuzp2q_s16(words[0], words[1]), vuzp2q_s16(words[2], words[3])}};
}
template <int Shift>
OCTAVO_INLINE Words32 nibble_words(Bytes64 a) {
  int16x8_t words[4];
  for (int i = 0; i < 4; ++i) {
    uint16x8_t both = vreinterpretq_u16_u8(a.v[i]);
    if constexpr (Shift > 0) both = vshrq_n_u16(both, Shift);
    words[i] = vreinterpretq_s16_u16(vandq_u16(both, vdupq_n_u16(15)));
  }
  return take_apart(words);
}
OCTAVO_INLINE Words32 low_even(Bytes64 a) { return nibble_words<0>(a); }
OCTAVO_INLINE Words32 low_odd(Bytes64 a) { return nibble_words<8>(a); }
OCTAVO_INLINE Words32 high_even(Bytes64 a) { return nibble_words<4>(a); }
OCTAVO_INLINE Words32 high_odd(Bytes64 a) { return nibble_words<12>(a); }

OCTAVO_INLINE Words32 load_widened(const int8_t* p) {
  const int8x16_t low = vld1q_s8(p);
  const int8x16_t high = vld1q_s8(p + 16);
  return take_apart({vmovl_s8(vget_low_s8(low)), vmovl_high_s8(low), vmovl_s8(vget_low_s8(high)),
                     vmovl_high_s8(high)});
}
OCTAVO_INLINE I32x16 multiply_add(Words32 weights, const int16_t* pair, I32x16 sum) {
  const int32_t bits = dword_at(pair);
  const int16x4_t x = vreinterpret_s16_s32(vdup_n_s32(bits));
  for (int i = 0; i < 2; ++i) {
    const int16x8_t first = weights.first[i];
    const int16x8_t second = weights.second[i];
    int32x4_t& low = sum.v[2 * i];
    int32x4_t& high = sum.v[2 * i + 1];
    low = vmlal_lane_s16(low, vget_low_s16(first), x, 0);
    low = vmlal_lane_s16(low, vget_low_s16(second), x, 1);
    high = vmlal_high_lane_s16(high, first, x, 0);
    high = vmlal_high_lane_s16(high, second, x, 1);
  }
  return sum;
}

}  // namespace octavo::OCTAVO_ISA
