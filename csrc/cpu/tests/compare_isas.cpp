// Runs random programs on two builds of the kernels and compares every output bit for bit.
//
//   compare_isas ISA ISA CASES SEED      ISA is a number of OctavoIsa
//
// Prints a digest of all outputs, the same on every machine: a run under an emulator can be held
// against one on another architecture. Ends with 1 at the first difference, with 2 if an ISA is not
// here. NaN has no sign and no payload: processors differ in them.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "../layouts.hpp"
#include "../octavo.h"

namespace {

using octavo::kBlockTokens;
using octavo::kGroup;
using octavo::kPanel;

constexpr int kBadUsage = 2;

// splitmix64 (Steele, Lea, Flood 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  int below(int end) { return static_cast<int>(next() >> 33) % end; }
  int between(int least, int most) { return least + below(most - least + 1); }
  bool one_in(int n) { return below(n) == 0; }

  // Mostly about 1; some of any magnitude, and some that are not finite.
  float value(bool special) {
    const float plain = static_cast<float>(below(1 << 24) - (1 << 23)) * 0x1p-22f;
    if (!one_in(32)) return plain;
    if (!special) return std::ldexp(plain, between(-20, 6));
    const float values[] = {INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 0x1p-149f, -0x1.8p-130f, 3e38f,
                            88.0f, -87.5f, 65520.0f, 0x1p31f, -0x1p31f, 0x1p-24f, 2.5f, 1e-30f};
    return values[below(sizeof values / sizeof *values)];
  }
  // A finite f16 of magnitude up to about 1; the smallest are subnormal.
  uint16_t half() {
    const int sign = below(2) << 15;
    return static_cast<uint16_t>(sign | below(0x3c00));
  }

 private:
  uint64_t state_;
};

// Memory of a program: zeroed, each piece 64-byte aligned.
class Memory {
 public:
  explicit Memory(size_t nbytes) : bytes_(nbytes + octavo::kAlignment) {}

  void* take(size_t nbytes) {
    const size_t base = reinterpret_cast<size_t>(bytes_.data());
    const size_t at = (base + used_ + octavo::kAlignment - 1) / octavo::kAlignment * octavo::kAlignment;
    used_ = at - base + nbytes;
    if (used_ > bytes_.size()) {
      fprintf(stderr, "a program needs more than %zu bytes\n", bytes_.size());
      abort();
    }
    return reinterpret_cast<void*>(at);
  }
  template <class T>
  T* array(size_t count) {
    return static_cast<T*>(take(count * sizeof(T)));
  }
  std::vector<uint8_t> snapshot() const { return {bytes_.begin(), bytes_.begin() + used_}; }
  void restore(const std::vector<uint8_t>& saved) {
    std::copy(saved.begin(), saved.end(), bytes_.begin());
  }

 private:
  std::vector<uint8_t> bytes_;
  size_t used_ = 0;
};

// What is compared: numbers of 2 or 4 bytes.
struct Output {
  const void* at;
  size_t count;
  int nbytes;
};

struct Step {
  std::vector<int> context;  // of each sequence
  std::vector<int> tokens;
};

// One random program, its memory and its steps.
struct Case {
  Memory memory{32 << 20};
  std::string what;
  std::vector<OctavoOp> ops;
  OctavoExperts experts{};
  OctavoInputs inputs{};
  OctavoLimits limits{};
  std::vector<Output> outputs;
  std::vector<Step> steps;
};

constexpr int kTokens = 80;
constexpr int kSeqs = 4;
constexpr int kBlocks = 6;  // of a sequence
constexpr int kVocab = 61;
constexpr size_t kScratch = 2 << 20;

// Bytes of 32 raw weights, and of their f16 scales, which come first.
struct RawGroup {
  size_t nbytes;
  size_t scales;
};
RawGroup raw_group(int format) {
  switch (format) {
    case OCTAVO_FORMAT_Q4: return {18, 2};
    case OCTAVO_FORMAT_Q4M: return {20, 4};
    case OCTAVO_FORMAT_Q8: return {34, 2};
    case OCTAVO_FORMAT_Q8G16: return {36, 4};
    case OCTAVO_FORMAT_F16: return {2 * kGroup, 2 * kGroup};
    case OCTAVO_FORMAT_BF16: return {2 * kGroup, 0};
    default: return {4 * kGroup, 0};
  }
}

