// What choosing a token from a row of logits needs: the passes of an ISA over whole rows, and constants
// that they share with choice.cpp.
#pragma once

#include <stdint.h>

#include "octavo.h"

namespace octavo {

// Tokens that the passes work on at a time.
constexpr int kChoiceChunk = 64;

constexpr double kLn2 = 0.693147180559945309417;
constexpr double kLog2e = 1.44269504088896340736;
// ln 2 in two parts, the first with zeros at its end, so that small multiples of it are exact.
constexpr double kLn2High = 6.93147180369123816490e-01;
constexpr double kLn2Low = 1.90821492927058770002e-10;

// Passes over a row; see kernels/choice.hpp.
struct ChoiceKernels {
  bool (*chunk_maxima)(const float* logits, int width, float* maxima);
  int64_t (*weigh)(const float* logits, int count, double temperature, double peak,
                   int64_t* weights);
  void (*words_of_chunk)(uint64_t seed, uint32_t position, uint32_t chunk, uint32_t* words);
  uint32_t (*word_of_token)(uint64_t seed, uint32_t position, uint32_t id);
  void (*mark_survivors)(const float* logits, const uint32_t* words, int count, double temperature,
                         double least, uint8_t* may_win);
};

// Bytes of scratch memory that choose_token uses on rows of this width.
int64_t choice_scratch_nbytes(int32_t width);

// Fill in choice->token_id; the contract is octavo/sampling/choice.py.
void choose_token(const ChoiceKernels& kernels, OctavoChoice* choice, int32_t width, void* scratch);

}  // namespace octavo
