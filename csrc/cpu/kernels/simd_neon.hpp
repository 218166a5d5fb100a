// simd.hpp on NEON, as every aarch64 CPU has it: eight lanes are two registers of four.
#pragma once

#include <arm_neon.h>

namespace octavo::OCTAVO_ISA {

constexpr int kRowsTogether = 6;

struct F8 {
  float32x4_t low;
  float32x4_t high;
};
struct Mask8 {
  uint32x4_t low;
  uint32x4_t high;
};
struct I32x8 {
  int32x4_t low;
  int32x4_t high;
};

// -- floats -------------------------------------------------------------------------------------

OCTAVO_INLINE F8 broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
OCTAVO_INLINE F8 zero() { return broadcast(0.0f); }
OCTAVO_INLINE F8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
OCTAVO_INLINE F8 load(const Half* p) {
  const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(&p->bits));
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
OCTAVO_INLINE F8 load(const Bf16* p) {
  const uint16x8_t words = vld1q_u16(&p->bits);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(words), 16)),
          vreinterpretq_f32_u32(vshll_high_n_u16(words, 16))};
}
OCTAVO_INLINE void store(float* p, F8 a) {
  vst1q_f32(p, a.low);
  vst1q_f32(p + 4, a.high);
}
OCTAVO_INLINE void store(Half* p, F8 a) {
  const float16x8_t halves = vcvt_high_f16_f32(vcvt_f16_f32(a.low), a.high);
  vst1q_u16(&p->bits, vreinterpretq_u16_f16(halves));
}
// To nearest, ties to even; too large becomes infinity, a NaN quiet.
OCTAVO_INLINE uint16x4_t to_bf16(float32x4_t a) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(1u << 22));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16);
}
OCTAVO_INLINE void store(Bf16* p, F8 a) {
  vst1q_u16(&p->bits, vcombine_u16(to_bf16(a.low), to_bf16(a.high)));
}
OCTAVO_INLINE float to_float(Half h) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h.bits))), 0);
}

OCTAVO_INLINE F8 add(F8 a, F8 b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
OCTAVO_INLINE F8 sub(F8 a, F8 b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
OCTAVO_INLINE F8 mul(F8 a, F8 b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
OCTAVO_INLINE F8 div(F8 a, F8 b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
OCTAVO_INLINE F8 fma(F8 a, F8 b, F8 c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
// Not FMAX and FMIN, which give NaN where one of two is.
OCTAVO_INLINE float32x4_t larger(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}
OCTAVO_INLINE float32x4_t smaller(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcltq_f32(a, b), a, b);
}
OCTAVO_INLINE F8 max(F8 a, F8 b) { return {larger(a.low, b.low), larger(a.high, b.high)}; }
OCTAVO_INLINE F8 min(F8 a, F8 b) { return {smaller(a.low, b.low), smaller(a.high, b.high)}; }
OCTAVO_INLINE F8 round_even(F8 a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }

// -- masks --------------------------------------------------------------------------------------

OCTAVO_INLINE Mask8 less(F8 a, F8 b) { return {vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)}; }

OCTAVO_INLINE uint32x4_t between(int32x4_t index, int begin, int end) {
  return vandq_u32(vcgeq_s32(index, vdupq_n_s32(begin)), vcltq_s32(index, vdupq_n_s32(end)));
}
// Lane i is true if begin <= first + i < end.
OCTAVO_INLINE Mask8 lanes_between(int first, int begin, int end) {
  const int32_t steps[4] = {0, 1, 2, 3};
  const int32x4_t index = vaddq_s32(vdupq_n_s32(first), vld1q_s32(steps));
  return {between(index, begin, end), between(vaddq_s32(index, vdupq_n_s32(4)), begin, end)};
}
OCTAVO_INLINE F8 select(Mask8 mask, F8 if_true, F8 if_false) {
  return {vbslq_f32(mask.low, if_true.low, if_false.low),
          vbslq_f32(mask.high, if_true.high, if_false.high)};
}

// -- reductions over lanes ----------------------------------------------------------------------

// ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7)): the tree of the contract.
OCTAVO_INLINE float sum_lanes(F8 a) {
  const float32x4_t four = vaddq_f32(a.low, a.high);
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
OCTAVO_INLINE float max_lanes(F8 a) {
  const float32x4_t four = larger(a.low, a.high);
  const float32x4_t two = larger(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(larger(two, vextq_f32(two, two, 1)), 0);
}
OCTAVO_INLINE float first_lane(F8 a) { return vgetq_lane_f32(a.low, 0); }

// -- int32 --------------------------------------------------------------------------------------

OCTAVO_INLINE I32x8 zero_i32() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
OCTAVO_INLINE I32x8 add(I32x8 a, I32x8 b) {
  return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)};
}

// FCVTNS gives the nearest int32 to what overflows and 0 to NaN; the contract wants INT_MIN.
OCTAVO_INLINE int32x4_t round_to_int(float32x4_t a) {
  const uint32x4_t fits =
      vandq_u32(vcgeq_f32(a, vdupq_n_f32(-0x1p31f)), vcltq_f32(a, vdupq_n_f32(0x1p31f)));
  return vbslq_s32(fits, vcvtnq_s32_f32(a), vdupq_n_s32(INT32_MIN));
}
OCTAVO_INLINE I32x8 round_to_int(F8 a) { return {round_to_int(a.low), round_to_int(a.high)}; }
OCTAVO_INLINE F8 to_float(I32x8 a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
OCTAVO_INLINE int32_t sum_lanes(I32x8 a) { return vaddvq_s32(vaddq_s32(a.low, a.high)); }

OCTAVO_INLINE float32x4_t power_of_two(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
// The float whose exponent field is n + 127: 2^n for -126 <= n <= 127, else of no meaning.
OCTAVO_INLINE F8 power_of_two(I32x8 n) { return {power_of_two(n.low), power_of_two(n.high)}; }

// The bits of |a|. As integers they are ordered like the numbers, infinity and then NaN on top.
OCTAVO_INLINE I32x8 magnitude_bits(F8 a) {
  return {vreinterpretq_s32_f32(vabsq_f32(a.low)), vreinterpretq_s32_f32(vabsq_f32(a.high))};
}
OCTAVO_INLINE I32x8 max(I32x8 a, I32x8 b) {
  return {vmaxq_s32(a.low, b.low), vmaxq_s32(a.high, b.high)};
}
OCTAVO_INLINE int32_t max_lanes(I32x8 a) { return vmaxvq_s32(vmaxq_s32(a.low, a.high)); }

OCTAVO_INLINE int32x4_t swap_middle(int32x4_t a) { return vzip1q_s32(a, vextq_s32(a, a, 2)); }
// In each four lanes, 0 2 1 3.
OCTAVO_INLINE I32x8 swap_middle(I32x8 a) { return {swap_middle(a.low), swap_middle(a.high)}; }

// Narrow 32 integers that fit.
OCTAVO_INLINE int16x8_t narrow(I32x8 a) {
  return vcombine_s16(vmovn_s32(a.low), vmovn_s32(a.high));
}
OCTAVO_INLINE void store_narrow(int16_t* p, const I32x8 (&a)[4]) {
  for (int i = 0; i < 4; ++i) vst1q_s16(p + 8 * i, narrow(a[i]));
}
OCTAVO_INLINE void store_narrow(int8_t* p, const I32x8 (&a)[4]) {
  for (int i = 0; i < 4; ++i) vst1_s8(p + 8 * i, vmovn_s16(narrow(a[i])));
}

OCTAVO_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
OCTAVO_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace octavo::OCTAVO_ISA
