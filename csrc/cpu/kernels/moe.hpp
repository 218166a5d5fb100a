// moe: a token goes through the experts that its router ranks best. Tokens of one expert go together,
// so that a chunk of tokens reads an expert's weights once.
//
// A pair (token, rank) has a slot; the slots of one expert are neighbours and the rows of its products:
//
//   route     each token's experts and shares
//   group     pairs to slots, by expert
//   gather    x of each slot                                        [slots][H]
//   widen     act(gate x) * up x of each slot                       [slots][F]
//   narrow    down of that                                          [slots][H]
//   combine   a token's slots by its shares, best first
//
// What the threads share out is counted from the step's sizes alone: a thread that comes late to a
// phase may read nothing of it. Rule: products don't mix rows, so a token's result is its own.
#pragma once

#include "gates.hpp"
#include "linear.hpp"

namespace octavo::OCTAVO_ISA {

struct ExpertSlots {
  int32_t expert;
  int32_t first_slot;
  int32_t num_slots;
};
// Rows [kRowTile * tile, ...) of a group's product.
struct SlotTile {
  int32_t group;
  int32_t tile;
};

OCTAVO_INLINE int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Scratch memory for chunks of up to `chunk` tokens; check.cpp and table.py count the same.
struct MoEScratch {
  int chunk;
  int logits_stride;
  float* logits;         // [chunk][stride]: the router's, then shares
  float* shares;         // [chunk][top_k], best first
  int32_t* chosen;       // [chunk][top_k]: experts
  int32_t* slots;        // [chunk][top_k]
  int32_t* tokens;       // [slots]: of the chunk
  int32_t* counts;       // [experts]
  int32_t* num_groups;   // one of each
  int32_t* num_tiles;
  ExpertSlots* groups;   // [experts or slots, if fewer]: experts that have slots
  SlotTile* tiles;       // [slots]
  float* rows;           // [slots][H]: gathered x, later results
  float* activated;      // [slots][F]
  float* gate_up;        // [chunk][2 * kPanel]: one thread's
  char* prepared;        // rows as weights multiply them: router's, gate_up's and down's in turn

  MoEScratch(const OctavoOp& op, const Step& step, const Worker& worker) {
    const OctavoExperts& e = *op.experts;
    chunk = smaller_of(kExpertTokens, step.limits.max_tokens);
    logits_stride = round_up(e.num_experts, kPanel);
    const size_t pairs = static_cast<size_t>(chunk) * e.top_k;
    at_ = static_cast<char*>(op.scratch);
    logits = take<float>(static_cast<size_t>(chunk) * logits_stride);
    shares = take<float>(pairs);
    chosen = take<int32_t>(pairs);
    slots = take<int32_t>(pairs);
    tokens = take<int32_t>(pairs);
    counts = take<int32_t>(e.num_experts);
    num_groups = take<int32_t>(2);
    num_tiles = num_groups + 1;
    groups = take<ExpertSlots>(e.num_experts);
    tiles = take<SlotTile>(pairs);
    rows = take<float>(pairs * op.in_width);
    activated = take<float>(pairs * e.width);
    const size_t gate_up_floats = static_cast<size_t>(chunk) * 2 * kPanel;
    gate_up = take<float>(gate_up_floats * worker.num_threads) + gate_up_floats * worker.thread;
    prepared = at_;
  }

 private:
  template <class T>
  T* take(size_t count) {
    T* found = reinterpret_cast<T*>(at_);
    at_ += align_up(count * sizeof(T));
    return found;
  }

