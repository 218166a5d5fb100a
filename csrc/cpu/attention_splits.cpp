// Whether a step's attention is shared a split at a time.
//
// Rule: decided by the caller of a run, from its inputs, and read by the team: a thread that comes
// late may meet inputs of the next step, and must not decide otherwise.

#include <algorithm>

#include "context.hpp"
#include "layouts.hpp"

namespace octavo {

namespace {

constexpr int kSplitItems = 8;  // a thread; fewer are shared

// The splits of all items of an op, or 0 if there is no room for their results.
int64_t splits_of_step(const OctavoOp& op, const Step& step, int num_threads) {
  const OctavoInputs& in = step.inputs;
  int64_t splits = 0;
  int64_t rows = 0;
  for (int seq = 0; seq < step.num_seqs; ++seq) {
    for (int token = in.cu_q[seq]; token < in.cu_q[seq + 1]; token += kQueryTile) {
      const int tokens = std::min(kQueryTile, in.cu_q[seq + 1] - token);
      const int of_item = num_attention_splits(op, in.positions[token], tokens);
      splits += of_item;
      rows += static_cast<int64_t>(of_item) * tokens;
    }
  }
  const int64_t room = static_cast<int64_t>(attention_split_rows(op, step.limits, num_threads));
  return rows * op.q_heads <= room ? splits * op.kv_heads : 0;
}

}  // namespace

int num_attention_splits(const OctavoOp& op, int first_position, int num_tokens) {
  const int begin = op.window > 0 ? std::max(0, first_position - op.window + 1) : 0;
  const int end = first_position + num_tokens;
  return (end + kSplit - 1) / kSplit - begin / kSplit;
}

size_t attention_split_rows(const OctavoOp& op, const OctavoLimits& limits, int num_threads) {
  if (num_threads == 1) return 0;
  const size_t positions = static_cast<size_t>(limits.max_blocks) * kBlockTokens;
  const size_t splits = (positions + kSplit - 1) / kSplit;
  const size_t tokens = (kSplitItems * num_threads + op.kv_heads - 1) / op.kv_heads;
  return tokens * op.q_heads * splits;
}

void share_attention(OctavoContext* context) {
  const Step& step = context->step;
  const int threads = context->team.size();
  const OctavoOp* last = nullptr;
  for (size_t index = 0; index < context->ops.size(); ++index) {
    const OctavoOp& op = context->ops[index];
    if (op.kind != OCTAVO_OP_ATTENTION) continue;
    int64_t* splits = &context->shared_splits[index];
    if (last && last->window == op.window && last->kv_heads == op.kv_heads &&
        last->q_heads == op.q_heads) {
      *splits = context->shared_splits[last - context->ops.data()];
    } else {
      const int64_t items = static_cast<int64_t>(op.kv_heads) * step.query_tiles[step.num_seqs];
      const bool few = threads > 1 && items < kSplitItems * threads;
      const int64_t all = few ? splits_of_step(op, step, threads) : 0;
      *splits = all > items ? all : 0;
    }
    last = &op;
  }
}

}  // namespace octavo
