// f32 weights to rows of Q4_0, Q4_1 and Q8_0, as pack.cpp reads them: a group of 32 at a time.
//
// Rule: octavo/quantization/quantize.py says what is computed, and this file does it operation for
// operation, so that both give the same bits. sum_lanes continues the order in which `sum` halves.
#pragma once

#include "math.hpp"

namespace octavo::OCTAVO_ISA {

constexpr float kShrinks[] = {0.0f, 1.0f, 2.5f};
constexpr int kFits = 2;
constexpr int kEights = kGroup / 8;

struct Group {
  F8 v[kEights];
};

template <class F>
OCTAVO_INLINE Group each_eight(F f) {
  Group r;
  for (int i = 0; i < kEights; ++i) r.v[i] = f(i);
  return r;
}

OCTAVO_INLINE float sum(const Group& a) {
  return sum_lanes(add(add(a.v[0], a.v[2]), add(a.v[1], a.v[3])));
}

OCTAVO_INLINE float largest_of(const Group& w) {
  I32x8 top = zero_i32();
  for (int i = 0; i < kEights; ++i) top = max(top, magnitude_bits(w.v[i]));
  const int32_t bits = max_lanes(top);
  float largest;
  memcpy(&largest, &bits, sizeof largest);
  return largest;
}

OCTAVO_INLINE Half as_half(float x) {
  Half halves[8];
  store(halves, broadcast(x));
  return halves[0];
}
OCTAVO_INLINE float widened(Half x) {
  Half halves[8];
  for (Half& half : halves) half = x;
  return first_lane(load(halves));
}

OCTAVO_INLINE float inverse_of(float scale) { return scale != 0 ? 1.0f / scale : 0.0f; }

OCTAVO_INLINE void store_codes(const Group& codes, int8_t* to) {
  I32x8 integers[kEights];
  for (int i = 0; i < kEights; ++i) integers[i] = round_to_int(codes.v[i]);
  store_narrow(to, integers);
}

OCTAVO_INLINE void store_nibbles(const Group& codes, uint8_t* to) {
  int8_t bytes[kGroup];
  store_codes(codes, bytes);
  for (int i = 0; i < kGroup / 2; ++i) {
    to[i] = static_cast<uint8_t>(bytes[i] | bytes[i + kGroup / 2] << 4);
  }
}

// -- Q8_0: f16 d, 32 int8 -----------------------------------------------------------------------

OCTAVO_INLINE void quantize_q8(const Group& w, uint8_t* to) {
  const float exact = largest_of(w) / 127.0f;
  Half scale = as_half(exact);
  if (widened(scale) < exact) ++scale.bits;  // the next half up: all are positive and finite
  memcpy(to, &scale, sizeof scale);
  if (scale.bits == 0) {
    memset(to + sizeof scale, 0, kGroup);
    return;
  }
  const F8 wide = broadcast(widened(scale));
  const Group quants = each_eight([&](int i) { return round_even(div(w.v[i], wide)); });
  store_codes(quants, reinterpret_cast<int8_t*>(to + sizeof scale));
}

// -- Q4_0: f16 d, 16 bytes ----------------------------------------------------------------------

// round(w / d) in -8 .. 7.
OCTAVO_INLINE Group signed_codes(const Group& w, float d) {
  const F8 inverse = broadcast(inverse_of(d));
  return each_eight([&](int i) {
    return max(min(round_even(mul(w.v[i], inverse)), broadcast(7.0f)), broadcast(-8.0f));
  });
}

OCTAVO_INLINE void quantize_q4(const Group& w, uint8_t* to) {
  const float largest = largest_of(w);
  float least = __builtin_inff();
  Half best{0};
  for (float divisor = 6.5f; divisor <= 9.5f; divisor += 0.25f) {
    const Half d = as_half(largest / divisor);
    const F8 wide = broadcast(widened(d));
    const Group codes = signed_codes(w, first_lane(wide));
    const float squared = sum(each_eight([&](int i) {
      const F8 error = sub(mul(codes.v[i], wide), w.v[i]);
      return mul(error, error);
    }));
    if (squared < least) {
      least = squared;
      best = d;
    }
  }
  const Group codes = signed_codes(w, widened(best));
  memcpy(to, &best, sizeof best);
  store_nibbles(each_eight([&](int i) { return add(codes.v[i], broadcast(8.0f)); }),
                to + sizeof best);
}

// -- Q4_1: f16 d, f16 m, 16 bytes ---------------------------------------------------------------

struct Line {
  float d;
  float m;
};

// round((w - m) / d) in 0 .. 15.
OCTAVO_INLINE Group codes_of(const Group& w, Line line) {
  const F8 start = broadcast(line.m);
  const F8 inverse = broadcast(inverse_of(line.d));
  return each_eight([&](int i) {
    const F8 exact = mul(sub(w.v[i], start), inverse);
    return round_even(min(max(exact, zero()), broadcast(15.0f)));
  });
}

OCTAVO_INLINE float squared_error(const Group& w, Line line, const Group& codes) {
  const F8 slope = broadcast(line.d);
  const F8 start = broadcast(line.m);
  return sum(each_eight([&](int i) {
    const F8 error = sub(add(mul(codes.v[i], slope), start), w.v[i]);
    return mul(error, error);
  }));
}

// The line of least squares for these codes; `line` where all codes are one.
OCTAVO_INLINE Line nearest_line(const Group& w, const Group& codes, float total, Line line) {
  const float sum_q = sum(codes);
  const float sum_qq = sum(each_eight([&](int i) { return mul(codes.v[i], codes.v[i]); }));
  const float sum_wq = sum(each_eight([&](int i) { return mul(codes.v[i], w.v[i]); }));
  const float spread = kGroup * sum_qq - sum_q * sum_q;
  if (!(spread > 0)) return line;
  return {(kGroup * sum_wq - total * sum_q) / spread, (total * sum_qq - sum_q * sum_wq) / spread};
}

OCTAVO_INLINE void quantize_q4m(const Group& w, uint8_t* to) {
  F8 low_lanes = w.v[0];
  F8 high_lanes = w.v[0];
  for (int i = 1; i < kEights; ++i) {
    low_lanes = min(w.v[i], low_lanes);
    high_lanes = max(w.v[i], high_lanes);
  }
  const float low = -max_lanes(sub(zero(), low_lanes));
  const float span = (max_lanes(high_lanes) - low) + 0.0f;  // never -0, whichever zero is larger
  const float total = sum(w);
  float least = __builtin_inff();
  Half best[2] = {};
  for (const float shrink : kShrinks) {
    const float d = span / (15.0f + shrink);
    Line line{d, low + (span - 15.0f * d) * 0.5f};
    for (int fit = 0; fit <= kFits; ++fit) {
      const Half halves[2] = {as_half(line.d), as_half(line.m)};
      const Line rounded{widened(halves[0]), widened(halves[1])};
      const Group codes = codes_of(w, rounded);
      const float squared = squared_error(w, rounded, codes);
      if (squared < least) {
        least = squared;
        memcpy(best, halves, sizeof best);
      }
      if (fit < kFits) line = nearest_line(w, codes, total, line);
    }
  }
  memcpy(to, best, sizeof best);
  store_nibbles(codes_of(w, {widened(best[0]), widened(best[1])}), to + sizeof best);
}

// -- rows ---------------------------------------------------------------------------------------

template <size_t kBytes, class F>
OCTAVO_INLINE void each_group(const OctavoQuantizeJob& job, int64_t row, F quantize) {
  const int groups = job.width / kGroup;
  const float* from = job.values + row * job.width;
  uint8_t* to = job.raw + row * groups * kBytes;
  for (int group = 0; group < groups; ++group, from += kGroup, to += kBytes) {
    quantize(each_eight([&](int i) { return load(from + 8 * i); }), to);
  }
}

static void quantize_row(const OctavoQuantizeJob& job, int64_t row) {
  switch (job.format) {
    case OCTAVO_FORMAT_Q4:
      return each_group<18>(job, row, [](const Group& w, uint8_t* to) { quantize_q4(w, to); });
    case OCTAVO_FORMAT_Q4M:
      return each_group<20>(job, row, [](const Group& w, uint8_t* to) { quantize_q4m(w, to); });
    default:
      return each_group<34>(job, row, [](const Group& w, uint8_t* to) { quantize_q8(w, to); });
  }
}

}  // namespace octavo::OCTAVO_ISA
