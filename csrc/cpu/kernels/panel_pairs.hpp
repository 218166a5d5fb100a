// F32x16 of simd.hpp where no register holds sixteen floats: a pair of eights.
#pragma once

namespace octavo::OCTAVO_ISA {

struct F32x16 {
  F8 low, high;
};

OCTAVO_INLINE F32x16 zero_f32x16() { return {zero(), zero()}; }
template <class T>
OCTAVO_INLINE F32x16 load_f32x16(const T* p) {
  return {load(p), load(p + 8)};
}
OCTAVO_INLINE void store(float* p, F32x16 a) {
  store(p, a.low);
  store(p + 8, a.high);
}
OCTAVO_INLINE F32x16 add(F32x16 a, F32x16 b) { return {add(a.low, b.low), add(a.high, b.high)}; }
OCTAVO_INLINE F32x16 mul(F32x16 a, float b) {
  return {mul(a.low, broadcast(b)), mul(a.high, broadcast(b))};
}
OCTAVO_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}
OCTAVO_INLINE F32x16 fma(F32x16 a, float b, F32x16 c) {
  return {fma(a.low, broadcast(b), c.low), fma(a.high, broadcast(b), c.high)};
}

}  // namespace octavo::OCTAVO_ISA
