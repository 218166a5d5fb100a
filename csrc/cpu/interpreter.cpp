// The C ABI: a context, its program, and a step of it as one call.
//
// Rule: octavo_run allocates nothing. Scratch memory is in the arena, laid out by the planner.

#include <cfenv>
#include <cstdarg>
#include <cstdio>
#include <exception>

#include "context.hpp"
#include "layouts.hpp"

#if defined(OCTAVO_ARM64)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace octavo {

namespace {

bool cpu_has(int32_t isa) {
  if (isa == OCTAVO_ISA_SCALAR) return true;
#if defined(OCTAVO_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (isa == OCTAVO_ISA_AVX2) return avx2;
  if (isa == OCTAVO_ISA_AVX512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
  }
#endif
#if defined(OCTAVO_ARM64)
  if (isa == OCTAVO_ISA_NEON) return true;
  if (isa == OCTAVO_ISA_NEON_DOT) return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#endif
  return false;
}

// The kernels of an ISA, or the fastest this CPU runs; null if it doesn't run them.
const KernelSet* kernels_for(int32_t isa) {
  if (isa == OCTAVO_ISA_AUTO) {
    for (const int32_t better :
         {OCTAVO_ISA_AVX512, OCTAVO_ISA_AVX2, OCTAVO_ISA_NEON_DOT, OCTAVO_ISA_NEON}) {
      if (cpu_has(better)) return kernels_for(better);
    }
    return &scalar_kernels();
  }
  if (!cpu_has(isa)) return nullptr;
  switch (isa) {
#if defined(OCTAVO_X86)
    case OCTAVO_ISA_AVX512: return &avx512_kernels();
    case OCTAVO_ISA_AVX2: return &avx2_kernels();
#endif
#if defined(OCTAVO_ARM64)
    case OCTAVO_ISA_NEON_DOT: return &neon_dot_kernels();
    case OCTAVO_ISA_NEON: return &neon_kernels();
#endif
    default: return &scalar_kernels();
  }
}

// Rounding to nearest and subnormals kept, on whichever thread: a caller that flushes subnormals to
// zero would otherwise compute other bits than the team's threads.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
};

void run_ops(const void* argument, Worker& worker) {
  const OctavoContext& context = *static_cast<const OctavoContext*>(argument);
  const DefaultFloatEnvironment environment;
  for (const OctavoOp& op : context.ops) {
    context.kernels.by_kind[op.kind](op, context.step, worker);
    end_phase(worker);
  }
}

// Fewer rows than this are not worth waking the team.
constexpr int kFewChoices = 4;

void choose_rows(const void* argument, Worker& worker) {
  const OctavoContext& context = *static_cast<const OctavoContext*>(argument);
  const Choosing& work = context.choosing;
  const DefaultFloatEnvironment environment;
  void* scratch = work.scratch + worker.thread * choice_scratch_nbytes(work.width);
  for (Range range{}; claim(worker, work.num_choices, 1, &range);) {
    choose_token(context.kernels.choice, &work.choices[range.begin], work.width, scratch);
  }
  end_phase(worker);
}

void count_query_tiles(OctavoContext* context) {
  const Step& step = context->step;
  int32_t* tiles = context->query_tiles.data();
  tiles[0] = 0;
  for (int seq = 0; seq < step.num_seqs; ++seq) {
    const int tokens = step.inputs.cu_q[seq + 1] - step.inputs.cu_q[seq];
    tiles[seq + 1] = tiles[seq] + (tokens + kQueryTile - 1) / kQueryTile;
  }
}

void take_own_memory(OctavoContext* context) {
  const size_t nbytes = own_memory_nbytes(*context);  // a multiple of kAlignment
  context->own_memory.assign(context->team.size() * nbytes + kAlignment, 0);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(context->own_memory.data());
  context->step.own_memory = reinterpret_cast<char*>((begin + kAlignment - 1) / kAlignment * kAlignment);
  context->step.own_nbytes = nbytes;
}

}  // namespace

void refuse(OctavoStatus* status, int code, int op, int64_t row, const char* format, ...) {
  status->code = code;
  status->op = op;
  status->row = static_cast<int32_t>(row);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status->cause, sizeof status->cause, format, arguments);
  va_end(arguments);
}

}  // namespace octavo

extern "C" {

int32_t octavo_version(void) { return OCTAVO_ABI_VERSION; }

OctavoContext* octavo_create(int32_t isa, int32_t num_threads) {
  const octavo::KernelSet* kernels = octavo::kernels_for(isa);
  if (!kernels || num_threads < 1) return nullptr;
  try {
    return new OctavoContext(*kernels, num_threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void octavo_destroy(OctavoContext* context) { delete context; }

const char* octavo_isa(const OctavoContext* context) { return context->kernels.isa; }

void octavo_bind(OctavoContext* context, const OctavoOp* ops, int32_t num_ops,
                 const OctavoInputs* inputs, const OctavoLimits* limits, OctavoStatus* status) {
  context->team.wait_idle();
  context->ops.clear();
  status->code = OCTAVO_OK;
  if (!octavo::check_limits(*limits, status)) return;
  context->ops.assign(ops, ops + num_ops);
  context->query_tiles.assign(limits->max_seqs + 1, 0);
  context->shared_splits.assign(num_ops, 0);
  context->step = {0, 0, 0, *inputs, *limits, context->query_tiles.data(), context->ops.data(),
                   context->shared_splits.data(), nullptr, 0};
  if (octavo::check_program(*context, status)) {
    octavo::take_own_memory(context);
  } else {
    context->ops.clear();
  }
}

void octavo_run(OctavoContext* context, int32_t num_tokens, int32_t num_seqs, int32_t num_sampled,
                OctavoStatus* status) {
  context->team.wait_idle();
  context->step.num_tokens = num_tokens;
  context->step.num_seqs = num_seqs;
  context->step.num_sampled = num_sampled;
  status->code = OCTAVO_OK;
  if (!octavo::check_step(*context, status)) return;
  octavo::count_query_tiles(context);
  octavo::share_attention(context);
  context->team.run(octavo::run_ops, context);
}

int64_t octavo_choice_scratch(const OctavoContext* context, int32_t width) {
  return context->team.size() * octavo::choice_scratch_nbytes(width);
}

void octavo_choose(OctavoContext* context, OctavoChoice* choices, int32_t num_choices, int32_t width,
                   void* scratch) {
  if (num_choices < octavo::kFewChoices) {
    const octavo::DefaultFloatEnvironment environment;
    for (int32_t i = 0; i < num_choices; ++i) {
      octavo::choose_token(context->kernels.choice, &choices[i], width, scratch);
    }
    return;
  }
  context->team.wait_idle();
  context->choosing = {choices, num_choices, width, static_cast<uint8_t*>(scratch)};
  context->team.run(octavo::choose_rows, context);
}

}  // extern "C"
