// Eight virtual lanes, and the integer dot products of quantised weights.
//
// Kernels are written once against these types and compiled per ISA. Each translation unit defines
// OCTAVO_ISA, the namespace of everything it compiles, so that the linker cannot merge two builds of
// one function. Rule: an implementation may choose instructions, never another result.
//
//   F8        8 floats: load, store, add, sub, mul, div, fma (one rounding), max, min, round_even
//   Mask8     8 truths: less, lanes_between, select
//   I32x8     8 int32: round_to_int (NaN and overflow give INT_MIN), to_float, sum_lanes
//   F32x16, I32x16   the 16 outputs of a weight panel
//   Bytes64     64 weights of a panel's block, four k's for each output: products with int8, exact
//   Words32     32 of them, two k's for each output: products with int16, exact. low_even .. high_odd
//               take those k = 0, 2 | 1, 3 | 4, 6 | 5, 7 of a row of Q4mBlock::quants
//   chains_for(rows)   sums to split a row's products over, so that none waits for the last
//   kRowTiles, kRowsTogether   rows of x, and of queries, whose sums fit the registers
//
// max(a, b) is a > b ? a : b and min(a, b) is a < b ? a : b, per lane: what x86 does with NaN.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../layouts.hpp"

#define OCTAVO_INLINE static inline __attribute__((always_inline))

// Unroll the next loop, where lanes are registers; unrolled eights of scalars only compile slowly.
#define OCTAVO_PRAGMA(x) _Pragma(#x)

namespace octavo::OCTAVO_ISA {

// Four bytes, wherever they lie.
OCTAVO_INLINE int32_t dword_at(const void* p) {
  int32_t bits;
  memcpy(&bits, p, sizeof bits);
  return bits;
}
OCTAVO_INLINE float to_float(float x) { return x; }
OCTAVO_INLINE float to_float(Bf16 b) {
  const uint32_t bits = static_cast<uint32_t>(b.bits) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace octavo::OCTAVO_ISA

#if defined(OCTAVO_KERNELS_AVX512)
#define OCTAVO_UNROLL(n) OCTAVO_PRAGMA(GCC unroll n)
#include "simd_avx2.hpp"
#include "panel_avx512.hpp"
#elif defined(OCTAVO_KERNELS_AVX2)
#define OCTAVO_UNROLL(n) OCTAVO_PRAGMA(GCC unroll n)
#include "simd_avx2.hpp"
#include "panel_avx2.hpp"
#elif defined(OCTAVO_KERNELS_NEON)
#define OCTAVO_UNROLL(n) OCTAVO_PRAGMA(GCC unroll n)
#include "simd_neon.hpp"
#include "panel_neon.hpp"
#else
#define OCTAVO_UNROLL(n)
#include "simd_scalar.hpp"
#include "panel_scalar.hpp"
#endif
#include "lanes16.hpp"