// Random bytes of a format whose scales are finite.
std::vector<uint8_t> raw_rows(Random& random, int format, int width, int rows, bool special) {
  const RawGroup group = raw_group(format);
  std::vector<uint8_t> raw(group.nbytes * width / kGroup * rows);
  for (size_t at = 0; at < raw.size();) {
    if (format == OCTAVO_FORMAT_F32 || format == OCTAVO_FORMAT_BF16) {
      const float value = random.value(special);
      const size_t nbytes = format == OCTAVO_FORMAT_F32 ? 4 : 2;
      memcpy(&raw[at], reinterpret_cast<const char*>(&value) + 4 - nbytes, nbytes);
      at += nbytes;
    } else if (at % group.nbytes < group.scales) {
      const uint16_t half = random.half();
      memcpy(&raw[at], &half, sizeof half);
      at += sizeof half;
    } else {
      raw[at++] = static_cast<uint8_t>(random.next() >> 56);
    }
  }
  return raw;
}

void* packed_weight(Case& c, Random& random, OctavoContext* packer, int format, int rows, int width,
                    bool special) {
  const std::vector<uint8_t> raw = raw_rows(random, format, width, rows, special);
  OctavoPackJob job{};
  job.format = format;
  job.width = width;
  job.num_rows = rows;
  job.raw = raw.data();
  const int padded = (rows + kPanel - 1) / kPanel * kPanel;
  job.packed = c.memory.take(static_cast<size_t>(padded) * width * sizeof(float));
  octavo_pack(packer, &job);
  return job.packed;
}

float* vector_weight(Case& c, Random& random, int width) {
  float* weight = c.memory.array<float>((width + kPanel - 1) / kPanel * kPanel);
  for (int i = 0; i < width; ++i) weight[i] = random.value(false);
  return weight;
}

OctavoOp op_of(Case& c, int kind, const float* x, int in_width, int out_width) {
  OctavoOp op{};
  op.kind = kind;
  op.x = x;
  op.in_width = in_width;
  op.out_width = out_width;
  op.out = c.memory.array<float>(static_cast<size_t>(kTokens) * out_width);
  op.scratch = c.memory.take(kScratch);
  op.scratch_nbytes = kScratch;
  c.outputs.push_back({op.out, static_cast<size_t>(kTokens) * out_width, 4});
  return op;
}

// Rows of `width` numbers, looked up by token id: what every program begins with.
const float* add_embedding(Case& c, Random& random, OctavoContext* packer, int format, int width,
                           bool special) {
  OctavoOp op = op_of(c, OCTAVO_OP_EMBEDDING, nullptr, 0, width);
  op.format = format;
  op.table_rows = kVocab;
  op.weight = packed_weight(c, random, packer, format, kVocab, width, special);
  op.scale = random.one_in(2) ? 1.0f : 3.7f;
  c.ops.push_back(op);
  return op.out;
}

void add_row_ops(Case& c, Random& random, OctavoContext* packer) {
  const int width = 8 * random.between(1, 24);
  const float* x = add_embedding(c, random, packer, OCTAVO_FORMAT_F32, 2 * width, true);
  OctavoOp gated = op_of(c, OCTAVO_OP_GATED_ACTIVATION, x, 2 * width, width);
  gated.activation = random.below(OCTAVO_NUM_ACTIVATIONS);
  c.ops.push_back(gated);
  OctavoOp norm = op_of(c, OCTAVO_OP_RMS_NORM, gated.out, width, width);
  norm.weight = vector_weight(c, random, width);
  norm.eps = 1e-5f;
  c.ops.push_back(norm);
  OctavoOp sum = op_of(c, OCTAVO_OP_ADD_RMS_NORM, norm.out, width, width);
  sum.residual = gated.out;
  sum.out_sum = c.memory.array<float>(static_cast<size_t>(kTokens) * width);
  c.outputs.push_back({sum.out_sum, static_cast<size_t>(kTokens) * width, 4});
  sum.weight = norm.weight;
  sum.eps = 1e-6f;
  sum.scale = random.one_in(2) ? 1.0f : 0.7f;
  c.ops.push_back(sum);
  OctavoOp plain_sum = op_of(c, OCTAVO_OP_ADD, norm.out, width, width);
  plain_sum.residual = sum.out;
  plain_sum.scale = 0.3f;
  c.ops.push_back(plain_sum);
  OctavoOp logits = op_of(c, OCTAVO_OP_SCALE_LOGITS, plain_sum.out, width, width);
  logits.scale = 1.3f;
  logits.softcap = random.one_in(2) ? 0.0f : 2.5f;
  c.ops.push_back(logits);
  c.what = "rows of " + std::to_string(width) + ", activation " + std::to_string(gated.activation);
}

