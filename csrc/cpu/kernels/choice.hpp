// The passes over a whole row of logits that choosing a token needs, for the translation unit of one ISA.
//
// Rule: plain C++ that a compiler vectorises, each operation IEEE's, so that every build gives the same
// bits as octavo/sampling does in numpy.
#pragma once

#include "../choice.hpp"
#include "philox.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_ISA {

// maxima[c] = the largest logit of chunk c; whether there is a NaN, which makes them meaningless.
//
//   logits    [ 64 | 64 | ... | rest ]     chunk c is [64 c, 64 c + 64), the last may be shorter
static bool chunk_maxima(const float* logits, int width, float* maxima) {
  constexpr int32_t kInfinityBits = 0x7f800000;
  const int whole = width / kChoiceChunk;
  I32x8 magnitude = zero_i32();
  for (int chunk = 0; chunk < whole; ++chunk) {
    const float* values = logits + chunk * kChoiceChunk;
    F8 best = load(values);
    magnitude = max(magnitude, magnitude_bits(best));
    for (int k = 8; k < kChoiceChunk; k += 8) {
      const F8 v = load(values + k);
      best = max(best, v);
      magnitude = max(magnitude, magnitude_bits(v));
    }
    maxima[chunk] = max_lanes(best);
  }
  bool any_nan = max_lanes(magnitude) > kInfinityBits;
  if (whole * kChoiceChunk < width) {
    float best = -__builtin_inff();
    for (int id = whole * kChoiceChunk; id < width; ++id) {
      best = logits[id] > best ? logits[id] : best;
      any_nan |= logits[id] != logits[id];
    }
    maxima[whole] = best;
  }
  return any_nan;
}

// 1.5 * 2^52: added, it rounds to an integer, whose bits are then the lowest ones.
constexpr double kRound = 6755399441055744.0;
constexpr int64_t kRoundBits = 0x4338000000000000;

// exp(x) for x <= 0, of -700 below: x = n ln 2 + r, and Taylor's polynomial in |r| <= ln 2 / 2.
OCTAVO_INLINE double exp_of_negative(double x) {
  const double clamped = x > -700.0 ? x : -700.0;
  const double shifted = clamped * kLog2e + kRound;
  const double n = shifted - kRound;
  const double r = (clamped - n * kLn2High) - n * kLn2Low;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 1.0 / 2.0;
  p = p * r + 1.0;
  p = p * r + 1.0;
  uint64_t bits;
  __builtin_memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 52) + (uint64_t{1023} << 52);
  double power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return p * power;
}

// weights[i] = exp(logits[i] / temperature - peak) in units of 2^-42, rounded; their sum. Integers, so
// that it matters to no sum in what order it is taken.
static int64_t weigh(const float* logits, int count, double temperature, double peak,
                     int64_t* weights) {
  constexpr double kUnits = 4398046511104.0;  // 2^42
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    const double weight = exp_of_negative(static_cast<double>(logits[i]) / temperature - peak);
    const double shifted = weight * kUnits + kRound;
    int64_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    weights[i] = bits - kRoundBits;
    total += weights[i];
  }
  return total;
}

// The word of each token of a chunk: word id % 4 of the counter (id / 4, position, 0, 0).
static void words_of_chunk(uint64_t seed, uint32_t position, uint32_t chunk, uint32_t* words) {
  philox_eight(seed, position, chunk * (kChoiceChunk / 4), words);
  philox_eight(seed, position, chunk * (kChoiceChunk / 4) + 8, words + 32);
}

static uint32_t word_of_token(uint64_t seed, uint32_t position, uint32_t id) {
  return philox(seed, position, id / 4)[id % 4];
}

// may_win[i]: whether logits[i] + temperature * noise may reach `least`, by a bound on the noise.
//
// Noise is -log(-log(1 - x)) with x = (~word + 0.5) / 2^32, and at most -log(x), so at most (31 - e) ln 2
// where 2^e is the power of two below ~word / 2. (Rounding to float may take the next one above: then x is
// so large that its true noise is less by x / 2 and more.)
static void mark_survivors(const float* logits, const uint32_t* words, int count, double temperature,
                           double least, uint8_t* may_win) {
  const double per_bit = temperature * kLn2;
  for (int i = 0; i < count; ++i) {
    const float half = static_cast<float>(static_cast<int32_t>(~words[i] >> 1));
    int32_t bits;
    __builtin_memcpy(&bits, &half, sizeof bits);
    const int32_t exponent = (bits >> 23) - 127;
    const double most = static_cast<double>(logits[i]) + per_bit * static_cast<double>(31 - exponent);
    may_win[i] = !(most < least);
  }
}

#define OCTAVO_CHOICE_KERNELS \
  {chunk_maxima, weigh, words_of_chunk, word_of_token, mark_survivors}

}  // namespace octavo::OCTAVO_ISA
