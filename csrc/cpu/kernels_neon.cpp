// The kernels on NEON, which every aarch64 CPU has.
#define OCTAVO_ISA neon
#define OCTAVO_KERNELS_NEON
#include "kernels/all_kernels.hpp"

namespace octavo {

const KernelSet& neon_kernels() {
  using namespace neon;
  static constexpr KernelSet kernels = {"neon", OCTAVO_ALL_KERNELS};
  return kernels;
}

}  // namespace octavo
