// What a kernel sees of the step and of the thread that runs it.
//
// Rule: no inline functions and no std templates here. This header is compiled under the flags of
// every ISA, and the linker keeps one copy of an inline function: it might keep the wrong one.
#pragma once

#include <stdint.h>

#include "octavo.h"

namespace octavo {

class ThreadTeam;

// One thread inside a run of the team.
struct Worker {
  ThreadTeam* team;
  int thread;
  int num_threads;
};

struct Range {
  int64_t begin;
  int64_t end;
};

// Take the next `chunk` of `total` items that no thread has taken since the last barrier.
bool claim(const Worker& worker, int64_t total, int64_t chunk, Range* range);

// Wait for all threads of the team. What they wrote is visible afterwards; claims start anew.
void barrier(const Worker& worker);

// The sizes and inputs of one step, checked.
struct Step {
  int num_tokens;
  int num_seqs;
  int num_sampled;
  OctavoInputs inputs;
  OctavoLimits limits;
  // Tiles of kQueryTile query tokens: those of sequence s are [query_tiles[s], query_tiles[s + 1]).
  const int32_t* query_tiles;
};

// Query tokens that attention works on at a time.
constexpr int kQueryTile = 16;

using Kernel = void (*)(const OctavoOp& op, const Step& step, const Worker& worker);

// The kernels of one ISA, by OctavoOpKind. All threads of a team call the same kernel together.
struct KernelSet {
  const char* isa;
  Kernel by_kind[OCTAVO_NUM_OP_KINDS];
};

const KernelSet& scalar_kernels();
#if defined(OCTAVO_X86)
const KernelSet& avx2_kernels();
#endif

}  // namespace octavo
