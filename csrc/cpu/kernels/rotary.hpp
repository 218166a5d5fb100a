// rotary_store_kv: rotate q and k, append k and v to the cache's pages.
#pragma once

#include "math.hpp"

namespace octavo::OCTAVO_ISA {

// The pages of one layer: K [kv_heads][head_dim][16], then V [kv_heads][16][head_dim], each page.
template <class T>
struct Pages {
  T* base;
  size_t head;  // elements of one head's K, and of its V
  int kv_heads;

  explicit Pages(const OctavoOp& op)
      : base(static_cast<T*>(op.kv)),
        head(static_cast<size_t>(op.head_dim) * kBlockTokens),
        kv_heads(op.kv_heads) {}

  T* k(int64_t block, int kv_head) const {
    return base + (block * 2 * kv_heads + kv_head) * head;
  }
  T* v(int64_t block, int kv_head) const { return k(block, kv_heads + kv_head); }
};

// Where a head's elements go: side by side (q, and v in its page), or kBlockTokens apart (k).
template <class T>
struct Contiguous {
  T* to;
  void put(int d, F8 a) const { store(to + d, a); }
};
template <class T>
struct Strided {
  T* to;
  void put(int d, F8 a) const {
    T lanes[8];
    store(lanes, a);
    for (int i = 0; i < 8; ++i) to[(d + i) * kBlockTokens] = lanes[i];
  }
};

// The elements of one head, rotated in its first rotary_dim elements, in eights. head_dim is a
// multiple of 8; half of rotary_dim may not be, so rotation works on a padded copy.
template <class To>
OCTAVO_INLINE void rotate_head(const float* x, const float* cos, const float* sin, int rotary_dim,
                               int head_dim, float* rotated, To to) {
  const int half = rotary_dim / 2;
  memcpy(rotated, x, head_dim * sizeof(float));
  int i = 0;
  for (; i + 8 <= half; i += 8) {
    const F8 a = load(x + i);
    const F8 b = load(x + half + i);
    const F8 c = load(cos + i);
    const F8 s = load(sin + i);
    store(rotated + i, sub(mul(a, c), mul(b, s)));
    store(rotated + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    rotated[i] = x[i] * cos[i] - x[half + i] * sin[i];
    rotated[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
  }
  for (int d = 0; d < head_dim; d += 8) to.put(d, load(rotated + d));
}

template <class T>
OCTAVO_INLINE void rotate_and_store(const OctavoOp& op, const Step& step, Worker& worker) {
  const Pages<T> pages(op);
  const int head_dim = op.head_dim;
  const int half = op.rotary_dim / 2;
  const float* table = static_cast<const float*>(op.weight);
  const int32_t* slots =
      step.inputs.slot_mapping + static_cast<size_t>(op.kv_group) * step.limits.max_tokens;
  const size_t head_nbytes = align_up(head_dim * sizeof(float));
  float* rotated =
      reinterpret_cast<float*>(static_cast<char*>(op.scratch) + worker.thread * head_nbytes);

  for_each_row(step.num_tokens, worker, [&](int64_t token) {
    const float* cos = table + static_cast<size_t>(step.inputs.rope_rows[token]) * op.rotary_dim;
    const float* sin = cos + half;
    const float* x = op.x + token * op.in_width;
    float* q = op.out + token * op.out_width;
    for (int h = 0; h < op.q_heads; ++h, x += head_dim, q += head_dim) {
      rotate_head(x, cos, sin, op.rotary_dim, head_dim, rotated, Contiguous<float>{q});
    }
    const int block = slots[token] / kBlockTokens;
    const int offset = slots[token] % kBlockTokens;
    for (int h = 0; h < op.kv_heads; ++h, x += head_dim) {
      rotate_head(x, cos, sin, op.rotary_dim, head_dim, rotated,
                  Strided<T>{pages.k(block, h) + offset});
    }
    for (int h = 0; h < op.kv_heads; ++h, x += head_dim) {
      const Contiguous<T> to{pages.v(block, h) + static_cast<size_t>(offset) * head_dim};
      for (int d = 0; d < head_dim; d += 8) to.put(d, load(x + d));
    }
  });
}

static void rotary_store_kv(const OctavoOp& op, const Step& step, Worker& worker) {
  switch (op.kv_dtype) {
    case OCTAVO_DTYPE_F16: return rotate_and_store<Half>(op, step, worker);
    case OCTAVO_DTYPE_BF16: return rotate_and_store<Bf16>(op, step, worker);
    default: return rotate_and_store<float>(op, step, worker);
  }
}

}  // namespace octavo::OCTAVO_ISA
