// Raw rows to panels (layouts.hpp). Lossless: scales and numbers are moved, not computed.

#include <cstring>

#include "context.hpp"
#include "layouts.hpp"

namespace octavo {

namespace {

// Blocks of 32 weights: GGUF's, and our own of halves with a scale each. In those of 4 bits element
// i < 16 is the low nibble of quants[i], i >= 16 the high nibble of quants[i - 16].
struct GgufQ4_0 {
  Half scale;
  uint8_t quants[16];
};
struct GgufQ4_1 {
  Half scale;
  Half min;
  uint8_t quants[16];
};
struct GgufQ8_0 {
  Half scale;
  int8_t quants[32];
};
struct RawQ8g16 {
  Half scales[2];
  int8_t quants[32];
};
static_assert(sizeof(GgufQ4_0) == 18 && sizeof(GgufQ4_1) == 20 && sizeof(GgufQ8_0) == 34 &&
                  sizeof(RawQ8g16) == 36,
              "as in the file");

void pack_nibbles(const uint8_t* from, uint8_t (*to)[4 * kPanel], int lane) {
  constexpr uint32_t kLowNibbles = 0x0f0f0f0f;
  for (int row = 0; row < kGroup / 8; ++row) {
    uint32_t pair[2];  // k = 8 row .. 8 row + 7, all in one half of the nibbles
    std::memcpy(pair, from + 8 * (row % 2), sizeof pair);
    const int half = row < 2 ? 0 : 4;
    const uint32_t packed = (pair[0] >> half & kLowNibbles) | (pair[1] >> half & kLowNibbles) << 4;
    std::memcpy(to[row] + lane * 4, &packed, sizeof packed);
  }
}

void pack_bytes(const int8_t* from, int8_t (*to)[32], int lane) {
  for (int pair = 0; pair < kGroup / 2; ++pair) {
    std::memcpy(to[pair] + lane * 2, from + pair * 2, 2);
  }
}

void pack_group(const GgufQ4_0& from, Q4Block* to, int lane) {
  pack_nibbles(from.quants, to->quants, lane);
  to->scales[lane] = from.scale;
}

void pack_group(const GgufQ4_1& from, Q4mBlock* to, int lane) {
  pack_nibbles(from.quants, to->quants, lane);
  to->scales[lane] = from.scale;
  to->mins[lane] = from.min;
}

void pack_group(const GgufQ8_0& from, Q8Block* to, int lane) {
  pack_bytes(from.quants, to->quants, lane);
  to->scales[lane] = from.scale;
}

void pack_group(const RawQ8g16& from, Q8g16Block* to, int lane) {
  pack_bytes(from.quants, to->quants, lane);
  to->scales[0][lane] = from.scales[0];
  to->scales[1][lane] = from.scales[1];
}

template <class From, class To>
void pack_row(const uint8_t* raw, int width, int64_t row, void* packed) {
  const int groups = width / kGroup;
  const From* from = reinterpret_cast<const From*>(raw);
  To* panel = static_cast<To*>(packed) + row / kPanel * groups;
  for (int group = 0; group < groups; ++group) {
    pack_group(from[group], panel + group, static_cast<int>(row % kPanel));
  }
}

template <class Plain>
void pack_plain_row(const uint8_t* raw, int width, int64_t row, void* packed) {
  Plain* panel = static_cast<Plain*>(packed) + row / kPanel * width * kPanel + row % kPanel;
  for (int k = 0; k < width; ++k) {
    std::memcpy(panel + static_cast<size_t>(k) * kPanel, raw + k * sizeof(Plain), sizeof(Plain));
  }
}

size_t raw_row_nbytes(const OctavoPackJob& job) {
  switch (job.format) {
    case OCTAVO_FORMAT_Q4: return job.width / kGroup * sizeof(GgufQ4_0);
    case OCTAVO_FORMAT_Q4M: return job.width / kGroup * sizeof(GgufQ4_1);
    case OCTAVO_FORMAT_Q8: return job.width / kGroup * sizeof(GgufQ8_0);
    case OCTAVO_FORMAT_Q8G16: return job.width / kGroup * sizeof(RawQ8g16);
    case OCTAVO_FORMAT_F16:
    case OCTAVO_FORMAT_BF16: return job.width * sizeof(uint16_t);
    default: return job.width * sizeof(float);
  }
}

void pack_one(const OctavoPackJob& job, int64_t row) {
  const int64_t source = job.row_order ? job.row_order[row] : row;
  const uint8_t* raw = job.raw + source * raw_row_nbytes(job);
  const int64_t target = job.first_row + row;
  switch (job.format) {
    case OCTAVO_FORMAT_Q4:
      return pack_row<GgufQ4_0, Q4Block>(raw, job.width, target, job.packed);
    case OCTAVO_FORMAT_Q4M:
      return pack_row<GgufQ4_1, Q4mBlock>(raw, job.width, target, job.packed);
    case OCTAVO_FORMAT_Q8:
      return pack_row<GgufQ8_0, Q8Block>(raw, job.width, target, job.packed);
    case OCTAVO_FORMAT_Q8G16:
      return pack_row<RawQ8g16, Q8g16Block>(raw, job.width, target, job.packed);
    case OCTAVO_FORMAT_F16:
    case OCTAVO_FORMAT_BF16:
      return pack_plain_row<uint16_t>(raw, job.width, target, job.packed);
    default: return pack_plain_row<uint32_t>(raw, job.width, target, job.packed);
  }
}

// The panels a job writes to, the first and the last perhaps in part.
Range panels_of(const OctavoPackJob& job) {
  const int64_t end_row = job.first_row + job.num_rows;
  return {job.first_row / kPanel, (end_row + kPanel - 1) / kPanel};
}

void pack_panel(const OctavoPackJob& job, int64_t panel) {
  for (int64_t target = panel * kPanel; target < (panel + 1) * kPanel; ++target) {
    const int64_t row = target - job.first_row;
    if (row >= 0 && row < job.num_rows) pack_one(job, row);
  }
}

// Threads take whole panels: rows of one panel share bytes.
void pack_together(const void* argument, Worker& worker) {
  const OctavoPackJob& job = *static_cast<const OctavoPackJob*>(argument);
  const Range panels = panels_of(job);
  for (Range range{}; claim(worker, panels.end - panels.begin, 1, &range);) {
    pack_panel(job, panels.begin + range.begin);
  }
  end_phase(worker);
}

// Smaller jobs take less time than it may take to wake a thread.
constexpr size_t kWorthSharing = 4 << 20;

}  // namespace

}  // namespace octavo

extern "C" void octavo_pack(OctavoContext* context, const OctavoPackJob* job) {
  if (octavo::raw_row_nbytes(*job) * job->num_rows >= octavo::kWorthSharing) {
    context->team.run(octavo::pack_together, job);
    context->team.wait_idle();  // the job is the caller's
    return;
  }
  const octavo::Range panels = octavo::panels_of(*job);
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) octavo::pack_panel(*job, panel);
}
