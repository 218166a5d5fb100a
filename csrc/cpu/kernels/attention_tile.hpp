// One KV tile for a few rows: scores, online softmax, weighted values.
//
// A row is a query head of a token. Rows that share a KV head go together, so that each K and V line
// is loaded once for all of them. What a row computes does not depend on its neighbours: every chain
// below is per row and element, over d or over t in ascending order.
#pragma once

#include "math.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int kTileBlocks = kTile / kBlockTokens;

// The pages of a tile for one KV head. Only blocks some row sees have pointers. As a line of a page
// is read, the same line of the page `ahead` is prefetched: pages lie anywhere, and no hardware
// prefetcher finds the next one. Where nothing is ahead it is the page itself.
template <class T>
struct KVTile {
  using Element = T;
  static constexpr bool kPrefetch = true;
  const T* k[kTileBlocks];  // [head_dim][16] each
  const T* v[kTileBlocks];  // [16][head_dim] each
  const T* k_ahead[kTileBlocks];
  const T* v_ahead[kTileBlocks];
};

// The same as f32 in a thread's scratch memory, for rows that are too many to go together.
struct ConvertedTile {
  using Element = float;
  static constexpr bool kPrefetch = false;
  const float* k[kTileBlocks];
  const float* v[kTileBlocks];
};

// Positions [begin, end) of a tile.
struct Span {
  int begin;
  int end;
};

// What R rows carry from tile to tile of a split. q is scaled; out is [R][head_dim]; softcap is 0 for
// none.
struct RowState {
  const float* q;
  float* max;
  float* sum;
  float* out;
  float softcap;
};

// How many F32x16 of sums each of R rows may have: 1, 2 or 4.
template <int R>
constexpr int kSumsOfRow = kSums16 / R >= 4 ? 4 : kSums16 / R >= 2 ? 2 : 1;

constexpr int kCacheLine = 64;

// The cache lines of `nbytes` bytes at p.
OCTAVO_INLINE void prefetch_all(const void* p, size_t nbytes) {
  for (size_t at = 0; at < nbytes; at += kCacheLine) prefetch_far(static_cast<const char*>(p) + at);
}

// scores[r][t] = q[r] . k[t] for the tokens of N neighbouring blocks, -inf where row r sees nothing.
//
//   k[block] is [head_dim][16]: a line is one dimension of 16 tokens, one F32x16
template <int R, int N, class Tile>
OCTAVO_INLINE void score_blocks(const Tile& tile, int block, int head_dim,
                                const RowState& rows, const Span* seen, bool all_seen,
                                float (*scores)[kTile]) {
  using T = typename Tile::Element;
  constexpr int kLines = kCacheLine / (kBlockTokens * sizeof(T));  // of K in a line of the cache
  F32x16 acc[R][N];
OCTAVO_UNROLL(6)
  for (int r = 0; r < R; ++r) {
OCTAVO_UNROLL(4)
    for (int n = 0; n < N; ++n) acc[r][n] = zero_f32x16();
  }
  for (int first = 0; first < head_dim; first += kLines) {
    if constexpr (Tile::kPrefetch) {
OCTAVO_UNROLL(4)
      for (int n = 0; n < N; ++n) prefetch_far(tile.k_ahead[block + n] + first * kBlockTokens);
    }
OCTAVO_UNROLL(4)
    for (int d = first; d < first + kLines; ++d) {
OCTAVO_UNROLL(4)
      for (int n = 0; n < N; ++n) {
        const F32x16 k = load_f32x16(tile.k[block + n] + d * kBlockTokens);
OCTAVO_UNROLL(6)
        for (int r = 0; r < R; ++r) acc[r][n] = fma(k, rows.q[r * head_dim + d], acc[r][n]);
      }
    }
  }
OCTAVO_UNROLL(6)
  for (int r = 0; r < R; ++r) {
OCTAVO_UNROLL(4)
    for (int n = 0; n < N; ++n) {
      const int first = (block + n) * kBlockTokens;
      F32x16 score = acc[r][n];
      if (rows.softcap > 0.0f) score = soften(score, rows.softcap);
      if (!all_seen) score = hide_outside(score, first, seen[r].begin, seen[r].end);
      store(scores[r] + first, score);
    }
  }
}

template <int R, int N, class Tile>
OCTAVO_INLINE void score_all(const Tile& tile, Span blocks, int head_dim, const RowState& rows,
                             const Span* seen, bool all_seen, float (*scores)[kTile]) {
  int block = blocks.begin;
  for (; block + N <= blocks.end; block += N) {
    score_blocks<R, N>(tile, block, head_dim, rows, seen, all_seen, scores);
  }
  if constexpr (N > 1) {
    score_all<R, N / 2>(tile, {block, blocks.end}, head_dim, rows, seen, all_seen, scores);
  }
}

// Turn row r's scores into exp(score - max), and fold them into its max and sum. Returns the factor
// that what was summed before is multiplied with. `blocks` are those that have scores; the rest of
// the tile would add zeros.
OCTAVO_INLINE float softmax_row(Span blocks, float* scores, float* running_max, float* running_sum) {
  const float infinity = __builtin_inff();
  const int begin = blocks.begin * kBlockTokens;
  const int end = blocks.end * kBlockTokens;
  F32x16 top = load_f32x16(scores + begin);
  for (int t = begin + 16; t < end; t += 16) top = max(top, load_f32x16(scores + t));
  const float old_max = *running_max;
  const float new_max = larger_of(old_max, max_lanes(max(low_half(top), high_half(top))));
  float factor = 1.0f;  // exp(0), where the maximum stays
  if (old_max == -infinity) {
    factor = 0.0f;
  } else if (old_max != new_max) {
    factor = exp(old_max - new_max);
  }

  F8 lanes = zero();
  for (int t = begin; t < end; t += 16) {
    const F32x16 p = exp(sub(load_f32x16(scores + t), new_max));
    store(scores + t, p);
    lanes = add(add(lanes, low_half(p)), high_half(p));
  }
  *running_max = new_max;
  *running_sum = *running_sum * factor + sum_lanes(lanes);
  return factor;
}

