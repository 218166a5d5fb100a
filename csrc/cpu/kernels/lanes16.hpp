// What attention asks of sixteen lanes, a line of a K page: F32x16 is one register on AVX-512, else a
// pair of eights. Lane by lane the same operations as on F8, so the same bits.
#pragma once

namespace octavo::OCTAVO_ISA {

#if defined(OCTAVO_KERNELS_AVX512)

// Of these many F32x16 the sums fit the registers.
constexpr int kSums16 = 24;

OCTAVO_INLINE F32x16 broadcast_f32x16(float x) { return {_mm512_set1_ps(x)}; }
// Masked, since GCC 12 warns of its own header where lanes are taken plainly.
OCTAVO_INLINE F8 low_half(F32x16 a) { return {_mm512_maskz_extractf32x8_ps(0xff, a.v, 0)}; }
OCTAVO_INLINE F8 high_half(F32x16 a) { return {_mm512_maskz_extractf32x8_ps(0xff, a.v, 1)}; }
OCTAVO_INLINE F32x16 join(F8 low, F8 high) {
  return {_mm512_insertf32x8(_mm512_zextps256_ps512(low.v), high.v, 1)};
}
OCTAVO_INLINE F32x16 sub(F32x16 a, float b) { return {_mm512_sub_ps(a.v, _mm512_set1_ps(b))}; }
OCTAVO_INLINE F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
OCTAVO_INLINE F32x16 round_even(F32x16 a) { return {_mm512_roundscale_ps(a.v, 0)}; }

// a * 2^n for what exp asks: -126 <= n <= 127 and no overflow.
OCTAVO_INLINE F32x16 times_power_of_two(F32x16 a, F32x16 n) {
  return {_mm512_scalef_ps(a.v, n.v)};
}
// a where x >= bound or x is NaN, else 0.
OCTAVO_INLINE F32x16 zero_below(F32x16 x, float bound, F32x16 a) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_NLT_UQ);
  return {_mm512_maskz_mov_ps(keep, a.v)};
}
// Lane i is a's if begin <= first + i < end, else -inf.
OCTAVO_INLINE F32x16 hide_outside(F32x16 a, int first, int begin, int end) {
  const int from = begin <= first ? 0 : begin >= first + 16 ? 16 : begin - first;
  const int to = end <= first ? 0 : end >= first + 16 ? 16 : end - first;
  const uint32_t lanes = ((1u << to) - 1) & ~((1u << from) - 1);
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  return {_mm512_mask_mov_ps(nothing, static_cast<__mmask16>(lanes), a.v)};
}

#else

constexpr int kSums16 = kRowsTogether;

OCTAVO_INLINE F32x16 broadcast_f32x16(float x) { return {broadcast(x), broadcast(x)}; }
OCTAVO_INLINE F8 low_half(F32x16 a) { return a.low; }
OCTAVO_INLINE F8 high_half(F32x16 a) { return a.high; }
OCTAVO_INLINE F32x16 join(F8 low, F8 high) { return {low, high}; }
OCTAVO_INLINE F32x16 sub(F32x16 a, float b) {
  return {sub(a.low, broadcast(b)), sub(a.high, broadcast(b))};
}
OCTAVO_INLINE F32x16 mul(F32x16 a, F32x16 b) { return {mul(a.low, b.low), mul(a.high, b.high)}; }
OCTAVO_INLINE F32x16 max(F32x16 a, F32x16 b) { return {max(a.low, b.low), max(a.high, b.high)}; }
OCTAVO_INLINE F32x16 round_even(F32x16 a) { return {round_even(a.low), round_even(a.high)}; }
OCTAVO_INLINE F32x16 times_power_of_two(F32x16 a, F32x16 n) {
  return {mul(a.low, power_of_two(round_to_int(n.low))),
          mul(a.high, power_of_two(round_to_int(n.high)))};
}
OCTAVO_INLINE F32x16 zero_below(F32x16 x, float bound, F32x16 a) {
  const F8 b = broadcast(bound);
  return {select(less(x.low, b), zero(), a.low), select(less(x.high, b), zero(), a.high)};
}
OCTAVO_INLINE F32x16 hide_outside(F32x16 a, int first, int begin, int end) {
  const F8 nothing = broadcast(-__builtin_inff());
  return {select(lanes_between(first, begin, end), a.low, nothing),
          select(lanes_between(first + 8, begin, end), a.high, nothing)};
}

#endif

// What exp needs of F8 in these words, and what tells the widths apart.
OCTAVO_INLINE F8 times_power_of_two(F8 a, F8 n) { return mul(a, power_of_two(round_to_int(n))); }
OCTAVO_INLINE F8 zero_below(F8 x, float bound, F8 a) {
  return select(less(x, broadcast(bound)), zero(), a);
}
template <class F>
struct Lanes;
template <>
struct Lanes<F8> {
  static constexpr int count = 8;
  template <class T>
  OCTAVO_INLINE F8 load(const T* p) { return OCTAVO_ISA::load(p); }
  OCTAVO_INLINE F8 splat(float x) { return broadcast(x); }
};
template <>
struct Lanes<F32x16> {
  static constexpr int count = 16;
  template <class T>
  OCTAVO_INLINE F32x16 load(const T* p) { return load_f32x16(p); }
  OCTAVO_INLINE F32x16 splat(float x) { return broadcast_f32x16(x); }
};
template <class F>
OCTAVO_INLINE F splat(float x) {
  return Lanes<F>::splat(x);
}

}  // namespace octavo::OCTAVO_ISA
