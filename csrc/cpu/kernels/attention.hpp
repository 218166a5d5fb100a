// attention: causal, over pages, for decode and chunked prefill alike.
//
// A work item is (KV head, sequence, tile of kQueryTile query tokens). Its rows are the tile's
// tokens times the query heads that share the KV head, token-major. It walks the positions its
// tokens see in splits of kSplit and tiles of kTile, both aligned to absolute position, so that a
// row's result does not depend on the tile of queries it came in.
//
// Where a step has few items, threads share them: an item is taken a split at a time, and its splits
// are merged in a second phase, in the same order and so to the same bits.
#pragma once

#include "attention_tile.hpp"
#include "rotary.hpp"

namespace octavo::OCTAVO_ISA {

// Positions [begin, end) that the token at `position` sees.
OCTAVO_INLINE Span seen_from(int position, int window) {
  const int begin = window > 0 ? position - window + 1 : 0;
  return {larger_of(begin, 0), position + 1};
}

// How many of `left` to take at once where `most` fit, so that the last are not much fewer.
OCTAVO_INLINE int share_of(int left, int most) {
  return static_cast<int>(ceil_div(left, ceil_div(left, most)));
}

struct Item {
  int kv_head;
  int first_token;     // in the step
  int num_tokens;      // 1 to kQueryTile
  int first_position;  // of first_token; the others follow
  const int32_t* block_table;
};

// Positions that some token of the item sees.
OCTAVO_INLINE Span seen_by(const OctavoOp& op, const Item& item) {
  return {seen_from(item.first_position, op.window).begin, item.first_position + item.num_tokens};
}
OCTAVO_INLINE int first_split(Span seen) { return seen.begin / kSplit * kSplit; }
OCTAVO_INLINE int num_splits(const OctavoOp& op, const Item& item) {
  return num_attention_splits(op, item.first_position, item.num_tokens);
}

// What reduces a split of each of an item's rows.
struct Partial {
  float* out;  // [rows][head_dim]
  float* max;  // [rows]
  float* sum;  // [rows]
};

// Scratch memory: a thread's own for an item of up to kQueryTile * group rows, one after the other,
// and then the splits that are taken apart.
struct Scratch {
  float* q;       // [rows][head_dim], scaled
  Partial split;  // where splits are not taken apart
  Partial total;
  float* k;       // a tile's K as f32, [4][head_dim][16]
  float* v;       // and V, [4][16][head_dim]
  Partial apart;  // [attention_split_rows]