// out[r][d ..] = out * factor[r], then fma(p[r][t], v[t][d ..], out) for t of the span in order.
// N vectors F of d at once; factor null leaves out as it is.
//
//   v[block] is [16][head_dim]: a line is one token
template <class F, int R, int N, class Tile>
OCTAVO_INLINE void add_values_at(const Tile& tile, Span span, int d, int head_dim,
                                 const float (*p)[kTile], const float* factor, float* out) {
  using T = typename Tile::Element;
  constexpr int kLanes = Lanes<F>::count;
  F acc[R][N];
OCTAVO_UNROLL(6)
  for (int r = 0; r < R; ++r) {
OCTAVO_UNROLL(4)
    for (int i = 0; i < N; ++i) {
      acc[r][i] = Lanes<F>::load(out + r * head_dim + d + kLanes * i);
      if (factor) acc[r][i] = mul(acc[r][i], Lanes<F>::splat(factor[r]));
    }
  }
  for (int t = span.begin; t < span.end;) {
    const int block = t / kBlockTokens;
    const int block_end = smaller_of((block + 1) * kBlockTokens, span.end);
    const int offset = (t % kBlockTokens) * head_dim + d;
    const T* line = tile.v[block] + offset;
    const T* ahead = line;
    if constexpr (Tile::kPrefetch) ahead = tile.v_ahead[block] + offset;
    for (; t < block_end; ++t, line += head_dim, ahead += head_dim) {
      if constexpr (Tile::kPrefetch) prefetch_all(ahead, N * kLanes * sizeof(T));
OCTAVO_UNROLL(4)
      for (int i = 0; i < N; ++i) {
        const F v = Lanes<F>::load(line + kLanes * i);
OCTAVO_UNROLL(6)
        for (int r = 0; r < R; ++r) acc[r][i] = fma(v, Lanes<F>::splat(p[r][t]), acc[r][i]);
      }
    }
  }
OCTAVO_UNROLL(6)
  for (int r = 0; r < R; ++r) {
OCTAVO_UNROLL(4)
    for (int i = 0; i < N; ++i) store(out + r * head_dim + d + kLanes * i, acc[r][i]);
  }
}

template <int R, class Tile>
OCTAVO_INLINE void add_values(const Tile& tile, Span span, int head_dim, const float (*p)[kTile],
                              const float* factor, float* out) {
  constexpr int N = kSumsOfRow<R>;
  int d = 0;
  for (; d + 16 * N <= head_dim; d += 16 * N) {
    add_values_at<F32x16, R, N>(tile, span, d, head_dim, p, factor, out);
  }
  for (; d < head_dim; d += 8) add_values_at<F8, R, 1>(tile, span, d, head_dim, p, factor, out);
}

// Rows that do not see the same positions: each its own head and tail, all what they share.
//
//   row 0   |--- alone ---|===== together =====|
//   row 1                 |===== together =====|-- alone --|
template <int R, class Tile>
static void add_values_ragged(const Tile& tile, const Span* seen, Span shared, int head_dim,
                              const float (*p)[kTile], const float* factor, float* out) {
  const bool overlap = shared.begin < shared.end;
  for (int r = 0; r < R; ++r) {
    const Span alone{seen[r].begin, overlap ? shared.begin : seen[r].end};
    add_values<1>(tile, alone, head_dim, p + r, factor + r, out + r * head_dim);
  }
  if (!overlap) return;
  add_values<R>(tile, shared, head_dim, p, nullptr, out);
  for (int r = 0; r < R; ++r) {
    const Span alone{shared.end, seen[r].end};
    if (alone.begin < alone.end) {
      add_values<1>(tile, alone, head_dim, p + r, nullptr, out + r * head_dim);
    }
  }
}

// Fold one tile into R rows, each of which sees at least one position of it.
template <int R, class Tile>
static void attend_tile(const Tile& tile, int head_dim, const Span* seen, RowState rows) {
  alignas(64) float scores[R][kTile];
  Span any{kTile, 0};
  Span all{0, kTile};
  for (int r = 0; r < R; ++r) {
    any = {smaller_of(any.begin, seen[r].begin), larger_of(any.end, seen[r].end)};
    all = {larger_of(all.begin, seen[r].begin), smaller_of(all.end, seen[r].end)};
  }
  const Span blocks{any.begin / kBlockTokens, static_cast<int>(ceil_div(any.end, kBlockTokens))};
  const bool all_seen =
      all.begin <= blocks.begin * kBlockTokens && all.end >= blocks.end * kBlockTokens;
  score_all<R, kSumsOfRow<R>>(tile, blocks, head_dim, rows, seen, all_seen, scores);

  float factor[R];
  for (int r = 0; r < R; ++r) {
    factor[r] = softmax_row(blocks, scores[r], rows.max + r, rows.sum + r);
  }
  const bool uniform = any.begin == all.begin && any.end == all.end;
  if (uniform) {
    add_values<R>(tile, all, head_dim, scores, factor, rows.out);
  } else {
    add_values_ragged<R>(tile, seen, all, head_dim, scores, factor, rows.out);
  }
}

}  // namespace octavo::OCTAVO_ISA
