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
  const T* k[kTileBlocks];  // [head_dim][16] each
  const T* v[kTileBlocks];  // [16][head_dim] each
  const T* k_ahead[kTileBlocks];
  const T* v_ahead[kTileBlocks];
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

// scores[r][t] = q[r] . k[t] for the tokens of N neighbouring blocks, -inf where row r sees nothing.
//
//   k[block] is [head_dim][16]: a line is one dimension of 16 tokens, two vectors
template <int R, int N, class T>
OCTAVO_INLINE void score_blocks(const KVTile<T>& tile, int block, int head_dim, const RowState& rows,
                                const Span* seen, float (*scores)[kTile]) {
  const F8 nothing = broadcast(-__builtin_inff());
  F8 acc[R][2 * N];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < 2 * N; ++i) acc[r][i] = zero();
  }
  for (int d = 0; d < head_dim; ++d) {
    F8 k[2 * N];
    for (int n = 0; n < N; ++n) {
      prefetch(tile.k_ahead[block + n] + d * kBlockTokens);
      k[2 * n] = load(tile.k[block + n] + d * kBlockTokens);
      k[2 * n + 1] = load(tile.k[block + n] + d * kBlockTokens + 8);
    }
OCTAVO_UNROLL(6)
    for (int r = 0; r < R; ++r) {
      const F8 x = broadcast(rows.q[r * head_dim + d]);
      for (int i = 0; i < 2 * N; ++i) acc[r][i] = fma(x, k[i], acc[r][i]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < 2 * N; ++i) {
      const int first = block * kBlockTokens + 8 * i;
      const Mask8 visible = lanes_between(first, seen[r].begin, seen[r].end);
      const F8 score = rows.softcap > 0.0f ? soften(acc[r][i], rows.softcap) : acc[r][i];
      store(scores[r] + first, select(visible, score, nothing));
    }
  }
}

// Turn row r's scores into exp(score - max), and fold them into its max and sum. Returns the factor
// that what was summed before is multiplied with. `blocks` are those that have scores; the rest of
// the tile would add zeros.
OCTAVO_INLINE float softmax_row(Span blocks, float* scores, float* running_max, float* running_sum) {
  const float infinity = __builtin_inff();
  const int begin = blocks.begin * kBlockTokens;
  const int end = blocks.end * kBlockTokens;
  F8 top = broadcast(-infinity);
  for (int t = begin; t < end; t += 8) top = max(top, load(scores + t));
  const float old_max = *running_max;
  const float new_max = larger_of(old_max, max_lanes(top));
  const float factor = old_max == -infinity ? 0.0f : exp(old_max - new_max);

  F8 lanes = zero();
  for (int t = begin; t < end; t += 8) {
    const F8 p = exp(sub(load(scores + t), broadcast(new_max)));
    store(scores + t, p);
    lanes = add(lanes, p);
  }
  *running_max = new_max;
  *running_sum = *running_sum * factor + sum_lanes(lanes);
  return factor;
}

// out[r][d ..] = out * factor[r], then fma(p[r][t], v[t][d ..], out) for t of the span in order.
// N vectors of d at once; factor null leaves out as it is.
//
//   v[block] is [16][head_dim]: a line is one token
template <int R, int N, class T>
OCTAVO_INLINE void add_values_at(const KVTile<T>& tile, Span span, int d, int head_dim,
                                 const float (*p)[kTile], const float* factor, float* out) {
  F8 acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < N; ++i) {
      acc[r][i] = load(out + r * head_dim + d + 8 * i);
      if (factor) acc[r][i] = mul(acc[r][i], broadcast(factor[r]));
    }
  }
  for (int t = span.begin; t < span.end;) {
    const int block = t / kBlockTokens;
    const int block_end = smaller_of((block + 1) * kBlockTokens, span.end);
    const T* line = tile.v[block] + (t % kBlockTokens) * head_dim + d;
    const T* ahead = tile.v_ahead[block] + (t % kBlockTokens) * head_dim + d;
    for (; t < block_end; ++t, line += head_dim, ahead += head_dim) {
      prefetch(ahead);
      F8 v[N];
      for (int i = 0; i < N; ++i) v[i] = load(line + 8 * i);
OCTAVO_UNROLL(6)
      for (int r = 0; r < R; ++r) {
        const F8 weight = broadcast(p[r][t]);
        for (int i = 0; i < N; ++i) acc[r][i] = fma(weight, v[i], acc[r][i]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < N; ++i) store(out + r * head_dim + d + 8 * i, acc[r][i]);
  }
}

template <int R, class T>
OCTAVO_INLINE void add_values(const KVTile<T>& tile, Span span, int head_dim,
                              const float (*p)[kTile], const float* factor, float* out) {
  constexpr int N = R <= 2 ? 4 : 2;
  int d = 0;
  for (; d + 8 * N <= head_dim; d += 8 * N) {
    add_values_at<R, N>(tile, span, d, head_dim, p, factor, out);
  }
  for (; d < head_dim; d += 8) add_values_at<R, 1>(tile, span, d, head_dim, p, factor, out);
}

// Rows that do not see the same positions: each its own head and tail, all what they share.
//
//   row 0   |--- alone ---|===== together =====|
//   row 1                 |===== together =====|-- alone --|
template <int R, class T>
static void add_values_ragged(const KVTile<T>& tile, const Span* seen, Span shared, int head_dim,
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
template <int R, class T>
static void attend_tile(const KVTile<T>& tile, int head_dim, const Span* seen, RowState rows) {
  alignas(32) float scores[R][kTile];
  Span any{kTile, 0};
  Span all{0, kTile};
  for (int r = 0; r < R; ++r) {
    any = {smaller_of(any.begin, seen[r].begin), larger_of(any.end, seen[r].end)};
    all = {larger_of(all.begin, seen[r].begin), smaller_of(all.end, seen[r].end)};
  }
  const Span blocks{any.begin / kBlockTokens, static_cast<int>(ceil_div(any.end, kBlockTokens))};

  int block = blocks.begin;
  if (R <= 2) {
    constexpr int kPair = R <= 2 ? 2 : 1;  // enough chains to hide an fma's latency
    for (; block + kPair <= blocks.end; block += kPair) {
      score_blocks<R, kPair>(tile, block, head_dim, rows, seen, scores);
    }
  }
  for (; block < blocks.end; ++block) {
    score_blocks<R, 1>(tile, block, head_dim, rows, seen, scores);
  }

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
