// The 16-output types of simd.hpp on AVX2: two registers for 16 outputs.
#pragma once

#include "panel_pairs.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int kRowTiles[] = {1, 2, 3, 4};
constexpr int chains_for(int) { return 1; }

struct I32x16 {
  __m256i low, high;
};

OCTAVO_INLINE I32x16 zero_i32x16() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
OCTAVO_INLINE I32x16 add(I32x16 a, I32x16 b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
// The int32 whose bits lie at p, in each lane.
OCTAVO_INLINE I32x16 broadcast_i32x16(const float* p) {
  const int32_t bits = dword_at(p);
  return {_mm256_set1_epi32(bits), _mm256_set1_epi32(bits)};
}
OCTAVO_INLINE F32x16 to_float(I32x16 a) {
  return {{_mm256_cvtepi32_ps(a.low)}, {_mm256_cvtepi32_ps(a.high)}};
}

// An empty asm that keeps GCC from reassociating a chain of integer additions, which makes it spill
// (measured: 1.5 to 2 times slower). By value: on a reference it pins the sum to memory instead.
OCTAVO_INLINE __m256i keep_order(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

// -- dot products of 4-bit weights with int8 activations ----------------------------------------

struct Bytes64 {
  __m256i low, high;
};
struct QuadSums {
  __m256i low, high;  // int16: pairs of products added
};

OCTAVO_INLINE Bytes64 load_bytes(const uint8_t* p) {
  const __m256i* at = reinterpret_cast<const __m256i*>(p);
  return {_mm256_load_si256(at), _mm256_load_si256(at + 1)};
}
OCTAVO_INLINE Bytes64 low_nibbles(Bytes64 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
OCTAVO_INLINE Bytes64 high_nibbles(Bytes64 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(a.low, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(a.high, 4), mask)};
}
OCTAVO_INLINE QuadSums start_quad_sums(I32x16) {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}

// sum + weights (0 .. 15) * quad (int8), adjacent pairs added. Cannot overflow within a group: 8
// quads of 2 * 15 * 127 are 30480.
OCTAVO_INLINE QuadSums multiply_add(Bytes64 weights, const int8_t* quad, QuadSums sum) {
  const int32_t bits = dword_at(quad);
  const __m256i x = _mm256_set1_epi32(bits);
  return {keep_order(_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(weights.low, x))),
          keep_order(_mm256_add_epi16(sum.high, _mm256_maddubs_epi16(weights.high, x)))};
}
// start plus the sums that were started from it.
OCTAVO_INLINE I32x16 end_quad_sums(I32x16 start, QuadSums a) {
  const __m256i ones = _mm256_set1_epi16(1);
  return add(start, {_mm256_madd_epi16(a.low, ones), _mm256_madd_epi16(a.high, ones)});
}

// -- dot products with int16 activations --------------------------------------------------------

struct Words32 {
  __m256i low, high;
};

OCTAVO_INLINE Words32 low_even(Bytes64 a) {
  const __m256i mask = _mm256_set1_epi16(15);
  return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
OCTAVO_INLINE Words32 low_odd(Bytes64 a) {
  return low_even({_mm256_srli_epi16(a.low, 8), _mm256_srli_epi16(a.high, 8)});
}
OCTAVO_INLINE Words32 high_even(Bytes64 a) {
  return low_even({_mm256_srli_epi16(a.low, 4), _mm256_srli_epi16(a.high, 4)});
}
OCTAVO_INLINE Words32 high_odd(Bytes64 a) {
  return {_mm256_srli_epi16(a.low, 12), _mm256_srli_epi16(a.high, 12)};
}
OCTAVO_INLINE Words32 load_widened(const int8_t* p) {
  const __m128i* at = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_load_si128(at)), _mm256_cvtepi8_epi16(_mm_load_si128(at + 1))};
}
OCTAVO_INLINE I32x16 multiply_add(Words32 weights, const int16_t* pair, I32x16 sum) {
  const int32_t bits = dword_at(pair);
  const __m256i x = _mm256_set1_epi32(bits);
  return {keep_order(_mm256_add_epi32(sum.low, _mm256_madd_epi16(weights.low, x))),
          keep_order(_mm256_add_epi32(sum.high, _mm256_madd_epi16(weights.high, x)))};
}

}  // namespace octavo::OCTAVO_ISA
