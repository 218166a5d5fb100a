// What a C ABI context holds: a team, the kernels of an ISA, and the bound program.
#pragma once

#include <vector>

#include "octavo.h"
#include "thread_team.hpp"
#include "worker.hpp"

namespace octavo {

// The arguments of octavo_choose. Threads that come late still read them when it has returned.
struct Choosing {
  OctavoChoice* choices;
  int32_t num_choices;
  int32_t width;
  uint8_t* scratch;
};

}  // namespace octavo

struct OctavoContext {
  OctavoContext(const octavo::KernelSet& kernels, int num_threads)
      : kernels(kernels), team(num_threads) {}

  const octavo::KernelSet& kernels;
  std::vector<OctavoOp> ops;
  octavo::Choosing choosing{};
  octavo::Step step{};               // inputs and limits from bind, sizes from run
  std::vector<int32_t> query_tiles;  // [max_seqs + 1]
  std::vector<int64_t> shared_splits;  // of each op
  std::vector<char> own_memory;        // Step::own_memory, and what aligns it
  octavo::ThreadTeam team;           // last: its threads read the above until they are joined
};

namespace octavo {

// Fill in why a call is refused; `format` and what follows are printf's.
void refuse(OctavoStatus* status, int code, int op, int64_t row, const char* format, ...)
    __attribute__((format(printf, 5, 6)));

// Whether the program fits this build: kinds, shapes, scratch memory.
bool check_program(const OctavoContext& context, OctavoStatus* status);

// Whether an op of a known kind has a shape that its kernel serves.
bool check_shape(const OctavoOp& op, int index, const OctavoLimits& limits, OctavoStatus* status);

// Bytes that each thread needs to prepare kRowsAlone rows of any of the program's linear ops.
size_t own_memory_nbytes(const OctavoContext& context);

// Whether the limits are numbers of things.
bool check_limits(const OctavoLimits& limits, OctavoStatus* status);

// Whether every index in the step's inputs is in range. Reads O(tokens + blocks used), writes nothing.
bool check_step(const OctavoContext& context, OctavoStatus* status);

// Decide for each attention op of the step whether threads share its splits.
void share_attention(OctavoContext* context);

}  // namespace octavo
