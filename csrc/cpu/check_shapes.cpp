// Whether an op has a shape that its kernel serves: what table.py declines is refused here, too.
//
// Rule: how much memory a pointer has is the caller's to know. Everything that kernels take for
// granted about numbers is checked.

#include "context.hpp"
#include "layouts.hpp"

namespace octavo {

namespace {

constexpr int kLanes = 8;
constexpr int kMostHeads = 1 << 16;  // and elements of a head: their products fit 64 bits
constexpr int kWidest = 1 << 30;

// The checks of one op; each says what it found.
class ShapeCheck {
 public:
  ShapeCheck(const OctavoOp& op, int index, const OctavoLimits& limits, OctavoStatus* status)
      : op_(op), index_(index), limits_(limits), status_(status) {}

  bool fits() const {
    if (!within(op_.rows, 0, OCTAVO_ROWS_SAMPLED + 1, "the kind of rows") ||
        !within(op_.out_width, 1, kWidest, "the width") || !given(op_.out, "out")) {
      return false;
    }
    switch (op_.kind) {
      case OCTAVO_OP_EMBEDDING:
        return lanes(op_.out_width) && groups(op_.format, op_.out_width) && packed(op_.weight) &&
               within(op_.table_rows, 1, INT32_MAX, "the number of table rows");
      case OCTAVO_OP_RMS_NORM: return row_wise() && lanes(op_.out_width) && weighted();
      case OCTAVO_OP_ADD: return row_wise() && lanes(op_.out_width) && given(op_.residual, "residual");
      case OCTAVO_OP_ADD_RMS_NORM:
        return row_wise() && lanes(op_.out_width) && weighted() && given(op_.residual, "residual") &&
               given(op_.out_sum, "out_sum");
      case OCTAVO_OP_LINEAR:
        return given(op_.x, "x") && within(op_.in_width, 1, kWidest, "the width of x") &&
               groups(op_.format, op_.in_width) && packed(op_.weight);
      case OCTAVO_OP_QK_NORM: return qk_norm();
      case OCTAVO_OP_ROTARY_STORE_KV: return rotary();
      case OCTAVO_OP_ATTENTION: return attention();
      case OCTAVO_OP_GATED_ACTIVATION: return gated();
      case OCTAVO_OP_MOE: return row_wise() && moe();
      default: return row_wise();  // gather_rows, scale_logits
    }
  }

 private:
  bool row_wise() const {
    return given(op_.x, "x") && equal(op_.in_width, op_.out_width, "columns of x");
  }

  bool gated() const {
    return given(op_.x, "x") && lanes(op_.out_width) && activated() &&
           equal(op_.in_width, 2 * static_cast<int64_t>(op_.out_width), "columns of x");
  }
  bool activated() const {
    return within(op_.activation, 0, OCTAVO_NUM_ACTIVATIONS, "the activation");
  }

  // An expert's rows begin with a panel.
  bool moe() const {
    const OctavoExperts* e = op_.experts;
    return given(e, "experts") && activated() && equal(op_.rows, OCTAVO_ROWS_TOKENS, "kind of rows") &&
           within(e->num_experts, 1, kMostHeads, "the number of experts") &&
           within(e->top_k, 1, e->num_experts + 1, "the number of a token's experts") &&
           within(e->width, 1, kWidest, "the width of an expert") &&
           multiple(e->width, kPanel, "rows of an expert") &&
           multiple(op_.out_width, kPanel, "rows of an expert") &&
           groups(e->router_format, op_.in_width) && packed(e->router) &&
           groups(e->gate_up_format, op_.in_width) && packed(e->gate_up) &&
           groups(e->down_format, e->width) && packed(e->down);
  }

  bool head_sizes() const {
    if (!within(op_.kv_heads, 1, kMostHeads, "the number of KV heads") ||
        !within(op_.q_heads, 1, kMostHeads, "the number of heads") ||
        !within(op_.head_dim, 1, kMostHeads, "the size of a head")) {
      return false;
    }
    return multiple(op_.head_dim, kLanes, "elements of a head") && given(op_.x, "x");
  }

