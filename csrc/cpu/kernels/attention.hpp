// attention: causal, over pages, for decode and chunked prefill alike.
//
// A work item is (KV head, sequence, tile of kQueryTile query tokens). Its rows are the tile's
// tokens times the query heads that share the KV head, token-major. It walks the positions its
// tokens see in splits of kSplit and tiles of kTile, both aligned to absolute position, so that a
// row's result does not depend on the tile of queries it came in.
#pragma once

#include "attention_tile.hpp"
#include "rotary.hpp"

namespace octavo::OCTAVO_ISA {

// Positions [begin, end) that the token at `position` sees.
OCTAVO_INLINE Span seen_from(int position, int window) {
  const int begin = window > 0 ? position - window + 1 : 0;
  return {larger_of(begin, 0), position + 1};
}

struct Item {
  int kv_head;
  int first_token;     // in the step
  int num_tokens;      // 1 to kQueryTile
  int first_position;  // of first_token; the others follow
  const int32_t* block_table;
};

// One thread's scratch memory for an item of up to kQueryTile * group rows.
struct Scratch {
  float* q;           // [rows][head_dim], scaled
  float* split_out;   // [rows][head_dim]
  float* total_out;   // [rows][head_dim]
  float* split_max;   // [rows], as the following
  float* split_sum;
  float* total_max;
  float* total_sum;
  float* k;           // a tile's K as f32, [4][head_dim][16]
  float* v;           // and V, [4][16][head_dim]