  char* at_;
};

// -- routing ------------------------------------------------------------------------------------

// A token's logits become shares; the largest top_k are taken, ties to the smaller expert.
OCTAVO_INLINE void route_token(const OctavoExperts& e, float* logits, float* shares,
                               int32_t* chosen) {
  constexpr float kTaken = -1.0f;
  const float infinity = __builtin_inff();
  const int padded = round_up(e.num_experts, 8);
  for (int i = e.num_experts; i < padded; ++i) logits[i] = -infinity;
  F8 top = broadcast(-infinity);
  for (int i = 0; i < padded; i += 8) top = max(top, load(logits + i));
  const F8 largest = broadcast(max_lanes(top));
  F8 lanes = zero();
  for (int i = 0; i < padded; i += 8) {
    const F8 weight = exp(sub(load(logits + i), largest));
    store(logits + i, weight);
    lanes = add(lanes, weight);
  }
  const F8 sum = broadcast(sum_lanes(lanes));
  for (int i = 0; i < padded; i += 8) store(logits + i, div(load(logits + i), sum));

  float total = 0.0f;
  for (int rank = 0; rank < e.top_k; ++rank) {
    int best = -1;  // of NaNs, the first: some expert is always found
    for (int i = 0; i < e.num_experts; ++i) {
      if (logits[i] != kTaken && (best < 0 || logits[i] > logits[best])) best = i;
    }
    chosen[rank] = best;
    shares[rank] = logits[best];
    total = rank ? total + logits[best] : logits[best];
    logits[best] = kTaken;
  }
  if (!e.normalize) return;
  for (int rank = 0; rank < e.top_k; ++rank) shares[rank] = shares[rank] / total;
}

static void group_pairs(const OctavoExperts& e, int num_pairs, const MoEScratch& s) {
  memset(s.counts, 0, e.num_experts * sizeof *s.counts);
  for (int pair = 0; pair < num_pairs; ++pair) ++s.counts[s.chosen[pair]];
  int slot = 0;
  int num_groups = 0;
  int num_tiles = 0;
  for (int expert = 0; expert < e.num_experts; ++expert) {
    const int count = s.counts[expert];
    if (!count) continue;
    for (int tile = 0; tile * kRowTile < count; ++tile) s.tiles[num_tiles++] = {num_groups, tile};
    s.groups[num_groups++] = {expert, slot, count};
    s.counts[expert] = slot;
    slot += count;
  }
  for (int pair = 0; pair < num_pairs; ++pair) {
    const int next = s.counts[s.chosen[pair]]++;
    s.slots[pair] = next;
    s.tokens[next] = pair / e.top_k;
  }
  *s.num_groups = num_groups;
  *s.num_tiles = num_tiles;
}

// -- products of one expert's slots -------------------------------------------------------------

// Where a group's prepared rows begin: those before it take what their slots need, padding included,
// and a few lines to align its arrays.
OCTAVO_INLINE char* prepared_at(const Product& p, const MoEScratch& s, int group, int first_slot) {
  const size_t rows = first_slot + static_cast<size_t>(group) * kMostPaddedRows;
  return s.prepared + align_up(rows * prepared_row_nbytes(p)) + group * 4 * kAlignment;
}

// x and prepared rows of a group of slots.
OCTAVO_INLINE void take_slots(const MoEScratch& s, int group, const float* x, Product* p) {
  const ExpertSlots& slots = s.groups[group];
  p->num_rows = slots.num_slots;
  p->x = x + static_cast<size_t>(slots.first_slot) * p->width;
  p->prepared = prepared_at(*p, s, group, slots.first_slot);
}

// Only the weight's rows from 16 * panel on.
OCTAVO_INLINE void skip_panels(int64_t panel, Product* p) {
  p->weight = static_cast<const char*>(p->weight) + panel * panel_nbytes(*p);
  if (p->bias) p->bias += panel * kPanel;
}

// gate and up of the chunk's group: 2 F rows of the weight.
OCTAVO_INLINE Product gate_up_product(const OctavoOp& op, const MoEScratch& s, int group) {
  const OctavoExperts& e = *op.experts;
  Product p = product_of(e.gate_up_format, op.activation_bits, op.in_width, e.gate_up, e.gate_up_bias);
  take_slots(s, group, s.rows, &p);
  skip_panels(static_cast<int64_t>(s.groups[group].expert) * (2 * e.width / kPanel), &p);
  return p;
}

OCTAVO_INLINE Product down_product(const OctavoOp& op, const MoEScratch& s, int group) {
  const OctavoExperts& e = *op.experts;
  Product p = product_of(e.down_format, op.activation_bits, e.width, e.down, e.down_bias);
  take_slots(s, group, s.activated, &p);
  skip_panels(static_cast<int64_t>(s.groups[group].expert) * (op.out_width / kPanel), &p);
  p.columns = op.out_width;
  p.stride = op.out_width;
  p.out = s.rows + static_cast<size_t>(s.groups[group].first_slot) * op.out_width;
  return p;
}

// Panels [begin, end) of F: gate's and up's outputs side by side, as many as fit, then activated.
OCTAVO_INLINE void widen(const OctavoOp& op, const MoEScratch& s, int group, Range panels) {
  const OctavoExperts& e = *op.experts;
  const Product whole = gate_up_product(op, s, group);
  const int most = larger_of(1, s.chunk / whole.num_rows);
  const size_t first_slot = s.groups[group].first_slot;
  for (int64_t panel = panels.begin; panel < panels.end; panel += most) {
    const int count = static_cast<int>(smaller_of<int64_t>(most, panels.end - panel));
    const int columns = count * kPanel;
    for (int half = 0; half < 2; ++half) {
      Product p = whole;
      skip_panels(half * (e.width / kPanel) + panel, &p);
      p.columns = columns;
      p.stride = 2 * columns;
      p.out = s.gate_up + half * columns;
      multiply(p, {0, count});
    }
    for (int row = 0; row < whole.num_rows; ++row) {
      gate_row(op.activation, s.gate_up + static_cast<size_t>(row) * 2 * columns, columns,
               s.activated + (first_slot + row) * e.width + panel * kPanel);
    }
  }
}

// -- phases -------------------------------------------------------------------------------------

// Call f(group, panels) for the panels of each group that this thread claims.
template <class F>
OCTAVO_INLINE void for_each_panel(int most_groups, int64_t panels, const MoEScratch& s,
                                  Worker& worker, F f) {
  const int64_t total = most_groups * panels;
  const int64_t chunk = claim_chunk(total, worker, kMostPanels);
  for (Range range{}; claim(worker, total, chunk, &range);) {
    for (int64_t at = range.begin; at < range.end;) {
      const int group = static_cast<int>(at / panels);
      if (group >= *s.num_groups) break;
      const int64_t first = group * panels;
      const int64_t end = smaller_of(range.end, first + panels);
      f(group, Range{at - first, end - first});
      at = end;
    }
  }
}

// Call f(tile) for the tiles of slots that this thread claims, and end the phase.
template <class F>
OCTAVO_INLINE void for_each_slot_tile(int most_tiles, const MoEScratch& s, Worker& worker, F f) {
  for_each_row(most_tiles, worker, [&](int64_t index) {
    if (index < *s.num_tiles) f(s.tiles[index]);
  });
  end_phase(worker);
}

OCTAVO_INLINE void gather_tile(const OctavoOp& op, const float* x, SlotTile at,
                               const MoEScratch& s) {
  const ExpertSlots& slots = s.groups[at.group];
  const int end = smaller_of((at.tile + 1) * kRowTile, slots.num_slots);
  for (int row = at.tile * kRowTile; row < end; ++row) {
    const size_t slot = slots.first_slot + row;
    memcpy(s.rows + slot * op.in_width, x + static_cast<size_t>(s.tokens[slot]) * op.in_width,
           op.in_width * sizeof(float));
  }
}

OCTAVO_INLINE void combine_token(const OctavoOp& op, int token, const MoEScratch& s, float* out) {
  const int top_k = op.experts->top_k;
  const int width = op.out_width;
  for (int rank = 0; rank < top_k; ++rank) {
    const int pair = token * top_k + rank;
    const float* result = s.rows + static_cast<size_t>(s.slots[pair]) * width;
    const F8 share = broadcast(s.shares[pair]);
    for (int k = 0; k < width; k += 8) {
      const F8 part = mul(share, load(result + k));
      store(out + k, rank ? add(load(out + k), part) : part);
    }
  }
}

// Tokens [first, first + num_tokens) of the step, up to the last phase.
static void moe_chunk(const OctavoOp& op, int first, int num_tokens, const MoEScratch& s,
                      Worker& worker) {
  const OctavoExperts& e = *op.experts;
  const int num_pairs = num_tokens * e.top_k;
  const int most_groups = smaller_of(e.num_experts, num_pairs);
  const int most_tiles = num_pairs / kRowTile + most_groups;
  const float* x = op.x + static_cast<size_t>(first) * op.in_width;

  Product router = product_of(e.router_format, kRouterBits, op.in_width, e.router, e.router_bias);
  router.columns = e.num_experts;
  router.num_rows = num_tokens;
  router.x = x;
  router.out = s.logits;
  router.stride = s.logits_stride;
  router.prepared = s.prepared;
  run_product(router, worker);
  end_phase(worker);
  for_each_row(num_tokens, worker, [&](int64_t token) {
    const size_t pair = token * e.top_k;
    route_token(e, s.logits + token * s.logits_stride, s.shares + pair, s.chosen + pair);
  });
  end_phase(worker);
  for (Range range{}; claim(worker, 1, 1, &range);) group_pairs(e, num_pairs, s);
  end_phase(worker);

  for_each_slot_tile(most_tiles, s, worker, [&](SlotTile at) {
    gather_tile(op, x, at, s);
    prepare_tile(gate_up_product(op, s, at.group), at.tile);
  });
  for_each_panel(most_groups, e.width / kPanel, s, worker,
                 [&](int group, Range panels) { widen(op, s, group, panels); });
  end_phase(worker);
  for_each_slot_tile(most_tiles, s, worker, [&](SlotTile at) {
    prepare_tile(down_product(op, s, at.group), at.tile);
  });
  for_each_panel(most_groups, op.out_width / kPanel, s, worker, [&](int group, Range panels) {
    multiply(down_product(op, s, group), panels);
  });
  end_phase(worker);
  for_each_row(num_tokens, worker, [&](int64_t token) {
    const size_t row = first + token;
    combine_token(op, static_cast<int>(token), s, op.out + row * op.out_width);
  });
}

static void moe(const OctavoOp& op, const Step& step, Worker& worker) {
  const MoEScratch scratch(op, step, worker);
  for (int first = 0;;) {
    const int num_tokens = smaller_of(scratch.chunk, step.num_tokens - first);
    moe_chunk(op, first, num_tokens, scratch, worker);
    first += num_tokens;
    if (first >= step.num_tokens) return;
    end_phase(worker);
  }
}

}  // namespace octavo::OCTAVO_ISA
