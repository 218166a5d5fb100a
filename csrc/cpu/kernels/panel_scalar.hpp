// The 16-output types of simd.hpp in portable C++.
#pragma once

#include "panel_pairs.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int kRowTiles[] = {1, 2};
constexpr int chains_for(int) { return 1; }

struct I32x16 {
  int32_t v[16];
};

OCTAVO_INLINE I32x16 zero_i32x16() { return {}; }
OCTAVO_INLINE I32x16 add(I32x16 a, I32x16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
  return a;
}
// The int32 whose bits lie at p, in each lane.
OCTAVO_INLINE I32x16 broadcast_i32x16(const float* p) {
  I32x16 r;
  for (int32_t& lane : r.v) memcpy(&lane, p, sizeof lane);
  return r;
}
OCTAVO_INLINE F32x16 to_float(I32x16 a) {
  F32x16 r;
  for (int i = 0; i < 8; ++i) {
    r.low.v[i] = static_cast<float>(a.v[i]);
    r.high.v[i] = static_cast<float>(a.v[i + 8]);
  }
  return r;
}

// -- dot products of 4-bit weights with int8 activations ----------------------------------------

struct Bytes64 {
  uint8_t v[64];
};
using QuadSums = I32x16;

OCTAVO_INLINE Bytes64 load_bytes(const uint8_t* p) {
  Bytes64 r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
OCTAVO_INLINE Bytes64 low_nibbles(Bytes64 a) {
  for (int i = 0; i < 64; ++i) a.v[i] &= 15;
  return a;
}
OCTAVO_INLINE Bytes64 high_nibbles(Bytes64 a) {
  for (int i = 0; i < 64; ++i) a.v[i] >>= 4;
  return a;
}
OCTAVO_INLINE QuadSums start_quad_sums(I32x16 start) { return start; }
OCTAVO_INLINE QuadSums multiply_add(Bytes64 weights, const int8_t* quad, QuadSums sum) {
  for (int i = 0; i < 64; ++i) sum.v[i / 4] += weights.v[i] * quad[i % 4];
  return sum;
}
OCTAVO_INLINE I32x16 end_quad_sums(I32x16, QuadSums a) { return a; }

// -- dot products with int16 activations --------------------------------------------------------

struct Words32 {
  int16_t v[32];
};

// Word i is byte 2 i + odd, its low or high nibble.
OCTAVO_INLINE Words32 nibble_words(Bytes64 a, int odd, int shift) {
  Words32 r;
  for (int i = 0; i < 32; ++i) r.v[i] = static_cast<int16_t>(a.v[2 * i + odd] >> shift & 15);
  return r;
}
OCTAVO_INLINE Words32 low_even(Bytes64 a) { return nibble_words(a, 0, 0); }
OCTAVO_INLINE Words32 low_odd(Bytes64 a) { return nibble_words(a, 1, 0); }
OCTAVO_INLINE Words32 high_even(Bytes64 a) { return nibble_words(a, 0, 4); }
OCTAVO_INLINE Words32 high_odd(Bytes64 a) { return nibble_words(a, 1, 4); }

OCTAVO_INLINE Words32 load_widened(const int8_t* p) {
  Words32 r;
  for (int i = 0; i < 32; ++i) r.v[i] = p[i];
  return r;
}
OCTAVO_INLINE I32x16 multiply_add(Words32 weights, const int16_t* pair, I32x16 sum) {
  for (int i = 0; i < 32; ++i) sum.v[i / 2] += weights.v[i] * pair[i % 2];
  return sum;
}

}  // namespace octavo::OCTAVO_ISA
