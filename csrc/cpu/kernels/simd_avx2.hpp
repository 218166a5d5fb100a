// simd.hpp on AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

namespace octavo::OCTAVO_ISA {

constexpr int kRowsTogether = 6;

struct F8 {
  __m256 v;
};
struct Mask8 {
  __m256 v;
};
struct I32x8 {
  __m256i v;
};

// -- floats -------------------------------------------------------------------------------------

OCTAVO_INLINE F8 zero() { return {_mm256_setzero_ps()}; }
OCTAVO_INLINE F8 broadcast(float x) { return {_mm256_set1_ps(x)}; }
OCTAVO_INLINE F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
OCTAVO_INLINE F8 load(const Half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
OCTAVO_INLINE F8 load(const Bf16* p) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16))};
}
OCTAVO_INLINE void store(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
OCTAVO_INLINE void store(Half* p, F8 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
// To nearest, ties to even; too large becomes infinity, a NaN quiet.
OCTAVO_INLINE void store(Bf16* p, F8 a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(1 << 22));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(words));
}
OCTAVO_INLINE float to_float(Half h) { return _cvtsh_ss(h.bits); }

OCTAVO_INLINE F8 add(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
OCTAVO_INLINE F8 sub(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE F8 mul(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE F8 div(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
OCTAVO_INLINE F8 fma(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
OCTAVO_INLINE F8 max(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }
OCTAVO_INLINE F8 min(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }
OCTAVO_INLINE F8 round_even(F8 a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// -- masks --------------------------------------------------------------------------------------

OCTAVO_INLINE Mask8 less(F8 a, F8 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }

// Lane i is true if begin <= first + i < end.
OCTAVO_INLINE Mask8 lanes_between(int first, int begin, int end) {
  const __m256i index =
      _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), index);
  const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), index);
  return {_mm256_castsi256_ps(_mm256_andnot_si256(before, inside))};
}

OCTAVO_INLINE F8 select(Mask8 mask, F8 if_true, F8 if_false) {
  return {_mm256_blendv_ps(if_false.v, if_true.v, mask.v)};
}

// -- reductions over lanes ----------------------------------------------------------------------

// ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7)): the tree of the contract.
OCTAVO_INLINE float sum_lanes(F8 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

OCTAVO_INLINE float max_lanes(F8 a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

OCTAVO_INLINE float first_lane(F8 a) { return _mm256_cvtss_f32(a.v); }

// -- int32 --------------------------------------------------------------------------------------

OCTAVO_INLINE I32x8 zero_i32() { return {_mm256_setzero_si256()}; }
OCTAVO_INLINE I32x8 add(I32x8 a, I32x8 b) { return {_mm256_add_epi32(a.v, b.v)}; }
OCTAVO_INLINE I32x8 round_to_int(F8 a) { return {_mm256_cvtps_epi32(a.v)}; }
OCTAVO_INLINE F8 to_float(I32x8 a) { return {_mm256_cvtepi32_ps(a.v)}; }

OCTAVO_INLINE int32_t sum_lanes(I32x8 a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// The float whose exponent field is n + 127: 2^n for -126 <= n <= 127, else of no meaning.
OCTAVO_INLINE F8 power_of_two(I32x8 n) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.v, _mm256_set1_epi32(127)), 23))};
}

// The bits of |a|. As integers they are ordered like the numbers, infinity and then NaN on top.
OCTAVO_INLINE I32x8 magnitude_bits(F8 a) {
  return {_mm256_and_si256(_mm256_castps_si256(a.v), _mm256_set1_epi32(0x7fffffff))};
}
OCTAVO_INLINE I32x8 max(I32x8 a, I32x8 b) { return {_mm256_max_epi32(a.v, b.v)}; }
OCTAVO_INLINE int32_t max_lanes(I32x8 a) {
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// In each four lanes, 0 2 1 3.
OCTAVO_INLINE I32x8 swap_middle(I32x8 a) { return {_mm256_shuffle_epi32(a.v, 0xd8)}; }

// Narrow 32 integers that fit.
OCTAVO_INLINE void store_narrow(int16_t* p, const I32x8 (&a)[4]) {
  for (int i = 0; i < 2; ++i) {
    const __m256i words = _mm256_packs_epi32(a[2 * i].v, a[2 * i + 1].v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16 * i),
                        _mm256_permute4x64_epi64(words, 0xd8));
  }
}
OCTAVO_INLINE void store_narrow(int8_t* p, const I32x8 (&a)[4]) {
  const __m256i low = _mm256_permute4x64_epi64(_mm256_packs_epi32(a[0].v, a[1].v), 0xd8);
  const __m256i high = _mm256_permute4x64_epi64(_mm256_packs_epi32(a[2].v, a[3].v), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8));
}

OCTAVO_INLINE void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
// Into the second level: a core has many more such reads in flight than of the first.
OCTAVO_INLINE void prefetch_far(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace octavo::OCTAVO_ISA
