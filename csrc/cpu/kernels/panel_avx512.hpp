// The 16-output types of simd.hpp on AVX-512 with VNNI: one register for 16 outputs, and products
// that add up in int32 by themselves.
#pragma once

namespace octavo::OCTAVO_ISA {

constexpr int kRowTiles[] = {1, 2, 4, 8, 12};
constexpr int chains_for(int rows) { return rows == 1 ? 4 : rows <= 4 ? 2 : 1; }

struct F32x16 {
  __m512 v;
};
struct I32x16 {
  __m512i v;
};

OCTAVO_INLINE F32x16 zero_f32x16() { return {_mm512_setzero_ps()}; }
OCTAVO_INLINE F32x16 load_f32x16(const float* p) { return {_mm512_loadu_ps(p)}; }
OCTAVO_INLINE F32x16 load_f32x16(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
OCTAVO_INLINE F32x16 load_f32x16(const Bf16* p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))};
}
OCTAVO_INLINE void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
OCTAVO_INLINE F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
OCTAVO_INLINE F32x16 mul(F32x16 a, float b) { return {_mm512_mul_ps(a.v, _mm512_set1_ps(b))}; }
OCTAVO_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
OCTAVO_INLINE F32x16 fma(F32x16 a, float b, F32x16 c) {
  return {_mm512_fmadd_ps(a.v, _mm512_set1_ps(b), c.v)};
}
OCTAVO_INLINE I32x16 zero_i32x16() { return {_mm512_setzero_si512()}; }
OCTAVO_INLINE I32x16 add(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
// The int32 whose bits lie at p, in each lane.
OCTAVO_INLINE I32x16 broadcast_i32x16(const float* p) {
  const int32_t bits = dword_at(p);
  return {_mm512_set1_epi32(bits)};
}
OCTAVO_INLINE F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

// -- dot products of 4-bit weights with int8 activations ----------------------------------------

struct Bytes64 {
  __m512i v;
};
using QuadSums = I32x16;

// Every second Q4Block begins in the middle of a line.
OCTAVO_INLINE Bytes64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE Bytes64 low_nibbles(Bytes64 a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))};
}
OCTAVO_INLINE Bytes64 high_nibbles(Bytes64 a) {
  return low_nibbles({_mm512_srli_epi16(a.v, 4)});
}
OCTAVO_INLINE QuadSums start_quad_sums(I32x16 start) { return start; }
OCTAVO_INLINE QuadSums multiply_add(Bytes64 weights, const int8_t* quad, QuadSums sum) {
  const int32_t bits = dword_at(quad);
  return {_mm512_dpbusd_epi32(sum.v, weights.v, _mm512_set1_epi32(bits))};
}
OCTAVO_INLINE I32x16 end_quad_sums(I32x16, QuadSums a) { return a; }

// -- dot products with int16 activations --------------------------------------------------------

struct Words32 {
  __m512i v;
};

OCTAVO_INLINE Words32 low_even(Bytes64 a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi16(15))};
}
OCTAVO_INLINE Words32 low_odd(Bytes64 a) { return low_even({_mm512_srli_epi16(a.v, 8)}); }
OCTAVO_INLINE Words32 high_even(Bytes64 a) { return low_even({_mm512_srli_epi16(a.v, 4)}); }
OCTAVO_INLINE Words32 high_odd(Bytes64 a) { return {_mm512_srli_epi16(a.v, 12)}; }
OCTAVO_INLINE Words32 load_widened(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)))};
}
OCTAVO_INLINE I32x16 multiply_add(Words32 weights, const int16_t* pair, I32x16 sum) {
  const int32_t bits = dword_at(pair);
  return {_mm512_dpwssd_epi32(sum.v, weights.v, _mm512_set1_epi32(bits))};
}

}  // namespace octavo::OCTAVO_ISA