struct LinearKind {
  int format;
  int activation_bits;
};
constexpr LinearKind kLinearKinds[] = {
    {OCTAVO_FORMAT_F32, 0},    {OCTAVO_FORMAT_F16, 0},  {OCTAVO_FORMAT_BF16, 0},
    {OCTAVO_FORMAT_Q8, 0},     {OCTAVO_FORMAT_Q4M, 16}, {OCTAVO_FORMAT_Q4M, 8},
    {OCTAVO_FORMAT_Q8G16, 0},  {OCTAVO_FORMAT_Q4, 16},  {OCTAVO_FORMAT_Q4, 8},
};

void add_linear(Case& c, Random& random, OctavoContext* packer) {
  const LinearKind kind = kLinearKinds[random.below(sizeof kLinearKinds / sizeof *kLinearKinds)];
  const int width = kGroup * random.between(1, 10);
  const int outputs = random.between(1, 90);
  const bool special = random.one_in(3);
  // Weights of x's own format too: that is how each format is read by row.
  const float* x = add_embedding(c, random, packer, random.one_in(2) ? OCTAVO_FORMAT_F32 : kind.format,
                                 width, special);
  OctavoOp op = op_of(c, OCTAVO_OP_LINEAR, x, width, outputs);
  op.format = kind.format;
  op.activation_bits = kind.activation_bits;
  op.weight = packed_weight(c, random, packer, kind.format, outputs, width, special);
  op.bias = random.one_in(2) ? vector_weight(c, random, outputs) : nullptr;
  c.ops.push_back(op);
  c.what = "linear " + std::to_string(width) + " to " + std::to_string(outputs) + ", format " +
           std::to_string(kind.format) + ", activations of " + std::to_string(kind.activation_bits);
}

void add_attention(Case& c, Random& random, OctavoContext* packer) {
  const int kv_heads = random.between(1, 3);
  const int q_heads = kv_heads * random.between(1, 5);
  const int head_dim = 8 * random.between(1, 9);
  const int positions = kBlocks * kBlockTokens;
  const int width = (q_heads + 2 * kv_heads) * head_dim;
  const float* qkv =
      add_embedding(c, random, packer, OCTAVO_FORMAT_F32, width, /*special=*/random.one_in(3));

  if (random.one_in(2)) {
    OctavoOp norm = op_of(c, OCTAVO_OP_QK_NORM, qkv, width, width);
    norm.q_heads = q_heads;
    norm.kv_heads = kv_heads;
    norm.head_dim = head_dim;
    norm.norm_together = random.below(2);
    norm.weight = vector_weight(c, random, q_heads * head_dim);
    norm.k_weight = vector_weight(c, random, kv_heads * head_dim);
    norm.eps = 1e-6f;
    c.ops.push_back(norm);
    qkv = norm.out;
  }

  OctavoOp rotary = op_of(c, OCTAVO_OP_ROTARY_STORE_KV, qkv, width, q_heads * head_dim);
  rotary.rotary_dim = random.one_in(2) ? head_dim : 2 * random.between(1, head_dim / 2);
  rotary.table_rows = positions;
  float* table = c.memory.array<float>(static_cast<size_t>(positions) * rotary.rotary_dim);
  for (int i = 0; i < positions * rotary.rotary_dim; ++i) table[i] = random.value(false);
  rotary.weight = table;
  rotary.q_heads = q_heads;
  rotary.kv_heads = kv_heads;
  rotary.head_dim = head_dim;
  rotary.kv_dtype = random.below(OCTAVO_NUM_DTYPES);
  const int element = rotary.kv_dtype == OCTAVO_DTYPE_F32 ? 4 : 2;
  const size_t elements =
      static_cast<size_t>(c.limits.num_blocks) * 2 * kv_heads * head_dim * kBlockTokens;
  rotary.kv = c.memory.take(elements * element);
  c.outputs.push_back({rotary.kv, elements, element});
  c.ops.push_back(rotary);

  OctavoOp op = op_of(c, OCTAVO_OP_ATTENTION, rotary.out, q_heads * head_dim, q_heads * head_dim);
  op.q_heads = q_heads;
  op.kv_heads = kv_heads;
  op.head_dim = head_dim;
  op.kv_dtype = rotary.kv_dtype;
  op.kv = rotary.kv;
  op.window = random.one_in(2) ? 0 : random.between(1, positions);
  op.scale = 0.3f;
  op.softcap = random.one_in(2) ? 0.0f : 4.0f;
  op.sinks = random.one_in(2) ? nullptr : vector_weight(c, random, q_heads);
  c.ops.push_back(op);
  c.what = std::to_string(q_heads) + " heads on " + std::to_string(kv_heads) + " of " +
           std::to_string(head_dim) + ", window " + std::to_string(op.window) + ", KV type " +
           std::to_string(op.kv_dtype);
}