  Scratch(const OctavoOp& op, int thread) {
    const size_t rows = static_cast<size_t>(kQueryTile) * (op.q_heads / op.kv_heads);
    const size_t matrix = rows * op.head_dim;
    const size_t tile = static_cast<size_t>(kTile) * op.head_dim;
    const size_t nbytes = align_up((3 * matrix + 4 * rows + 2 * tile) * sizeof(float));
    float* at = reinterpret_cast<float*>(static_cast<char*>(op.scratch) + thread * nbytes);
    q = at;
    split_out = q + matrix;
    total_out = split_out + matrix;
    split_max = total_out + matrix;
    split_sum = split_max + rows;
    total_max = split_sum + rows;
    total_sum = total_max + rows;
    k = total_sum + rows;
    v = k + tile;
  }
};

// The pages of blocks of a tile; `end` is where the positions that the item reads end.
template <class T>
OCTAVO_INLINE void find_pages(const Pages<T>& pages, const Item& item, int tile_begin, Span blocks,
                              int end, KVTile<T>* tile) {
  const int32_t* ids = item.block_table + tile_begin / kBlockTokens;
  const int blocks_left = static_cast<int>(ceil_div(end - tile_begin, kBlockTokens));
  for (int block = blocks.begin; block < blocks.end; ++block) {
    const int next = block + kTileBlocks < blocks_left ? block + kTileBlocks : block;
    tile->k[block] = pages.k(ids[block], item.kv_head);
    tile->v[block] = pages.v(ids[block], item.kv_head);
    tile->k_ahead[block] = pages.k(ids[next], item.kv_head);
    tile->v_ahead[block] = pages.v(ids[next], item.kv_head);
  }
}

// The same tile as f32, for rows that are too many to go together.
OCTAVO_INLINE KVTile<float> convert(const KVTile<Half>& from, Span blocks, int head_dim,
                                    const Scratch& scratch) {
  const int page = head_dim * kBlockTokens;
  KVTile<float> to;
  for (int block = blocks.begin; block < blocks.end; ++block) {
    float* k = scratch.k + block * page;
    float* v = scratch.v + block * page;
    for (int i = 0; i < page; i += 8) {
      store(k + i, load(from.k[block] + i));
      store(v + i, load(from.v[block] + i));
    }
    to.k[block] = to.k_ahead[block] = k;
    to.v[block] = to.v_ahead[block] = v;
  }
  return to;
}
OCTAVO_INLINE KVTile<float> convert(const KVTile<float>& from, Span, int, const Scratch&) {
  return from;
}

// Fold a tile into rows [begin, end) of the item, a few at a time.
template <class T>
OCTAVO_INLINE void attend_all(const KVTile<T>& tile, int tile_begin, const OctavoOp& op,
                              const Item& item, Span rows, const Scratch& scratch) {
  const int group = op.q_heads / op.kv_heads;
  for (int row = rows.begin; row < rows.end; row += kRowsTogether) {
    const int together = smaller_of(kRowsTogether, rows.end - row);
    Span seen[kRowsTogether];
    for (int r = 0; r < together; ++r) {
      const Span absolute = seen_from(item.first_position + (row + r) / group, op.window);
      seen[r] = {larger_of(absolute.begin - tile_begin, 0),
                 smaller_of(absolute.end - tile_begin, kTile)};
    }
    const size_t at = static_cast<size_t>(row) * op.head_dim;
    const RowState state{scratch.q + at, scratch.split_max + row, scratch.split_sum + row,
                         scratch.split_out + at, op.softcap};
    with_rows<kRowsTogether>(together, [&](auto r) {
      attend_tile<decltype(r)::value>(tile, op.head_dim, seen, state);
    });
  }
}

template <class T>
OCTAVO_INLINE void attend_split(const OctavoOp& op, const Item& item, Span split,
                                const Scratch& scratch) {
  const Pages<T> pages(op);
  const int group = op.q_heads / op.kv_heads;
  const int last_position = item.first_position + item.num_tokens - 1;
  for (int begin = split.begin / kTile * kTile; begin < split.end; begin += kTile) {
    // Tokens that see some of the tile: not those before it, nor those whose window is past it.
    const int end = begin + kTile;
    const int first = larger_of(begin, item.first_position);
    const int last = op.window > 0 ? smaller_of(end + op.window - 2, last_position) : last_position;
    const Span rows{(first - item.first_position) * group,
                    (last - item.first_position + 1) * group};

    const Span positions{larger_of(begin, split.begin), smaller_of(end, split.end)};
    const Span blocks{(positions.begin - begin) / kBlockTokens,
                      static_cast<int>(ceil_div(positions.end - begin, kBlockTokens))};
    KVTile<T> tile;
    find_pages(pages, item, begin, blocks, last_position + 1, &tile);
    if (rows.end - rows.begin <= kRowsTogether) {
      attend_all(tile, begin, op, item, rows, scratch);
    } else {
      attend_all(convert(tile, blocks, op.head_dim, scratch), begin, op, item, rows, scratch);
    }
  }
}

// total = total merged with the row's split: the weights of both are brought to one maximum.
OCTAVO_INLINE void merge_row(int row, int head_dim, const Scratch& s) {
  const float max = larger_of(s.total_max[row], s.split_max[row]);
  const float a = exp(s.total_max[row] - max);
  const float b = exp(s.split_max[row] - max);
  float* total = s.total_out + static_cast<size_t>(row) * head_dim;
  const float* split = s.split_out + static_cast<size_t>(row) * head_dim;
  for (int d = 0; d < head_dim; d += 8) {
    store(total + d, add(mul(load(total + d), broadcast(a)), mul(load(split + d), broadcast(b))));
  }
  s.total_sum[row] = s.total_sum[row] * a + s.split_sum[row] * b;
  s.total_max[row] = max;
}

// A row's first visible split is the total so far; later ones are merged into it in order.
OCTAVO_INLINE void fold_split(const OctavoOp& op, const Item& item, int split_begin,
                              const Scratch& s) {
  const int group = op.q_heads / op.kv_heads;
  for (int row = 0; row < item.num_tokens * group; ++row) {
    const Span seen = seen_from(item.first_position + row / group, op.window);
    if (seen.end <= split_begin || seen.begin >= split_begin + kSplit) continue;
    if (seen.begin < split_begin) {
      merge_row(row, op.head_dim, s);
      continue;
    }
    const size_t at = static_cast<size_t>(row) * op.head_dim;
    memcpy(s.total_out + at, s.split_out + at, op.head_dim * sizeof(float));
    s.total_max[row] = s.split_max[row];
    s.total_sum[row] = s.split_sum[row];
  }
}

// Merge in a last split of one score, the head's sink, and no value.
OCTAVO_INLINE void fold_sinks(const OctavoOp& op, const Item& item, const Scratch& s) {
  const int group = op.q_heads / op.kv_heads;
  const size_t rows = static_cast<size_t>(item.num_tokens) * group;
  memset(s.split_out, 0, rows * op.head_dim * sizeof(float));
  for (size_t row = 0; row < rows; ++row) {
    s.split_max[row] = op.sinks[item.kv_head * group + row % group];
    s.split_sum[row] = 1.0f;
    merge_row(static_cast<int>(row), op.head_dim, s);
  }
}

// Query rows of an item lie together in q and out: head kv_head * group of each token, and on.
OCTAVO_INLINE size_t item_column(const OctavoOp& op, const Item& item) {
  return static_cast<size_t>(item.kv_head) * (op.q_heads / op.kv_heads) * op.head_dim;
}

OCTAVO_INLINE void load_queries(const OctavoOp& op, const Item& item, const Scratch& scratch) {
  const int width = op.q_heads / op.kv_heads * op.head_dim;
  const F8 scale = broadcast(op.scale);
  for (int token = 0; token < item.num_tokens; ++token) {
    const float* q = op.x + static_cast<size_t>(item.first_token + token) * op.in_width +
                     item_column(op, item);
    float* to = scratch.q + static_cast<size_t>(token) * width;
    for (int i = 0; i < width; i += 8) store(to + i, mul(load(q + i), scale));
  }
}

OCTAVO_INLINE void store_result(const OctavoOp& op, const Item& item, const Scratch& scratch) {
  const int group = op.q_heads / op.kv_heads;
  for (int row = 0; row < item.num_tokens * group; ++row) {
    const float* from = scratch.total_out + static_cast<size_t>(row) * op.head_dim;
    float* out = op.out + static_cast<size_t>(item.first_token + row / group) * op.out_width +
                 item_column(op, item) + row % group * op.head_dim;
    const F8 sum = broadcast(scratch.total_sum[row]);
    for (int d = 0; d < op.head_dim; d += 8) store(out + d, div(load(from + d), sum));
  }
}

template <class T>
static void attend_item(const OctavoOp& op, const Item& item, const Scratch& scratch) {
  const size_t rows = static_cast<size_t>(item.num_tokens) * (op.q_heads / op.kv_heads);
  const int begin = seen_from(item.first_position, op.window).begin;
  const int end = item.first_position + item.num_tokens;
  load_queries(op, item, scratch);
  for (int split = begin / kSplit * kSplit; split < end; split += kSplit) {
    for (size_t row = 0; row < rows; ++row) {
      scratch.split_max[row] = -__builtin_inff();
      scratch.split_sum[row] = 0.0f;
    }
    memset(scratch.split_out, 0, rows * op.head_dim * sizeof(float));
    const Span positions{larger_of(split, begin), smaller_of(split + kSplit, end)};
    attend_split<T>(op, item, positions, scratch);
    fold_split(op, item, split, scratch);
  }
  if (op.sinks) fold_sinks(op, item, scratch);
  store_result(op, item, scratch);
}

// Items are numbered head by head, then sequence by sequence: neighbours read neighbouring pages,
// and sequences with a common prefix the same ones.
OCTAVO_INLINE Item item_at(const OctavoOp& op, const Step& step, int64_t index, int* seq) {
  const OctavoInputs& in = step.inputs;
  const int tiles = step.query_tiles[step.num_seqs];
  const int tile = static_cast<int>(index % tiles);
  if (tile < step.query_tiles[*seq]) *seq = 0;
  while (tile >= step.query_tiles[*seq + 1]) ++*seq;

  const int skipped = (tile - step.query_tiles[*seq]) * kQueryTile;
  const int first_token = in.cu_q[*seq] + skipped;
  const size_t table = static_cast<size_t>(op.kv_group) * step.limits.max_seqs + *seq;
  return {static_cast<int>(index / tiles), first_token,
          smaller_of(kQueryTile, in.cu_q[*seq + 1] - first_token), in.positions[first_token],
          in.block_table + table * step.limits.max_blocks};
}

static void attention(const OctavoOp& op, const Step& step, Worker& worker) {
  const Scratch scratch(op, worker.thread);
  const int64_t items = static_cast<int64_t>(op.kv_heads) * step.query_tiles[step.num_seqs];
  int seq = 0;
  for (Range range{}; claim(worker, items, 1, &range);) {
    const Item item = item_at(op, step, range.begin, &seq);
    if (op.kv_dtype == OCTAVO_DTYPE_F16) {
      attend_item<Half>(op, item, scratch);
    } else {
      attend_item<float>(op, item, scratch);
    }
  }
}

}  // namespace octavo::OCTAVO_ISA
