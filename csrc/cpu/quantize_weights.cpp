// Quantising on load: threads take rows, kernels/quantize_weights.hpp does one.

#include "context.hpp"

namespace octavo {

namespace {

struct Job {
  const OctavoQuantizeJob& rows;
  QuantizeRow quantize_row;
};

void quantize_together(const void* argument, Worker& worker) {
  const Job& job = *static_cast<const Job*>(argument);
  constexpr int64_t kChunk = 8;
  for (Range range{}; claim(worker, job.rows.num_rows, kChunk, &range);) {
    for (int64_t row = range.begin; row < range.end; ++row) job.quantize_row(job.rows, row);
  }
  end_phase(worker);
}

}  // namespace

}  // namespace octavo

extern "C" void octavo_quantize(OctavoContext* context, const OctavoQuantizeJob* job) {
  const octavo::Job both{*job, context->kernels.quantize_row};
  context->team.run(octavo::quantize_together, &both);
  context->team.wait_idle();  // the job is the caller's
}
