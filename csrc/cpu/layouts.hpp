// How weights and KV pages lie in memory. Plain data: shared by the packer and by every ISA's kernels.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

constexpr int kPanel = 16;       // outputs (rows of W) that a weight panel holds
constexpr int kGroup = 32;       // weights that share a scale, along K
constexpr int kBlockTokens = 16; // tokens of a KV block
constexpr int kTile = 64;        // KV positions that attention reduces at a time
constexpr int kSplit = 512;      // KV positions that are reduced apart and merged in order
constexpr size_t kAlignment = 64;
constexpr int kExpertTokens = 512;  // tokens whose experts are worked on together
constexpr int kRouterBits = 16;  // of a router's activations: rougher ones would choose other experts
constexpr int kMostPaddedRows = 4;  // that a kernel adds to the quantised rows of linear's last tile

struct Half {
  uint16_t bits;
};
// The upper half of an f32.
struct Bf16 {
  uint16_t bits;
};

// A weight W [N, K] is N / 16 panels, one after the other; the last is padded with zero rows.
// A panel is K / 32 blocks; a block holds 16 outputs n by 32 inputs k, scales inline.

// q4m, w = scale * q + min. Row j of `quants` holds k = 8j .. 8j + 7 of all 16 outputs: its low
// nibbles what one dword of four activations multiplies, its high nibbles what the next one does.
//
//              byte 0 .. 3        4 .. 7            60 .. 63
//   quants[j]  n=0, k=8j..8j+3    n=1, k=8j..8j+3   ...  n=15    in the low nibbles
//              n=0, k=8j+4..8j+7  n=1               ...  n=15    in the high nibbles
struct Q4mBlock {
  uint8_t quants[kGroup / 8][4 * kPanel];
  Half scales[kPanel];
  Half mins[kPanel];
};

// q4, w = scale * (q - 8): a Q4mBlock without mins.
struct Q4Block {
  uint8_t quants[kGroup / 8][4 * kPanel];
  Half scales[kPanel];
};

// q8, w = scale * q. Row p of `quants` holds k = 2p, 2p + 1: what one pair of int16 activations
// multiplies.
//
//              byte 0, 1           2, 3                30, 31
//   quants[p]  n=0, k=2p, 2p + 1   n=1, k=2p, 2p + 1   ...  n=15
struct Q8Block {
  int8_t quants[kGroup / 2][32];
  Half scales[kPanel];
};

// q8g16: a Q8Block in which rows 0 .. 7 (k < 16) and rows 8 .. 15 have scales of their own.
struct Q8g16Block {
  int8_t quants[kGroup / 2][32];
  Half scales[2][kPanel];
};

// Plain panels (f32, f16, bf16) are [K][16] numbers: the 16 outputs' weights for one k side by side.

static_assert(sizeof(Q4mBlock) == 320, "5 bits a weight");
static_assert(sizeof(Q4Block) == 288, "4.5 bits a weight");
static_assert(sizeof(Q8Block) == 544, "8.5 bits a weight");
static_assert(sizeof(Q8g16Block) == 576, "9 bits a weight");

// A KV page: K as [kv_heads][head_dim][16], then V as [kv_heads][16][head_dim].

}  // namespace octavo
