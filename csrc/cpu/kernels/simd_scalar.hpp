// simd.hpp in portable C++: the reference of the contract, and what CPUs without an own build run.
#pragma once

namespace octavo::OCTAVO_ISA {

constexpr int kRowsTogether = 2;

struct F8 {
  float v[8];
};
struct Mask8 {
  bool v[8];
};
struct I32x8 {
  int32_t v[8];
};

template <class F>
OCTAVO_INLINE F8 each_lane(F f) {
  F8 r;
  for (int i = 0; i < 8; ++i) r.v[i] = f(i);
  return r;
}

OCTAVO_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
OCTAVO_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// -- floats -------------------------------------------------------------------------------------

OCTAVO_INLINE float to_float(Half h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000) << 16;
  const uint32_t exponent = (h.bits >> 10) & 31;
  const uint32_t mantissa = h.bits & 1023;
  if (exponent == 31) {
    const uint32_t quiet = mantissa ? 1u << 22 : 0;
    return float_of(sign | 0x7f800000 | quiet | mantissa << 13);
  }
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exactly
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return float_of(sign | bits_of(magnitude));
  }
  return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

// To nearest, ties to even; too large becomes infinity.
OCTAVO_INLINE Half to_half(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {  // NaN: keep the top of its payload, made quiet
    half = 0x7e00 | (magnitude >> 13 & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // 65520 and above
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: subnormal, in units of 2^-24
    half = static_cast<uint32_t>(__builtin_rintf(float_of(magnitude) * 0x1p24f));
  } else {  // a carry out of the mantissa rightly raises the exponent
    const uint32_t ties_to_even = 0xfff + (magnitude >> 13 & 1);
    half = (magnitude + ties_to_even - (112u << 23)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

OCTAVO_INLINE F8 broadcast(float x) {
  return each_lane([=](int) { return x; });
}
OCTAVO_INLINE F8 zero() { return broadcast(0.0f); }
OCTAVO_INLINE F8 load(const float* p) {
  return each_lane([=](int i) { return p[i]; });
}
OCTAVO_INLINE F8 load(const Half* p) {
  return each_lane([=](int i) { return to_float(p[i]); });
}
OCTAVO_INLINE void store(float* p, F8 a) {
  for (int i = 0; i < 8; ++i) p[i] = a.v[i];
}
OCTAVO_INLINE F8 load(const Bf16* p) {
  return each_lane([=](int i) { return to_float(p[i]); });
}
OCTAVO_INLINE void store(Half* p, F8 a) {
  for (int i = 0; i < 8; ++i) p[i] = to_half(a.v[i]);
}
// To nearest, ties to even; too large becomes infinity, a NaN quiet.
OCTAVO_INLINE void store(Bf16* p, F8 a) {
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = bits_of(a.v[i]);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint32_t rounded = nan ? bits | 1u << 22 : bits + 0x7fff + (bits >> 16 & 1);
    p[i].bits = static_cast<uint16_t>(rounded >> 16);
  }
}

OCTAVO_INLINE F8 add(F8 a, F8 b) {
  return each_lane([=](int i) { return a.v[i] + b.v[i]; });
}
OCTAVO_INLINE F8 sub(F8 a, F8 b) {
  return each_lane([=](int i) { return a.v[i] - b.v[i]; });
}
OCTAVO_INLINE F8 mul(F8 a, F8 b) {
  return each_lane([=](int i) { return a.v[i] * b.v[i]; });
}
OCTAVO_INLINE F8 div(F8 a, F8 b) {
  return each_lane([=](int i) { return a.v[i] / b.v[i]; });
}
// Not inlined: where the baseline has no fma instruction this is eight library calls.
static __attribute__((noinline)) F8 fma(F8 a, F8 b, F8 c) {
  return each_lane([=](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
OCTAVO_INLINE F8 max(F8 a, F8 b) {
  return each_lane([=](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
OCTAVO_INLINE F8 min(F8 a, F8 b) {
  return each_lane([=](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
OCTAVO_INLINE F8 round_even(F8 a) {
  return each_lane([=](int i) { return __builtin_rintf(a.v[i]); });
}

// -- masks --------------------------------------------------------------------------------------

OCTAVO_INLINE Mask8 less(F8 a, F8 b) {
  Mask8 r;
  for (int i = 0; i < 8; ++i) r.v[i] = a.v[i] < b.v[i];
  return r;
}
OCTAVO_INLINE Mask8 lanes_between(int first, int begin, int end) {
  Mask8 r;
  for (int i = 0; i < 8; ++i) r.v[i] = begin <= first + i && first + i < end;
  return r;
}
OCTAVO_INLINE F8 select(Mask8 mask, F8 if_true, F8 if_false) {
  return each_lane([=](int i) { return mask.v[i] ? if_true.v[i] : if_false.v[i]; });
}

// -- reductions over lanes ----------------------------------------------------------------------

OCTAVO_INLINE float sum_lanes(F8 a) {
  const float* l = a.v;
  return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}
OCTAVO_INLINE float larger(float a, float b) { return a > b ? a : b; }
OCTAVO_INLINE float max_lanes(F8 a) {
  const float* l = a.v;
  return larger(larger(larger(l[0], l[4]), larger(l[2], l[6])),
                larger(larger(l[1], l[5]), larger(l[3], l[7])));
}
OCTAVO_INLINE float first_lane(F8 a) { return a.v[0]; }

// -- int32 --------------------------------------------------------------------------------------

OCTAVO_INLINE I32x8 zero_i32() { return {}; }
OCTAVO_INLINE I32x8 add(I32x8 a, I32x8 b) {
  for (int i = 0; i < 8; ++i) a.v[i] += b.v[i];
  return a;
}
OCTAVO_INLINE I32x8 round_to_int(F8 a) {
  I32x8 r;
  for (int i = 0; i < 8; ++i) {
    const bool fits = a.v[i] >= -0x1p31f && a.v[i] < 0x1p31f;
    r.v[i] = fits ? static_cast<int32_t>(__builtin_rintf(a.v[i])) : INT32_MIN;
  }
  return r;
}
OCTAVO_INLINE F8 to_float(I32x8 a) {
  return each_lane([=](int i) { return static_cast<float>(a.v[i]); });
}
OCTAVO_INLINE int32_t sum_lanes(I32x8 a) {
  int32_t sum = 0;
  for (int i = 0; i < 8; ++i) sum += a.v[i];
  return sum;
}
OCTAVO_INLINE F8 power_of_two(I32x8 n) {
  return each_lane([=](int i) { return float_of((static_cast<uint32_t>(n.v[i]) + 127) << 23); });
}
OCTAVO_INLINE I32x8 magnitude_bits(F8 a) {
  I32x8 r;
  for (int i = 0; i < 8; ++i) r.v[i] = static_cast<int32_t>(bits_of(a.v[i]) & 0x7fffffff);
  return r;
}
OCTAVO_INLINE I32x8 max(I32x8 a, I32x8 b) {
  for (int i = 0; i < 8; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
OCTAVO_INLINE int32_t max_lanes(I32x8 a) {
  int32_t top = a.v[0];
  for (int i = 1; i < 8; ++i) top = a.v[i] > top ? a.v[i] : top;
  return top;
}
OCTAVO_INLINE I32x8 swap_middle(I32x8 a) {
  for (int i = 0; i < 8; i += 4) {
    const int32_t second = a.v[i + 1];
    a.v[i + 1] = a.v[i + 2];
    a.v[i + 2] = second;
  }
  return a;
}
template <class T>
OCTAVO_INLINE void store_narrow(T* p, const I32x8 (&a)[4]) {
  for (int i = 0; i < 32; ++i) p[i] = static_cast<T>(a[i / 8].v[i % 8]);
}

OCTAVO_INLINE void prefetch(const void*) {}
OCTAVO_INLINE void prefetch_far(const void*) {}

}  // namespace octavo::OCTAVO_ISA
