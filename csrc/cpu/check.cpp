// What is refused before anything is written: programs that don't fit this build, and steps whose
// inputs point outside of what was bound.

#include <algorithm>

#include "context.hpp"
#include "layouts.hpp"

namespace octavo {

namespace {

constexpr int kWholeStep = -1;

// An inclusive-exclusive range check that names what it checked.
bool check_index(int64_t value, int64_t end, const char* what, int op, int64_t row,
                 OctavoStatus* status) {
  if (value >= 0 && value < end) return true;
  refuse(status, OCTAVO_BAD_INPUT, op, row, "%s %lld is not in [0, %lld)", what,
         static_cast<long long>(value), static_cast<long long>(end));
  return false;
}

bool check_size(int value, int most, const char* what, OctavoStatus* status) {
  if (value >= 0 && value <= most) return true;
  refuse(status, OCTAVO_BAD_INPUT, kWholeStep, -1, "the step has %d %s, but 0 to %d fit", value,
         what, most);
  return false;
}

bool check_sequence(const OctavoContext& context, int seq, OctavoStatus* status) {
  const Step& step = context.step;
  const OctavoInputs& in = step.inputs;
  const int begin = in.cu_q[seq];
  const int end = in.cu_q[seq + 1];
  if (end < begin || end > step.num_tokens) {
    refuse(status, OCTAVO_BAD_INPUT, kWholeStep, seq,
           "cu_q goes from %d to %d, but must not fall nor exceed the step's %d tokens", begin, end,
           step.num_tokens);
    return false;
  }
  if (begin == end) return true;
  const int seq_len = in.seq_lens[seq];
  const int64_t capacity = static_cast<int64_t>(step.limits.max_blocks) * kBlockTokens;
  if (seq_len < end - begin || seq_len > capacity) {
    refuse(status, OCTAVO_BAD_INPUT, kWholeStep, seq,
           "seq_len %d is not in [%d, %lld]: its new tokens, and what its block table holds", seq_len,
           end - begin, static_cast<long long>(capacity));
    return false;
  }
  for (int token = begin; token < end; ++token) {
    const int expected = seq_len - (end - token);
    if (in.positions[token] == expected) continue;
    refuse(status, OCTAVO_BAD_INPUT, kWholeStep, token,
           "position %d should be %d: the %d new tokens of sequence %d end at seq_len %d",
           in.positions[token], expected, end - begin, seq, seq_len);
    return false;
  }
  return true;
}

bool check_sequences(const OctavoContext& context, OctavoStatus* status) {
  const Step& step = context.step;
  const int32_t* cu_q = step.inputs.cu_q;
  if (cu_q[0] != 0 || cu_q[step.num_seqs] != step.num_tokens) {
    refuse(status, OCTAVO_BAD_INPUT, kWholeStep, -1,
           "cu_q goes from %d to %d, but the step's tokens are [0, %d)", cu_q[0],
           cu_q[step.num_seqs], step.num_tokens);
    return false;
  }
  for (int seq = 0; seq < step.num_seqs; ++seq) {
    if (!check_sequence(context, seq, status)) return false;
  }
  return true;
}

bool check_tokens(const OctavoContext& context, int index, const OctavoOp& op,
                  OctavoStatus* status) {
  for (int token = 0; token < context.step.num_tokens; ++token) {
    const int id = context.step.inputs.token_ids[token];
    if (!check_index(id, op.table_rows, "token id", index, token, status)) return false;
  }
  return true;
}

bool check_slots(const OctavoContext& context, int index, const OctavoOp& op,
                 OctavoStatus* status) {
  const Step& step = context.step;
  const int32_t* slots =
      step.inputs.slot_mapping + static_cast<size_t>(op.kv_group) * step.limits.max_tokens;
  const int64_t num_slots = static_cast<int64_t>(step.limits.num_blocks) * kBlockTokens;
  for (int token = 0; token < step.num_tokens; ++token) {
    const int rope_row = step.inputs.rope_rows[token];
    if (!check_index(rope_row, op.table_rows, "rope row", index, token, status)) return false;
    if (!check_index(slots[token], num_slots, "KV slot", index, token, status)) return false;
  }
  return true;
}

// Block ids that attention will follow: those of the positions the new tokens see.
bool check_blocks(const OctavoContext& context, int index, const OctavoOp& op,
                  OctavoStatus* status) {
  const Step& step = context.step;
  for (int seq = 0; seq < step.num_seqs; ++seq) {
    const int begin = step.inputs.cu_q[seq];
    if (begin == step.inputs.cu_q[seq + 1]) continue;
    const int first_seen =
        op.window > 0 ? std::max(0, step.inputs.positions[begin] - op.window + 1) : 0;
    const size_t row = static_cast<size_t>(op.kv_group) * step.limits.max_seqs + seq;
    const int32_t* table = step.inputs.block_table + row * step.limits.max_blocks;
    const int last_block = (step.inputs.seq_lens[seq] - 1) / kBlockTokens;
    for (int block = first_seen / kBlockTokens; block <= last_block; ++block) {
      if (!check_index(table[block], step.limits.num_blocks, "KV block", index, seq, status)) {
        return false;
      }
    }
  }
  return true;
}

bool check_sampled(const OctavoContext& context, int index, OctavoStatus* status) {
  const Step& step = context.step;
  for (int row = 0; row < step.num_sampled; ++row) {
    const int token = step.inputs.sampled_rows[row];
    if (!check_index(token, step.num_tokens, "sampled row", index, row, status)) return false;
  }
  return true;
}

// Layers of a group read the same inputs: checking the first of them will do.
bool reads_as_before(const std::vector<OctavoOp>& ops, size_t index) {
  const OctavoOp& op = ops[index];
  return std::any_of(ops.begin(), ops.begin() + index, [&](const OctavoOp& earlier) {
    return earlier.kind == op.kind && earlier.kv_group == op.kv_group &&
           earlier.window == op.window && earlier.table_rows == op.table_rows;
  });
}

size_t align_up(size_t nbytes) { return (nbytes + kAlignment - 1) / kAlignment * kAlignment; }

bool is_4_bit(int format) { return format == OCTAVO_FORMAT_Q4 || format == OCTAVO_FORMAT_Q4M; }
bool is_quantized(int format) {
  return is_4_bit(format) || format == OCTAVO_FORMAT_Q8 || format == OCTAVO_FORMAT_Q8G16;
}

// Bytes of a number of activations as a weight multiplies it.
size_t quant_nbytes(int format, int activation_bits) {
  return is_4_bit(format) && activation_bits == 8 ? sizeof(int8_t) : sizeof(int16_t);
}

// Bytes that `rows` rows of activations take as a weight multiplies them, in up to `products` products.
size_t prepared_nbytes(int format, int activation_bits, size_t width, size_t rows, size_t products) {
  if (!is_quantized(format)) return 0;
  const size_t row = width * quant_nbytes(format, activation_bits) + 2 * (width / kGroup) * sizeof(float);
  return align_up((rows + products * kMostPaddedRows) * row) + products * 4 * kAlignment;
}

// QuantizedRows of kernels/quantize.hpp.
size_t quantized_rows_nbytes(const OctavoOp& op, size_t rows) {
  const size_t padded = rows + kMostPaddedRows;
  return align_up(padded * op.in_width * quant_nbytes(op.format, op.activation_bits)) +
         2 * align_up(padded * (op.in_width / kGroup) * sizeof(float));
}

// MoEScratch of kernels/moe.hpp.
size_t experts_scratch(const OctavoOp& op, const OctavoLimits& limits, size_t num_threads) {
  const OctavoExperts& e = *op.experts;
  const size_t chunk = std::min(kExpertTokens, limits.max_tokens);
  const size_t pairs = chunk * e.top_k;
  const size_t experts = e.num_experts;
  const size_t groups = std::min(experts, pairs);
  const size_t padded_experts = (experts + kPanel - 1) / kPanel * kPanel;
  const size_t prepared = std::max(
      {prepared_nbytes(e.router_format, kRouterBits, op.in_width, chunk, 1),
       prepared_nbytes(e.gate_up_format, op.activation_bits, op.in_width, pairs, groups),
       prepared_nbytes(e.down_format, op.activation_bits, e.width, pairs, groups)});
  return align_up(chunk * padded_experts * sizeof(float)) + 4 * align_up(pairs * sizeof(float)) +
         align_up(experts * sizeof(int32_t)) + align_up(2 * sizeof(int32_t)) +
         align_up(experts * 3 * sizeof(int32_t)) + align_up(pairs * 2 * sizeof(int32_t)) +
         align_up(pairs * op.in_width * sizeof(float)) + align_up(pairs * e.width * sizeof(float)) +
         align_up(chunk * 2 * kPanel * num_threads * sizeof(float)) + prepared;
}

// Bytes of scratch memory a kernel uses at the limits; table.py bills the same.
size_t scratch_needed(const OctavoOp& op, const OctavoLimits& limits, size_t num_threads) {
  if (op.kind == OCTAVO_OP_LINEAR && is_quantized(op.format)) {
    return quantized_rows_nbytes(op, op.rows == OCTAVO_ROWS_TOKENS ? limits.max_tokens
                                     : op.rows == OCTAVO_ROWS_SEQS ? limits.max_seqs
                                                                   : limits.max_sampled);
  }
  if (op.kind == OCTAVO_OP_ROTARY_STORE_KV) {
    return num_threads * align_up(op.head_dim * sizeof(float));
  }
  if (op.kind == OCTAVO_OP_ATTENTION) {
    const size_t rows = static_cast<size_t>(kQueryTile) * (op.q_heads / op.kv_heads);
    const size_t tile = static_cast<size_t>(kTile) * op.head_dim;
    const size_t apart = attention_split_rows(op, limits, static_cast<int>(num_threads));
    return num_threads * align_up((3 * rows * op.head_dim + 4 * rows + 2 * tile) * sizeof(float)) +
           align_up(apart * (op.head_dim + 2) * sizeof(float));
  }
  return op.kind == OCTAVO_OP_MOE ? experts_scratch(op, limits, num_threads) : 0;
}

}  // namespace

bool check_program(const OctavoContext& context, OctavoStatus* status) {
  for (size_t index = 0; index < context.ops.size(); ++index) {
    const OctavoOp& op = context.ops[index];
    const int at = static_cast<int>(index);
    if (op.kind < 0 || op.kind >= OCTAVO_NUM_OP_KINDS) {
      refuse(status, OCTAVO_BAD_PROGRAM, at, -1, "no op kind %d in this build", op.kind);
      return false;
    }
    if (!check_shape(op, at, context.step.limits, status)) return false;
    const size_t needed = scratch_needed(op, context.step.limits, context.team.size());
    if (op.scratch_nbytes < static_cast<int64_t>(needed) || (needed > 0 && !op.scratch)) {
      refuse(status, OCTAVO_BAD_PROGRAM, at, -1, "%lld bytes of scratch memory, but %zu are needed",
             static_cast<long long>(op.scratch_nbytes), needed);
      return false;
    }
  }
  return true;
}

size_t own_memory_nbytes(const OctavoContext& context) {
  size_t nbytes = 0;
  for (const OctavoOp& op : context.ops) {
    if (op.kind != OCTAVO_OP_LINEAR || !is_quantized(op.format)) continue;
    nbytes = std::max(nbytes, quantized_rows_nbytes(op, kRowsAlone));
  }
  return nbytes;
}

bool check_step(const OctavoContext& context, OctavoStatus* status) {
  const Step& step = context.step;
  if (context.ops.empty()) {
    refuse(status, OCTAVO_BAD_PROGRAM, kWholeStep, -1, "no program is bound");
    return false;
  }
  if (!check_size(step.num_tokens, step.limits.max_tokens, "tokens", status) ||
      !check_size(step.num_seqs, step.limits.max_seqs, "sequences", status) ||
      !check_size(step.num_sampled, step.limits.max_sampled, "sampled rows", status) ||
      !check_sequences(context, status)) {
    return false;
  }
  for (size_t index = 0; index < context.ops.size(); ++index) {
    const OctavoOp& op = context.ops[index];
    const int at = static_cast<int>(index);
    bool fine = true;
    if (op.kind == OCTAVO_OP_GATHER_ROWS) {
      fine = check_sampled(context, at, status);
    } else if (op.kind == OCTAVO_OP_EMBEDDING && !reads_as_before(context.ops, index)) {
      fine = check_tokens(context, at, op, status);
    } else if (op.kind == OCTAVO_OP_ROTARY_STORE_KV && !reads_as_before(context.ops, index)) {
      fine = check_slots(context, at, op, status);
    } else if (op.kind == OCTAVO_OP_ATTENTION && !reads_as_before(context.ops, index)) {
      fine = check_blocks(context, at, op, status);
    }
    if (!fine) return false;
  }
  return true;
}

}  // namespace octavo