void add_experts(Case& c, Random& random, OctavoContext* packer) {
  const int hidden = kGroup * random.between(1, 4);
  OctavoExperts& e = c.experts;
  e.num_experts = random.between(1, 9);
  e.top_k = random.between(1, e.num_experts);
  e.normalize = random.below(2);
  e.width = kGroup * random.between(1, 3);
  const LinearKind kind = kLinearKinds[random.below(sizeof kLinearKinds / sizeof *kLinearKinds)];
  e.router_format = OCTAVO_FORMAT_F32;
  e.gate_up_format = e.down_format = kind.format;
  const bool special = random.one_in(3);
  const float* x = add_embedding(c, random, packer, OCTAVO_FORMAT_F32, hidden, special);
  const int gate_up_rows = e.num_experts * 2 * e.width;
  e.router = packed_weight(c, random, packer, e.router_format, e.num_experts, hidden, false);
  e.gate_up = packed_weight(c, random, packer, kind.format, gate_up_rows, hidden, special);
  e.down = packed_weight(c, random, packer, kind.format, e.num_experts * hidden, e.width, special);
  if (random.one_in(2)) {
    e.router_bias = vector_weight(c, random, e.num_experts);
    e.gate_up_bias = vector_weight(c, random, gate_up_rows);
    e.down_bias = vector_weight(c, random, e.num_experts * hidden);
  }
  OctavoOp op = op_of(c, OCTAVO_OP_MOE, x, hidden, hidden);
  op.experts = &e;
  op.activation = random.below(OCTAVO_NUM_ACTIVATIONS);
  op.activation_bits = kind.activation_bits;
  c.ops.push_back(op);
  c.what = std::to_string(e.top_k) + " of " + std::to_string(e.num_experts) + " experts, format " +
           std::to_string(kind.format);
}

// Two steps: what the first leaves in the cache the second sees.
void add_steps(Case& c, Random& random) {
  std::vector<int> context(kSeqs, 0);
  for (int i = 0; i < 2; ++i) {
    Step step;
    int left = kTokens;
    for (int seq = 0; seq < kSeqs; ++seq) {
      const int room = std::min(left, kBlocks * kBlockTokens - context[seq]);
      const int tokens = random.one_in(3) ? std::min(room, 1) : random.between(0, room);
      step.context.push_back(context[seq]);
      step.tokens.push_back(tokens);
      context[seq] += tokens;
      left -= tokens;
    }
    c.steps.push_back(step);
  }
}

void add_inputs(Case& c, Random& random) {
  c.limits = {kTokens, kSeqs, 1, kBlocks, 1, kSeqs * kBlocks};
  const size_t slots = static_cast<size_t>(kSeqs) * kBlocks;
  int32_t* tables = c.memory.array<int32_t>(slots);
  for (size_t i = 0; i < slots; ++i) tables[i] = static_cast<int32_t>(i);
  for (size_t i = slots - 1; i > 0; --i) std::swap(tables[i], tables[random.below(static_cast<int>(i + 1))]);
  c.inputs.block_table = tables;
  c.inputs.token_ids = c.memory.array<int32_t>(kTokens);
  c.inputs.positions = c.memory.array<int32_t>(kTokens);
  c.inputs.rope_rows = c.inputs.positions;
  c.inputs.cu_q = c.memory.array<int32_t>(kSeqs + 1);
  c.inputs.seq_lens = c.memory.array<int32_t>(kSeqs);
  c.inputs.slot_mapping = c.memory.array<int32_t>(kTokens);
  c.inputs.sampled_rows = c.memory.array<int32_t>(1);
  int32_t* ids = const_cast<int32_t*>(c.inputs.token_ids);
  for (int i = 0; i < kTokens; ++i) ids[i] = random.below(kVocab);
}