  // All heads of q, k and v together.
  int64_t qkv_width() const {
    return (static_cast<int64_t>(op_.q_heads) + 2 * op_.kv_heads) * op_.head_dim;
  }

  bool qk_norm() const {
    return head_sizes() && row_wise() && weighted() && given(op_.k_weight, "weight of k") &&
           equal(op_.in_width, qkv_width(), "columns of x");
  }

  bool cached() const {
    return head_sizes() && multiple(op_.q_heads, op_.kv_heads, "query heads") &&
           given(op_.kv, "KV cache") &&
           within(op_.kv_group, 0, limits_.num_groups, "the KV group") &&
           within(op_.kv_dtype, 0, OCTAVO_NUM_DTYPES, "the KV type");
  }

  bool rotary() const {
    return cached() && weighted() && equal(op_.in_width, qkv_width(), "columns of x") &&
           equal(op_.out_width, static_cast<int64_t>(op_.q_heads) * op_.head_dim, "columns of q") &&
           within(op_.rotary_dim, 0, op_.head_dim + 1, "the number of rotated elements") &&
           multiple(op_.rotary_dim, 2, "rotated elements") &&
           within(op_.table_rows, 1, INT32_MAX, "the number of rope rows");
  }

  bool attention() const {
    const int64_t width = static_cast<int64_t>(op_.q_heads) * op_.head_dim;
    return cached() && equal(op_.in_width, width, "columns of q") &&
           equal(op_.out_width, width, "columns of out") &&
           within(op_.window, 0, INT32_MAX, "the window");
  }

  bool lanes(int width) const { return multiple(width, kLanes, "elements of a row"); }

  bool groups(int format, int width) const {
    if (!within(format, 0, OCTAVO_NUM_FORMATS, "the format")) return false;
    const bool plain = format == OCTAVO_FORMAT_F32 || format == OCTAVO_FORMAT_F16 ||
                       format == OCTAVO_FORMAT_BF16;
    return plain || multiple(width, kGroup, "elements of a row in groups");
  }

  bool weighted() const { return given(op_.weight, "weight"); }

  bool packed(const void* weight) const {
    if (!given(weight, "weight")) return false;
    if (reinterpret_cast<uintptr_t>(weight) % kAlignment == 0) return true;
    return refused("a weight at %p, but packed weights begin at multiples of %zu", weight, kAlignment);
  }

  bool given(const void* pointer, const char* what) const {
    return pointer || refused("no %s", what);
  }
  bool within(int value, int least, int end, const char* what) const {
    return (value >= least && value < end) ||
           refused("%s, %d, is not in [%d, %d)", what, value, least, end);
  }
  bool multiple(int value, int unit, const char* what) const {
    return value % unit == 0 || refused("%d %s are not a multiple of %d", value, what, unit);
  }
  bool equal(int64_t value, int64_t expected, const char* what) const {
    return value == expected || refused("%lld %s, but there should be %lld",
                                        static_cast<long long>(value), what,
                                        static_cast<long long>(expected));
  }

  template <class... Values>
  bool refused(const char* format, Values... values) const {
    refuse(status_, OCTAVO_BAD_PROGRAM, index_, -1, format, values...);
    return false;
  }

  const OctavoOp& op_;
  const int index_;
  const OctavoLimits& limits_;
  OctavoStatus* const status_;
};

}  // namespace

bool check_shape(const OctavoOp& op, int index, const OctavoLimits& limits, OctavoStatus* status) {
  return ShapeCheck(op, index, limits, status).fits();
}

bool check_limits(const OctavoLimits& limits, OctavoStatus* status) {
  for (const int32_t limit : {limits.max_tokens, limits.max_seqs, limits.max_sampled,
                              limits.max_blocks, limits.num_groups, limits.num_blocks}) {
    if (limit >= 0 && limit < kWidest) continue;
    refuse(status, OCTAVO_BAD_PROGRAM, -1, -1, "the limit %d is not in [0, %d)", limit, kWidest);
    return false;
  }
  return true;
}

}  // namespace octavo
