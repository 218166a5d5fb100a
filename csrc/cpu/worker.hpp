// What a kernel sees of the step and of the thread that runs it.
//
// Rule: no inline functions and no std templates here. This header is compiled under the flags of
// every ISA, and the linker keeps one copy of an inline function: it might keep the wrong one.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "choice.hpp"
#include "octavo.h"

namespace octavo {

class ThreadTeam;

// One thread of a team.
struct Worker {
  ThreadTeam* team;
  int thread;
  int num_threads;
  uint32_t phase;  // of the team's work this thread is in
};

// A kernel's work is one or more phases. In a phase every thread claims ranges of the same items
// until none is left, and then ends the phase:
//
//   for (Range range{}; claim(worker, total, chunk, &range);) { ... items of range ... }
//   end_phase(worker);
struct Range {
  int64_t begin;
  int64_t end;
};

// Take the next `chunk` of `total` items; false when none is left. Also reports the range claimed
// before as done. `total` is below 2^31 and the same on every thread.
bool claim(Worker& worker, int64_t total, int64_t chunk, Range* range);

// Wait until all items of the phase are done. What was written for them is visible afterwards.
void end_phase(Worker& worker);

// The sizes and inputs of one step, checked.
struct Step {
  int num_tokens;
  int num_seqs;
  int num_sampled;
  OctavoInputs inputs;
  OctavoLimits limits;
  // Tiles of kQueryTile query tokens: those of sequence s are [query_tiles[s], query_tiles[s + 1]).
  const int32_t* query_tiles;
  // For each of `ops`: the splits that threads share where it is attention of few items, else 0.
  const OctavoOp* ops;
  const int64_t* shared_splits;
  // Memory of each thread alone: what one does there is nobody's phase. A thread that comes late may
  // still write to it, so it is no part of the arena.
  char* own_memory;  // [num_threads][own_nbytes]
  size_t own_nbytes;
};

// Rows of x that each thread quantises for itself: a phase would take longer.
constexpr int kRowsAlone = 4;

// Query tokens that attention works on at a time.
constexpr int kQueryTile = 16;

// Splits that attention reduces for a tile of query tokens and one KV head.
int num_attention_splits(const OctavoOp& op, int first_position, int num_tokens);

// Rows (a query head of a token, in one split) that there is scratch memory for where splits are
// shared: a token for each item of the most that are, all of its splits.
size_t attention_split_rows(const OctavoOp& op, const OctavoLimits& limits, int num_threads);

// Runs an op up to its last phase, which the interpreter ends. All threads call it.
using Kernel = void (*)(const OctavoOp& op, const Step& step, Worker& worker);

// Quantises a row of the job, on one thread.
using QuantizeRow = void (*)(const OctavoQuantizeJob& job, int64_t row);

// The kernels of one ISA, by OctavoOpKind.
struct KernelSet {
  const char* isa;
  Kernel by_kind[OCTAVO_NUM_OP_KINDS];
  ChoiceKernels choice;
  QuantizeRow quantize_row;
};

const KernelSet& scalar_kernels();
#if defined(OCTAVO_X86)
const KernelSet& avx2_kernels();
const KernelSet& avx512_kernels();
#endif
#if defined(OCTAVO_ARM64)
const KernelSet& neon_kernels();
const KernelSet& neon_dot_kernels();
#endif

}  // namespace octavo