int fill_step(const Case& c, const Step& step) {
  auto* positions = const_cast<int32_t*>(c.inputs.positions);
  auto* slots = const_cast<int32_t*>(c.inputs.slot_mapping);
  auto* cu_q = const_cast<int32_t*>(c.inputs.cu_q);
  auto* seq_lens = const_cast<int32_t*>(c.inputs.seq_lens);
  int token = 0;
  for (int seq = 0; seq < kSeqs; ++seq) {
    for (int i = 0; i < step.tokens[seq]; ++i, ++token) {
      const int position = step.context[seq] + i;
      positions[token] = position;
      slots[token] = c.inputs.block_table[seq * kBlocks + position / kBlockTokens] * kBlockTokens +
                     position % kBlockTokens;
    }
    cu_q[seq + 1] = token;
    seq_lens[seq] = step.context[seq] + step.tokens[seq];
  }
  return token;
}

void require_ok(const OctavoStatus& status, const Case& c) {
  if (status.code == OCTAVO_OK) return;
  fprintf(stderr, "%s: op %d, row %d: %s\n", c.what.c_str(), status.op, status.row, status.cause);
  exit(kBadUsage);
}

// All outputs of all steps, NaN alike.
std::vector<uint32_t> run(OctavoContext* context, const Case& c) {
  OctavoStatus status;
  octavo_bind(context, c.ops.data(), static_cast<int32_t>(c.ops.size()), &c.inputs, &c.limits, &status);
  require_ok(status, c);
  std::vector<uint32_t> found;
  for (const Step& step : c.steps) {
    octavo_run(context, fill_step(c, step), kSeqs, 0, &status);
    require_ok(status, c);
    for (const Output& output : c.outputs) {
      for (size_t i = 0; i < output.count; ++i) {
        uint32_t bits = 0;
        memcpy(&bits, static_cast<const char*>(output.at) + i * output.nbytes, output.nbytes);
        const uint32_t magnitude = output.nbytes == 4 ? bits & 0x7fffffff : bits & 0x7fff;
        const uint32_t infinity = output.nbytes == 4 ? 0x7f800000 : 0x7c00;
        found.push_back(magnitude > infinity ? ~0u : bits);
      }
    }
  }
  return found;
}

// FNV-1a over words.
uint64_t add_to_digest(uint64_t digest, const std::vector<uint32_t>& words) {
  for (const uint32_t word : words) digest = (digest ^ word) * 0x100000001b3;
  return digest;
}

OctavoContext* create(int isa, int threads) {
  OctavoContext* context = octavo_create(isa, threads);
  if (context) return context;
  fprintf(stderr, "no ISA %d on this machine\n", isa);
  exit(kBadUsage);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    fprintf(stderr, "usage: compare_isas ISA ISA CASES SEED\n");
    return kBadUsage;
  }
  OctavoContext* first = create(atoi(argv[1]), 1);
  OctavoContext* second = create(atoi(argv[2]), 2);
  uint64_t digest = 0xcbf29ce484222325;
  for (int number = 0; number < atoi(argv[3]); ++number) {
    Random random(strtoull(argv[4], nullptr, 10) + number * 1000003ull);
    Case c;
    add_inputs(c, random);
    add_steps(c, random);
    constexpr void (*kAdd[])(Case&, Random&, OctavoContext*) = {add_row_ops, add_linear, add_attention,
                                                                add_experts};
    kAdd[number % 4](c, random, first);
    const std::vector<uint8_t> before = c.memory.snapshot();
    const std::vector<uint32_t> expected = run(first, c);
    c.memory.restore(before);
    const std::vector<uint32_t> found = run(second, c);
    for (size_t i = 0; i < expected.size(); ++i) {
      if (found[i] == expected[i]) continue;
      printf("case %d (%s): output %zu is %08x on %s and %08x on %s\n", number, c.what.c_str(), i,
             expected[i], octavo_isa(first), found[i], octavo_isa(second));
      return 1;
    }
    digest = add_to_digest(digest, expected);
  }
  printf("%s and %s agree, digest %016llx\n", octavo_isa(first), octavo_isa(second),
         static_cast<unsigned long long>(digest));
  octavo_destroy(first);
  octavo_destroy(second);
}
