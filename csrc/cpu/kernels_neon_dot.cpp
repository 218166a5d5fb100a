// The kernels on NEON with SDOT. Compiled with those flags, called only where the CPU has it.
#define OCTAVO_ISA neon_dot
#define OCTAVO_KERNELS_NEON
#include "kernels/all_kernels.hpp"

namespace octavo {

const KernelSet& neon_dot_kernels() {
  using namespace neon_dot;
  static constexpr KernelSet kernels = {"neon_dot", OCTAVO_ALL_KERNELS};
  return kernels;
}

}  // namespace octavo