  Scratch(const OctavoOp& op, const Step& step, const Worker& worker) {
    const size_t rows = static_cast<size_t>(kQueryTile) * (op.q_heads / op.kv_heads);
    const size_t matrix = rows * op.head_dim;
    const size_t tile = static_cast<size_t>(kTile) * op.head_dim;
    const size_t nbytes = align_up((3 * matrix + 4 * rows + 2 * tile) * sizeof(float));
    char* base = static_cast<char*>(op.scratch);
    float* at = reinterpret_cast<float*>(base + worker.thread * nbytes);
    q = at;
    split.out = q + matrix;
    total.out = split.out + matrix;
    k = total.out + matrix;
    v = k + tile;
    split.max = v + tile;
    split.sum = split.max + rows;
    total.max = split.sum + rows;
    total.sum = total.max + rows;
    const size_t num_apart = attention_split_rows(op, step.limits, worker.num_threads);
    apart.out = reinterpret_cast<float*>(base + worker.num_threads * nbytes);
    apart.max = apart.out + num_apart * op.head_dim;
    apart.sum = apart.max + num_apart;
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

// n numbers as f32, and a prefetch of those ahead.
template <class T>
OCTAVO_INLINE void convert(const T* from, const T* ahead, int n, float* to) {
  constexpr int kLine = kCacheLine / sizeof(T);
  for (int i = 0; i < n; i += kLine) {
    prefetch_far(ahead + i);
    for (int j = i; j < i + kLine; j += 16) store(to + j, load_f32x16(from + j));
  }
}

template <class T>
OCTAVO_INLINE ConvertedTile convert_tile(const KVTile<T>& from, Span blocks, int head_dim,
                                         const Scratch& scratch) {
  const int page = head_dim * kBlockTokens;
  ConvertedTile to;
  for (int block = blocks.begin; block < blocks.end; ++block) {
    to.k[block] = scratch.k + block * page;
    to.v[block] = scratch.v + block * page;
    convert(from.k[block], from.k_ahead[block], page, scratch.k + block * page);
    convert(from.v[block], from.v_ahead[block], page, scratch.v + block * page);
  }
  return to;
}

// Fold a tile into rows [begin, end) of the item, a few at a time.
template <class Tile>
OCTAVO_INLINE void attend_all(const Tile& tile, int tile_begin, const OctavoOp& op,
                              const Item& item, Span rows, const Scratch& scratch) {
  const int group = op.q_heads / op.kv_heads;
  for (int row = rows.begin; row < rows.end;) {
    const int together = share_of(rows.end - row, kRowsTogether);
    Span seen[kRowsTogether];
    for (int r = 0; r < together; ++r) {
      const Span absolute = seen_from(item.first_position + (row + r) / group, op.window);
      seen[r] = {larger_of(absolute.begin - tile_begin, 0),
                 smaller_of(absolute.end - tile_begin, kTile)};
    }
    const size_t at = static_cast<size_t>(row) * op.head_dim;
    const RowState state{scratch.q + at, scratch.split.max + row, scratch.split.sum + row,
                         scratch.split.out + at, op.softcap};
    with_rows<kRowsTogether>(together, [&](auto r) {
      attend_tile<decltype(r)::value>(tile, op.head_dim, seen, state);
    });
    row += together;
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
      attend_all(convert_tile(tile, blocks, op.head_dim, scratch), begin, op, item, rows, scratch);
    }
  }
}

// total = total merged with the row's split: the weights of both are brought to one maximum.
OCTAVO_INLINE void merge_row(int row, int head_dim, const Scratch& s) {
  const float max = larger_of(s.total.max[row], s.split.max[row]);
  const float a = exp(s.total.max[row] - max);
  const float b = exp(s.split.max[row] - max);
  float* total = s.total.out + static_cast<size_t>(row) * head_dim;
  const float* split = s.split.out + static_cast<size_t>(row) * head_dim;
  for (int d = 0; d < head_dim; d += 8) {
    store(total + d, add(mul(load(total + d), broadcast(a)), mul(load(split + d), broadcast(b))));
  }
  s.total.sum[row] = s.total.sum[row] * a + s.split.sum[row] * b;
  s.total.max[row] = max;
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
    memcpy(s.total.out + at, s.split.out + at, op.head_dim * sizeof(float));
    s.total.max[row] = s.split.max[row];
    s.total.sum[row] = s.split.sum[row];
  }
}

// Merge in a last split of one score, the head's sink, and no value.
OCTAVO_INLINE void fold_sinks(const OctavoOp& op, const Item& item, const Scratch& s) {
  const int group = op.q_heads / op.kv_heads;
  const size_t rows = static_cast<size_t>(item.num_tokens) * group;
  memset(s.split.out, 0, rows * op.head_dim * sizeof(float));
  for (size_t row = 0; row < rows; ++row) {
    s.split.max[row] = op.sinks[item.kv_head * group + row % group];
    s.split.sum[row] = 1.0f;
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
    const float* from = scratch.total.out + static_cast<size_t>(row) * op.head_dim;
    float* out = op.out + static_cast<size_t>(item.first_token + row / group) * op.out_width +
                 item_column(op, item) + row % group * op.head_dim;
    const F8 sum = broadcast(scratch.total.sum[row]);
    for (int d = 0; d < op.head_dim; d += 8) store(out + d, div(load(from + d), sum));
  }
}

// Reduce the rows' positions in [split, split + kSplit) to scratch.split.
template <class T>
static void reduce_split(const OctavoOp& op, const Item& item, int split, const Scratch& scratch) {
  const size_t rows = static_cast<size_t>(item.num_tokens) * (op.q_heads / op.kv_heads);
  for (size_t row = 0; row < rows; ++row) {
    scratch.split.max[row] = -__builtin_inff();
    scratch.split.sum[row] = 0.0f;
  }
  memset(scratch.split.out, 0, rows * op.head_dim * sizeof(float));
  const Span seen = seen_by(op, item);
  const Span positions{larger_of(split, seen.begin), smaller_of(split + kSplit, seen.end)};
  attend_split<T>(op, item, positions, scratch);
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

template <class T>
static void attend_items(const OctavoOp& op, const Step& step, Worker& worker,
                         const Scratch& scratch) {
  const int64_t items = static_cast<int64_t>(op.kv_heads) * step.query_tiles[step.num_seqs];
  int seq = 0;
  for (Range range{}; claim(worker, items, 1, &range);) {
    const Item item = item_at(op, step, range.begin, &seq);
    const Span seen = seen_by(op, item);
    load_queries(op, item, scratch);
    for (int split = first_split(seen); split < seen.end; split += kSplit) {
      reduce_split<T>(op, item, split, scratch);
      fold_split(op, item, split, scratch);
    }
    if (op.sinks) fold_sinks(op, item, scratch);
    store_result(op, item, scratch);
  }
}

// The splits of all items: those of an item are neighbours, and so are its rows in Scratch::apart.
struct Splits {
  int64_t count = 0;
  int64_t rows = 0;

  void add(const OctavoOp& op, const Item& item) {
    const int splits = num_splits(op, item);
    count += splits;
    rows += static_cast<int64_t>(splits) * item.num_tokens * (op.q_heads / op.kv_heads);
  }
};

// The splits of items [0, end).
OCTAVO_INLINE Splits splits_before(const OctavoOp& op, const Step& step, int64_t end) {
  Splits before;
  int seq = 0;
  for (int64_t i = 0; i < end; ++i) before.add(op, item_at(op, step, i, &seq));
  return before;
}

// The scratch memory in which one split of an item is reduced.
OCTAVO_INLINE Scratch with_split(const OctavoOp& op, const Item& item, int64_t rows_before,
                                 int index, Scratch scratch) {
  const int64_t rows = static_cast<int64_t>(item.num_tokens) * (op.q_heads / op.kv_heads);
  const int64_t row = rows_before + index * rows;
  scratch.split = {scratch.apart.out + row * op.head_dim, scratch.apart.max + row,
                   scratch.apart.sum + row};
  return scratch;
}

template <class T>
static void attend_splits(const OctavoOp& op, const Step& step, Worker& worker,
                          const Scratch& scratch, int64_t items, int64_t splits) {
  for (Range range{}; claim(worker, splits, 1, &range);) {
    Splits before;
    int seq = 0;
    int64_t i = 0;
    Item item = item_at(op, step, 0, &seq);
    while (before.count + num_splits(op, item) <= range.begin) {
      before.add(op, item);
      item = item_at(op, step, ++i, &seq);
    }
    const int index = static_cast<int>(range.begin - before.count);
    load_queries(op, item, scratch);
    reduce_split<T>(op, item, first_split(seen_by(op, item)) + index * kSplit,
                    with_split(op, item, before.rows, index, scratch));
  }
  end_phase(worker);
  for (Range range{}; claim(worker, items, 1, &range);) {
    const Splits before = splits_before(op, step, range.begin);
    int seq = 0;
    const Item item = item_at(op, step, range.begin, &seq);
    const int begin = first_split(seen_by(op, item));
    for (int index = 0; index < num_splits(op, item); ++index) {
      fold_split(op, item, begin + index * kSplit,
                 with_split(op, item, before.rows, index, scratch));
    }
    if (op.sinks) fold_sinks(op, item, scratch);
    store_result(op, item, scratch);
  }
}

template <class T>
static void attend(const OctavoOp& op, const Step& step, Worker& worker) {
  const Scratch scratch(op, step, worker);
  const int64_t items = static_cast<int64_t>(op.kv_heads) * step.query_tiles[step.num_seqs];
  const int64_t splits = step.shared_splits[&op - step.ops];
  if (splits > 0) return attend_splits<T>(op, step, worker, scratch, items, splits);
  attend_items<T>(op, step, worker, scratch);
}

static void attention(const OctavoOp& op, const Step& step, Worker& worker) {
  switch (op.kv_dtype) {
    case OCTAVO_DTYPE_F16: return attend<Half>(op, step, worker);
    case OCTAVO_DTYPE_BF16: return attend<Bf16>(op, step, worker);
    default: return attend<float>(op, step, worker);
  }
}

}  // namespace octavo::OCTAVO_ISA
