// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") for one counter, or eight.
#pragma once

#include "../choice.hpp"
#include "simd.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace octavo::OCTAVO_ISA {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultipliers[2] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t kPhiloxWeyl[2] = {0x9E3779B9, 0xBB67AE85};

// The four words of the counter (first, position, 0, 0).
struct Words4 {
  uint32_t operator[](int i) const { return v[i]; }
  uint32_t v[4];
};
OCTAVO_INLINE Words4 philox(uint64_t seed, uint32_t position, uint32_t first) {
  uint32_t c0 = first, c1 = position, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed);
  uint32_t k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxMultipliers[0]} * c0;
    const uint64_t p1 = uint64_t{kPhiloxMultipliers[1]} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxWeyl[0];
    k1 += kPhiloxWeyl[1];
  }
  return {{c0, c1, c2, c3}};
}

#if defined(__AVX2__)

struct U32x8 {
  __m256i v;
};

OCTAVO_INLINE U32x8 count_from(uint32_t first) {
  return {_mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))};
}
OCTAVO_INLINE U32x8 broadcast_u32(uint32_t x) { return {_mm256_set1_epi32(x)}; }
OCTAVO_INLINE U32x8 exclusive_or(U32x8 a, U32x8 b) { return {_mm256_xor_si256(a.v, b.v)}; }

// The two halves of 64-bit products.
OCTAVO_INLINE void multiply(U32x8 a, uint32_t b, U32x8* high, U32x8* low) {
  constexpr int kOdd = 0xAA;
  const __m256i factor = _mm256_set1_epi32(b);
  const __m256i even = _mm256_mul_epu32(a.v, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a.v, 32), factor);
  high->v = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, kOdd);
  low->v = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), kOdd);
}

// words[4 i + j] = word j of counter i.
OCTAVO_INLINE void store_interleaved(const U32x8 (&word)[4], uint32_t* words) {
  const __m256i low01 = _mm256_unpacklo_epi32(word[0].v, word[1].v);  // counters 0 1 | 4 5
  const __m256i low23 = _mm256_unpacklo_epi32(word[2].v, word[3].v);
  const __m256i high01 = _mm256_unpackhi_epi32(word[0].v, word[1].v);  // counters 2 3 | 6 7
  const __m256i high23 = _mm256_unpackhi_epi32(word[2].v, word[3].v);
  const __m256i counters04 = _mm256_unpacklo_epi64(low01, low23);
  const __m256i counters15 = _mm256_unpackhi_epi64(low01, low23);
  const __m256i counters26 = _mm256_unpacklo_epi64(high01, high23);
  const __m256i counters37 = _mm256_unpackhi_epi64(high01, high23);
  __m256i* out = reinterpret_cast<__m256i*>(words);
  _mm256_storeu_si256(out, _mm256_permute2x128_si256(counters04, counters15, 0x20));
  _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(counters26, counters37, 0x20));
  _mm256_storeu_si256(out + 2, _mm256_permute2x128_si256(counters04, counters15, 0x31));
  _mm256_storeu_si256(out + 3, _mm256_permute2x128_si256(counters26, counters37, 0x31));
}

// The 32 words of counters (first + i, position, 0, 0), i < 8, under the key `seed`.
OCTAVO_INLINE void philox_eight(uint64_t seed, uint32_t position, uint32_t first, uint32_t* words) {
  U32x8 c[4] = {count_from(first), broadcast_u32(position), broadcast_u32(0), broadcast_u32(0)};
  uint32_t k0 = static_cast<uint32_t>(seed);
  uint32_t k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    U32x8 high0, low0, high1, low1;
    multiply(c[0], kPhiloxMultipliers[0], &high0, &low0);
    multiply(c[2], kPhiloxMultipliers[1], &high1, &low1);
    c[0] = exclusive_or(exclusive_or(high1, c[1]), broadcast_u32(k0));
    c[2] = exclusive_or(exclusive_or(high0, c[3]), broadcast_u32(k1));
    c[1] = low1;
    c[3] = low0;
    k0 += kPhiloxWeyl[0];
    k1 += kPhiloxWeyl[1];
  }
  store_interleaved(c, words);
}

#else

OCTAVO_INLINE void philox_eight(uint64_t seed, uint32_t position, uint32_t first, uint32_t* words) {
  for (int i = 0; i < 8; ++i) {
    const Words4 four = philox(seed, position, first + i);
    for (int j = 0; j < 4; ++j) words[4 * i + j] = four[j];
  }
}

#endif

}  // namespace octavo::OCTAVO_ISA
